"""The kernel of activations on the chip, against float64: about as near to it as XLA's."""

import functools

import jax
import pytest

import accelerator
from activation_cases import by_hand, make, run
from comparing import errors
from tformer.layers import mlp
from tformer.layers.accelerators import activation_kernel

pytestmark = pytest.mark.accelerator

FACTOR = 2  # it rounds results alone
SHAPES = ((2, 64, 3072), (3, 37, 384), (1, 300, 256))  # lengths and widths that tiles do and do not divide


@pytest.mark.parametrize('name', mlp.WIDE)
@pytest.mark.parametrize('shape', SHAPES)
def test_the_kernel_is_as_near_to_float64_as_xla(shape, name):
    if accelerator.MODE == 'chip' and jax.default_backend() != 'gpu':
        pytest.skip('the kernel is for GPUs')
    given = make(shape)
    kernel = functools.partial(
        activation_kernel.activate, activation_kernel.Options(mlp.WIDE[name], accelerator.MODE == 'cpu')
    )

    def of_xla(x, bias):
        return mlp.ACTIVATIONS[name][1](x + (bias - jax.lax.stop_gradient(bias)).astype(x.dtype)[None, None])

    exact = by_hand(name, *given)
    own, theirs = (errors(run(activate, *given), exact) for activate in (kernel, of_xla))
    assert {name: error for name, error in own.items() if error > FACTOR * max(theirs[name], 2.0**-9)} == {}
