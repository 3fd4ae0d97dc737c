"""The configuration tree: text to values, ConfigDict and JSON round trips, checks, choices, derived values."""

import dataclasses
import json
import math
import operator
import re
import types
import typing

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict

from tformer import checks, config
from tformer.config import Config, convert
from tformer.config.renamed import RENAMED
from tformer.errors import UserError
from tformer.layers.resolved import resolve_model
from tformer.training import dummy_batch

SIZES = {'vocab_size': 40, 'encoder_vocab_size': 30, 'num_classes': 3, 'steps_per_epoch': 7}
SECTIONS = [field.name for field in dataclasses.fields(Config)]
FIELDS = convert.field_types()

# For each type a field may have: texts of the command line and the values they stand for.
TEXTS = {
    bool: {'true': True, 'True': True, '1': True, 'yes': True, 'false': False, 'False': False, '0': False, 'no': False},
    int: {'7': 7, '-1': -1, '1_000': 1000, '1e4': 10_000, '2.0': 2},
    int | float: {'7': 7, '0.25': 0.25, '1e-3': 1e-3},
    float: {'0.25': 0.25, '5': 5.0, '1e-3': 1e-3, '1_000.5': 1000.5},
    str: {'rmsnorm': 'rmsnorm', '5': '5', 'a,b': 'a,b', 'runs/x=y': 'runs/x=y'},
    tuple[str, ...]: {
        'a': ('a',),
        'a,b': ('a', 'b'),
        'a, b,': ('a', 'b'),
        ' cat=2.5': (' cat=2.5',),
        ' ': (' ',),
        "('a', 'b')": ('a', 'b'),
        "['a']": ('a',),
        "('a')": ('a',),
        '': (),
        '()': (),
    },
    tuple[float, ...]: {'1': (1.0,), '0,2.5': (0.0, 2.5), '(-1, 5.0)': (-1.0, 5.0), '[1e3]': (1000.0,), '': ()},
    tuple[int, ...]: {'1': (1,), '0,-2': (0, -2), '(1, 2)': (1, 2), '[1]': (1,), '1e3, 2': (1000, 2), '': ()},
    types.NoneType: {'None': None},
}

# Texts that a type refuses.
REFUSED = {
    bool: ('None', 'maybe', '2', ''),
    int: ('None', '1.5', 'four', '', '1e-3', 'inf'),
    int | float: ('None', 'fast', '', '1,5'),
    float: ('None', 'fast', '', '1,5'),
    str: ('None',),
    tuple[str, ...]: ("('a'", '(1, 2)', "('a', None)"),
    tuple[float, ...]: ('(1', 'low,high', '(1, None)', "('1', '2')", '(True, 2)'),
    tuple[int, ...]: ('(1', 'low,high', '(1, None)', "('1', '2')", '(True, 2)', '1.5', '(1.5, 2)'),
}


def options(annotation):
    """The types of a field: whole numbers and fractions together are one."""
    union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    found = typing.get_args(annotation) if union else (annotation,)
    return (int | float, *(set(found) - {int, float})) if {int, float} <= set(found) else found


def is_word(option):
    return typing.get_origin(option) is typing.Literal


def value_of(tree, name):
    return operator.attrgetter(name)(tree)


@pytest.mark.parametrize('name', FIELDS)
def test_every_field_reads_every_text_of_its_type(name):
    annotation = FIELDS[name]
    for option in options(annotation):
        words = {word: word for word in typing.get_args(option)} if is_word(option) else TEXTS[option]
        for text, expected in words.items():
            value = value_of(config.override(Config(), {name: text}), name)
            assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize('name', FIELDS)
def test_every_field_refuses_text_of_another_type_in_one_line(name):
    kinds = [option for option in options(FIELDS[name]) if option is not types.NoneType and not is_word(option)]
    assert len(kinds) == 1
    for text in REFUSED[kinds[0]]:
        if text == 'None' and types.NoneType in options(FIELDS[name]):
            continue
        with pytest.raises(UserError) as error:
            config.override(Config(), {name: text})
        assert f'config.{name}={text!r} is not' in str(error.value) and '\n' not in str(error.value)


