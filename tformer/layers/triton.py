"""Attention on GPUs for any mask: flash attention in Triton, as three Pallas kernels (Dao et al. 2022; Dao 2023).

A tile reads the positions and segments of its queries and keys, 4 bytes a token each, and makes its part of the mask.
Where the order of the tokens is known, tiles of which no query sees a key are skipped, in packed rows those of other
examples too. Memory is linear in the length.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tformer.layers import tile_dropout, triton_tiles
from tformer.layers.kernels import Meeting, Pair, ScoreOptions, pad, plain, refuse, sink_gradient, with_sink
from tformer.layers.masks import AttentionMask
from tformer.layers.parallel.each_device import on_each_device
from tformer.layers.triton_tiles import BLOCK, Tiles

NO_WINDOW = 2**30


class Tokens(NamedTuple):
    """What tiles read of their tokens."""

    queries_B2T: jax.Array  # positions, segments
    keys_B3S: jax.Array  # positions, segments, 1 in the prefix
    window_1: jax.Array
    first_BI: jax.Array  # of tiles in order, the first tile of keys that a tile of queries sees, its window apart
    end_BJ: jax.Array  # and the tile of queries after the last that sees a tile of keys
    drawn_BN3: jax.Array | None = None  # of `tile_dropout`, where weights are dropped


def triton(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSU: jax.Array,
    mask: AttentionMask,
    options: ScoreOptions,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Attention as kernels.py defines it, on each device's own rows and heads.

    One query, a step of decoding, goes elsewhere: here it would be a tile of padding, and the cache's keys be copied.
    """
    refuse('triton', options, 'bias')
    if q_BNTH.shape[2] == 1:
        return plain(q_BNTH, k_BKSH, v_BKSU, mask.array(), options)
    in_order = mask.order in ('behind', 'front') and mask.causal and mask.prefix_BS is None
    tiles = Tiles(options.softcap, mask.causal, in_order, interpret)

    def attend(q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array, mask: AttentionMask, heads: Any) -> jax.Array:
        sink_N, drawn_BN3 = heads
        (T, H), S, U = q_BNTH.shape[2:], k_BKSH.shape[2], v_BKSU.shape[-1]
        width, value_width = pl.next_power_of_2(max(H, 16)), pl.next_power_of_2(max(U, 16))
        q_BNTH, k_BKSH = (pad(pad(x, 2, BLOCK), 3, width) for x in (q_BNTH * options.scale, k_BKSH))
        v_BKSU = pad(pad(v_BKSU, 2, BLOCK), 3, value_width)
        read = tokens(mask, len(q_BNTH), T, S)._replace(drawn_BN3=drawn_BN3)
        return attention(tiles, q_BNTH, k_BKSH, v_BKSU, read, sink_N)[:, :, :T, :U]

    drawn_BN3 = tile_dropout.draw(options.dropout_rate, options.dropout_key, *q_BNTH.shape[:2])
    return on_each_device(attend, q_BNTH, k_BKSH, v_BKSU, mask, (options.sink_N, drawn_BN3))


