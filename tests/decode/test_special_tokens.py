"""The special tokens around texts: those of each hub family, alike in training, in prompts and in decoding."""

import dataclasses
import importlib.util
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import processors

import hub_files
import small_decoding
from tformer import checks, config, hf
from tformer.config import Config, Data, Decode, Model, Train
from tformer.data.examples import corrupt, example_formats, special_tokens
from tformer.data.tokenizers.bytes_and_characters import Byte
from tformer.data.tokenizers.hub_tokenizer import HubTokenizer
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.data.tokenizers.vocabulary import BOS, EOS, PAD, Specials
from tformer.decode import text as text_lib
from tformer.decode.generate import make_generate
from tformer.errors import UserError
from tformer.hf import special_tokens as hub_special_tokens
from tformer.model import build
from tformer.training import setup, workdir

BYTE = Byte()
TORCH = all(importlib.util.find_spec(name) for name in ('torch', 'transformers'))
BART = {'data.start': ('eos', 'bos'), 'data.source_start': ('bos',)}

# ids of the published tokenizers, and what their config.json say of them
S = {
    'bert': Specials(pad=0, bos=101, eos=102, unk=100, mask_or_none=103, cls=101, sep=102),
    'roberta': Specials(pad=1, bos=0, eos=2, unk=3, mask_or_none=50_264, cls=0, sep=2),
    'gpt2': Specials(*[50_256] * 4, None, 50_256, 50_256),
    't5': Specials(pad=0, bos=0, eos=1, unk=2, mask_or_none=None, cls=0, sep=1),
    'marian': Specials(pad=58_100, bos=58_100, eos=0, unk=1, mask_or_none=None, cls=58_100, sep=0),
    'llama': Specials(pad=2, bos=1, eos=2, unk=0, mask_or_none=None, cls=1, sep=2),
    'gemma2': Specials(pad=0, bos=2, eos=1, unk=3, mask_or_none=None, cls=2, sep=1),
}
S |= {'bart': S['roberta'], 'mixtral': S['llama']}
IDS = {
    'bert': {'pad_token_id': 0},
    'roberta': {'bos_token_id': 0, 'eos_token_id': 2, 'pad_token_id': 1},
    'gpt2': {'bos_token_id': 50_256, 'eos_token_id': 50_256},
    't5': {'decoder_start_token_id': 0, 'eos_token_id': 1, 'pad_token_id': 0},
    'bart': {'bos_token_id': 0, 'decoder_start_token_id': 2, 'eos_token_id': 2, 'forced_bos_token_id': 0,
             'forced_eos_token_id': 2, 'pad_token_id': 1},
    'marian': {'decoder_start_token_id': 58_100, 'eos_token_id': 0, 'forced_eos_token_id': 0, 'pad_token_id': 58_100},
    'llama': {'bos_token_id': 1, 'eos_token_id': [2, 7]},
    'gemma2': {'bos_token_id': 2, 'eos_token_id': 1, 'pad_token_id': 0},
    'mixtral': {'bos_token_id': 1, 'eos_token_id': 2},
}  # fmt: skip
# of a text 11 12, and for two stacks of the target 13: as it is read; the decoder's inputs, targets and weights
READ = {
    'bert': [101, 11, 12, 102],
    'roberta': [0, 11, 12, 2],
    'gpt2': [11, 12],
    't5': [11, 12, 1],
    'bart': [0, 11, 12, 2],
    'marian': [11, 12, 0],
    'llama': [1, 11, 12],
    'gemma2': [2, 11, 12],
    'mixtral': [1, 11, 12],
}
WRITTEN = {
    't5': ([0, 13], [13, 1], [1, 1]),
    'bart': ([2, 0, 13], [0, 13, 2], [0, 1, 1]),
    'marian': ([58_100, 13], [13, 0], [1, 1]),
}


def template_of(family: str, fields: dict[str, Any], specials: Specials) -> special_tokens.SpecialTokenTemplate:
    stacks = 'encoder_decoder' if family in WRITTEN else 'encoder' if 'bert' in family else 'decoder'
    run = config.override(Config(model=Model(family=stacks)), fields)
    task = {'encoder': 'masked_lm', 'decoder': 'causal_lm', 'encoder_decoder': 'seq2seq'}[stacks]
    checks.check(dataclasses.replace(run, train=Train(objective=task, num_steps=1)))
    return special_tokens.TEMPLATES[stacks](specials, specials, True, run.data.start, run.data.source_start)


