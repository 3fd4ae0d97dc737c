"""Activations on GPUs, as a Pallas (Triton) kernel each way that reads its input once.

XLA spends more time on their arithmetic than on memory, and sums the gradient of their bias in a pass of its own.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tformer.layers.parallel.each_device import on_own_tokens

ROWS = 32  # of a tile
WIDTH = 128  # of a tile, a divisor of the last axis


class Options(NamedTuple):
    """An activation: a function of float32 arrays, element by element."""

    function: Callable[[jax.Array], jax.Array]
    interpret: bool = False


def activate(options: Options, x_BTF: jax.Array, bias_F: jax.Array | None = None) -> jax.Array:
    """Returns function(x) in the type of x, computed in float32; each device has its own tokens and features.

    The gradient of the bias that x has is given here, as a sum of that of x, if the bias is given and x has been made
    with `stop_gradient` of it.
    """

    def of_rows(bias_F: jax.Array | None, x_BTF: jax.Array) -> jax.Array:
        if x_BTF.shape[2] % WIDTH:  # of this device
            nothing = 0.0 if bias_F is None else (bias_F - jax.lax.stop_gradient(bias_F))[None, None]
            return options.function(x_BTF.astype(jnp.float32) + nothing).astype(x_BTF.dtype)
        return _activate(options, x_BTF.reshape(-1, x_BTF.shape[2]), bias_F).reshape(x_BTF.shape)

    found: jax.Array = on_own_tokens(of_rows, bias_F, x_BTF, features='act_mlp')
    return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _activate(options: Options, x_RF: jax.Array, bias_F: jax.Array | None) -> jax.Array:
    (y_RF,) = _call(_forward, options, (x_RF,), [x_RF])
    return y_RF


def _activate_forward(options: Options, x_RF: jax.Array, bias_F: jax.Array | None) -> tuple[jax.Array, Any]:
    return _activate(options, x_RF, bias_F), (x_RF, bias_F)


def _activate_backward(options: Options, read: Any, dy_RF: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    x_RF, bias_F = read
    sums = jax.ShapeDtypeStruct((pl.cdiv(len(x_RF), ROWS), x_RF.shape[1]), jnp.float32)
    dx_RF, *sums = _call(_backward, options, (x_RF, dy_RF), [x_RF] if bias_F is None else [x_RF, sums])
    return dx_RF, None if bias_F is None else sums[0].sum(0).astype(bias_F.dtype)


_activate.defvjp(_activate_forward, _activate_backward)


def _call(kernel: Any, options: Options, arrays: tuple[jax.Array, ...], outs: list[Any]) -> Any:
    """Returns what the programs of a kernel make of tiles of arrays [R, F]: as many rows, or one."""
    from jax.experimental.pallas import triton as gpu  # slow to import

    R, F = arrays[0].shape
    tile, row = (pl.BlockSpec((rows, WIDTH), lambda i, j: (i, j)) for rows in (ROWS, 1))
    call = pl.pallas_call(
        functools.partial(kernel, options.function, R),
        grid=(pl.cdiv(R, ROWS), F // WIDTH),
        in_specs=[tile] * len(arrays),
        out_specs=[tile if len(out) == R else row for out in outs],
        out_shape=[jax.ShapeDtypeStruct(out.shape, out.dtype) for out in outs],
        compiler_params=gpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=options.interpret,
    )
    return call(*arrays)


# ------------------------------------------------------------------------------------------------ in a program
def _forward(function: Any, R: int, x: Any, y: Any) -> None:
    _write(y, function(_read(x, R)), R)


def _backward(function: Any, R: int, x: Any, dy: Any, dx: Any, *sums: Any) -> None:
    _, pull = jax.vjp(function, _read(x, R))
    (slope,) = pull(_read(dy, R))
    _write(dx, slope, R)
    for ref in sums:
        ref[...] = jnp.sum(slope, 0, keepdims=True)


def _there(R: int) -> jax.Array:
    """Returns which numbers of the program's tile are in the array."""
    rows = pl.program_id(0) * ROWS + jnp.arange(ROWS)
    return jnp.broadcast_to(rows[:, None] < R, (ROWS, WIDTH))


def _read(ref: Any, R: int) -> jax.Array:
    from jax.experimental.pallas import triton as gpu

    return gpu.load(ref.at[...], mask=_there(R), other=0.0).astype(jnp.float32)


def _write(ref: Any, x: jax.Array, R: int) -> None:
    from jax.experimental.pallas import triton as gpu

    gpu.store(ref.at[...], x.astype(ref.dtype), mask=_there(R))


# --------------------------------------------------------------------------------- what kernels can compute, float32
@jax.custom_jvp
def normal_cdf(x: jax.Array) -> jax.Array:
    """The distribution function of the standard normal distribution (Abramowitz & Stegun 1964, 7.1.26)."""
    t = 1 / (1 + 0.3275911 * math.sqrt(0.5) * jnp.abs(x))
    series = jnp.zeros_like(x)
    for factor in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = (series + factor) * t
    tail = 0.5 * series * jnp.exp(-0.5 * x * x)
    return jnp.where(x > 0, 1 - tail, tail)


@normal_cdf.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    return normal_cdf(x), dx * (jnp.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi)))
