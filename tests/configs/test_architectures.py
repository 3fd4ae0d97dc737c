"""Published architectures (configs/architectures): every size loads and has the published number of parameters."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest

import recipes
from tformer import checks, config
from tformer.distributed.sharding import unboxed
from tformer.model import build

FILES = [name.removeprefix('architectures/') for name in recipes.FILES if '/' in name]

# Parameters of each FILE[:argument]. Encoders: (with the pooler, without the masked-LM head; the other way round).
SIZES = {
    'original': 63_045_632,
    'original:attention_biases': 63_082_496,
    'original:big': 214_171_648,
    'original:big,attention_biases': 214_245_376,
    'bert': (109_482_240, 109_514_298),
    'bert:large': (335_141_888, 335_174_458),
    'roberta': (124_645_632, 124_697_433),
    'roberta:large': (355_359_744, 355_412_057),
    'albert': (11_683_584, 11_221_680),
    'albert:large': (17_683_968, 16_795_824),
    'albert:xlarge': (58_724_864, 54_821_040),
    'albert:xxlarge': (222_595_584, 206_368_944),
    'gpt2': 124_439_808,
    'gpt2:medium': 354_823_168,
    'gpt2:large': 774_030_080,
    'gpt2:xl': 1_557_611_200,
    't5:small': 60_506_624,
    't5': 222_903_552,
    't5:large': 737_668_096,
    't5:3b': 2_851_598_336,
    't5:11b': 11_307_321_344,
    't5:v1_1_small': 76_961_152,
    't5:v1_1_base': 247_577_856,
    't5:v1_1_large': 783_150_080,
    't5:v1_1_xl': 2_849_757_184,
    't5:v1_1_xxl': 11_135_332_352,
    'bart': 139_420_416,
    'bart:large': 406_291_456,
    'llama': 6_738_415_616,
    'llama:llama2_13b': 13_015_864_320,
    'llama:llama2_70b': 68_976_648_192,
    'llama:llama3_1_8b': 8_030_261_248,
    'llama:llama3_1_70b': 70_553_706_496,
    'gemma': 2_614_341_888,
    'gemma:gemma2_9b': 9_241_705_984,
    'gemma:gemma2_27b': 27_227_128_320,
    'mixtral': 46_702_792_704,
    'mixtral:8x22b': 140_620_634_112,
}


def load(name: str) -> config.Config:
    return recipes.load(f'architectures/{name}')


def count(cfg: config.Model, method: str = '__call__') -> int:
    """Returns how many parameters `method` of the model uses; nothing is allocated."""
    row = jnp.zeros((1, 4), jnp.int32)
    batch = {'inputs': row, 'encoder_inputs': row}
    init = functools.partial(build(cfg).init, method=method)
    shapes = unboxed(jax.eval_shape(init, jax.random.key(0), batch)['params'])
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize('file', FILES)
def test_every_size_of_an_architecture_has_its_number(file: str) -> None:
    for size in ('', *recipes.arguments(f'architectures/{file}')):
        loaded = load(f'{file}:{size}')
        assert loaded.data.source == 'files'
        sources = 263 if loaded.model.family == 'encoder_decoder' else None
        resolved = checks.resolve(loaded, vocab_size=263, encoder_vocab_size=sources)  # of a smaller tokenizer
        assert resolved.model.vocab_size == loaded.model.vocab_size
        assert size == 'smoke' or any(name.split(':')[0] == file and size in name for name in SIZES), size


@pytest.mark.slow
@pytest.mark.parametrize('name', SIZES)
def test_an_architecture_has_the_published_number_of_parameters(name: str) -> None:
    cfg, expected = recipes.stated(f'architectures/{name}').model, SIZES[name]  # the pooler is for fine-tuning
    if isinstance(expected, tuple):
        assert (count(cfg, 'pool'), count(cfg)) == expected
    else:
        assert count(cfg) == expected
    page = recipes.header(f'architectures/{name.split(":")[0]}')
    for number in expected if isinstance(expected, tuple) else (expected,):
        assert f'{number:,}' in page or name.startswith('albert')
