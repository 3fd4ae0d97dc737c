"""Attention on GPUs for any mask, in Triton: three Pallas kernels, and one for the gradient of a bias."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tformer.layers.accelerators import tiled_attention, triton_tiles
from tformer.layers.accelerators.tiled_attention import Backend, Tokens
from tformer.layers.accelerators.tiles import Tiles
from tformer.layers.kernels import ScoreOptions
from tformer.layers.masks import AttentionMask

BLOCK = 64  # queries and keys of a tile, at most
SHARED = 128 * 1024  # bytes of a tile of queries, keys, values and gradients: half of the shared memory of a Hopper
PARTS = 8  # of a batch, at most, of which programs sum the gradient of a bias each by itself


def triton(
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
    B, N, T, _ = q_BNTH.shape
    out = jax.ShapeDtypeStruct((B, N, T, v_BKSU.shape[-1]), v_BKSU.dtype)
    found = _call(triton_tiles.forward, tiles, (q_BNTH, k_BKSH, v_BKSU), tokens, (), 'queries')
    return tuple(found((out, jax.ShapeDtypeStruct((B, N, T), jnp.float32))))


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
    (B, N, _, _), K, shape = q_BNTH.shape, k_BKSH.shape[1], jax.ShapeDtypeStruct
    inputs, kept = (q_BNTH, k_BKSH, v_BKSU), (lse_BNT, delta_BNT, dout_BNTU)
    dq_BNTH = _call(triton_tiles.backward_queries, tiles, inputs, tokens, kept, 'queries')(
        shape(q_BNTH.shape, q_BNTH.dtype)
    )
    dtype = k_BKSH.dtype if N == K else jnp.float32
    outs = shape((B, N, *k_BKSH.shape[2:]), dtype), shape((B, N, *v_BKSU.shape[2:]), dtype)
    dkeys = _call(triton_tiles.backward_keys, tiles, inputs, tokens, kept, 'keys')(outs)
    dk_BKSH, dv_BKSU = (tiled_attention.summed(x, K) for x in dkeys)
    dbias_NMXX = None if tokens.bias_NM is None else _backward_bias(tiles, inputs, tokens, kept)
    return dq_BNTH, dk_BKSH, dv_BKSU, dbias_NMXX


def spread(bias_NM1X: jax.Array) -> jax.Array:
    """Returns the tiles [queries, keys] of a bias, bias_NMXX: one for each distance of a tile of queries from one of
    keys. A GPU reads no row of a tile one place further on than the last, so that they are made beforehand; at the same
    addresses each time, and so is their gradient, without a sum whose order is by chance."""
    N, M, _, X = bias_NM1X.shape
    turned = jnp.concatenate([bias_NM1X[:, :-1, 0], bias_NM1X[:, 1:, 0]], -1)[..., ::-1]
    rows = jnp.tile(turned, (1, 1, X))[..., : X * (2 * X - 1)].reshape(N, M - 1, X, 2 * X - 1)
    return rows[..., X - 1 :]


def _backward_bias(tiles: Tiles, inputs: Any, tokens: Tokens, kept: Any) -> jax.Array:
    """Returns the gradient of the tiles of a bias. A program sums that of one of them, for a head and some rows."""
    (B, N, T, H), S = inputs[0].shape, inputs[1].shape[2]
    bias, drawn = tokens.bias_NM, tokens.drawn_BN3
    assert bias is not None
    parts, M = math.gcd(B, PARTS), bias.shape[1]

    def rows(x: Any) -> pl.BlockSpec:
        """Of a head, arrays [B, N or K, ...]."""
        group = N // x.shape[1]
        rest = x.shape[2:]
        return pl.BlockSpec((B // parts, None, *rest), lambda part, n, m: (part, n // group, *(0,) * len(rest)))

    def tokens_of(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((B // parts, *x.shape[1:]), lambda part, n, m: (part, 0, 0))

    read = tokens.queries_B2T, tokens.keys_B3S, tokens.window_1, drawn, bias
    call = pl.pallas_call(
        functools.partial(triton_tiles.backward_bias, tiles),
        grid=(parts, N, M),
        in_specs=[
            *map(rows, inputs),
            tokens_of(tokens.queries_B2T),
            tokens_of(tokens.keys_B3S),
            pl.BlockSpec((1,), lambda part, n, m: (0,)),
            None if drawn is None else rows(drawn),
            pl.BlockSpec((None, None, tiles.block, tiles.block), lambda part, n, m: (n, m, 0, 0)),
            *map(rows, kept),
        ],
        out_specs=pl.BlockSpec((None, None, None, tiles.block, tiles.block), lambda part, n, m: (part, n, m, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((parts, *bias.shape), jnp.float32),
        compiler_params=_compiler_params(H, True),
        interpret=tiles.interpret,
    )
    with tiled_attention.counted(tiles, T, S, 'dbias'):
        return call(*inputs, *read, *kept).sum(0)


def _compiler_params(width: int, biased: bool) -> Any:
    """Stages are tiles that are loaded ahead, into the 227 KiB of shared memory that a Hopper has at most."""
    from jax.experimental.pallas import triton as gpu  # slow to import

    stages = 3 if width <= 64 else 2 if width + 64 * biased <= 256 else 1
    return gpu.CompilerParams(num_warps=4 if width <= 64 else 8, num_stages=stages)


def _call(
    kernel: Callable[..., None], tiles: Tiles, inputs: Any, tokens: Tokens, kept: Any, by: str
) -> Callable[[Any], Any]:
    """Returns the call of a kernel whose programs each hold one tile of the queries or keys, `by`, and all the rest."""
    (B, N, T, H), (K, S) = inputs[0].shape, inputs[1].shape[1:3]

    def spec(x: Any, own: str) -> pl.BlockSpec:
        """Heads are axis 1 of all but the tokens' arrays, and places the axis after them."""
        length = tiles.block if own == by else x.shape[2]
        heads = x.shape[1]

        def index(b: Any, n: Any, tile: Any) -> tuple[Any, ...]:
            head = n // (N // K) if heads == K else n
            return (b, head, tile if own == by else 0, *(0,) * (x.ndim - 3))

        return pl.BlockSpec((None, None, length, *x.shape[3:]), index)

    def token_spec(x: jax.Array, own: str) -> pl.BlockSpec:
        length = tiles.block if own == by else x.shape[2]
        return pl.BlockSpec((None, x.shape[1], length), lambda b, n, tile: (b, 0, tile if own == by else 0))

    in_specs: list[Any] = [spec(x, own) for x, own in zip(inputs, ('queries', 'keys', 'keys'), strict=True)]
    in_specs += [token_spec(tokens.queries_B2T, 'queries'), token_spec(tokens.keys_B3S, 'keys')]
    in_specs += [pl.BlockSpec((1,), lambda b, n, tile: (0,))]
    in_specs += [pl.BlockSpec((None, 2, 1), lambda b, n, tile: (b, 0, tile))]
    drawn_spec = None if tokens.drawn_BN3 is None else pl.BlockSpec((None, None, 3), lambda b, n, tile: (b, n, 0))
    bias = tokens.bias_NM
    bias_spec = None if bias is None else pl.BlockSpec((None, *bias.shape[1:]), lambda b, n, tile: (n, 0, 0, 0))
    in_specs += [drawn_spec, bias_spec, *(spec(x, 'queries') for x in kept)]
    read = *tokens[:3], tokens.keys_B2I if by == 'queries' else tokens.queries_B2J, tokens.drawn_BN3, bias

    def run(out_shape: Any) -> Any:
        call = pl.pallas_call(
            functools.partial(kernel, tiles),
            grid=(B, N, (T if by == 'queries' else S) // tiles.block),
            in_specs=in_specs,
            out_specs=jax.tree.map(lambda x: spec(x, by), out_shape),
            out_shape=out_shape,
            compiler_params=_compiler_params(H, bias is not None),
            interpret=tiles.interpret,
        )
        with tiled_attention.counted(tiles, T, S, PHASES[kernel]):
            return call(*inputs, *read, *kept)

    return run


PHASES: dict[Any, str] = {
    triton_tiles.forward: 'fwd',
    triton_tiles.backward_queries: 'dq',
    triton_tiles.backward_keys: 'dkv',
}


def width(size: int) -> int:
    """Returns the size of a head in the kernels."""
    return pl.next_power_of_2(max(size, 16))


def block(q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array) -> int:
    """Returns the queries and keys of a tile: fewer of wide heads."""
    token = 4 * q_BNTH.dtype.itemsize * max(width(x.shape[3]) for x in (q_BNTH, v_BKSU))
    return min(BLOCK, max(SHARED // token, 16))


BACKEND = Backend('triton', forward, backward, block, width, BLOCK, spread)
PAIR = tiled_attention.make_pair(BACKEND)
