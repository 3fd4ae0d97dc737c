"""The tiles of attention in Triton: a program holds one tile of queries or keys, and adds up over the others."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tformer.layers.accelerators.tiles import Drop, Tiles, met, scored
from tformer.layers.kernels import MIN


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.lax.dot(x, y, preferred_element_type=jnp.float32)


def _scores(
    tiles: Tiles, q: jax.Array, k: jax.Array, queries: Any, keys: Any, window: jax.Array, bias: jax.Array | None
) -> Any:
    """Returns what `scored` does, each [queries, keys]."""
    columns, rows = [x[:, None] for x in queries], [x[None] for x in keys]
    return scored(tiles, _dot(q, k.T), columns, rows, window, bias)


def _bias(bias: Any, i: Any, j: Any, count: Any) -> jax.Array | None:
    """Returns the bias of a tile of queries and one of `count` of keys, by their numbers."""
    return None if bias is None else bias[i - j + count - 1]


def _gradients(scored_slope: Any, lse: jax.Array, delta: jax.Array, dweights: jax.Array) -> tuple[jax.Array, ...]:
    """Returns (the weights, the gradients of the scores, and of the products of queries and keys) of a tile, from what
    `_scores` gives and the gradients of the weights after dropout."""
    scores, slope = scored_slope
    weights = jnp.exp(scores - lse[:, None])
    dscores = weights * (dweights - delta[:, None])
    return weights, dscores, dscores * slope


def _drop(tiles: Tiles, drawn: Any) -> Drop:
    return Drop(tiles.block, (0, 1), None if drawn is None else [drawn[i] for i in range(3)])


def forward(
    tiles: Tiles, q: Any, k: Any, v: Any, queries: Any, keys: Any, window: Any, bounds: Any, drawn: Any, bias: Any,
    out: Any, lse: Any,
) -> None:  # fmt: skip
    q_tile, own, width, block = q[...], (queries[0, :], queries[1, :]), window[0], tiles.block
    drop, tile, count = _drop(tiles, drawn), pl.program_id(2), k.shape[0] // block

    def body(j: Any, carry: Any) -> Any:
        top, total, sums = carry
        at = pl.ds(j * block, block)
        their = keys[0, at], keys[1, at], keys[2, at]
        scores, _ = _scores(tiles, q_tile, k[at, :], own, their, width, _bias(bias, tile, j, count))
        higher = jnp.maximum(top, scores.max(1))
        weights, fade = jnp.exp(scores - higher[:, None]), jnp.exp(top - higher)
        values = v[at, :]
        sums = sums * fade[:, None] + _dot(drop(weights, tile, j).astype(values.dtype), values)
        return higher, total * fade + weights.sum(1), sums

    begin, end = met(tiles, tile, count, width, bounds[0, 0], bounds[1, 0])
    start = jnp.full((block,), MIN), jnp.zeros(block), jnp.zeros((block, v.shape[1]))
    top, total, sums = jax.lax.fori_loop(begin, end, body, start)
    seen = top > MIN  # else what was added is not what a query sees
    found = jnp.where(seen, total, 1.0)
    out[...] = jnp.where(seen[:, None], drop.scaled(sums / found[:, None]), 0.0).astype(out.dtype)
    lse[...] = jnp.where(seen, top + jnp.log(found), MIN)


def backward_queries(
    tiles: Tiles, q: Any, k: Any, v: Any, queries: Any, keys: Any, window: Any, bounds: Any, drawn: Any, bias: Any,
    *kept_and_out: Any,
) -> None:  # fmt: skip
    lse, delta, dout, dq = kept_and_out
    drop, tile, block = _drop(tiles, drawn), pl.program_id(2), tiles.block
    q_tile, own, width = q[...], (queries[0, :], queries[1, :]), window[0]
    lse_tile, delta_tile, dout_tile, count = lse[...], delta[...], dout[...], k.shape[0] // block

    def body(j: Any, sums: Any) -> Any:
        at = pl.ds(j * block, block)
        k_tile = k[at, :]
        their = keys[0, at], keys[1, at], keys[2, at]
        scores = _scores(tiles, q_tile, k_tile, own, their, width, _bias(bias, tile, j, count))
        dweights = drop.scaled(drop(_dot(dout_tile, v[at, :].T), tile, j))
        _, _, dproducts = _gradients(scores, lse_tile, delta_tile, dweights)
        return sums + _dot(dproducts.astype(k_tile.dtype), k_tile)

    begin, end = met(tiles, tile, count, width, bounds[0, 0], bounds[1, 0])
    sums = jax.lax.fori_loop(begin, end, body, jnp.zeros(q_tile.shape))
    dq[...] = sums.astype(dq.dtype)


def backward_keys(
    tiles: Tiles, q: Any, k: Any, v: Any, queries: Any, keys: Any, window: Any, bounds: Any, drawn: Any, bias: Any,
    *kept_and_out: Any,
) -> None:  # fmt: skip
    lse, delta, dout, *out = kept_and_out
    drop, tile, block = _drop(tiles, drawn), pl.program_id(2), tiles.block
    k_tile, v_tile, width = k[...], v[...], window[0]
    own, count = (keys[0, :], keys[1, :], keys[2, :]), pl.num_programs(2)

    def body(i: Any, sums: Any) -> Any:
        at = pl.ds(i * block, block)
        q_tile, dout_tile = q[at, :], dout[at, :]
        their = queries[0, at], queries[1, at]
        scores = _scores(tiles, q_tile, k_tile, their, own, width, _bias(bias, i, tile, count))
        dweights = drop.scaled(drop(_dot(dout_tile, v_tile.T), i, tile))
        weights, _, dproducts = _gradients(scores, lse[at], delta[at], dweights)
        used = drop(weights, i, tile).astype(v_tile.dtype)
        dk, dv = sums
        return dk + _dot(dproducts.astype(q_tile.dtype).T, q_tile), dv + _dot(used.T, dout_tile)

    begin, end = met(tiles, tile, q.shape[0] // block, width, bounds[0, 0], bounds[1, 0])
    dk, dv = jax.lax.fori_loop(begin, end, body, (jnp.zeros(k_tile.shape), jnp.zeros(v_tile.shape)))
    for ref, x in zip(out, (dk, drop.scaled(dv)), strict=True):
        ref[...] = x.astype(ref.dtype)


def backward_bias(
    tiles: Tiles, q: Any, k: Any, v: Any, queries: Any, keys: Any, window: Any, drawn: Any, bias: Any, lse: Any,
    delta: Any, dout: Any, dbias: Any,
) -> None:  # fmt: skip
    """Sums over rows and over the tiles of queries and keys that are as far apart."""
    block, width, bias_tile = tiles.block, window[0], bias[...]
    (rows, queries_count), keys_count = (q.shape[0], q.shape[1] // block), k.shape[1] // block
    apart = pl.program_id(2) + 1 - keys_count  # how many tiles the queries are behind the keys
    begin, end = jnp.maximum(apart, 0), jnp.minimum(queries_count, keys_count + apart)
    if tiles.in_order:
        unseen = (jnp.abs(apart) - 1) * block + 1 >= width
        unseen = unseen | (apart < 0) if tiles.causal else unseen
        end = jnp.where(unseen, begin, end)

    def row(b: Any, sums: jax.Array) -> jax.Array:
        drop = _drop(tiles, None if drawn is None else [drawn[b, i] for i in range(3)])

        def body(i: Any, sums: jax.Array) -> jax.Array:
            j = i - apart
            at, to = pl.ds(i * block, block), pl.ds(j * block, block)
            own, their = (queries[b, 0, at], queries[b, 1, at]), (keys[b, 0, to], keys[b, 1, to], keys[b, 2, to])
            scores = _scores(tiles, q[b, at, :], k[b, to, :], own, their, width, bias_tile)
            dweights = drop.scaled(drop(_dot(dout[b, at, :], v[b, to, :].T), i, j))
            _, dscores, _ = _gradients(scores, lse[b, at], delta[b, at], dweights)
            return sums + dscores

        return jax.lax.fori_loop(begin, end, body, sums)

    dbias[...] = jax.lax.fori_loop(0, rows, row, jnp.zeros((block, block)))