def tokens(mask: AttentionMask, rows: int, T: int, S: int) -> Tokens:
    """Returns the tokens of a mask, padded to whole tiles by keys that nobody sees."""
    segments = mask.segments()
    prefix_BS = jnp.zeros_like(mask.key_positions_BS) if mask.prefix_BS is None else mask.prefix_BS

    def stacked(*arrays: jax.Array, length: int) -> jax.Array:
        wide = [jnp.broadcast_to(x.astype(jnp.int32), (rows, length)) for x in arrays]
        return pad(jnp.stack(wide, 1), 2, BLOCK, -1)

    queries_B2T = stacked(mask.query_positions_BT, segments[0], length=T)
    keys_B3S = stacked(mask.key_positions_BS, segments[1], prefix_BS, length=S)
    window_1 = jnp.full((1,), NO_WINDOW) if mask.window is None else jnp.minimum(mask.window, NO_WINDOW).reshape(1)
    return Tokens(queries_B2T, keys_B3S, window_1, *_bounds(queries_B2T[:, 0], keys_B3S.shape[2] // BLOCK))


def _bounds(positions_BT: jax.Array, key_tiles: int) -> tuple[jax.Array, jax.Array]:
    """Returns first_BI and end_BJ of `Tokens`: no query sees a key before the place where its positions begin."""
    begins_BT = jnp.where(positions_BT >= 0, jnp.arange(positions_BT.shape[1])[None] - positions_BT, NO_WINDOW)
    first_BI = begins_BT.reshape(len(begins_BT), -1, BLOCK).min(2) // BLOCK
    later_BT = jax.lax.cummin(begins_BT, axis=1, reverse=True)  # where the first of all later queries begins
    ends_J = BLOCK * (1 + jnp.arange(key_tiles))
    count_BJ = jnp.sum(later_BT[:, None] < ends_J[None, :, None], 2, dtype=jnp.int32)
    return first_BI, -(-count_BJ // BLOCK)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(
    tiles: Tiles, q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array, tokens: Tokens, sink_N: jax.Array | None
) -> jax.Array:
    """Returns out_BNTU, of scaled queries; lengths are whole tiles, head sizes powers of 2."""
    return _attention_forward(tiles, q_BNTH, k_BKSH, v_BKSU, tokens, sink_N)[0]


def _attention_forward(
    tiles: Tiles, q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array, tokens: Tokens, sink_N: jax.Array | None
) -> tuple[jax.Array, Any]:
    out_BNTU, lse_BNT = with_sink(*forward(tiles, q_BNTH, k_BKSH, v_BKSU, tokens), sink_N)
    return out_BNTU, (q_BNTH, k_BKSH, v_BKSU, tokens, sink_N, out_BNTU, lse_BNT)


def _attention_backward(tiles: Tiles, kept: Any, dout_BNTU: jax.Array) -> tuple[Any, ...]:
    q_BNTH, k_BKSH, v_BKSU, tokens, sink_N, out_BNTU, lse_BNT = kept
    delta_BNT = jnp.sum(dout_BNTU.astype(jnp.float32) * out_BNTU.astype(jnp.float32), -1)
    grads = backward(tiles, q_BNTH, k_BKSH, v_BKSU, tokens, lse_BNT, delta_BNT, dout_BNTU)
    dsink_N = sink_gradient(lse_BNT, delta_BNT, sink_N)
    return (*(g.astype(x.dtype) for g, x in zip(grads, (q_BNTH, k_BKSH, v_BKSU), strict=True)), None, dsink_N)


attention.defvjp(_attention_forward, _attention_backward)


def forward(
    tiles: Tiles, q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array, tokens: Tokens
) -> tuple[jax.Array, jax.Array]:
    """Returns (out_BNTU, the log-sum-exp of the scores lse_BNT, float32; `MIN` where a query sees nothing)."""
    B, N, T, _ = q_BNTH.shape
    out = jax.ShapeDtypeStruct((B, N, T, v_BKSU.shape[-1]), v_BKSU.dtype)
    found = _call(triton_tiles.forward, tiles, (B, N, T // BLOCK), (q_BNTH, k_BKSH, v_BKSU), tokens, (), 'queries')
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
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of queries, keys and values, of attention whose weights are exp(scores - lse)."""
    (B, N, T, _), (K, S), shape = q_BNTH.shape, k_BKSH.shape[1:3], jax.ShapeDtypeStruct
    inputs, kept = (q_BNTH, k_BKSH, v_BKSU), (lse_BNT, delta_BNT, dout_BNTU)
    dq_BNTH = _call(triton_tiles.backward_queries, tiles, (B, N, T // BLOCK), inputs, tokens, kept, 'queries')(
        shape(q_BNTH.shape, q_BNTH.dtype)
    )
    dtype = k_BKSH.dtype if N == K else jnp.float32
    outs = shape((B, N, *k_BKSH.shape[2:]), dtype), shape((B, N, *v_BKSU.shape[2:]), dtype)
    grads = _call(triton_tiles.backward_keys, tiles, (B, N, S // BLOCK), inputs, tokens, kept, 'keys')(outs)
    dk_BKSH, dv_BKSU = (x.reshape(B, K, N // K, *x.shape[2:]).sum(2) if N != K else x for x in grads)
    return dq_BNTH, dk_BKSH, dv_BKSU


def _call(
    kernel: Callable[..., None], tiles: Tiles, grid: tuple[int, ...], inputs: Any, tokens: Tokens, kept: Any, by: str
) -> Callable[[Any], Any]:
    """Returns the call of a kernel whose programs each hold one tile of the queries or keys, `by`, and all the rest."""
    from jax.experimental.pallas import triton as gpu  # slow to import

    N, K = inputs[0].shape[1], inputs[1].shape[1]

    def spec(x: Any, own: str) -> pl.BlockSpec:
        """Heads are axis 1 of all but the tokens' arrays, and places the axis after them."""
        length = BLOCK if own == by else x.shape[2]
        heads = x.shape[1]

        def index(b: Any, n: Any, tile: Any) -> tuple[Any, ...]:
            head = n // (N // K) if heads == K else n
            return (b, head, tile if own == by else 0, *(0,) * (x.ndim - 3))

        return pl.BlockSpec((None, None, length, *x.shape[3:]), index)

    def token_spec(x: jax.Array, own: str) -> pl.BlockSpec:
        length = BLOCK if own == by else x.shape[2]
        return pl.BlockSpec((None, x.shape[1], length), lambda b, n, tile: (b, 0, tile if own == by else 0))

    in_specs: list[Any] = [spec(x, own) for x, own in zip(inputs, ('queries', 'keys', 'keys'), strict=True)]
    in_specs += [token_spec(tokens.queries_B2T, 'queries'), token_spec(tokens.keys_B3S, 'keys')]
    in_specs += [pl.BlockSpec((1,), lambda b, n, tile: (0,))]
    in_specs += [pl.BlockSpec((None, 1), lambda b, n, tile: (b, tile))]
    drawn_spec = None if tokens.drawn_BN3 is None else pl.BlockSpec((None, None, 3), lambda b, n, tile: (b, n, 0))
    in_specs += [drawn_spec, *(spec(x, 'queries') for x in kept)]
    read = *tokens[:3], tokens.first_BI if by == 'queries' else tokens.end_BJ, tokens.drawn_BN3

    narrow = inputs[0].shape[-1] <= 64

    def run(out_shape: Any) -> Any:
        out_specs = jax.tree.map(lambda x: spec(x, by), out_shape)
        call = pl.pallas_call(
            functools.partial(kernel, tiles),
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            out_shape=out_shape,
            compiler_params=gpu.CompilerParams(num_warps=4 if narrow else 8, num_stages=3 if narrow else 2),
            interpret=tiles.interpret,
        )
        T, S = inputs[0].shape[2], inputs[1].shape[2]
        visited = T * min(T + BLOCK, 2 * S) // 2 if tiles.in_order else T * S  # for distributed.costs
        with jax.named_scope(f'pairs_{visited}'), jax.named_scope(f'attention_{PHASES[kernel]}_tiles'):
            return call(*inputs, *read, *kept)

    return run


def _tokens_of(meeting: Meeting, q_BNTH: jax.Array, k_BKSH: jax.Array) -> Tokens:
    found = tokens(meeting.mask, len(q_BNTH), q_BNTH.shape[2], k_BKSH.shape[2])
    return found._replace(drawn_BN3=meeting.drawn_BN3)


def pair_forward(
    q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array, meeting: Meeting,
    options: ScoreOptions, interpret: bool,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns (out_BNTU, lse_BNT) of scaled queries and some of their keys, a part of a ring."""
    own, U = _tokens_of(meeting, q_BNTH, k_BKSH), v_BKSU.shape[-1]
    q, k, v = (pad(x, 3, pl.next_power_of_2(max(x.shape[3], 16))) for x in (q_BNTH, k_BKSH, v_BKSU))
    out_BNTU, lse_BNT = forward(Tiles(options.softcap, meeting.mask.causal, False, interpret), q, k, v, own)
    return out_BNTU[..., :U], lse_BNT


def pair_backward(
    q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array, meeting: Meeting,
    options: ScoreOptions, interpret: bool, out_BNTU: jax.Array, lse_BNT: jax.Array, dout_BNTU: jax.Array,
) -> list[jax.Array]:  # fmt: skip
    """Returns the gradients of queries, keys and values, from the outputs and log-sum-exps of the whole ring."""
    own = _tokens_of(meeting, q_BNTH, k_BKSH)
    delta_BNT = jnp.sum(dout_BNTU.astype(jnp.float32) * out_BNTU.astype(jnp.float32), -1)
    q, k, v, dout = (pad(x, 3, pl.next_power_of_2(max(x.shape[3], 16))) for x in (q_BNTH, k_BKSH, v_BKSU, dout_BNTU))
    tiles = Tiles(options.softcap, meeting.mask.causal, False, interpret)
    found = backward(tiles, q, k, v, own, lse_BNT, delta_BNT, dout)
    return [g[..., : x.shape[3]] for g, x in zip(found, (q_BNTH, k_BKSH, v_BKSU), strict=True)]


PAIR = Pair(pair_forward, pair_backward, BLOCK, any_order=True, drops=True)


PHASES: dict[Any, str] = {
    triton_tiles.forward: 'fwd',
    triton_tiles.backward_queries: 'dq',
    triton_tiles.backward_keys: 'dkv',
}
