"""Attention on TPUs for any mask, and with dropout, in Mosaic: three Pallas kernels."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tformer.layers.accelerators import mosaic_tiles, tiled_attention
from tformer.layers.accelerators.tiled_attention import Backend, Tokens
from tformer.layers.accelerators.tiles import Tiles, met
from tformer.layers.kernels import ScoreOptions, pad
from tformer.layers.masks import AttentionMask

LANES, SUBLANES = 128, 8
BLOCKS = (512, 384, 256, 128)  # queries and keys of a tile: the first that divides both lengths


def mosaic(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSU: jax.Array,
    mask: AttentionMask,
    options: ScoreOptions,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Attention as kernels.py defines it, on each device's own rows and heads."""
    return tiled_attention.attend(BACKEND, q_BNTH, k_BKSH, v_BKSU, mask, options, interpret)


def forward(
    tiles: Tiles, q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array, tokens: Tokens
) -> tuple[jax.Array, jax.Array]:
    """Returns (out_BNTU, lse_BNT), as `Backend` says."""
    (B, N, T, _), U, shape = q_BNTH.shape, v_BKSU.shape[-1], jax.ShapeDtypeStruct
    outs = shape((B, N, T, U), v_BKSU.dtype), shape((B, N, 1, T), jnp.float32)
    sums = (1, tiles.block), (1, tiles.block), (U, tiles.block)
    inputs = q_BNTH, k_BKSH, v_BKSU
    out_BNTU, lse_BN1T, _ = _call(mosaic_tiles.forward, tiles, inputs, tokens, (), 'queries', outs, sums)
    return out_BNTU, lse_BN1T[:, :, 0]


