"""The kernel of norms on the chip, against float64: about as near to it as XLA's."""

import functools

import jax
import pytest

import accelerator
from comparing import errors
from norm_cases import by_hand, make, run
from tformer.layers import norms
from tformer.layers.accelerators import norm_kernel

pytestmark = pytest.mark.accelerator

EPSILON = 1e-5
FACTOR = 3  # its sums are in another order, and their error another draw of the same size
ROUNDOFF = {'float32': 2.0**-24, 'bfloat16': 2.0**-9}
SHAPES = ((4, 64, 768), (3, 37, 320), (2, 5, 5120), (1, 300, 256))  # lengths and widths that tiles do and do not divide


def of_xla(centred, dtype):
    if centred:
        return lambda x, scale, bias: norms.layer_norm(x, scale, bias, EPSILON, True).astype(dtype)
    return lambda x, scale, bias: (norms.rms_norm(x, scale, EPSILON, True) + bias[None, None]).astype(dtype)


@pytest.mark.parametrize('dtype', ROUNDOFF)
@pytest.mark.parametrize('centred', (True, False))
@pytest.mark.parametrize('shape', SHAPES)
def test_the_kernel_is_as_near_to_float64_as_xla(shape, centred, dtype):
    if accelerator.MODE == 'chip' and jax.default_backend() != 'gpu':
        pytest.skip('the kernel is for GPUs')
    given = make(shape, dtype)
    options = norm_kernel.Options(centred, EPSILON, dtype, interpret=accelerator.MODE == 'cpu')
    kernel = functools.partial(norm_kernel.norm, options)
    exact = by_hand(centred, EPSILON, *given)
    own, theirs = (errors(run(norm, *given), exact) for norm in (kernel, of_xla(centred, dtype)))
    assert {name: error for name, error in own.items() if error > FACTOR * max(theirs[name], ROUNDOFF[dtype])} == {}
