"""LayerNorm and RMSNorm on GPUs, as a Pallas (Triton) kernel each way that reads its tokens once.

XLA sums over one axis in a pass: the gradient of the scale, a sum over tokens, reads what another pass has written in
float32.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tformer.layers.parallel.each_device import on_own_tokens

FORWARD, BACKWARD = 4096, 1024  # numbers of a tile, of one token at least
WARP = 1024  # of them, those of one warp
TILES = 16  # of which a program of the backward pass adds up the gradients of scale and bias


class Options(NamedTuple):
    """A norm besides its arrays: (x - mean) / sqrt(mean square + epsilon), the mean where it is `centred`."""

    centred: bool
    epsilon: float
    dtype: Any  # of the result
    interpret: bool = False


def norm(options: Options, x_BTD: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    """Returns the norm of each token, computed in float32, times a scale plus a bias; each device has its own tokens
    (Ba et al. 2016, eq. 4; Zhang & Sennrich 2019, eq. 4)."""

    def scaled(vectors: tuple[jax.Array, jax.Array], x_BTD: jax.Array) -> jax.Array:
        return _norm(options, x_BTD.reshape(-1, x_BTD.shape[-1]), *vectors).reshape(x_BTD.shape)

    return on_own_tokens(scaled, (scale_D, bias_D), x_BTD, 'stream_length')


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(options: Options, x_RD: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    out = jax.ShapeDtypeStruct(x_RD.shape, options.dtype)
    (y_RD,) = _call(_forward, options, (FORWARD, 1), (x_RD,), (scale_D, bias_D), (out,))
    return y_RD


def _norm_forward(options: Options, x_RD: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> tuple[jax.Array, Any]:
    return _norm(options, x_RD, scale_D, bias_D), (x_RD, scale_D, bias_D)


def _norm_backward(options: Options, read: Any, dy_RD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    x_RD, scale_D, bias_D = read
    R, D = x_RD.shape
    sums = jax.ShapeDtypeStruct((pl.cdiv(R, tokens(BACKWARD, D) * TILES), D), jnp.float32)
    outs = jax.ShapeDtypeStruct((R, D), x_RD.dtype), sums, sums
    dx_RD, dscale_PD, dbias_PD = _call(_backward, options, (BACKWARD, TILES), (x_RD, dy_RD), (scale_D,), outs)
    return dx_RD, dscale_PD.sum(0).astype(scale_D.dtype), dbias_PD.sum(0).astype(bias_D.dtype)


_norm.defvjp(_norm_forward, _norm_backward)


def tokens(size: int, D: int) -> int:
    """Returns how many vectors [D] a tile of a size holds."""
    return max(size // pl.next_power_of_2(D), 1)


def _call(kernel: Any, options: Options, tiles: tuple[int, int], rows: Any, vectors: Any, outs: Any) -> Any:
    """Returns what the programs of a kernel make of arrays [R, D], each of as many tiles of a size, and of vectors [D];
    outputs of other lengths have a row of each program."""
    from jax.experimental.pallas import triton as gpu  # slow to import

    R, D = rows[0].shape
    (size, number), width = tiles, pl.next_power_of_2(D)
    count = tokens(size, D) * number
    by_row = pl.BlockSpec((count, width), lambda i: (i, 0))
    by_program = pl.BlockSpec((1, width), lambda i: (i, 0))
    call = pl.pallas_call(
        functools.partial(kernel, options, R, D),
        grid=(pl.cdiv(R, count),),
        in_specs=[by_row] * len(rows) + [pl.BlockSpec((width,), lambda i: (0,))] * len(vectors),
        out_specs=tuple(by_row if out.shape[0] == R else by_program for out in outs),
        out_shape=outs,
        compiler_params=gpu.CompilerParams(num_warps=max(size, width) // WARP, num_stages=1),
        interpret=options.interpret,
    )
    return call(*rows, *vectors)


# ------------------------------------------------------------------------------------------------ in a program
class Tile(NamedTuple):
    """A tile of tokens, as wide as the next power of 2: where it is, and which of it is there."""

    at: tuple[Any, Any]
    there: jax.Array  # [tokens, width]

    @classmethod
    def of(cls, number: Any, shape: tuple[int, int], left: Any, D: int) -> 'Tile':
        """Returns a program's tile of this number and shape, if `left` tokens are left for the program."""
        first = number * shape[0]
        rows, columns = first + jnp.arange(shape[0]), jnp.arange(shape[1])
        return cls((pl.ds(first, shape[0]), pl.ds(0, shape[1])), (rows[:, None] < left) & (columns[None] < D))

    def read(self, ref: Any) -> jax.Array:
        from jax.experimental.pallas import triton as gpu

        return gpu.load(ref.at[self.at], mask=self.there, other=0.0)

    def write(self, ref: Any, x: jax.Array) -> None:
        from jax.experimental.pallas import triton as gpu

        gpu.store(ref.at[self.at], x.astype(ref.dtype), mask=self.there)

    def normalised(self, options: Options, x: jax.Array, D: int) -> tuple[jax.Array, jax.Array]:
        """Returns (x without mean and root, 1 / root), float32."""
        x = x.astype(jnp.float32)
        if options.centred:
            x = jnp.where(self.there, x - _mean(x, D), 0.0)
        scale = jax.lax.rsqrt(_mean(x * x, D) + options.epsilon)
        return x * scale, scale


