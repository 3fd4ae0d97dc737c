"""Products in eight bits: integers of kernels and of activations, each with a scale for what a sum does not run over.

The integers of a kernel stand in the collection of variables `INT8`, in the place of the parameter or, of a table whose
rows are looked up, beside it. Where the collection is mutable, a product puts its own there; where it has them, it is
computed by them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

INT8 = 'int8'
_MOST = 127  # symmetric: no integer without its negative


class Quantized(NamedTuple):
    """Numbers as integers times scales (Wu et al. 2020, sections 3.1.2 and 3.3)."""

    integers: jax.Array  # int8
    scales: jax.Array  # float32, of size 1 along the axes that share one


def numbers(x: jax.Array | Quantized, dtype: Any) -> jax.Array:
    """Returns the numbers that integers stand for, and others as they are."""
    return (x.integers * x.scales).astype(dtype) if isinstance(x, Quantized) else x


def quantize(x: jax.Array, axes: Sequence[int]) -> Quantized:
    """Returns x as integers, with one scale along `axes`: the largest magnitude there is 127."""
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=tuple(axes), keepdims=True) / _MOST
    return Quantized(jnp.round(x / jnp.where(scales > 0, scales, 1.0)).astype(jnp.int8), scales)


def quantized_kernel(
    module: nn.Module, name: str, parameter: Callable[[], jax.Array], axes: Sequence[int]
) -> tuple[jax.Array | None, Quantized | None]:
    """Returns a parameter of a module, None where its integers have taken its place, and itself as integers, whose
    products sum over `axes`, None where there are none."""
    found: Quantized | None = module.get_variable(INT8, name)
    if found is not None and not module.has_variable('params', name):
        return None, found
    kernel = parameter()
    if module.is_mutable_collection(INT8) and not module.is_initializing():
        found = quantize(kernel, axes)
        module.put_variable(INT8, name, found)
    return kernel, found


def without_kernels(params: Mapping[str, Any], integers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters but those kernels of which there are integers; tables, whose rows are looked up, stay."""
    left = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            left[name] = without_kernels(value, integers.get(name, {}))
        elif name != 'kernel' or name not in integers:
            left[name] = value
    return left


def quantized_product(equation: str, x: jax.Array, kernel: Quantized, dtype: Any) -> jax.Array:
    """Returns einsum(equation, x, kernel) in a dtype, each vector of x with a scale (Dettmers et al. 2022, eq. 4)."""
    inputs, rest = equation.split(',')
    letters, outputs = rest.split('->')
    summed = [place for place, letter in enumerate(inputs) if letter in letters]
    if all(size == 1 for place, size in enumerate(x.shape) if place not in summed):  # XLA's product of one is slow
        return quantized_product(equation, jnp.concatenate([x, x]), kernel, dtype)[:1]
    rows = quantize(x, summed)
    sums = jnp.einsum(equation, rows.integers, kernel.integers, preferred_element_type=jnp.int32)
    ones = [''.join(letter for letter in side if letter in outputs) for side in (inputs, letters)]
    squeezed = [
        part.scales.reshape([size for letter, size in zip(side, part.scales.shape, strict=True) if letter in outputs])
        for side, part in ((inputs, rows), (letters, kernel))
    ]
    scales = jnp.einsum(f'{ones[0]},{ones[1]}->{outputs}', *squeezed)
    return (sums.astype(jnp.float32) * scales).astype(dtype)
