"""Text to text in every family: what is generated is what training would have scored best."""

import json
import pathlib

import jax
import numpy as np
import pytest

from small_decoding import generator
from tformer import checks, config
from tformer.commands import train as train_command
from tformer.config import Config, Data, Decode, Evaluate, Mesh, Model, Optimizer, Train
from tformer.data.batches import pipeline
from tformer.data.tokenizers import tokenizers
from tformer.distributed import sharding
from tformer.errors import UserError
from tformer.evaluation import predictions, text_scores
from tformer.model import build

WORDS = 'ant bee cat dog eel fox'.split()
SOURCES = ['ant', 'bee cat dog', 'fox fox eel ant bee', 'cat eel']
SIZES = {'emb_dim': 32, 'mlp_dim': 32, 'num_heads': 2, 'num_decoder_layers': 2, 'max_len': 32}
WRITERS = [
    ('seq2seq', 'decoder', True),
    ('seq2seq', 'decoder', False),
    ('seq2seq', 'encoder_decoder', True),
    ('prefix_lm', 'decoder', True),
]


def settings(objective: str, family: str, bidirectional: bool = True, **sections: dict) -> Config:
    data = {'tokenizer': 'symbol', 'byte_fallback': False, 'length': 24, 'batching': 'pad'}
    data['bidirectional_prefix'] = bidirectional
    encoder = {'num_encoder_layers': 1} if family == 'encoder_decoder' else {}
    return Config(
        model=Model(family=family, **encoder, **{**SIZES, **sections.get('model', {})}),
        data=Data(**{**data, **sections.get('data', {})}),
        optimizer=Optimizer(**sections.get('optimizer', {})),
        train=Train(objective=objective, **{'num_steps': 1, 'batch_size': 4, **sections.get('train', {})}),
        mesh=Mesh(data=1),
        decode=Decode(**{'max_len': 5, 'batch_size': 4, **sections.get('decode', {})}),
        evaluate=Evaluate(**sections.get('evaluate', {})),
    )


def record(objective: str, source: str, output: str) -> dict[str, str]:
    return {'source': source, 'target': output} if objective == 'seq2seq' else {'text': f'{source} {output}'.strip()}


@pytest.mark.slow
@pytest.mark.parametrize(('objective', 'family', 'bidirectional'), WRITERS)
def test_what_is_generated_is_what_training_scores_best(objective: str, family: str, bidirectional: bool) -> None:
    """With its source it goes through the pipeline, and the full forward pass of that batch says it again."""
    cfg = settings(objective, family, bidirectional)
    words = tokenizers.train_tokenizers(cfg, [record(objective, ' '.join(WORDS), ' '.join(WORDS))])
    cfg = checks.resolve(cfg, vocab_size=words.target.vocab_size, encoder_vocab_size=words.target.vocab_size)
    model = build(cfg.model)

    def batches(outputs: list[str]) -> pipeline.Batches:
        records = [record(objective, source, output) for source, output in zip(SOURCES, outputs, strict=True)]
        return pipeline.Batches(cfg, words, 'valid', training=False, records=records)

    start = batches(['ant'] * 4).batch(0)
    variables = sharding.unboxed(jax.jit(model.init)(jax.random.key(1), start))
    variables = jax.tree.map(lambda x: 3 * x, variables)
    outputs = generator(model, cfg, words, cut=False)(variables, SOURCES)
    assert len(set(outputs)) > 1 and max(len(output.split()) for output in outputs) > 2
    # Of one shape, rows are in the order of the records.
    batch = batches(outputs).batch(0)
    assert ('prefix' in batch) == (bidirectional and family == 'decoder')
    if objective == 'prefix_lm':  # where generation drew the line, and not where noise did
        given = [1 + len(source.split()) for source in SOURCES]
        place = np.arange(batch['inputs'].shape[1])[None]
        batch['prefix'] = place < np.array(given)[:, None]
        batch['weights'] = ((place >= np.array(given)[:, None] - 1) & (batch['positions'] >= 0)).astype(np.float32)
    logits = np.array(jax.jit(model.apply)(variables, batch))
    logits[..., ~words.target.ordinary & (np.arange(words.target.vocab_size) != words.target.specials.eos)] = -np.inf
    for row, output in enumerate(outputs):
        scored = batch['weights'][row] > 0
        best, written = logits[row, scored].argmax(-1).tolist(), words.target.encode(output)
        ended = len(written) < cfg.decode.max_len
        assert batch['targets'][row, scored].tolist() == [*written, words.target.specials.eos]
        assert best[: len(written) + ended] == [*written, words.target.specials.eos][: len(written) + ended]


@pytest.mark.parametrize('objective', ['classification', 'regression', 'token_classification', 'question_answering'])
@pytest.mark.parametrize('family', ['decoder', 'encoder_decoder'])
def test_an_objective_that_does_not_write_does_not_generate(objective: str, family: str) -> None:
    cfg = settings(objective, family)
    with pytest.raises(UserError, match=f'train.objective={objective} does not write text; valid: .*seq2seq') as error:
        generator(build(cfg.model), cfg, None, cut=True)
    assert '\n' not in str(error.value)


def test_a_source_that_is_too_long_is_refused_by_the_limit_that_it_is_over() -> None:
    cfg = settings('seq2seq', 'decoder', data={'length': 8})
    words = tokenizers.train_tokenizers(cfg, [record('seq2seq', 'ant', 'bee')])
    for max_len, limit in ((5, 'data.encoder_length'), (29, 'model.max_len - decode.max_len')):
        changed = config.override(cfg, {'decode.max_len': max_len})
        changed = checks.resolve(changed, vocab_size=words.target.vocab_size)
        generate = generator(build(changed.model), changed, words, cut=False)
        with pytest.raises(UserError, match=rf'has 7 tokens, the model takes [26] \({limit}\)'):
            generate(None, ['ant ' * 6 + 'ant'])


@pytest.mark.slow
def test_a_decoder_learns_to_write_a_source_backwards(tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    for split, count in (('train', 400), ('valid', 20), ('test', 60)):
        rows = [rng.choice(WORDS, rng.integers(2, 4)).tolist() for _ in range(count)]
        (tmp_path / f'{split}.tsv').write_text(''.join(f'{" ".join(r)}\t{" ".join(r[::-1])}\n' for r in rows))
    cfg = settings(
        'seq2seq',
        'decoder',
        model={'dropout_rate': 0.0, 'position': 'learned'},
        data={'path': (str(tmp_path),), 'length': 10},
        optimizer={'learning_rate': 1e-2, 'warmup_steps': 10},
        train={'num_steps': 150, 'batch_size': 32, 'log_every': 150},
        evaluate={'metrics': ('exact_match',), 'samples': 0},
    )
    train_command.train_and_evaluate(cfg, str(tmp_path / 'run'))
    found = json.loads((tmp_path / 'run' / 'result.json').read_text())['test']
    assert found['exact_match'] > 0.8, found  # of 252 outputs
    kept = predictions.read(tmp_path / 'run', 'test')
    assert kept is not None and len(kept[0]) == 60 and text_scores.exact_match(*kept) == found['exact_match']