def _mean(x: jax.Array, D: int) -> jax.Array:
    return jnp.sum(x, 1, keepdims=True) / D


def _vector(ref: Any, D: int) -> jax.Array:
    from jax.experimental.pallas import triton as gpu

    width = pl.next_power_of_2(D)
    return gpu.load(ref.at[pl.ds(0, width)], mask=jnp.arange(width) < D, other=0.0).astype(jnp.float32)[None]


def _forward(options: Options, R: int, D: int, x: Any, scale: Any, bias: Any, y: Any) -> None:
    shape = tokens(FORWARD, D), x.shape[1]
    tile = Tile.of(0, shape, R - pl.program_id(0) * shape[0], D)
    normalised, _ = tile.normalised(options, tile.read(x), D)
    tile.write(y, normalised * _vector(scale, D) + _vector(bias, D))


def _backward(options: Options, R: int, D: int, x: Any, dy: Any, scale: Any, dx: Any, dscale: Any, dbias: Any) -> None:
    from jax.experimental.pallas import triton as gpu

    shape, factor = (tokens(BACKWARD, D), x.shape[1]), _vector(scale, D)
    left = jnp.minimum(R - pl.program_id(0) * x.shape[0], x.shape[0])

    def read(number: Any) -> tuple[jax.Array, jax.Array]:
        tile = Tile.of(number, shape, left, D)
        return tile.read(x), tile.read(dy)

    def body(number: Any, carry: Any) -> Any:
        (x_tile, dy_tile), sums = carry
        following = read(number + 1)  # which arrives while this one is computed
        tile, dy_tile = Tile.of(number, shape, left, D), dy_tile.astype(jnp.float32)
        normalised, inverse = tile.normalised(options, x_tile, D)
        slope = dy_tile * factor
        rest = slope - normalised * _mean(slope * normalised, D)
        tile.write(dx, (rest - _mean(slope, D) if options.centred else rest) * inverse)
        return following, (sums[0] + dy_tile * normalised, sums[1] + dy_tile)

    zeros = jnp.zeros(shape, jnp.float32)
    _, sums = jax.lax.fori_loop(0, TILES, body, (read(0), (zeros, zeros)))
    for ref, total in zip((dscale, dbias), sums, strict=True):
        there = (jnp.arange(shape[1]) < D)[None]
        gpu.store(ref.at[pl.ds(0, 1), pl.ds(0, shape[1])], jnp.sum(total, 0, keepdims=True), mask=there)
