"""No field is set in vain: one that the user states is refused where nothing reads it, one of a recipe is dropped."""

import dataclasses
import functools
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import recipes
from tformer import checks
from tformer.checks import run_fields
from tformer.config import Config, Data, Model, Optimizer, override, values
from tformer.config.tasks import TASKS
from tformer.data.examples.corrupt import NOISES, Noise
from tformer.data.sources import algorithmic
from tformer.data.tokenizers.bytes_and_characters import Byte
from tformer.errors import UserError
from tformer.model import FAMILIES
from tformer.optim.optimizers import OPTIMIZERS
from tformer.optim.schedules import SCHEDULES, learning_rate

RULES = sorted(run_fields.rules(Config()))
OTHER: dict[str, Any] = {  # a value besides the default, where none follows from its type
    'train.loss_chunk': 7,
    'data.source_tokenizer': 'char',
    'data.tokenizer': 'byte',
    'data.normalization': 'nfc',
    'data.bad_lines': 'skip',
    'data.overlong': 'truncate',
    'data.tokenizer_model': 'bpe',
    'data.split_by': 'family',
    'data.task': 'sort',
    'data.mask_unit': 'word',
    'data.noise': ('mask',),
    'data.denoisers': ('s',),
    'data.mixture_stages': ('step=9 weights=1,2',),
    'data.train_lengths': (1, 4),
    'data.test_lengths': (5, 6),
    'data.start': ('eos',),
    'data.source_start': ('bos',),
    'data.source_end': ('sep',),
    'data.end': ('sep',),
    'model.pooling': 'last',
    'model.pooler_activation': 'relu',
    'optimizer.decayed_roles': ('kernel',),
    'optimizer.master_dtype': 'float32',
    'train.init_narrow': ('optimizer.beta1=0.5',),
    'decode.strategy': 'beam',
    'decode.early_stopping': 'full',
    'decode.utility': 'bleu',
    'decode.draft': 'prompt',
    'decode.quantization': 'int8',
    'decode.cache_quantization': 'int8',
    'decode.bias': ('a=-1',),
    'evaluate.metrics': ('bleu',),
    'evaluate.language': 'de',
    'evaluate.positive_label': 'a',
    'evaluate.lengths': (8,),
    'evaluate.null_threshold': 0.5,
    'data.label_range': (0.0, 1.0),
}


def other(field: str) -> Any:
    """Returns a value of a field that is not its default."""
    default = values(Config())[field]
    if field in OTHER:
        return OTHER[field]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default / 2 if isinstance(default, float) and default else default + 1
    return ('other',) if isinstance(default, tuple) else 7 if default is None and field not in TEXTS else 'other'


TEXTS = (
    *('decode.regex', 'decode.json_schema', 'decode.begin'),
    'data.tokenizer_path',
    'data.tfds_name',
    'data.tfds_dir',
    'data.source_template',
    'data.target_template',
    'train.init_from',
    'train.teacher',
    'data.chat_template',
)


@functools.cache
def settled_configs() -> list[tuple[Config, Any, frozenset[str]]]:
    """Returns each config in which all that is stated has an effect, its rules, and the fields that it states."""
    made = []
    for objective, family, changes in itertools.product(TASKS, FAMILIES, SURROUNDINGS):
        if family in TASKS[objective].families:
            stated = {'train.objective': objective, 'train.num_steps': 1, **changes}
            config = override(Config(model=Model(family=family)), stated)
            if checks.settled(config) == config:
                made.append((config, run_fields.rules(config), frozenset(changes)))
    return made


def somewhere(field: str, applies: bool) -> Config:
    """Returns a config in which a field has an effect, or has none."""
    return next(
        config
        for config, rules, stated in settled_configs()
        if field not in stated and field in rules and rules[field][0](config) == applies
    )


SURROUNDINGS: list[dict[str, Any]] = [
    {},
    {'data.source': 'tfds'},
    {'data.source': 'cmudict'},
    {'data.source': 'algorithmic'},
    {'data.source': 'algorithmic', 'data.task': 'copy'},
    {'data.tokenizer': 'byte'},
    {'data.batching': 'pad'},
    {'data.batch_tokens': 64},
    {'data.mixture': ('source=stdlib', 'source=cmudict')},
    {'data.noise': ('mask', 'delete', 'infill')},
    *({'optimizer.name': name} for name in OPTIMIZERS),
    {'optimizer.weight_decay': 0.1},
    {'optimizer.schedule': 'wsd'},
    {'optimizer.schedule': 'noam'},
    {'model.param_dtype': 'bfloat16'},
    {'model.pooler': True},
    {'train.init_from': 'runs/a'},
    {'train.init_model': True},
    {'mesh.pipeline': 2},
    {'decode.strategy': 'beam'},
    {'decode.strategy': 'beam', 'decode.beam_groups': 2},
    {'decode.strategy': 'mbr'},
    {'decode.strategy': 'sample'},
    {'evaluate.metrics': ('bleu', 'label_f1')},
]