@pytest.mark.parametrize('given', ['the ids', 'none'])
@pytest.mark.parametrize('family', S)
def test_texts_of_each_family_by_hand(family: str, given: str) -> None:
    ids = {'model_type': family, **(IDS[family] if given == 'the ids' else {})}
    fields = hf.special_tokens_of(ids, S[family])
    template = template_of(family, fields, S[family])
    read = template.given([11, 12]) if family in WRITTEN else template.prompt([11, 12])
    assert read == READ[family]
    assert fields['decode.forced_end'] == ('forced_eos_token_id' in ids)
    if family in WRITTEN:
        found = template.write(np.array([11, 12]), np.array([13]))
        assert found['encoder_inputs'].tolist() == READ[family]
        assert tuple(found[name].tolist() for name in ('inputs', 'targets', 'weights')) == WRITTEN[family]


def as_files_say() -> dict[str, tuple[Any, Any]]:
    """The files of test_hub_tokenizer with the post-processors that their families' files have."""
    made = {name: hub_files.FILES[name]() for name in ('bert', 'roberta', 'gpt2', 't5', 'llama')}
    for name, parts in (('t5', '$A </s>'), ('llama', '<s> $A')):
        used = [part for part in parts.split() if part != '$A']
        made[name].post_processor = processors.TemplateProcessing(
            single=parts, special_tokens=[(token, made[name].token_to_id(token)) for token in used]
        )
    made['bert'].no_truncation()
    made['bert'].no_padding()
    return {**made, 'bart': made['roberta']}


def test_a_text_is_read_as_the_file_of_its_tokenizer_writes_it() -> None:
    for family, library in as_files_say().items():
        ours = HubTokenizer(library.to_str().encode())
        template = template_of(family, hf.special_tokens_of({'model_type': family}, ours.specials), ours.specials)
        read = template.given if family in WRITTEN else template.prompt
        for text in ('the quick', 'x', ''):
            expected = library.encode(text).ids or [ours.specials.bos]  # GPT-2's, of nothing
            assert read(ours.encode(text)) == expected, (family, text)


@pytest.mark.parametrize(('added', 'begins'), [
    (None, {'<s> $A': ('bos',), '$A': ()}),  # as the file says
    (True, {'<s> $A': ('bos',), '$A': ('bos',)}),
    (False, {'<s> $A': (), '$A': ()}),
])  # fmt: skip
def test_add_bos_token_decides_what_a_text_begins_with_whatever_the_file_of_the_tokenizer_says(
    tmp_path: pathlib.Path, added: bool | None, begins: dict[str, tuple[str, ...]]
) -> None:
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps({} if added is None else {'add_bos_token': added}))
    made, hub = hub_files.llama(), {'model_type': 'llama'}
    known = [('<s>', made.token_to_id('<s>'))]
    for parts, start in begins.items():
        used = known if '<s>' in parts else []
        made.post_processor = processors.TemplateProcessing(single=parts, special_tokens=used)
        read = Tokenizers(None, HubTokenizer(made.to_str().encode()))
        assert hub_special_tokens.framing(tmp_path, hub, {}, read, 'decoder')['data.start'] == start


@pytest.mark.parametrize('parts', ['$A', '$A </s>'])
def test_a_source_ends_with_eos_also_where_its_tokenizer_puts_nothing_behind_it(
    tmp_path: pathlib.Path, parts: str
) -> None:
    made = hub_files.FILES['t5']()
    known = [('</s>', made.token_to_id('</s>'))] if '</s>' in parts else []
    made.post_processor = processors.TemplateProcessing(single=parts, special_tokens=known)
    read = Tokenizers(None, HubTokenizer(made.to_str().encode()))
    found = hub_special_tokens.framing(tmp_path, {'model_type': 't5'}, {}, read, 'encoder_decoder')
    assert (found['data.source_start'], found['data.source_end']) == ((), ('eos',))


