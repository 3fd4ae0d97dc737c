"""Products by integers of eight bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tformer.layers.quantized import quantize, quantized_product

RNG = np.random.default_rng(0)
PRODUCTS = {  # equation -> (shape of the input, shape of the kernel, the kernel's axes that are summed over)
    'BTD,DF->BTF': ((2, 3, 5), (5, 4), (0,)),
    'BTD,DNH->BNTH': ((2, 3, 5), (5, 2, 4), (0,)),
    'BNTU,NUD->BTD': ((2, 2, 3, 4), (2, 4, 5), (0, 1)),
    'BTW,VW->BTV': ((2, 3, 5), (7, 5), (1,)),
    'BTD,DF->BTF of one row': ((1, 1, 5), (5, 4), (0,)),
}


@pytest.mark.parametrize('axes', [(0,), (1,), (0, 1)])
def test_each_number_is_within_half_a_step_of_its_integer_and_the_largest_is_127(axes) -> None:
    x = RNG.normal(size=(6, 8)).astype(np.float32)
    integers, scales = (np.asarray(part) for part in quantize(jnp.asarray(x), axes))
    assert integers.dtype == np.int8 and (np.abs(integers).max(axis=axes) == 127).all()
    np.testing.assert_allclose(scales, np.abs(x).max(axis=axes, keepdims=True) / 127, rtol=1e-6)
    assert (np.abs(x - integers * scales) <= scales * 0.5001).all()


def test_the_integers_of_nothing_are_zero() -> None:
    integers, scales = quantize(jnp.zeros((2, 3)).at[1, 1].set(-2.0), (1,))
    np.testing.assert_array_equal(integers, [[0, 0, 0], [0, -127, 0]])
    np.testing.assert_allclose(scales, [[0.0], [2 / 127]])


@pytest.mark.parametrize('name', PRODUCTS)
def test_a_product_is_that_of_the_rounded_numbers(name) -> None:
    """Each token has a scale of its own, and each output: in float64, of the numbers that the integers stand for."""
    equation, (of_x, of_kernel, summed) = name.split(' ')[0], PRODUCTS[name]
    x, kernel = (RNG.normal(size=shape).astype(np.float32) for shape in (of_x, of_kernel))
    x *= 10.0 ** np.arange(of_x[1]).reshape([-1 if axis == 1 else 1 for axis in range(x.ndim)])
    inputs, letters = equation.split('->')[0].split(',')

    def rounded(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        step = np.abs(x).max(axis=axes, keepdims=True) / np.float32(127)
        return np.round(x / step).astype(np.float64) * step

    axes = tuple(place for place, letter in enumerate(inputs) if letter in letters)
    expected = np.einsum(equation, rounded(x, axes), rounded(kernel, summed))
    product = jax.jit(lambda x, kernel: quantized_product(equation, x, quantize(kernel, summed), jnp.float32))
    np.testing.assert_allclose(product(x, kernel), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).min())
