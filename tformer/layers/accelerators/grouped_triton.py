"""Grouped products on GPUs, in Triton: a program makes one tile of the result."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tformer.layers.grouped_blocks import Blocks, Options

WIDTH = 64  # divides the widths of kernels
DEPTH = 128  # bytes of a row of a tile that is added up
GROUP = 8  # tiles of slots whose programs run next to each other, so that they find their operands in the cache


def multiply(options: Options, x: jax.Array, kernel_EDF: jax.Array, blocks: Blocks, turned: bool) -> jax.Array:
    """Returns the products of slots [P, D] or, if `turned`, [P, F] with their kernels or these turned."""
    _, D, F = kernel_EDF.shape
    slots, width = len(x), D if turned else F
    size = slots // len(blocks.expert_M)
    tile = (size, _tile(width) if size > WIDTH else WIDTH)
    used_1 = blocks.count_E.sum(keepdims=True)
    kernel = functools.partial(_multiply, turned, tile, slots // size, DEPTH // x.dtype.itemsize)
    return _call(options, kernel, tile, (x, kernel_EDF, blocks.expert_M, used_1), (slots, width), slots // size)


def gradient(options: Options, x_PD: jax.Array, dy_PF: jax.Array, blocks: Blocks, kernel_EDF: jax.Array) -> jax.Array:
    """Returns the gradient of kernels, the sums over slots of x times dy; 0 for experts without a block."""
    E, D, F = kernel_EDF.shape
    size = len(x_PD) // len(blocks.expert_M)
    tile = (_tile(D), _tile(F))
    first_E = jnp.cumsum(blocks.count_E) - blocks.count_E
    depth = min(size, DEPTH // x_PD.dtype.itemsize)
    kernel = functools.partial(_gradient, tile, size, depth, D // tile[0])
    return _call(options, kernel, tile, (x_PD, dy_PF, first_E, blocks.count_E), kernel_EDF.shape, E * D // tile[0])


def _tile(width: int) -> int:
    return 128 if width % 128 == 0 else WIDTH


def _call(
    options: Options, kernel: Any, tile: tuple[int, int], arrays: Any, shape: tuple[int, ...], rows: int
) -> jax.Array:
    """Returns what programs make, of so many rows of tiles each."""
    from jax.experimental.pallas import triton as gpu  # slow to import

    def whole(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda i: (0,) * len(shape))

    call = pl.pallas_call(
        kernel,
        grid=(rows * shape[-1] // tile[1],),
        in_specs=[whole(x.shape) for x in arrays],
        out_specs=whole(shape),
        out_shape=jax.ShapeDtypeStruct(shape, arrays[0].dtype, manual_axis_type=jax.typeof(arrays[0]).manual_axis_type),
        compiler_params=gpu.CompilerParams(num_warps=8 if min(tile) == 128 else 4, num_stages=3),
        interpret=options.interpret,
    )
    found: jax.Array = call(*arrays)
    return found


# ------------------------------------------------------------------------------------------------ in a program
def _multiply(
    turned: bool, tile: tuple[int, int], count: int, depth: int, x: Any, kernel: Any, experts: Any, used: Any, y: Any
) -> None:
    group = GROUP * (y.shape[1] // tile[1])
    before, place = lax.div(pl.program_id(0), group) * GROUP, lax.rem(pl.program_id(0), group)
    near = jnp.minimum(count - before, GROUP)  # the last group has fewer
    block, column = before + lax.rem(place, near), lax.div(place, near)
    rows, columns, expert = pl.ds(block * tile[0], tile[0]), pl.ds(column * tile[1], tile[1]), experts[block]

    def body(step: Any, total: jax.Array) -> jax.Array:
        inner = pl.ds(step * depth, depth)
        weights = kernel[expert, columns, inner].T if turned else kernel[expert, inner, columns]
        return total + _dot(x[rows, inner], weights)

    steps = (block < used[0]).astype(jnp.int32) * (x.shape[1] // depth)
    total = lax.fori_loop(0, steps, body, jnp.zeros(tile, jnp.float32))
    y[rows, columns] = total.astype(y.dtype)


def _gradient(
    tile: tuple[int, int], size: int, depth: int, across: int, x: Any, dy: Any, first: Any, counts: Any, out: Any
) -> None:
    each = across * (out.shape[2] // tile[1])
    expert, place = lax.div(pl.program_id(0), each), lax.rem(pl.program_id(0), each)
    rows, columns = pl.ds(lax.rem(place, across) * tile[0], tile[0]), pl.ds(lax.div(place, across) * tile[1], tile[1])
    steps = size // depth  # of a block

    def body(step: Any, total: jax.Array) -> jax.Array:
        inner = pl.ds(step * depth, depth)
        return total + _dot(x[inner, rows].T, dy[inner, columns])

    begin = first[expert] * steps
    total = lax.fori_loop(begin, begin + counts[expert] * steps, body, jnp.zeros(tile, jnp.float32))
    out[expert, rows, columns] = total.astype(out.dtype)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.dot(x, y, preferred_element_type=jnp.float32)