def test_every_field_keeps_its_default_through_its_own_text():
    for name in FIELDS:
        default = value_of(Config(), name)
        text = ','.join(map(str, default)) if isinstance(default, tuple) else str(default)
        assert value_of(config.override(Config(), {name: text}), name) == default


def test_values_that_are_no_text_are_checked_too():
    assert config.override(Config(), {'model.dropout_rate': 0}).model.dropout_rate == 0.0
    assert isinstance(config.override(Config(), {'optimizer.clip_norm': 5}).optimizer.clip_norm, float)
    assert config.override(Config(), {'data.path': ['a', 'b']}).data.path == ('a', 'b')
    bad = {
        'model.num_heads': 2.5,
        'model.scan_layers': 1,
        'train.seed': True,
        'model.num_kv_heads': '',
        'data.path': [1],
    }
    for name, value in bad.items():
        with pytest.raises(UserError, match=f'config.{name}'):
            config.override(Config(), {name: value})


@pytest.mark.parametrize(
    'wrong, near',
    [
        ('model.nrom', 'model.norm'),
        ('model.num_head', 'model.num_heads'),
        ('optimizer.lr', r'optimizer\.\w+'),
        ('training.num_steps', 'train.num_steps'),
        ('norm', None),
        ('model', r'model\.\w+'),
        ('data.path.x', 'data.path'),
    ],
)
def test_an_unknown_field_names_the_nearest(wrong, near):
    with pytest.raises(UserError) as error:
        config.override(Config(), {wrong: '1'})
    message = str(error.value)
    hint = '' if near is None else f"; did you mean '({near})'[?]"
    found = re.fullmatch(f'config[.]{wrong} is not a field{hint}', message)
    assert found and set(found.groups()) <= set(FIELDS)


TRAINABLE = Config(train=config.Train(num_steps=1), data=config.Data(path=('x',)))
HOSTILE = [
    *(0, -1, 0.5, 1e30, -1e30, 10**12, 2**31, 10**30, 10**400, -(10**400), math.nan, math.inf, -math.inf, 1e-300),
    *('', 'None', 'x', 'x\ny', 'x\0y', '1e30', 'nan', '9' * 5000, '(' * 300, '1' + ',1' * 50, b'x', object()),
    *(None, True, [], [1], ['x'], [10**30], [math.nan], [-1, -1], ['x\0'], {}, {1: 2}, [[1]]),
]


@pytest.mark.slow
@pytest.mark.parametrize('name', FIELDS)
def test_no_value_of_a_field_is_more_than_a_line_or_a_config_that_resolves(name):
    for value in HOSTILE:
        try:
            stated = config.override(TRAINABLE, {name: value})
            if name != 'extensions':
                checks.check(stated)
                dummy_batch.assumed(stated)
        except UserError as error:
            line = str(error)
            assert name.rpartition('.')[2] in line and '\n' not in line and len(line) < 20_000
        else:
            numbers = value_of(stated, name)
            numbers = numbers if isinstance(numbers, tuple) else (numbers,)
            assert all(math.isfinite(x) and abs(x) < 2**31 for x in numbers if type(x) is int)
            assert all(math.isfinite(x) for x in numbers if isinstance(x, float))


def test_scalars_of_numpy_are_those_of_python():
    given = {
        'model.emb_dim': np.int64(16), 'model.dropout_rate': np.float32(0.5), 'optimizer.learning_rate': np.float64(2),
        'optimizer.clip_norm': np.int32(1), 'model.mlp_bias': np.bool_(False), 'model.norm': np.str_('rmsnorm'),
        'evaluate.lengths': list(np.arange(8, 10)),
    }  # fmt: skip
    stated = config.override(Config(), given)
    found = {name: value_of(stated, name) for name in given}
    assert found == {
        'model.emb_dim': 16, 'model.dropout_rate': 0.5, 'optimizer.learning_rate': 2.0, 'optimizer.clip_norm': 1.0,
        'model.mlp_bias': False, 'model.norm': 'rmsnorm', 'evaluate.lengths': (8, 9),
    }  # fmt: skip
    assert [type(value) for value in found.values()] == [int, float, float, float, bool, str, tuple]
    assert {type(value) for value in stated.evaluate.lengths} == {int}
    assert json.loads(json.dumps(config.to_dict(stated)))['model']['emb_dim'] == 16
    for name, value in {'model.emb_dim': np.float64(16), 'model.mlp_bias': np.int64(1)}.items():
        with pytest.raises(UserError, match=rf'config.{name}={value.item()} is not'):
            config.override(Config(), {name: value})