AROUND_TWO = {  # the post-processor of one text and of two; data.start, data.end, data.separator of a classifier
    'gpt2': (('$A', '$A $B'), ((), (), ())),
    'llama': (('<s> $A', '<s> $A <s> $B'), (('bos',), (), ('bos',))),
    'bert': (('[CLS] $A [SEP]', '[CLS] $A [SEP] $B [SEP]'), (('bos',), ('eos',), ('sep',))),
    'roberta': (('<s> $A </s>', '<s> $A </s> </s> $B </s>'), (('bos',), ('eos',), ('sep', 'sep'))),
    'bart': (('<s> $A </s>', '<s> $A </s> </s> $B </s>'), (('eos', 'bos'), (), ('sep', 'sep'))),
    't5': (('$A </s>', '$A </s> $B </s>'), (('bos',), (), ('sep',))),
}


@pytest.mark.parametrize('told', [True, False])
@pytest.mark.parametrize('name', AROUND_TWO)
def test_a_classifier_reads_one_text_and_two_as_its_tokenizer_writes_them(
    tmp_path: pathlib.Path, name: str, told: bool
) -> None:
    (single, pair), expected = AROUND_TWO[name]
    made = hub_files.FILES['roberta' if name == 'bart' else name]()
    known = [(token, made.token_to_id(token)) for token in {*pair.split()} - {'$A', '$B'}]
    made.post_processor = processors.TemplateProcessing(single, pair, known) if told else None
    made.no_truncation()
    made.no_padding()
    tokens, texts = Tokenizers(None, HubTokenizer(made.to_str().encode())), ('the quick', 'x')
    stacks = str(hf.FAMILIES[name].model['family'])
    found = hub_special_tokens.framing(tmp_path, {'model_type': name}, {}, tokens, stacks, judged=True)
    run = config.override(Config(model=Model(family=stacks)), found)
    assert (run.data.start, run.data.end, run.data.separator) == expected
    made.post_processor = processors.TemplateProcessing(single, pair, known)
    template = special_tokens.template_of(run, tokens)
    for given in (texts[:1], texts):
        read = template.read(*(np.array(tokens.target.encode(text)) for text in given))
        ids = made.encode(*given).ids
        assert read.get('encoder_inputs', read['inputs']).tolist() == ids
        if stacks == 'encoder_decoder':  # one place later, as in the hub's library
            first = tokens.target.specials.of(run.data.start[:1])
            assert read['inputs'].tolist() == [*first, *ids[:-1]]


def test_the_end_of_a_text_that_is_classified_is_that_of_its_tokenizer(tmp_path: pathlib.Path) -> None:
    made, hub = hub_files.llama(), {'model_type': 'llama'}
    known = [(name, made.token_to_id(name)) for name in ('<s>', '</s>')]
    for parts, settings, end, separator in (
        ('<s> $A </s>', {}, ('eos',), ('eos', 'bos')),
        ('<s> $A', {'add_bos_token': True, 'add_eos_token': True}, ('eos',), ('sep', 'bos')),
        ('<s> $A </s>', {'add_eos_token': False}, (), ('bos',)),
    ):
        (tmp_path / 'tokenizer_config.json').write_text(json.dumps(settings))
        made.post_processor = processors.TemplateProcessing(parts, special_tokens=known)
        read = Tokenizers(None, HubTokenizer(made.to_str().encode()))
        found = hub_special_tokens.framing(tmp_path, hub, {}, read, 'decoder')
        assert (found['data.end'], found['data.separator']) == (end, separator)


def test_an_encoder_whose_tokenizer_writes_other_tokens_around_a_text_is_refused(tmp_path: pathlib.Path) -> None:
    made = hub_files.FILES['roberta']()
    made.add_special_tokens(['[CLS]'])
    read = Tokenizers(None, HubTokenizer(made.to_str().encode()))
    with pytest.raises(UserError, match=r'its tokenizer writes <s> text </s>, and .* are read as \[CLS\] text </s>$'):
        hub_special_tokens.framing(tmp_path, {'model_type': 'roberta'}, {}, read, 'encoder')


