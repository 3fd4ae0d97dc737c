"""The tiles of attention in Triton: the scores of a tile of queries and one of keys, and what is added up over them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tformer.layers import tile_dropout
from tformer.layers.kernels import MIN

BLOCK = 64  # queries and keys of a tile


class Tiles(NamedTuple):
    """What the kernels are told besides arrays."""

    softcap: float | None = None
    causal: bool = False
    in_order: bool = False  # no query sees a key whose place is after its own, or a window before
    interpret: bool = False


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.lax.dot(x, y, preferred_element_type=jnp.float32)


def _scores(
    tiles: Tiles, q: jax.Array, k: jax.Array, queries: Any, keys: Any, window: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (scores, whether they are seen, the derivative of the soft cap), each [queries, keys]."""
    scores = _dot(q, k.T)
    slope = jnp.ones_like(scores)
    if tiles.softcap is not None:
        tanh = 1 - 2 / (jnp.exp(2 * scores / tiles.softcap) + 1)
        scores, slope = tiles.softcap * tanh, 1 - tanh * tanh
    (at, own), (places, segments, prefix) = (x[:, None] for x in queries), (x[None] for x in keys)
    seen = (places >= 0) & (own == segments) & (jnp.abs(at - places) < window)
    if tiles.causal:
        seen &= (at >= places) | (prefix > 0)
    return jnp.where(seen, scores, MIN), seen, slope


class _Drop(NamedTuple):
    """Dropout of the weights of a tile, of none without an array."""

    drawn_3: Any  # what `tile_dropout` reads, or None

    def __call__(self, x: jax.Array, queries: Any, keys: Any) -> jax.Array:
        """Returns what is kept of `x`, by the numbers of the tiles of queries and keys; it is not yet scaled."""
        if self.drawn_3 is None:
            return x
        places = jnp.arange(BLOCK)
        return jnp.where(tile_dropout.kept(self.drawn_3, queries * BLOCK + places, keys * BLOCK + places), x, 0.0)

    def scaled(self, x: jax.Array) -> jax.Array:
        """Returns `x` over 1 - rate."""
        return x if self.drawn_3 is None else x * tile_dropout.scale(self.drawn_3)


def forward(
    tiles: Tiles, q: Any, k: Any, v: Any, queries: Any, keys: Any, window: Any, first: Any, drawn: Any, out: Any,
    lse: Any,
) -> None:  # fmt: skip
    q_tile, own, width = q[...], (queries[0, :], queries[1, :]), window[0]
    drop, tile = _Drop(drawn), pl.program_id(2)

    def body(j: Any, carry: Any) -> Any:
        top, total, sums = carry
        at = pl.ds(j * BLOCK, BLOCK)
        scores, seen, _ = _scores(tiles, q_tile, k[at, :], own, (keys[0, at], keys[1, at], keys[2, at]), width)
        higher = jnp.maximum(top, scores.max(1))
        weights, fade = jnp.where(seen, jnp.exp(scores - higher[:, None]), 0.0), jnp.exp(top - higher)
        values = v[at, :]
        sums = sums * fade[:, None] + _dot(drop(weights, tile, j).astype(values.dtype), values)
        return higher, total * fade + weights.sum(1), sums

    begin, end = _keys_seen(tiles, tile, k.shape[0] // BLOCK, width, first[0])
    start = jnp.full((BLOCK,), MIN), jnp.zeros(BLOCK), jnp.zeros((BLOCK, v.shape[1]))
    top, total, sums = jax.lax.fori_loop(begin, end, body, start)
    found = jnp.where(total > 0, total, 1.0)
    out[...] = drop.scaled(sums / found[:, None]).astype(out.dtype)
    lse[...] = jnp.where(total > 0, top + jnp.log(found), MIN)


def _keys_seen(tiles: Tiles, tile: Any, count: int, width: Any, first: Any) -> tuple[Any, Any]:
    """Returns the first tile of keys that a tile of queries sees, and the one after the last."""
    if not tiles.in_order:
        return 0, count
    return jnp.maximum(first, jnp.maximum(tile * BLOCK - width + 1, 0) // BLOCK), jnp.minimum(tile + 1, count)


def backward_queries(
    tiles: Tiles, q: Any, k: Any, v: Any, queries: Any, keys: Any, window: Any, first: Any, drawn: Any,
    *kept_and_out: Any,
) -> None:  # fmt: skip
    lse, delta, dout, dq = kept_and_out
    drop, tile = _Drop(drawn), pl.program_id(2)
    q_tile, own, width = q[...], (queries[0, :], queries[1, :]), window[0]
    lse_tile, delta_tile, dout_tile = lse[...], delta[...], dout[...]

    def body(j: Any, sums: Any) -> Any:
        at = pl.ds(j * BLOCK, BLOCK)
        k_tile = k[at, :]
        scores, seen, slope = _scores(tiles, q_tile, k_tile, own, (keys[0, at], keys[1, at], keys[2, at]), width)
        weights = jnp.where(seen, jnp.exp(scores - lse_tile[:, None]), 0.0)
        dweights = drop.scaled(drop(_dot(dout_tile, v[at, :].T), tile, j))
        dscores = weights * (dweights - delta_tile[:, None]) * slope
        return sums + _dot(dscores.astype(k_tile.dtype), k_tile)

    begin, end = _keys_seen(tiles, tile, k.shape[0] // BLOCK, width, first[0])
    sums = jax.lax.fori_loop(begin, end, body, jnp.zeros(q_tile.shape))
    dq[...] = sums.astype(dq.dtype)


def backward_keys(
    tiles: Tiles, q: Any, k: Any, v: Any, queries: Any, keys: Any, window: Any, end: Any, drawn: Any,
    *kept_and_out: Any,
) -> None:  # fmt: skip
    lse, delta, dout, *out = kept_and_out
    drop, tile, count = _Drop(drawn), pl.program_id(2), q.shape[0] // BLOCK
    k_tile, v_tile, width = k[...], v[...], window[0]
    own = keys[0, :], keys[1, :], keys[2, :]

    def body(i: Any, sums: Any) -> Any:
        at = pl.ds(i * BLOCK, BLOCK)
        q_tile, dout_tile = q[at, :], dout[at, :]
        scores, seen, slope = _scores(tiles, q_tile, k_tile, (queries[0, at], queries[1, at]), own, width)
        weights = jnp.where(seen, jnp.exp(scores - lse[at][:, None]), 0.0)
        dweights = drop.scaled(drop(_dot(dout_tile, v_tile.T), i, tile))
        dscores = weights * (dweights - delta[at][:, None]) * slope
        used = drop(weights, i, tile).astype(v_tile.dtype)
        dk, dv = sums
        return dk + _dot(dscores.astype(q_tile.dtype).T, q_tile), dv + _dot(used.T, dout_tile)

    first, last = jnp.int32(0), jnp.int32(count)
    if tiles.in_order:  # the queries from a key's own place to where it leaves the window
        first = jnp.minimum(tile, count)
        last = jnp.minimum((tile * BLOCK + 2 * BLOCK - 2 + width) // BLOCK, end[0])
    sums = jax.lax.fori_loop(first, last, body, (jnp.zeros(k_tile.shape), jnp.zeros(v_tile.shape)))
    for ref, x in zip(out, (sums[0], drop.scaled(sums[1])), strict=True):
        ref[...] = x.astype(ref.dtype)