def test_an_unknown_field_in_a_tree_names_its_place_and_the_nearest():
    for tree, place, near in [
        ({'model': {'nrom': 'rmsnorm'}}, 'config.model.nrom', 'norm'),
        ({'modle': {}}, 'config.modle', 'model'),
    ]:
        with pytest.raises(UserError, match=f"{place} is not a field; did you mean '{near}'"):
            config.from_dict(tree)


def test_a_section_that_is_no_mapping_is_refused():
    with pytest.raises(UserError, match=r'config\.model=3'):
        config.from_dict({'model': 3})


def test_the_config_dict_is_locked_and_holds_every_field():
    tree = config.config_dict(Config())
    assert isinstance(tree, ConfigDict) and tree.is_locked
    assert list(tree) and set(tree) == set(SECTIONS)
    with pytest.raises(AttributeError):
        tree.model.nrom = 'rmsnorm'
    with pytest.raises(TypeError):
        tree.model.num_heads = 'four'
    for chunk in (128, 'auto', None):
        tree.train.loss_chunk = chunk
        assert config.from_dict(tree).train.loss_chunk == chunk


WHOLE = st.integers(-(2**63) + 1, 2**63 - 1)
REAL = st.floats(allow_nan=False, allow_infinity=False)
WORD = st.text('ab/_.-=é 1', min_size=1, max_size=6).map(str.strip).filter(bool)
DRAWN = {
    bool: st.booleans(),
    int: WHOLE,
    float: REAL,
    int | float: st.one_of(WHOLE, REAL),
    str: st.text(st.characters(codec='utf-8', exclude_characters='\0'), max_size=6).filter(lambda text: text != 'None'),
    tuple[str, ...]: st.lists(WORD, max_size=3).map(tuple),
    tuple[float, ...]: st.lists(REAL, max_size=3).map(tuple),
    tuple[int, ...]: st.lists(WHOLE, max_size=3).map(tuple),
    types.NoneType: st.none(),
}


@st.composite
def stated(draw):
    """Up to six fields, each with a value of its type."""
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=6, unique=True))
    return {name: draw(st.one_of(*map(drawn, options(FIELDS[name])))) for name in names}


def drawn(option):
    return st.sampled_from(typing.get_args(option)) if is_word(option) else DRAWN[option]


@settings(max_examples=40)
@given(stated())
@example({'train.seed': 2**53 + 1})  # which float64 does not hold
@example({'optimizer.warmup_steps': 0.25, 'train.eval_every': 3})
def test_any_config_survives_its_text_its_json_and_its_printed_form(values):
    cfg = config.override(Config(), values)
    assert all(value_of(cfg, name) == value for name, value in values.items())
    texts = {name: repr(value) if isinstance(value, tuple) else str(value) for name, value in values.items()}
    assert config.override(Config(), texts) == cfg
    assert config.from_dict(json.loads(json.dumps(config.to_dict(cfg)))) == cfg
    assert config.from_dict(config.config_dict(cfg)) == cfg
    assert eval(repr(cfg), vars(config)) == cfg and config.from_dict({}) == Config()
    differs = {name for name, value in values.items() if value != value_of(Config(), name)}
    changes = config.difference(Config(), cfg)
    assert changes == {name: (value_of(Config(), name), values[name]) for name in differs}
    assert config.override(cfg, {name: before for name, (before, _) in changes.items()}) == Config()


def test_difference_names_exactly_what_differs():
    cfg = config.override(Config(), {'model.norm': 'rmsnorm', 'train.seed': 3})
    assert config.difference(Config(), cfg) == {'model.norm': ('layernorm', 'rmsnorm'), 'train.seed': (0, 3)}
    assert config.difference(cfg, cfg) == {}


