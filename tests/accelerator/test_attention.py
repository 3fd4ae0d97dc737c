"""Attention kernels on the chip, against float64: about as near to it as the `reference` of the same type.

The rehearsal interprets the kernels of Pallas on a CPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import accelerator
from attention_cases import BIASED, CASES, Case, by_hand, make, make_mask
from comparing import errors
from tformer.layers.accelerators import cudnn, mosaic, splash, tile_dropout, triton
from tformer.layers.kernel_choice import KERNELS, unserved
from tformer.layers.kernels import ScoreOptions

pytestmark = pytest.mark.accelerator

# A kernel rounds other sums than `reference` and as many of them: its error is another draw of the same size.
FACTOR = 3
KEY = jax.random.key(5)
ROUNDOFF = {'float32': 2.0**-24, 'bfloat16': 2.0**-9}
INTERPRETED = {
    'flash': functools.partial(splash.flash, interpret=True),
    'mosaic': functools.partial(mosaic.mosaic, interpret=True),
    'triton': functools.partial(triton.triton, interpret=True),
}
ODD = {
    'odd length': Case(lengths=(141, 141)),
    'odd, across': Case(causal=False, order=None, across=True, lengths=(97, 141), heads=(8, 4)),
    'odd, packed, groups': Case(lengths=(141, 141), packed=True, heads=(8, 2)),
}
ALL = {
    name: case._replace(sizes=tuple(4 * size for size in case.sizes))  # heads of 64
    for name, case in (CASES | ODD | BIASED).items()
}
WIDE = ('causal', 'prefix and packed', 'softcap and sink')  # in float32, which compiles for longer
RUNS = [
    *((kernel, name, 'bfloat16') for kernel in ('cudnn', 'triton', 'mosaic') for name in ALL),
    *(('flash', name, 'bfloat16') for name in CASES | ODD),
    *((kernel, name, 'float32') for kernel in ('triton', 'flash', 'mosaic') for name in WIDE),
    *(
        (kernel, name, dtype)
        for kernel in ('chunked', 'xla')
        for name in ('causal', 'groups', 'across and packed')
        for dtype in ROUNDOFF
    ),
]


def needs(case, dtype, rate=None):
    asked = {
        'bias': case.bias,
        'dropout': rate,
        'softcap': case.softcap,
        'sink': case.sink,
        'value_dim': case.sizes[0] != case.sizes[1],
    }
    return {dtype} | {feature for feature, asks in asked.items() if asks}


def function(kernel, case, dtype, rate=None):
    """Returns the kernel; skips where the chip or the kernel does not serve the case."""
    if accelerator.MODE == 'cpu' and kernel in INTERPRETED:
        return INTERPRETED[kernel]
    if line := unserved(kernel, needs(case, dtype, rate), jax.default_backend()):
        pytest.skip(line.partition(';')[0])
    if kernel == 'cudnn' and not case.bias and not cudnn.knows(make_mask(case)[0]):
        pytest.skip('cudnn leaves this mask to triton')
    return KERNELS[kernel].function


def cotangent(case, dtype):
    """Zero at padding, whose outputs nobody reads."""
    real_BT = make_mask(case)[1]
    shape = (len(real_BT), case.heads[0], case.lengths[0], case.sizes[1])
    drawn = np.where(real_BT[:, None, :, None], np.random.default_rng(1).standard_normal(shape), 0)
    return jnp.asarray(drawn, dtype)


def run(kernel, case, dtype, rate=None):
    """Returns the outputs at tokens and the gradients, by name."""
    dout_BNTU, (mask, real_BT) = cotangent(case, dtype), make_mask(case)

    @jax.jit
    def program(arrays, mask, dout_BNTU):
        def attend(arrays):
            vectors = {name: arrays[name] for name in ('sink_N', 'bias_1NX') if name in arrays}
            options = ScoreOptions(case.sizes[0] ** -0.5, softcap=case.softcap, **vectors)
            options = options._replace(dropout_rate=rate, dropout_key=None if rate is None else KEY)
            return kernel(arrays['q'], arrays['k'], arrays['v'], mask, options)

        out_BNTU, pull = jax.vjp(attend, arrays)
        return jnp.where(real_BT[:, None, :, None], out_BNTU, 0), *pull(dout_BNTU)

    with jax.default_matmul_precision('highest'):
        out_BNTU, grads = jax.device_get(program(make(case, dtype), mask, dout_BNTU))
    return {'out': out_BNTU, **grads}


@functools.cache
def exact(name, dtype, rate=None):
    case = ALL[name]
    mask, real_BT = make_mask(case)
    options, factor_BNTS = ScoreOptions(case.sizes[0] ** -0.5, softcap=case.softcap), 1.0
    if rate is not None:
        drawn_BN3 = tile_dropout.draw(rate, KEY, len(real_BT), case.heads[0])
        places = np.ogrid[: case.lengths[0], : case.lengths[1]]
        kept = jax.vmap(jax.vmap(lambda drawn_3: tile_dropout.kept(drawn_3, *places)))(drawn_BN3)
        factor_BNTS = np.asarray(kept, np.float64) / (1 - rate)
    out, grads = by_hand(make(case, dtype), np.asarray(mask.array()), options, cotangent(case, dtype), factor_BNTS)
    return {'out': np.where(real_BT[:, None, :, None], out, 0), **grads}


@functools.cache
def own_errors(name, dtype):
    return errors(run(KERNELS['reference'].function, ALL[name], dtype), exact(name, dtype))


@pytest.mark.parametrize(('kernel', 'name', 'dtype'), RUNS)
def test_a_kernel_is_as_near_to_float64_as_the_reference(kernel, name, dtype):
    found = errors(run(function(kernel, ALL[name], dtype), ALL[name], dtype), exact(name, dtype))
    bounds = {key: FACTOR * max(own, ROUNDOFF[dtype]) for key, own in own_errors(name, dtype).items()}
    assert {key: (error, bounds[key]) for key, error in found.items() if not error <= bounds[key]} == {}


DROPPING = ['causal', 'odd, packed, groups', 'across', 'softcap and sink']
DROPPING = [(kernel, name) for kernel in ('mosaic', 'triton') for name in [*DROPPING, 'bias, groups']]


@pytest.mark.parametrize(('kernel', 'name'), DROPPING)
def test_a_kernel_drops_what_is_drawn(kernel, name):
    """As near to float64 as the `reference` that drops nothing."""
    rate, dtype = 0.25, 'bfloat16'
    found = errors(run(function(kernel, ALL[name], dtype, rate), ALL[name], dtype, rate), exact(name, dtype, rate))
    bounds = {key: FACTOR * max(own, ROUNDOFF[dtype]) for key, own in own_errors(name, dtype).items()}
    assert {key: (error, bounds[key]) for key, error in found.items() if not error <= bounds[key]} == {}