@pytest.mark.slow
@pytest.mark.parametrize('field', RULES)
def test_a_field_without_effect_is_refused_where_it_is_stated_and_dropped_from_a_recipe(field: str) -> None:
    assert somewhere(field, applies=True)
    config = override(somewhere(field, applies=False), {field: other(field)})
    with pytest.raises(UserError) as error:
        checks.settle(config, [field])
    line = str(error.value)
    assert line.startswith(f'{field}=') and ' has no effect here: it applies where ' in line and '\n' not in line
    words = line.partition(': ')[2]
    said: list[str] = []
    settled = checks.settle(config, say=said.append)
    assert values(settled)[field] == values(Config())[field]
    (line,) = said
    assert f'{field}=' in line and words in line and '\n' not in line
    assert checks.settle(settled, say=said.append) == settled and len(said) == 1


@pytest.mark.slow
@pytest.mark.parametrize('field', RULES)
def test_a_field_with_an_effect_is_kept(field: str) -> None:
    config = override(somewhere(field, applies=True), {field: other(field)})
    assert values(checks.settle(config, [field], say=lambda line: None))[field] == values(config)[field]


def test_a_recipe_is_changed_by_one_field() -> None:
    base = override(Config(), {'model.position': 'rope', 'model.rope_theta': 5e5, 'train.num_steps': 1})
    said: list[str] = []
    changed = checks.settle(override(base, {'model.position': 'alibi'}), ['model.position'], said.append)
    assert changed == override(Config(), {'model.position': 'alibi', 'train.num_steps': 1})
    assert said == [
        'dropped from the config, as it has no effect here: '
        'model.rope_theta=500000.0 (it applies where model.position is rope)'
    ]


def test_tokenizers_of_another_run_leave_nothing_to_the_fields_of_new_ones() -> None:
    config = override(Config(), {'train.init_from': 'runs/a', 'data.sentinels': 3, 'data.tokenizer': 'huggingface'})
    said: list[str] = []
    assert checks.settle(config, say=said.append) == override(Config(), {'train.init_from': 'runs/a'})
    with pytest.raises(UserError, match=r'data\.tokenizer=char has no effect here: .* and train\.teacher are None'):
        checks.settle(override(config, {'data.tokenizer': 'char'}), ['data.tokenizer'])


def test_a_field_of_a_part_is_set_once() -> None:
    with pytest.raises(UserError, match=r'data\.mixture\[0\] sets path twice'):
        checks.settle(override(Config(), {'data.mixture': ('path=a path=b',)}))


def test_a_field_that_each_part_of_a_mixture_sets_itself_has_no_effect() -> None:
    parts = ('path=a', 'path=b')
    config = override(Config(), {'data.mixture': parts, 'data.path': ('c',), 'train.num_steps': 1})
    with pytest.raises(UserError, match=r'a part of data\.mixture does not set it'):
        checks.settle(config, ['data.path'])
    mixed = override(config, {'data.mixture': ('path=a', 'source=cmudict')})
    with pytest.raises(UserError, match=r'a part of data\.mixture does not set it'):
        checks.settle(mixed, ['data.path'])
    inherited = override(config, {'data.mixture': ('path=a', 'columns=x')})
    assert checks.settle(inherited, ['data.path']) == inherited
    with pytest.raises(UserError, match=r'data.mixture\[1\]: modulus=7 has no effect here'):
        checks.settle(override(config, {'data.path': (), 'data.mixture': ('path=a', 'source=stdlib modulus=7')}))


@pytest.mark.parametrize('recipe', [f'{file}:{size}' for file in recipes.FILES for size in ('', 'smoke')])
def test_shipped_recipes_set_no_field_in_vain(recipe: str) -> None:
    if not recipe.startswith('architectures/'):  # which hold fields for fine-tuning, too
        said: list[str] = []
        checks.settle(recipes.stated(recipe), say=said.append)
        assert said == []