# ------------------------------------------------------------------------------------------- config files
def test_a_recipe_states_its_differences_by_size():
    sizes = {'small': {'model.emb_dim': 64}, 'smoke': {'train.num_steps': 2, 'train.num_epochs': None}}
    base = Config(train=config.Train(num_epochs=3.0))
    assert config.from_dict(config.recipe(base, '', **sizes)) == base
    assert config.from_dict(config.recipe(base, None, **sizes)) == base
    small = config.from_dict(config.recipe(base, 'small', **sizes))
    assert config.difference(base, small) == {'model.emb_dim': (256, 64)}
    assert config.recipe(base, 'smoke', **sizes).is_locked
    with pytest.raises(UserError, match="'smal' is unknown; did you mean 'small'"):
        config.recipe(base, 'smal', **sizes)
    with pytest.raises(UserError, match=r'model\.emb_dm is not a field'):
        config.recipe(base, 'small', small={'model.emb_dm': 64})


RECIPE = """
from tformer.config import Config, Model, recipe


def get_config(size=''):
    return recipe(Config(model=Model(emb_dim=64)), size, small={'model.emb_dim': 16})
"""


def test_load_reads_a_file_its_argument_and_overrides(tmp_path):
    file = tmp_path / 'mine.py'
    file.write_text(RECIPE)
    assert config.load(str(file)).model.emb_dim == 64
    assert config.load(f'{file}:small').model.emb_dim == 16
    assert config.load(f'{file}:small', {'model.emb_dim': '8'}).model.emb_dim == 8
    with pytest.raises(UserError, match='valid'):
        config.load(f'{file}:huge')


def test_load_of_what_is_no_config_file_is_one_line(tmp_path):
    (tmp_path / 'mine.py').write_text(RECIPE)
    (tmp_path / 'empty.py').write_text('')
    (tmp_path / 'broken.py').write_text('def get_config(:\n')
    expected = {
        'mien.py': "no file .*mien.py; did you mean '.*mine.py'",
        'no/such/place.py': 'no file',
        'empty.py': 'defines no get_config',
        'broken.py': 'broken.py:1: ',
        '.': 'no file',
    }
    mistakes = {  # the bodies of get_config, and what is said of them
        'return None': 'get_config returns NoneType',
        'return 5': 'get_config returns int',
        'return {"model": 3}': 'config.model=3 is not a section',
        'return {"model": {"nrom": 1}}': "config.model.nrom is not a field; did you mean 'norm'",
        'return {5: {}}': 'config.5 is not a field',
        'return {"train": {"seed": 10**5000}}': 'config.train.seed is a number of more than 64 bits',
        'raise ValueError("two\\nlines")': ':2: ValueError: two lines',
        'raise SystemExit(7)': ':2: SystemExit: 7',
        'import sys; sys.exit()': ':2: SystemExit:',
        'def half(x):\n        return x / 0\n    return half(1)': ':3: ZeroDivisionError: ',  # not the line of the call
        'return get_config(_)': ':2: RecursionError: ',
        'return eval("1 +")': ':2: invalid syntax',
        'return open("/no/such")': ':2: FileNotFoundError: ',
        'from tformer.lab.sweep import overrides; overrides.seeds(10**9)': ':2: seeds: 1,000,000,000 trials are more',
    }
    for number, (body, message) in enumerate(mistakes.items()):
        (tmp_path / f'mistake_{number}.py').write_text(f'def get_config(_):\n    {body}\n')
        expected[f'mistake_{number}.py'] = f'mistake_{number}.py{":" * (message[0] != ":")}.*{re.escape(message)}'
    for name, contents in {'nul.py': b'\0', 'binary.py': b'\xff\xfe\x80', 'latin.py': b'x = "\xe9"'}.items():
        (tmp_path / name).write_bytes(contents)
        expected[name] = f'{name}(:1)?: '
    for name, contents in {'nul.json': b'\0', 'a.json': b'[]', 'b.json': b'{"model": ', 'c.json': b'[' * 10**5}.items():
        (tmp_path / name).write_bytes(contents)
        expected[name] = f'{name}: '
    for name, message in expected.items():
        with pytest.raises(UserError, match=message) as error:
            config.load(str(tmp_path / name))
        assert '\n' not in str(error.value)


