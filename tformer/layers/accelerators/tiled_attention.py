"""Attention by tiles of queries and keys, as kernels of Pallas compute it for GPUs and TPUs: flash attention (Dao et
al. 2022; Dao 2023).

A tile reads the positions and segments of its queries and keys, 4 bytes a token each, and makes its part of the mask.
Where the order of the tokens is known, tiles of which no query sees a key are skipped, in packed rows those of other
examples too. Memory is linear in the length.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tformer.layers.accelerators import tile_dropout
from tformer.layers.accelerators.tiles import Tiles
from tformer.layers.kernels import (
    MIN,
    Meeting,
    Pair,
    ScoreOptions,
    is_step,
    pad,
    plain,
    sink_gradient,
    with_sink,
)
from tformer.layers.masks import HIDDEN, AttentionMask
from tformer.layers.parallel.each_device import on_each_device

NO_WINDOW = 2**30


class Tokens(NamedTuple):
    """What tiles read of their tokens."""

    queries_B2T: jax.Array  # positions, segments
    keys_B3S: jax.Array  # positions, segments, `HIDDEN` at padding, and 1 in the prefix
    window_1: jax.Array
    # of tiles in order, whatever the window: of the keys that a tile of queries sees the first tile, and the one after
    # the last; and of the queries that see a tile of keys
    keys_B2I: jax.Array
    queries_B2J: jax.Array
    drawn_BN3: jax.Array | None = None  # of `tile_dropout`, where weights are dropped
    bias_NM: jax.Array | None = None  # of `tiled_bias`, as the backend reads it, where there is one


class Backend(NamedTuple):
    """The kernels of a platform. Lengths are whole tiles; queries are scaled.

    Attributes:
      name: key of `kernel_choice.KERNELS`.
      forward: (tiles, q_BNTH, k_BKSH, v_BKSU, tokens) -> (out_BNTU, the log-sum-exp of the scores lse_BNT, float32,
        `MIN` where a query sees nothing).
      backward: (tiles, q_BNTH, k_BKSH, v_BKSU, tokens, lse_BNT, delta_BNT, dout_BNTU) -> the gradients of queries, keys
        and values, and of the bias or None, of attention whose weights are exp(scores - lse); `lse_BNT` is 0 where a
        query sees nothing.
      block: (q_BNTH, k_BKSH, v_BKSU) -> the queries and keys of a tile.
      width: the size of a head in the kernel.
      multiple: lengths that are a multiple are whole tiles.
      spread: what the kernels read of a bias, from `tiled_bias`.
    """

    name: str
    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]]
    block: Callable[[jax.Array, jax.Array, jax.Array], int]
    width: Callable[[int], int]
    multiple: int
    spread: Callable[[jax.Array], jax.Array] = lambda bias_NM1X: bias_NM1X


def attend(
    backend: Backend,
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSU: jax.Array,
    mask: AttentionMask,
    options: ScoreOptions,
    interpret: bool,
) -> jax.Array:
    """Attention as kernels.py defines it, on each device's own rows and heads.

    A step of decoding goes elsewhere: here it would be a tile of padding, and the cache's keys be copied. So does a
    bias of pairs whose distance the places do not tell.
    """
    if is_step(q_BNTH, k_BKSH, mask) or options.bias is not None:
        return plain(q_BNTH, k_BKSH, v_BKSU, mask, options)

    def own(q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array, mask: AttentionMask, heads: Any) -> jax.Array:
        sink_N, drawn_BN3, bias_NX = heads
        T, U = q_BNTH.shape[2], v_BKSU.shape[3]
        q, k, v = (pad(x, 2, backend.multiple) for x in (q_BNTH * options.scale, k_BKSH, v_BKSU))
        tiles = _tiles(backend, q, k, v, options, mask, interpret)
        tiles = tiles._replace(in_order=_in_order(mask))
        tiles = tiles._replace(pairs=_visited(tiles, mask, q.shape[2], k.shape[2]))
        read = make_tokens(mask, q, k, tiles, drawn_BN3)
        if bias_NX is not None:
            bias_NM1X = tiled_bias(bias_NX, T, q.shape[2], k.shape[2], tiles.block)
            read = read._replace(bias_NM=backend.spread(bias_NM1X))
        return attention(backend, tiles, *_wide(backend, q, k, v), read, sink_N)[:, :, :T, :U]

    drawn_BN3 = tile_dropout.draw(options.dropout_rate, options.dropout_key, *q_BNTH.shape[:2])
    bias_NX = None if options.bias_1NX is None else options.bias_1NX[0]
    return on_each_device(own, q_BNTH, k_BKSH, v_BKSU, mask, (options.sink_N, drawn_BN3, bias_NX))


def tiled_bias(bias_NX: jax.Array, T: int, queries: int, keys: int, block: int) -> jax.Array:
    """Returns the bias by distance of padded queries and keys, in blocks, bias_NM1X: block m holds the distances from
    m X - keys on, of which a tile of queries and one of keys have two blocks."""
    S = bias_NX.shape[1] - T + 1
    wide = jnp.pad(bias_NX, ((0, 0), (keys - S + 1, queries - T)))
    return wide.reshape(len(bias_NX), -1, 1, block)


def _tiles(
    backend: Backend, q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array, options: ScoreOptions,
    mask: AttentionMask, interpret: bool,
) -> Tiles:  # fmt: skip
    """Returns tiles in an unknown order."""
    block = backend.block(q_BNTH, k_BKSH, v_BKSU)
    prefix = mask.causal and mask.prefix_BS is not None
    return Tiles(block, options.softcap, mask.causal, mask.window is not None, prefix, interpret=interpret)


def _in_order(mask: AttentionMask) -> bool:
    """Returns whether the places of tokens tell which tiles of a row meet."""
    if mask.causal:
        return mask.order in ('behind', 'front') and mask.prefix_BS is None
    return mask.order == 'behind' and mask.within


def _wide(backend: Backend, *arrays: jax.Array) -> list[jax.Array]:
    return [pad(x, 3, backend.width(x.shape[3])) for x in arrays]


def make_tokens(
    mask: AttentionMask, q_BNTH: jax.Array, k_BKSH: jax.Array, tiles: Tiles, drawn_BN3: jax.Array | None = None
) -> Tokens:
    """Returns the tokens of a mask, padded to the lengths of queries and keys by keys that nobody sees."""
    (B, _, T, _), S, segments = q_BNTH.shape, k_BKSH.shape[2], mask.segments()
    prefix_BS = jnp.zeros_like(mask.key_positions_BS) if mask.prefix_BS is None else mask.prefix_BS

    def stacked(*arrays: jax.Array, length: int, value: int) -> jax.Array:
        wide = [jnp.broadcast_to(x.astype(jnp.int32), (B, x.shape[1])) for x in arrays]
        return pad(jnp.stack(wide, 1), 2, length, value)

    queries_B2T = stacked(mask.query_positions_BT, segments[0], length=T, value=-1)
    keys_B3S = stacked(mask.key_positions_BS, segments[1], prefix_BS, length=S, value=HIDDEN)
    window_1 = jnp.full((1,), NO_WINDOW) if mask.window is None else jnp.minimum(mask.window, NO_WINDOW).reshape(1)
    return Tokens(queries_B2T, keys_B3S, window_1, *_bounds(queries_B2T[:, 0], S // tiles.block, tiles), drawn_BN3)


def _bounds(positions_BT: jax.Array, key_tiles: int, tiles: Tiles) -> tuple[jax.Array, jax.Array]:
    """Returns keys_B2I and queries_B2J of `Tokens`: no query sees a key before the place where its positions begin, nor
    one after its own, or in an encoder after the last of its segment."""
    block, (B, T) = tiles.block, positions_BT.shape
    query_tiles = T // block
    begins_BT = jnp.where(positions_BT >= 0, jnp.arange(T)[None] - positions_BT, NO_WINDOW)
    first_BI = begins_BT.reshape(B, query_tiles, block).min(2) // block
    later_BT = jax.lax.cummin(begins_BT, axis=1, reverse=True)  # where the first of all later queries begins
    ends_J = block * (1 + jnp.arange(key_tiles))
    end_BJ = -(-jnp.sum(later_BT[:, None] < ends_J[None, :, None], 2, dtype=jnp.int32) // block)
    own_I, own_J = jnp.arange(query_tiles), jnp.arange(key_tiles)
    if not tiles.causal and query_tiles == key_tiles:  # who sees whom is seen by them, too
        met_B2I = jnp.stack([first_BI, end_BJ], 1)
        return met_B2I, met_B2I
    keys_B2I = jnp.stack([first_BI, jnp.broadcast_to(jnp.minimum(own_I + 1, key_tiles), first_BI.shape)], 1)
    begin_BJ = jnp.broadcast_to(jnp.minimum(own_J, query_tiles), end_BJ.shape)
    return keys_B2I, jnp.stack([begin_BJ, end_BJ], 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attention(
    backend: Backend,
    tiles: Tiles,
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSU: jax.Array,
    tokens: Tokens,
    sink_N: jax.Array | None,
) -> jax.Array:
    """Returns out_BNTU, as the backend's kernels compute it."""
    return _attention_forward(backend, tiles, q_BNTH, k_BKSH, v_BKSU, tokens, sink_N)[0]


