"""Grouped products on TPUs, in Mosaic: steps of one block of slots each, with a part of its expert's kernel."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tformer.layers.grouped_blocks import Blocks, Options

WIDTH = 128  # divides the widths of kernels
PART = 2**22  # bytes of the part of a kernel that a step has
SUMS = 512  # rows and columns, at most, of the part of a gradient that steps add up
MEMORY = 2**26  # bytes, of which the arrays of two steps may take so many


def multiply(options: Options, x: jax.Array, kernel_EDF: jax.Array, blocks: Blocks, turned: bool) -> jax.Array:
    """Returns the products of slots [P, D] or, if `turned`, [P, F] with their kernels or these turned."""
    _, D, F = kernel_EDF.shape
    (slots, depth), width = x.shape, D if turned else F
    size, part = slots // len(blocks.expert_M), _part(width, PART // (x.dtype.itemsize * depth))

    def weights(j: Any, m: Any, experts: Any, used: Any) -> tuple[Any, ...]:
        return (experts[_held(m, used)], j, 0) if turned else (experts[_held(m, used)], 0, j)

    return _call(
        options,
        functools.partial(_multiply, turned),
        grid=(width // part, len(blocks.expert_M)),
        arrays=(x, kernel_EDF),
        blocks=blocks,
        in_specs=[
            pl.BlockSpec((size, depth), lambda j, m, experts, used: (_held(m, used), 0)),
            pl.BlockSpec((None, part, depth) if turned else (None, depth, part), weights),
        ],
        out_spec=pl.BlockSpec((size, part), lambda j, m, experts, used: (m, j)),
        shape=(slots, width),
    )


def gradient(options: Options, x_PD: jax.Array, dy_PF: jax.Array, blocks: Blocks, kernel_EDF: jax.Array) -> jax.Array:
    """Returns the gradient of kernels, the sums over slots of x times dy; 0 for experts without a block."""
    _, D, F = kernel_EDF.shape
    size, rows, columns = len(x_PD) // len(blocks.expert_M), _part(D, SUMS), _part(F, SUMS)
    found = _call(
        options,
        _gradient,
        grid=(D // rows, F // columns, len(blocks.expert_M)),
        arrays=(x_PD, dy_PF),
        blocks=blocks,
        in_specs=[
            pl.BlockSpec((size, rows), lambda i, j, m, experts, used: (_held(m, used), i)),
            pl.BlockSpec((size, columns), lambda i, j, m, experts, used: (_held(m, used), j)),
        ],
        out_spec=pl.BlockSpec((None, rows, columns), lambda i, j, m, experts, used: (experts[_held(m, used)], i, j)),
        shape=kernel_EDF.shape,
        sums=[(rows, columns)],
    )
    return jnp.where((blocks.count_E > 0)[:, None, None], found, 0)


def _held(m: Any, used: Any) -> Any:
    """Returns the number of the block that a step holds: behind the last one that has a token that stays."""
    return jnp.maximum(jnp.minimum(m, used[0] - 1), 0)


def _part(width: int, most: int) -> int:
    """Returns the largest divisor of a width, in multiples of WIDTH, up to `most`."""
    return max([size for size in range(WIDTH, most + 1, WIDTH) if width % size == 0], default=WIDTH)


def _call(
    options: Options,
    kernel: Any,
    *,
    grid: tuple[int, ...],
    arrays: tuple[jax.Array, jax.Array],
    blocks: Blocks,
    in_specs: Any,
    out_spec: Any,
    shape: tuple[int, ...],
    sums: Any = (),
) -> jax.Array:
    """Returns what a kernel makes, whose steps go through the blocks one after the other."""
    from jax.experimental.pallas import tpu  # slow to import

    flops = 2 * options.slots * arrays[0].shape[1] * shape[-1]
    moved = sum(x.nbytes for x in arrays) + math.prod(shape) * arrays[0].dtype.itemsize
    call = pl.pallas_call(
        kernel,
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=in_specs,
            out_specs=out_spec,
            scratch_shapes=[tpu.VMEM(size, jnp.float32) for size in sums],
        ),
        out_shape=jax.ShapeDtypeStruct(shape, arrays[0].dtype, manual_axis_type=jax.typeof(arrays[0]).manual_axis_type),
        compiler_params=tpu.CompilerParams(
            dimension_semantics=(*[tpu.PARALLEL] * (len(grid) - 1), tpu.ARBITRARY), vmem_limit_bytes=MEMORY
        ),
        cost_estimate=pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=moved),
        interpret=options.interpret,
    )
    found: jax.Array = call(blocks.expert_M, blocks.count_E.sum(keepdims=True), *arrays)
    return found


# ------------------------------------------------------------------------------------------------ in a step
def _multiply(turned: bool, experts: Any, used: Any, x: Any, weights: Any, y: Any) -> None:
    there = pl.program_id(1) < used[0]

    @pl.when(there)
    def _() -> None:
        y[...] = _dot(x[...], weights[...], (1, 1 if turned else 0)).astype(y.dtype)

    @pl.when(jnp.logical_not(there))
    def _() -> None:
        y[...] = jnp.zeros_like(y)


def _gradient(experts: Any, used: Any, x: Any, dy: Any, out: Any, total: Any) -> None:
    m, last = pl.program_id(2), pl.num_programs(2) - 1
    before, own, behind = (experts[_held(each, used)] for each in (m - 1, m, m + 1))

    @pl.when((m == 0) | (before != own))
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    @pl.when(m < used[0])
    def _() -> None:
        total[...] += _dot(x[...], dy[...], (0, 0))

    @pl.when((m == last) | (behind != own))
    def _() -> None:
        out[...] = total[...].astype(out.dtype)


def _dot(x: jax.Array, y: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Returns a product that sums over these axes of its operands."""
    return lax.dot_general(x, y, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=jnp.float32)