# -------------------------------------------------------------------------------------------------- checks
STEPS = {'train.num_steps': 10}
PAIR = {**STEPS, 'model.family': 'encoder_decoder', 'train.objective': 'seq2seq'}

BAD = [  # overrides that do not fit together, and what the message must name
    ({'model.num_heads': 3, 'model.emb_dim': 16}, ('model.num_heads=3', 'model.emb_dim=16', 'nearest that does: 2')),
    ({'model.num_heads': 4, 'model.num_kv_heads': 3}, ('model.num_kv_heads=3', 'model.num_heads=4', 'does: 2')),
    ({'model.num_heads': 4, 'model.num_kv_heads': 8}, ('model.num_kv_heads=8', 'nearest that does: 4')),
    ({'model.position': 'rope', 'model.head_dim': 5}, ('rope', '5', 'even')),
    ({'model.position': 'rope', 'model.emb_dim': 12, 'model.num_heads': 4}, ('rope', '3', 'even')),
    ({'model.emb_dim': 15, 'model.num_heads': 3}, ('sinusoidal', 'even', '15')),
    ({'model.emb_dim': 0}, ('model.emb_dim=0',)),
    ({'model.mlp_dim': -1}, ('model.mlp_dim=-1',)),
    ({'model.num_heads': 0}, ('model.num_heads=0',)),
    ({'model.num_kv_heads': 0}, ('model.num_kv_heads=0',)),
    ({'model.head_dim': 0}, ('model.head_dim=0',)),
    ({'model.vocab_size': 0}, ('model.vocab_size=0',)),
    ({'model.num_decoder_layers': 0}, ('model.num_decoder_layers=0',)),
    ({'model.dropout_rate': 1.0}, ('model.dropout_rate=1.0', '[0, 1)')),
    ({'model.dropout_rate': float('nan')}, ('model.dropout_rate=nan', '[0, 1)')),
    ({'model.attention_dropout_rate': -0.1}, ('model.attention_dropout_rate=-0.1', '[0, 1)')),
    ({'model.activation_dropout_rate': 1.5}, ('model.activation_dropout_rate=1.5', '[0, 1)')),
    ({'model.tied_embeddings': 'inputs'}, ('tied_embeddings=inputs', 'decoder')),
    (
        {**PAIR, 'model.tied_embeddings': 'all', 'model.vocab_size': 9, 'model.encoder_vocab_size': 8},
        ('tied_embeddings=all', '8', '9', 'output'),
    ),
    (
        {**PAIR, 'model.tied_embeddings': 'inputs', 'model.vocab_size': 9, 'model.encoder_vocab_size': 8},
        ('tied_embeddings=inputs', 'vocabularies differ'),
    ),
    (
        {'model.family': 'encoder', 'train.objective': 'seq2seq'},
        ('train.objective=seq2seq', 'encoder_decoder or decoder', 'not encoder'),
    ),
    ({'train.objective': 'masked_lm'}, ('train.objective=masked_lm', 'encoder', 'not decoder')),
    ({'train.objective': 'replaced_token'}, ('train.objective=replaced_token', 'encoder, not decoder')),
    (
        {'train.objective': 'regression', 'train.label_smoothing': 0.1},
        ('train.label_smoothing=0.1 has no effect', 'train.objective is not regression'),
    ),
    ({'train.objective': 'question_answering', 'train.label_smoothing': 0.1}, ('train.label_smoothing=0.1',)),
    ({'train.objective': 'regression', 'train.z_loss': 0.1}, ('train.z_loss=0.1 has no effect', 'regression')),
    (
        {'train.second_loss_weight': 0.0},
        ('train.second_loss_weight=0.0 has no effect', 'train.objective is masked_lm_nsp'),
    ),
    ({'model.family': 'encoder'}, ('train.objective=causal_lm', 'decoder', 'not encoder')),
    ({'train.num_steps': None}, ('train.num_steps=None', 'train.num_epochs=None', 'exactly one')),
    ({'train.num_epochs': 1.0}, ('train.num_steps=10', 'train.num_epochs=1.0', 'exactly one')),
    ({'train.num_steps': 0}, ('train.num_steps=0',)),
    ({'train.num_steps': None, 'train.num_epochs': -1.0}, ('train.num_epochs=-1.0',)),
    ({'train.batch_size': 0}, ('train.batch_size=0',)),
    ({'train.batch_size': 8, 'train.microbatches': 3}, ('train.microbatches=3', 'train.batch_size=8', 'does: 2')),
    ({'train.microbatches': 0}, ('train.microbatches=0',)),
    (
        {'model.norm': 'batchnorm', 'train.microbatches': 2},
        ('model.norm=batchnorm', 'train.microbatches=2 is not exact'),
    ),
    ({'train.label_smoothing': 1.0}, ('train.label_smoothing=1.0', '[0, 1)')),
    ({'train.patience': 0}, ('train.patience=0',)),
    ({'train.eval_every': 0}, ('train.eval_every=0',)),
    ({'train.checkpoint_every': 0}, ('train.checkpoint_every=0',)),
    ({'train.eval_batches': 0}, ('train.eval_batches=0',)),
    ({'data.length': 513}, ('data.length=513', 'model.max_len=512')),
    ({'data.length': 2}, ('data.length=2', '3')),
    ({**PAIR, 'data.encoder_length': 513}, ('data.encoder_length=513', 'model.max_len=512')),
    ({**PAIR, 'decode.max_len': 513}, ('decode.max_len=513', 'model.max_len=512')),
    ({'data.mask_rate': 0.0}, ('data.mask_rate=0.0',)),
    ({'data.num_buckets': 0}, ('data.num_buckets=0',)),
    ({'data.source': 'tfds', 'data.tfds_splits': ('train',)}, ('data.tfds_splits', 'three')),
    ({'optimizer.learning_rate': 0.0}, ('optimizer.learning_rate=0.0',)),
    ({'optimizer.learning_rate': float('nan')}, ('optimizer.learning_rate=nan',)),
    ({'optimizer.warmup_steps': -1}, ('optimizer.warmup_steps=-1',)),
    ({'optimizer.ema_decay': 1.0}, ('optimizer.ema_decay=1.0 must be in [0, 1)',)),
    ({'train.seed': 2**31}, ('train.seed=2147483648 must be at most 2,147,483,647',)),
    ({'optimizer.clip_value': 0.0}, ('optimizer.clip_value=0.0',)),
    ({'decode.beam_size': 0}, ('decode.beam_size=0',)),
    ({'decode.temperature': 0.0}, ('decode.temperature=0.0',)),
    ({'decode.max_len': 8, 'decode.min_len': 9}, ('decode.min_len=9', 'decode.max_len=8')),
    (
        {'decode.strategy': 'beam', 'decode.presence_penalty': -0.5},
        ('decode.presence_penalty=-0.5', 'decode.strategy=beam'),
    ),
    ({'decode.strategy': 'beam', 'decode.num_outputs': 5}, ('decode.num_outputs=5', 'decode.beam_size=4')),
    ({'decode.strategy': 'mbr', 'decode.num_outputs': 17}, ('decode.num_outputs=17', 'decode.candidates=16')),
    (
        {'decode.strategy': 'beam', 'decode.beam_size': 6, 'decode.beam_groups': 4},
        ('decode.beam_groups=4', 'decode.beam_size=6', 'nearest that'),
    ),
    ({'decode.strategy': 'beam', 'decode.frequency_penalty': -0.1}, ('decode.frequency_penalty=-0.1',)),
    ({'mesh.data': -1, 'mesh.tensor': -1}, ('mesh', '-1')),
    ({'mesh.fsdp': 0}, ('mesh', "'fsdp': 0")),
]