def _attention_forward(
    backend: Backend,
    tiles: Tiles,
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSU: jax.Array,
    tokens: Tokens,
    sink_N: jax.Array | None,
) -> tuple[jax.Array, Any]:
    out_BNTU, lse_BNT = with_sink(*backend.forward(tiles, q_BNTH, k_BKSH, v_BKSU, tokens), sink_N)
    return out_BNTU, (q_BNTH, k_BKSH, v_BKSU, tokens, sink_N, out_BNTU, lse_BNT)


def _attention_backward(backend: Backend, tiles: Tiles, kept: Any, dout_BNTU: jax.Array) -> tuple[Any, ...]:
    q_BNTH, k_BKSH, v_BKSU, tokens, sink_N, out_BNTU, lse_BNT = kept
    delta_BNT = _delta(out_BNTU, dout_BNTU)
    *grads, dbias = backend.backward(tiles, q_BNTH, k_BKSH, v_BKSU, tokens, _finite(lse_BNT), delta_BNT, dout_BNTU)
    dsink_N = sink_gradient(lse_BNT, delta_BNT, sink_N)
    dtokens = None if dbias is None else jax.tree.map(lambda _: None, tokens)._replace(bias_NM=dbias)
    return (*(g.astype(x.dtype) for g, x in zip(grads, (q_BNTH, k_BKSH, v_BKSU), strict=True)), dtokens, dsink_N)


