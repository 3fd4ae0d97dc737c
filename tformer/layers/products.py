"""Products of activations with kernels, or with one another, whose gradients XLA makes fast on a CPU."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from tformer.distributed.sharding import platform

LEAST = 8  # numbers that a product sums, or gives: XLA aborts at some of fewer that are in another order than JAX's


def einsum(equation: str, dtype: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns `jnp.einsum(equation, x, y)` in a dtype.

    On a CPU the gradient of `y` is a product in the order that needs no transposition of its operands but the smaller
    one's, if it is not tiny: in JAX's own order XLA takes up to three times as long.
    """
    return (_ordered if platform() == 'cpu' else _product)(equation, dtype, x, y)


def _product(equation: str, dtype: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, y, preferred_element_type=dtype)


_ordered = jax.custom_vjp(_product, nondiff_argnums=(0, 1))


def _forward(equation: str, dtype: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
    return _product(equation, dtype, x, y), (x, y)  # as rematerialisation knows it


def _backward(equation: str, dtype: Any, operands: Any, dz: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, y = operands
    (dx,) = jax.linear_transpose(lambda x: _product(equation, dtype, x, y), x)(dz)
    operand, rest = equation.split(',')
    other, result = rest.split('->')
    sizes, batch = dict(zip(operand + result, x.shape + dz.shape, strict=True)), set(operand) & set(result)
    summed, given = set(operand) - set(other), set(other) - batch
    if min(math.prod(sizes[letter] for letter in letters) for letters in (summed, given)) < LEAST:
        (dy,) = jax.linear_transpose(lambda y: _product(equation, dtype, x, y), y)(dz)
        return dx, dy
    (small, first), (large, second) = sorted([(operand, x), (result, dz)], key=lambda each: each[1].size)
    found = ''.join(sorted(other, key=(small + large).index))
    dy = jnp.einsum(f'{small},{large}->{found}', first, second)
    if found != other:  # else XLA would turn product and transposition into JAX's order
        dy = jnp.einsum(f'{found}->{other}', jax.lax.optimization_barrier(dy))
    return dx, dy.astype(y.dtype)


_ordered.defvjp(_forward, _backward)


def fork(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns x for two products, of which the second's gradient is added to the first's as it is written: on a GPU, by
    cuBLAS. XLA finds that in two summands, and not in more. Where devices have parts of both gradients, they are added
    before the sum over the devices."""
    parts = jax.sharding.get_abstract_mesh().shape.get('tensor', 1) > 1
    return _fork(parts, x) if parts or platform() == 'gpu' else (x, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fork(parts: bool, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, x


def _join(parts: bool, _: None, dx: tuple[jax.Array, jax.Array]) -> tuple[jax.Array]:
    return ((dx[0] if parts else jax.lax.optimization_barrier(dx[0])) + dx[1],)


_fork.defvjp(lambda parts, x: (_fork(parts, x), None), _join)