@pytest.mark.parametrize(
    'changes, fragments', BAD, ids=['-'.join(f'{k}={v}' for k, v in bad.items()) for bad, _ in BAD]
)
def test_fields_that_do_not_fit_are_one_line_that_names_them(changes, fragments):
    with pytest.raises(UserError) as error:
        checks.check(checks.settle(config.override(Config(), {**STEPS, **changes}), changes))
    assert '\n' not in str(error.value)
    for fragment in fragments:
        assert fragment in str(error.value)


@pytest.mark.parametrize(
    'changes',
    [
        STEPS,
        {'train.num_epochs': 0.5},
        {**STEPS, 'model.num_heads': 3, 'model.emb_dim': 16, 'model.head_dim': 8},
        {**STEPS, 'model.num_heads': 4, 'model.num_kv_heads': 1},
        {**STEPS, 'data.length': 512},
        {**STEPS, 'data.length': 3, 'evaluate.lengths': (3, 512)},
        {**STEPS, 'model.num_experts': 2, 'model.experts_per_token': 2},
        {**STEPS, 'model.num_decoder_layers': 2, 'model.attention_pattern': ('local', 'global'), 'model.window': 8},
        {**STEPS, 'model.num_decoder_layers': 2, 'optimizer.frozen_layers': 2},
        {**PAIR, 'decode.max_len': 512},
        {**STEPS, 'decode.max_len': 8, 'decode.min_len': 8, 'decode.presence_penalty': -2.0},
        {**PAIR, 'decode.max_len': 511, 'data.start': ('eos', 'bos')},
        {**PAIR, 'model.tied_embeddings': 'output', 'model.vocab_size': 9, 'model.encoder_vocab_size': 8},
        {**PAIR, 'model.tied_embeddings': 'inputs'},
        {**STEPS, 'mesh.data': 2, 'mesh.tensor': -1},
        {**STEPS, 'model.family': 'encoder', 'train.objective': 'masked_lm'},
        {**STEPS, 'model.family': 'encoder', 'train.objective': 'masked_lm'}
        | {'data.mask_keep': 0.25, 'data.mask_random': 0.75},  # and none becomes the mask
        {**STEPS, 'model.family': 'encoder', 'train.objective': 'classification'},
        {**STEPS, 'train.objective': 'seq2seq'},
        {**STEPS, 'train.objective': 'classification', 'train.label_smoothing': 0.1, 'train.z_loss': 0.1},
        {**STEPS, 'train.objective': 'question_answering', 'train.z_loss': 0.1},
        {**STEPS, 'model.family': 'encoder', 'train.objective': 'masked_lm_sop', 'train.second_loss_weight': 0.0},
    ],
)
def test_fields_that_fit_pass(changes):
    checks.check_here(config.override(Config(), changes))