def test_a_class_of_two_stacks_whose_text_does_not_end_with_eos_is_refused(tmp_path: pathlib.Path) -> None:
    made = hub_files.FILES['t5']()
    known = [(name, made.token_to_id(name)) for name in ('</s>', '<pad>')]
    made.post_processor = processors.TemplateProcessing('$A </s> <pad>', special_tokens=known)
    read = Tokenizers(None, HubTokenizer(made.to_str().encode()))
    with pytest.raises(UserError, match=r'puts eos, bos behind a text; of a head of texts it must be eos$'):
        hub_special_tokens.framing(tmp_path, {'model_type': 't5'}, {}, read, 'encoder_decoder', judged=True)


@pytest.mark.parametrize(('family', 'ids', 'words'), [
    ('bart', {'decoder_start_token_id': 5}, 'decoder_start_token_id=5 is not a special token of the tokenizer; valid'),
    ('bart', {'forced_bos_token_id': [0]}, 'forced_bos_token_id=[0] is not a special token'),
    ('t5', {'decoder_start_token_id': True}, 'decoder_start_token_id=True is not'),
    ('llama', {'bos_token_id': 128_000}, 'bos_token_id=128000 is not a special token'),
    ('llama', {'eos_token_id': 1}, 'eos_token_id=1, but the tokenizer ends a text with 2'),
    ('marian', {'forced_eos_token_id': 58_100}, 'forced_eos_token_id=58100, but the tokenizer ends a text with 0'),
    ('brat', {}, "config.json: model_type='brat' is unknown; did you mean"),
])  # fmt: skip
def test_ids_that_are_not_the_tokenizers_are_refused_in_a_line(family: str, ids: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        hf.special_tokens_of({'model_type': family, **ids}, S.get(family, Specials()))
    assert words in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize(('family', 'fields', 'words'), [
    ('decoder', {'data.start': ('bos', 'eos')}, 'one token or none with model.family=decoder'),
    ('encoder_decoder', {'data.start': ()}, 'one or more with encoder_decoder'),
    ('encoder', {'data.start': ()}, 'it applies where model.family is decoder or encoder_decoder'),
    ('decoder', {'data.source_start': ('bos',)}, 'it applies where model.family is encoder_decoder'),
    ('encoder_decoder', {'data.start': ('boss',)}, "data.start='boss' is unknown; did you mean 'bos'"),
    ('encoder_decoder', {**BART, 'decode.max_len': 512}, "after data.start=('eos', 'bos') is longer than"),
])  # fmt: skip
def test_starts_that_do_not_fit_are_refused(family: str, fields: dict[str, Any], words: str) -> None:
    objective = {'encoder': 'masked_lm', 'decoder': 'causal_lm', 'encoder_decoder': 'seq2seq'}[family]
    run = Config(model=Model(family=family), train=Train(objective=objective, num_steps=1))
    with pytest.raises(UserError) as error:
        checks.check(checks.settle(config.override(run, fields), fields))
    assert words in str(error.value) and '\n' not in str(error.value)


# ------------------------------------------------------------------------------------------------ texts of a run
def test_without_a_token_in_front_every_token_but_the_first_is_predicted_once() -> None:
    texts = ['abcdefgh', 'ab', 'a', 'abcdefghijklmnop']
    run = Config(data=Data(tokenizer='byte', length=5, start=()), train=Train(objective='causal_lm'))
    records = [{'text': text} for text in texts]
    made = example_formats.make(run, Tokenizers(None, BYTE), records, 'test', False)
    found: list[list[int]] = [[] for _ in texts]
    for index in range(len(made)):
        fields = example_formats.format_of(run).fields(made, index, corrupt.Noise(run.data, BYTE, (0,)))
        own = found[made.spans[index][0]]
        before = own[-1] if own else BYTE.encode('a')[0]
        assert fields['inputs'].tolist() == [before, *fields['targets'].tolist()][:-1]
        assert fields['weights'].all() and len(fields['inputs']) == made.lengths[index] <= 5
        own += fields['targets'].tolist()
    assert found == [[*BYTE.encode(text)[1:], EOS] for text in texts]


def generated_batch(run: Config, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """Returns the batch that the generation of these texts starts from."""
    seen: dict[str, np.ndarray] = {}

    def make(*_: Any, **__: Any) -> Callable[..., Any]:
        def generate(variables: Any, batch: dict[str, np.ndarray], key: Any) -> tuple[np.ndarray, np.ndarray]:
            seen.update(batch)
            return np.zeros((len(batch['inputs']), 1), int), np.zeros(len(batch['inputs']))

        return generate

    monkeypatch.setattr(text_lib, 'make_generate', make)
    tokens = Tokenizers(BYTE if run.model.family == 'encoder_decoder' else None, BYTE)
    small_decoding.generator(build(run.model), run, tokens, cut=False)({}, texts)
    return seen


def test_generation_starts_as_training_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder's prompt is what training gives it before the first token that is scored."""
    record = {'source': 'abc', 'target': 'de'}
    for family, (start, source_start) in (
        ('decoder', ((), ())),
        ('decoder', (('bos',), ())),
        ('encoder_decoder', (('bos',), ())),
        ('encoder_decoder', (('eos', 'bos'), ('bos',))),
        ('encoder_decoder', (('pad',), ('cls', 'bos'))),
    ):
        data = Data(tokenizer='byte', length=16, start=start, source_start=source_start)
        model = Model(family=family, vocab_size=BYTE.vocab_size, max_len=32)
        run = Config(model, data, train=Train(objective='seq2seq', num_steps=1), decode=Decode(max_len=4, batch_size=2))
        tokens = Tokenizers(BYTE, BYTE)
        made = example_formats.make(run, tokens, [record], 'test', False)
        fields = example_formats.format_of(run).fields(made, 0, corrupt.Noise(run.data, BYTE, (0,)))
        batch = generated_batch(run, ['abc'], monkeypatch)
        first = int(np.argmax(fields['weights'] > 0))
        own = batch['inputs'][0][batch['positions'][0] >= 0]
        assert own.tolist() == fields['inputs'][: first + 1].tolist()
        assert fields['targets'][first:].tolist() == [*BYTE.encode('de'), EOS]
        if family == 'encoder_decoder':
            source = batch['encoder_inputs'][0][batch['encoder_positions'][0] >= 0]
            assert source.tolist() == fields['encoder_inputs'].tolist()


def test_an_empty_prompt_is_a_token_though_none_stands_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(family='decoder', vocab_size=BYTE.vocab_size, max_len=32)
    run = Config(model, Data(length=16, start=()), train=Train(num_steps=1), decode=Decode(max_len=4, batch_size=2))
    batch = generated_batch(run, ['', 'ab'], monkeypatch)
    assert [row[where >= 0].tolist() for row, where in zip(batch['inputs'], batch['positions'], strict=True)] == [
        [BOS],
        BYTE.encode('ab'),
    ]


@pytest.mark.parametrize(('changes', 'said'), [
    ({}, ''),
    ({'model.dropout_rate': 0.3, 'model.remat': 'block', 'train.seed': 5, 'model.max_len': 99}, ''),
    ({'data.start': ('bos',)}, "data.start=('bos',) (('eos', 'bos') there)"),
    ({'model.activation': 'gelu', 'model.norm_epsilon': 1e-3},
     f"model.norm_epsilon=0.001 ({Model().norm_epsilon} there), model.activation='gelu' ('relu' there), "
     "model.transform_activation='gelu' ('relu' there)"),
    ({'model.attention_softcap': 5.0}, 'model.attention_softcap=5.0 (None there)'),
])  # fmt: skip
def test_another_function_than_the_pretrained_parameters_know_is_said(
    changes: dict[str, object], said: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = config.override(Config(model=Model(family='encoder_decoder')), BART)
    workdir.save_config(tmp_path, there)
    setup._say_other_function(config.override(there, changes), str(tmp_path))
    line = f'train.init_from={tmp_path} was trained otherwise: {said}\n' if said else ''
    assert capsys.readouterr().err == line


# ------------------------------------------------------------------------------------------------ searches
@pytest.mark.slow
@pytest.mark.parametrize('strategy', ['greedy', 'sample', 'beam'])
def test_scores_of_what_is_generated_are_those_of_teacher_forcing(strategy: str) -> None:
    """Given tokens count nothing; the forced end counts nothing."""
    front = [EOS, BOS]
    model, variables = small_decoding.make('encoder_decoder', scale=2.0)
    source = {'encoder_inputs': jnp.array([[5, 6, 7]]), 'encoder_positions': jnp.arange(3)[None]}
    batch = {'inputs': jnp.array([front]), 'positions': jnp.arange(len(front))[None], **source}
    decode = Decode(strategy=strategy, max_len=4, length_penalty=0.0, forced_end=True)
    (tokens,), (score,) = make_generate(model, decode, eos=EOS, banned=(PAD, BOS))(variables, batch, jax.random.key(0))
    end = tokens.tolist().index(EOS)
    whole = jnp.array([*front, *tokens[:end].tolist()])[None]
    batch = {'inputs': whole, 'positions': jnp.arange(whole.shape[1])[None], **source}
    logprobs = jax.nn.log_softmax(small_decoding.FORWARD(model, variables, batch))[0, len(front) - 1 :]
    expected = sum(float(logprobs[i, token]) for i, token in enumerate(tokens[: end + 1].tolist()) if i < 3)
    assert float(score) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not TORCH, reason='needs torch and transformers')
@pytest.mark.parametrize('family', [pytest.param('bart', marks=pytest.mark.proof), 'marian'])
def test_greedy_and_beam_search_are_those_of_the_hubs_library(family: str) -> None:
    import torch

    import make_hf_reference as references

    torch.manual_seed(3)
    model = references.CASES[family](32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and (family == 'bart' or 'embed_positions' not in name):  # Marian's are sinusoids
                parameter.add_((0.2 if 'shared' in name else 1) * torch.randn_like(parameter))
    specials = Specials(pad=1, bos=0 if family == 'bart' else 1, eos=2, unk=3, cls=0, sep=2)
    ids = {'pad_token_id': 1, 'bos_token_id': 0, 'eos_token_id': 2, 'decoder_start_token_id': 2}
    ids |= {'forced_bos_token_id': 0} if family == 'bart' else {'decoder_start_token_id': 1}
    ids |= {'forced_eos_token_id': 2}
    fields = hf.special_tokens_of({'model_type': family, **ids}, specials)
    template = template_of(family, fields, specials)
    sources = [template.given([9, 17, 33, 41]), template.given([50, 8])]
    width = max(map(len, sources))
    tokens = np.array([row + [1] * (width - len(row)) for row in sources])
    real = np.array([[i < len(row) for i in range(width)] for row in sources])
    hub = {**model.config.to_dict(), **ids}
    cfg = hf.model_of(hub, say=lambda line: None)
    arrays = {name: array.numpy() for name, array in model.state_dict().items()}
    params = hf.import_params(family, arrays, cfg)
    front = template.front
    batch = {
        'inputs': jnp.tile(jnp.array(front), (2, 1)),
        'positions': jnp.tile(jnp.arange(len(front)), (2, 1)),
        'encoder_inputs': jnp.asarray(tokens),
        'encoder_positions': jnp.where(real, jnp.arange(width), -1),
    }
    for strategy, beams in (('greedy', 1), ('beam', 3)):
        new = 8
        decode = Decode(strategy=strategy, max_len=new, beam_size=beams, length_penalty=0.0)
        decode = dataclasses.replace(decode, forced_end=fields['decode.forced_end'])
        found, scores = make_generate(build(cfg), decode, eos=2)({'params': params}, batch, None)
        hubs = model.generate(
            torch.from_numpy(tokens), attention_mask=torch.from_numpy(real.astype(int)), num_beams=beams,
            max_new_tokens=new + len(front) - 1, do_sample=False, length_penalty=0.0, early_stopping=False,
            return_dict_in_generate=True, output_scores=True, **ids,
        )  # fmt: skip
        for mine, theirs in zip(np.asarray(found).tolist(), hubs.sequences.tolist(), strict=True):
            assert theirs[: len(front)] == front
            assert [t for t in mine if t not in (0, 1)] == [t for t in theirs[len(front) :] if t not in (0, 1)]
        if strategy == 'beam':
            np.testing.assert_allclose(scores, hubs.sequences_scores.numpy(), rtol=1e-4)
