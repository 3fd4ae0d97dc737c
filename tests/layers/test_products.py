"""Products whose gradients are those of `jnp.einsum`, and of which a CPU transposes no large operand."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tformer.layers.products import einsum

SIZES = {'B': 2, 'T': 24, 'S': 24, 'R': 48, 'D': 16, 'F': 64, 'V': 128, 'W': 16, 'N': 4, 'K': 2, 'G': 2, 'H': 8, 'U': 4}
EQUATIONS = [
    'BTD,DF->BTF',
    'BTF,FD->BTD',
    'BTW,VW->BTV',
    'BTD,DNH->BNTH',
    'BNTU,NUD->BTD',
    'BKGTH,BKSH->BKGTS',
    'BKGTS,BKSU->BKGTU',
]
OF_ROWS = ['BKRH,BKSH->BKRS', 'BKRS,BKSU->BKRU']  # which XLA reads as they are


def operands(equation: str, dtype: str = 'float32') -> list[jax.Array]:
    """Random x, y, and gradient of their product."""
    random = np.random.default_rng(0)
    return [
        jnp.asarray(random.normal(size=[SIZES[axis] for axis in axes]), dtype) for axes in re.findall(r'\w+', equation)
    ]


def pulled(product, x, y, dz):
    out, pull = jax.vjp(product, x, y)
    return out, *pull(dz.astype(out.dtype))


def plain(equation, dtype, x, y):
    return jnp.einsum(equation, x, y, preferred_element_type=dtype)


@pytest.mark.slow
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('equation', EQUATIONS + OF_ROWS)
def test_product_and_gradients_are_those_of_einsum(equation, dtype):
    given = operands(equation, dtype)
    for out in {dtype, 'float32'}:
        found, wanted = (pulled(functools.partial(each, equation, out), *given) for each in (einsum, plain))
        for one, other in zip(found, wanted, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            scale = float(jnp.abs(other.astype(jnp.float32)).max())
            bound = 1e-6 if one.dtype == jnp.float32 else 2**-8  # half a place of each number
            np.testing.assert_allclose(*(np.float32(each) / scale for each in (one, other)), rtol=bound, atol=bound)


@pytest.mark.parametrize('equation', EQUATIONS)
def test_the_gradient_of_the_second_reads_rows_and_transposes_no_large_operand(equation):
    """In JAX's order XLA transposes the larger one, and the product reads both along their columns."""
    x, y, dz = operands(equation)
    gradient = jax.jit(lambda x, y, dz: pulled(functools.partial(einsum, equation, jnp.float32), x, y, dz)[2])
    lines = gradient.lower(x, y, dz).compile().as_text().splitlines()
    (product,) = (line for line in lines if ' dot(' in line)
    batch = 2 if 'lhs_batch_dims' in product else 0
    read = [int(re.search(f'{side}_contracting_dims={{(.)}}', product)[1]) - batch for side in ('lhs', 'rhs')]
    assert read == [1, 0]
    if 'N' not in equation:  # heads stand between
        moved = [re.search(r' = f32\[([\d,]*)\]', line) for line in lines if re.search(r' (copy|transpose)\(', line)]
        sizes = [int(np.prod([int(size) for size in found[1].split(',')])) for found in moved if found]
        assert max(sizes, default=0) <= max(min(x.size, dz.size), y.size)


def test_under_vmap_each_has_its_own_gradient():
    equation = 'BTD,DF->BTF'
    x, y, dz = (jnp.stack([each, 2 * each]) for each in operands(equation))
    found = jax.vmap(functools.partial(pulled, functools.partial(einsum, equation, jnp.float32)))(x, y, dz)
    for number in range(2):
        wanted = pulled(functools.partial(plain, equation, jnp.float32), x[number], y[number], dz[number])
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one[number], other, rtol=1e-5, atol=1e-4)