# ------------------------------------------------------------------------------------------------- choices
@pytest.mark.parametrize('field', checks.TABLES)
def test_an_unknown_key_of_any_table_names_the_field_and_the_nearest_key(field):
    table = list(checks.TABLES[field])
    known = next(key for key in table if isinstance(key, str))
    wrong = known + 'x'
    many = isinstance(value_of(Config(), field), tuple)
    cfg = config.override(Config(), {**STEPS, field: (wrong,) if many else wrong})
    with pytest.raises(UserError) as error:
        checks.check_here(cfg)
    message = str(error.value)
    assert message.startswith(f'{field}={wrong!r} is unknown; did you mean {known!r}?') and '\n' not in message
    assert all(repr(key) in message for key in table)


@pytest.mark.parametrize('field', checks.TABLES)
def test_none_is_refused_where_the_table_has_no_none(field):
    if None in checks.TABLES[field] or isinstance(value_of(Config(), field), tuple):
        return
    section, name = field.split('.')
    cfg = config.override(Config(), STEPS)
    cfg = dataclasses.replace(cfg, **{section: dataclasses.replace(getattr(cfg, section), **{name: None})})
    with pytest.raises(UserError, match=f'{field}=None is unknown'):
        checks.check_here(cfg)


def test_every_table_belongs_to_a_field_and_holds_its_default():
    for field, table in checks.TABLES.items():
        default = value_of(Config(), field)
        assert all(key in list(table) for key in (default if isinstance(default, tuple) else (default,)))