# ------------------------------------------------------------------------------------------------- rows of tables
class Recorder:
    """A section of a config that remembers which of its fields are read."""

    def __init__(self, section: object) -> None:
        self.__dict__.update(section=section, read=set())

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.section, name)


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_an_optimizer_reads_the_fields_that_its_row_names(name: str) -> None:
    recorder: Any = Recorder(Optimizer())
    names = {'mlp': {'kernel': P('embed', 'mlp')}, 'norm': {'scale': P('embed')}}
    params = {'mlp': {'kernel': jnp.ones((2, 3))}, 'norm': {'scale': jnp.ones(2)}}
    direction = OPTIMIZERS[name].direction(recorder, names)
    direction.update(params, direction.init(params), params)
    averaged = {'beta1'} if OPTIMIZERS[name].averages else set()
    assert recorder.read | averaged == set(OPTIMIZERS[name].fields or ()) - {'weight_decay'}


@pytest.mark.parametrize('name', SCHEDULES)
def test_a_schedule_reads_the_fields_that_apply_to_it(name: str) -> None:
    @dataclasses.dataclass
    class Hyper:
        learning_rate: float = 1.0
        warmup_steps: int = 2
        final_fraction: float = 0.0
        decay_fraction: float = 0.2

    def rates(**fields: float) -> np.ndarray:
        hyper: Any = Hyper(**fields)
        return np.array([learning_rate(name, hyper, step, num_steps=10, emb_dim=4) for step in range(1, 11)])

    config = override(Config(), {'optimizer.schedule': name})
    read = {field for field in ('final_fraction', 'decay_fraction') if (rates(**{field: 0.5}) != rates()).any()}
    rules = run_fields.rules(config)
    assert read == {field for field in ('final_fraction', 'decay_fraction') if rules[f'optimizer.{field}'][0](config)}


@pytest.mark.parametrize('name', algorithmic.TASKS)
def test_an_algorithmic_task_reads_the_fields_that_its_row_names(name: str) -> None:
    recorder: Any = Recorder(Data(source='algorithmic', task=name, modulus=5))
    for split in ('train', 'test'):
        next(iter(algorithmic.TASKS[name].pairs(recorder, split)))
    assert recorder.read - {'task'} == set(algorithmic.TASKS[name].fields)


@pytest.mark.parametrize('name', NOISES)
def test_a_noise_reads_the_fields_that_its_row_names(name: str) -> None:
    recorder: Any = Recorder(Data())
    NOISES[name].corrupt(np.arange(10, 40), Noise(recorder, Byte.train([]), (0,)))
    NOISES[name].longest(np.array([9]), recorder)
    assert recorder.read == set(NOISES[name].fields)


HERE = {
    'the head size of cudnn': (
        {'model.attention_kernel': 'cudnn', 'model.emb_dim': 24, 'model.num_heads': 2},
        'model.attention_kernel=cudnn does not serve a model.head_dim that is not a multiple of 8, or above 256, '
        'model.dtype=float32, platform cpu; reference, chunked, blocked, xla do',
    ),
    'flash on a CPU': (
        {'model.attention_kernel': 'flash'},
        'model.attention_kernel=flash does not serve platform cpu; reference, chunked, blocked, xla do',
    ),
}


@pytest.mark.parametrize('case', HERE)
def test_a_kernel_that_does_not_serve_the_model_here_is_refused(case: str) -> None:
    changes, line = HERE[case]
    with pytest.raises(UserError) as error:
        checks.check_here(override(Config(), {'train.num_steps': 1, **changes}))
    assert str(error.value) == line


def test_rows_of_a_pipeline_are_parted_whole_where_a_batch_has_a_number_of_rows() -> None:
    """A batch of a number of tokens has as many rows as the parts need."""
    stated = {
        'model.num_decoder_layers': 2,
        'mesh.pipeline': 2,
        'mesh.microbatches': 3,
        'train.batch_size': 8,
        'train.num_steps': 1,
    }
    with pytest.raises(UserError, match=r'train.batch_size=8 .*mesh.microbatches=3 x 1 ways of the rows'):
        checks.check(override(Config(), stated))
    with pytest.raises(UserError, match=r'train.batch_size=9 is not a multiple of .*nearest that is: 12'):
        checks.check(override(Config(), {**stated, 'train.batch_size': 9}))  # 3 parts, and 2 stages split the rows
    checks.check(override(Config(), {**stated, 'train.batch_size': 12}))
    checks.check(override(Config(), {**stated, 'data.batch_tokens': 4096}))