attention.defvjp(_attention_forward, _attention_backward)


def _delta(out_BNTU: jax.Array, dout_BNTU: jax.Array) -> jax.Array:
    """Returns the sum of the weights times their gradients (Dao et al. 2022, appendix B.4)."""
    return jnp.sum(dout_BNTU.astype(jnp.float32) * out_BNTU.astype(jnp.float32), -1)


def _finite(lse_BNT: jax.Array) -> jax.Array:
    """Returns log-sum-exps of which the weight of a masked score is 0 in every case."""
    return jnp.where(lse_BNT > MIN, lse_BNT, 0.0)


def summed(x_BNSX: jax.Array, kv_heads: int) -> jax.Array:
    """Returns the gradients of the key heads, which several query heads use, x_BKSX."""
    B, N, *rest = x_BNSX.shape
    return x_BNSX if kv_heads == N else x_BNSX.reshape(B, kv_heads, N // kv_heads, *rest).sum(2)


def _visited(tiles: Tiles, mask: AttentionMask, T: int, S: int) -> int:
    """Returns about how many pairs of a query and a key tiles visit in a row, in the mean of the layers."""
    if not tiles.in_order:
        return T * S
    whole = T * min(T + tiles.block, 2 * S) // 2 if tiles.causal else T * S
    width = next((width for width in mask.widths if width is not None), None)
    if width is None:
        return whole
    reach = width if tiles.causal else 2 * width - 1
    return round(mask.narrow * min(whole, T * (reach + tiles.block)) + (1 - mask.narrow) * whole)


@contextlib.contextmanager
def counted(tiles: Tiles, T: int, S: int, phase: str) -> Iterator[None]:
    """A context for the call of a kernel, which says for `distributed.costs` how many pairs its tiles visit."""
    with jax.named_scope(f'pairs_{tiles.pairs or T * S}'), jax.named_scope(f'attention_{phase}_tiles'):
        yield


# ------------------------------------------------------------------------------------------------ in a ring
def make_pair(backend: Backend) -> Pair:
    """Returns the kernels of one block of queries and one of keys, parts of a ring."""

    def spread(bias_NX: jax.Array, tiles: Tiles) -> jax.Array:
        """Whole tiles, of as many queries as keys."""
        T = (bias_NX.shape[1] + 1) // 2
        return backend.spread(tiled_bias(bias_NX, T, T, T, tiles.block))

    def read(
        meeting: Meeting,
        q_BNTH: jax.Array,
        k_BKSH: jax.Array,
        v_BKSU: jax.Array,
        options: ScoreOptions,
        interpret: bool,
    ) -> Any:
        tiles = _tiles(backend, q_BNTH, k_BKSH, v_BKSU, options, meeting.mask, interpret)
        tokens = make_tokens(meeting.mask, q_BNTH, k_BKSH, tiles, meeting.drawn_BN3)
        return tiles, tokens if meeting.bias_NX is None else tokens._replace(bias_NM=spread(meeting.bias_NX, tiles))

    def forward(
        q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array, meeting: Meeting,
        options: ScoreOptions, interpret: bool,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        tiles, tokens = read(meeting, q_BNTH, k_BKSH, v_BKSU, options, interpret)
        out_BNTU, lse_BNT = backend.forward(tiles, *_wide(backend, q_BNTH, k_BKSH, v_BKSU), tokens)
        return out_BNTU[..., : v_BKSU.shape[-1]], lse_BNT

    def backward(
        q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array, meeting: Meeting,
        options: ScoreOptions, interpret: bool, out_BNTU: jax.Array, lse_BNT: jax.Array, dout_BNTU: jax.Array,
    ) -> list[Any]:  # fmt: skip
        tiles, tokens = read(meeting, q_BNTH, k_BKSH, v_BKSU, options, interpret)
        q, k, v, dout = _wide(backend, q_BNTH, k_BKSH, v_BKSU, dout_BNTU)
        *found, dbias = backend.backward(tiles, q, k, v, tokens, _finite(lse_BNT), _delta(out_BNTU, dout_BNTU), dout)
        grads = [g[..., : x.shape[3]] for g, x in zip(found, (q_BNTH, k_BKSH, v_BKSU), strict=True)]
        if dbias is not None:
            (dbias,) = jax.linear_transpose(functools.partial(spread, tiles=tiles), meeting.bias_NX)(dbias)
        return [*grads, dbias]

    return Pair(forward, backward, backend.multiple, any_order=True, drops=True, biased=True)