# ------------------------------------------------------------------------------------------------- resolve
@pytest.mark.parametrize('changes', [{'train.num_epochs': 2.5}, {**PAIR, 'model.tied_embeddings': 'output'}])
def test_resolve_fills_every_derived_none_and_is_idempotent(changes):
    cfg = config.override(Config(), changes)
    once = checks.resolve(cfg, **SIZES)
    assert checks.resolve(once, **SIZES) == once
    assert all(getattr(once.model, name) is not None for name in ('vocab_size', 'encoder_vocab_size'))
    assert once.model.num_classes is None  # only an encoder classifies
    assert (once.model.num_kv_heads, once.model.head_dim, once.model.final_norm) == (4, 64, True)
    assert once.train.num_steps == (10 if 'train.num_steps' in changes else round(2.5 * 7))
    assert once.train.eval_every == once.train.checkpoint_every == once.train.num_steps
    often = checks.resolve(config.override(once, {'train.eval_every': 1, 'train.checkpoint_every': None}), **SIZES)
    assert often.train.checkpoint_every == 1
    assert once.train.num_epochs is None and once.data.encoder_length == once.data.length
    derived_none = {'model.num_kv_heads', 'model.head_dim', 'model.final_norm', 'model.vocab_size', 'train.num_steps'}
    left = {name for name in FIELDS if value_of(once, name) is None and value_of(Config(), name) is None}
    assert not left & derived_none
    assert resolve_model(once.model) == once.model


def test_resolve_keeps_what_is_set():
    changes = {
        'model.vocab_size': 64,
        'model.num_kv_heads': 2,
        'model.head_dim': 8,
        'model.final_norm': False,
        'train.num_steps': 9,
        'train.eval_every': 4,
        'train.checkpoint_every': 2,
        'data.encoder_length': 5,
    }
    cfg = checks.resolve(config.override(Config(), changes), **SIZES)
    assert {name: value_of(cfg, name) for name in changes} == changes


def test_numbers_of_steps_below_1_are_shares_of_the_run():
    stated = {'train.num_epochs': 10, 'optimizer.warmup_steps': '0.1', 'train.eval_every': 0.25}  # 70 steps
    cfg = checks.resolve(config.override(Config(), stated), **SIZES)
    assert (cfg.optimizer.warmup_steps, cfg.train.eval_every, cfg.train.checkpoint_every) == (7, 18, 18)
    shortest = checks.resolve(config.override(Config(), {'train.num_steps': 2, 'train.eval_every': 0.01}), **SIZES)
    assert shortest.train.eval_every == 1


def test_the_final_norm_follows_the_placement():
    for placement, expected in (('pre', True), ('post', False)):
        cfg = config.override(Config(), {**STEPS, 'model.norm_placement': placement})
        assert checks.resolve(cfg, **SIZES).model.final_norm is expected


def test_resolve_refuses_a_vocabulary_smaller_than_the_tokenizer():
    with pytest.raises(UserError, match=r'model\.vocab_size=39 is smaller than the tokenizer, which has 40'):
        checks.resolve(config.override(Config(), {**STEPS, 'model.vocab_size': 39}), **SIZES)


def test_resolve_refuses_one_table_for_two_vocabularies():
    with pytest.raises(UserError, match='vocabularies differ'):
        checks.resolve(config.override(Config(), {**PAIR, 'model.tied_embeddings': 'all'}), **SIZES)


def test_one_tokenizer_for_both_sides_has_one_vocabulary_size():
    cfg = config.override(Config(), {**PAIR, 'model.tied_embeddings': 'all', 'model.vocab_size': 64})
    assert checks.resolve(cfg, vocab_size=40, encoder_vocab_size=40).model.encoder_vocab_size == 64


# ------------------------------------------------------------------------------------------------- renamed fields
def test_old_names_of_fields_are_read_from_files_and_refused_on_the_command_line(tmp_path):
    tree = json.loads(json.dumps(config.to_dict(Config())))
    values = {
        'optimizer.rate_factors': ['mlp=2'],
        'optimizer.decayed': ['kernel'],
        'mesh.rounds': 3,
        'mesh.slices': 'fsdp',
    }
    for (old, new), value in zip(RENAMED.items(), values.values(), strict=True):
        (section, was), (_, now) = old.split('.'), new.split('.')
        del tree[section][now]
        tree[section][was] = value
        with pytest.raises(UserError, match=f'^config.{old} is now config.{new}$'):
            config.override(Config(), {old: '1'})
    (tmp_path / 'config.json').write_text(json.dumps(tree))
    read = config.load(str(tmp_path / 'config.json'))
    assert read.optimizer.lr_multipliers == ('mlp=2',) and read.optimizer.decayed_roles == ('kernel',)
    assert (read.mesh.pipeline_repeats, read.mesh.dcn_axis) == (3, 'fsdp')
