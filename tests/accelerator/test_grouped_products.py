"""The kernels of experts' products on the chip, against float64: about as near to it as XLA's."""

import functools

import jax
import jax.numpy as jnp
import pytest

import accelerator
from comparing import errors
from grouped_cases import by_hand, make, run
from tformer.layers.grouped_blocks import Options
from tformer.layers.grouped_products import PLATFORMS, grouped_product

pytestmark = pytest.mark.accelerator

FACTOR = 3  # its sums are in another order, and their error another draw of the same size
ROUNDOFF = {'float32': 2.0**-24, 'bfloat16': 2.0**-9}
CASES = {  # blocks of each expert, slots of a block, widths, blocks behind
    'the last one empty': ((2, 3, 0), 64, (128, 256), 4),
    'many': ((9, 0, 17, 1), 128, (256, 704), 6),
    'narrow': ((3, 1, 0, 2), 16, (128, 384), 1),
    'one slot in four': ((1,) * 8, 16, (384, 640), 3),
}


def of_xla(x_PD, kernel_EDF, blocks):
    """Each block by its expert's kernel, of which it has a copy."""
    y_MRF = jnp.einsum(
        'MRD,MDF->MRF', x_PD.reshape(len(blocks.expert_M), -1, x_PD.shape[1]), kernel_EDF[blocks.expert_M]
    )
    return y_MRF.reshape(len(x_PD), -1)


@pytest.mark.parametrize('dtype', ROUNDOFF)
@pytest.mark.parametrize('case', CASES)
def test_the_kernels_are_as_near_to_float64_as_xla(case, dtype):
    platform = jax.default_backend() if accelerator.MODE == 'chip' else 'gpu'
    if platform not in PLATFORMS:
        pytest.skip(f'there is no kernel for {platform}')
    given = make(*CASES[case], dtype)
    kernel = functools.partial(grouped_product, Options(platform, 0, accelerator.MODE == 'cpu'))
    with jax.default_matmul_precision('highest'):
        own, theirs = (errors(run(product, *given), by_hand(*given)) for product in (kernel, of_xla))
    assert {name: error for name, error in own.items() if error > FACTOR * max(theirs[name], ROUNDOFF[dtype])} == {}