def backward(
    tiles: Tiles,
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSU: jax.Array,
    tokens: Tokens,
    lse_BNT: jax.Array,
    delta_BNT: jax.Array,
    dout_BNTU: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Returns the gradients of queries, keys and values, and of a bias."""
    (B, N, _, H), (_, K, S, U), shape, block = q_BNTH.shape, v_BKSU.shape, jax.ShapeDtypeStruct, tiles.block
    inputs, kept = (q_BNTH, k_BKSH, v_BKSU), (lse_BNT[:, :, None], delta_BNT[:, :, None], dout_BNTU)
    dq_BNTH, dbias_BNM1X = _call(
        mosaic_tiles.backward_queries, tiles, inputs, tokens, kept, 'queries',
        (shape(q_BNTH.shape, q_BNTH.dtype),), ((H, block),),
    )  # fmt: skip
    dtype = k_BKSH.dtype if N == K else jnp.float32
    *dkeys, _ = _call(
        mosaic_tiles.backward_keys, tiles, inputs, tokens, kept, 'keys',
        (shape((B, N, S, H), dtype), shape((B, N, S, U), dtype)), ((block, H), (block, U)),
    )  # fmt: skip
    dk_BKSH, dv_BKSU = (tiled_attention.summed(x, K) for x in dkeys)
    return dq_BNTH, dk_BKSH, dv_BKSU, None if dbias_BNM1X is None else dbias_BNM1X.sum(0)


class _Grid:
    """Programs that each hold one tile of the queries or keys, `by`, and meet one of the others at each step. Steps
    that would meet no query and key load no tile."""

    def __init__(self, tiles: Tiles, q_BNTH: jax.Array, k_BKSH: jax.Array, tokens: Tokens, by: str):
        (B, N, T, _), (self.kv_heads, S) = q_BNTH.shape, k_BKSH.shape[1:3]
        self.tiles, self.by, self.heads, self.key_tiles = tiles, by, N, S // tiles.block
        lengths = T // tiles.block, self.key_tiles
        self.count, self.met = lengths if by == 'queries' else lengths[::-1]
        self.shape = B, N, self.count, self.met
        bounds = tokens.keys_B2I if by == 'queries' else tokens.queries_B2J
        self.bounds = bounds.reshape(-1)  # rows of scalar memory would be padded to 128 words

    def number(self, own: str, b: Any, tile: Any, step: Any, window: Any, bounds: Any) -> Any:
        """Returns the number of the tile of `own`, queries or keys, that is held at a step."""
        if own == self.by:
            return tile
        if not self.tiles.in_order:
            return step
        near = mosaic_tiles.bounds_of(bounds, b, self.count, tile)
        begin, end = met(self.tiles, tile, self.met, window[0], *near)
        return jnp.minimum(jnp.clip(step, begin, jnp.maximum(end - 1, begin)), self.met - 1)  # of padding none is met

    def by_head(self, x: Any, own: str) -> pl.BlockSpec:
        """Of arrays with heads on axis 1 and places on axis 2, of the numbers of queries on axis 3."""
        heads, along, block = x.shape[1], x.shape[2] == 1, self.tiles.block
        shape = (1, block) if along else (block, x.shape[3])

        def index(b: Any, n: Any, *place: Any) -> tuple[Any, ...]:
            at = self.number(own, b, *place)
            head = lax.div(n, self.heads // heads) if heads == self.kv_heads else n
            return (b, head, *((0, at) if along else (at, 0)))

        return pl.BlockSpec((None, None, *shape), index)

    def tokens(self, own: str) -> pl.BlockSpec:
        block = self.tiles.block
        return pl.BlockSpec((None, SUBLANES, block), lambda b, n, *place: (b, 0, self.number(own, b, *place)))

    def bias(self, after: int) -> pl.BlockSpec:
        """Of the blocks that hold the distances of two tiles, the last and those before it."""

        def index(b: Any, n: Any, *place: Any) -> tuple[Any, ...]:
            apart = self.number('queries', b, *place) - self.number('keys', b, *place)
            return n, apart + self.key_tiles + after, 0, 0

        return pl.BlockSpec((None, None, 1, self.tiles.block), index)


def _call(
    kernel: Callable[..., None], tiles: Tiles, inputs: Any, tokens: Tokens, kept: Any, by: str, outs: Any, sums: Any
) -> Any:
    """Returns the results of a kernel, by its `_Grid`, and the gradient of a bias if it makes one."""
    from jax.experimental.pallas import tpu  # slow to import

    (B, N, T, _), S = inputs[0].shape, inputs[1].shape[2]
    grid, along = _Grid(tiles, inputs[0], inputs[1], tokens, by), tpu.PARALLEL
    drawn = None if tokens.drawn_BN3 is None else tokens.drawn_BN3.reshape(B * N, 1, 3)
    of_drawn = pl.BlockSpec((None, 1, 3), lambda b, n, *place: (b * N + n, 0, 0), memory_space=tpu.SMEM)
    bias = None if tokens.bias_NM is None else (tokens.bias_NM, tokens.bias_NM)
    in_specs: list[Any] = [grid.by_head(x, own) for x, own in zip(inputs, ('queries', 'keys', 'keys'), strict=True)]
    in_specs += [grid.tokens('queries'), grid.tokens('keys'), None if drawn is None else of_drawn]
    in_specs += [None if bias is None else (grid.bias(-1), grid.bias(0)), *(grid.by_head(x, 'queries') for x in kept)]
    out_specs = [grid.by_head(x, by) for x in outs]
    summed = bias is not None and kernel is mosaic_tiles.backward_queries
    if bias is not None and summed:  # by all tiles of a row, one after the other
        outs, along = (*outs, jax.ShapeDtypeStruct((B, *bias[0].shape), jnp.float32)), tpu.ARBITRARY
        out_specs += [pl.BlockSpec((None, None, *bias[0].shape[1:]), lambda b, n, *place: (b, n, 0, 0, 0))]
    call = pl.pallas_call(
        functools.partial(kernel, tiles),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid.shape,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[tpu.VMEM(shape, jnp.float32) for shape in sums],
        ),
        out_shape=outs,
        compiler_params=tpu.CompilerParams(dimension_semantics=(tpu.PARALLEL, tpu.PARALLEL, along, tpu.ARBITRARY)),
        interpret=tiles.interpret,
    )
    queries, keys = (pad(x, 1, SUBLANES) for x in (tokens.queries_B2T, tokens.keys_B3S))
    with tiled_attention.counted(tiles, T, S, PHASES[kernel]):
        found = call(tokens.window_1, grid.bounds, *inputs, queries, keys, drawn, bias, *kept)
    return found if summed else (*found, None)


def block(q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array) -> int:
    """Returns the queries and keys of a tile, for lengths that are multiples of `LANES`."""
    return next(size for size in BLOCKS if math.gcd(q_BNTH.shape[2], k_BKSH.shape[2]) % size == 0)


PHASES: dict[Any, str] = {
    mosaic_tiles.forward: 'fwd',
    mosaic_tiles.backward_queries: 'dq',
    mosaic_tiles.backward_keys: 'dkv',
}
BACKEND = Backend('mosaic', forward, backward, block, lambda size: size, LANES)
PAIR = tiled_attention.make_pair(BACKEND)
