"""The tiles of attention in Mosaic: at each step a program meets one tile of queries with one of keys.

Scores are [keys, queries]: what there is one of for each query lies along the lanes.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tformer.layers.accelerators.tiles import Drop, Tiles, met, scored
from tformer.layers.kernels import MIN


def _dot(x: jax.Array, y: jax.Array, axis_x: int, axis_y: int) -> jax.Array:
    """Returns the product over an axis of each."""
    return lax.dot_general(x, y, (((axis_x,), (axis_y,)), ((), ())), preferred_element_type=jnp.float32)


class _TilePair:
    """A tile of queries and a tile of keys: their scores, and what is dropped."""

    def __init__(
        self, tiles: Tiles, queries: Any, keys: Any, window: Any, drawn: Any, bias: Any, numbers: tuple[Any, Any]
    ):
        columns = keys[...].T  # positions, segments, whether in the prefix
        self.tiles, self.window, self.numbers, self.bias = tiles, window[0], numbers, bias
        self.queries, self.keys = [queries[i : i + 1, :] for i in range(2)], [columns[:, i : i + 1] for i in range(3)]
        self.drop = Drop(tiles.block, (1, 0), None if drawn is None else [drawn[0, i] for i in range(3)])

    def scores(self, q: Any, k: Any) -> Any:
        """Returns what `scored` does, each [keys, queries]."""
        bias = None if self.bias is None else _spread(jnp.concatenate([x[...] for x in self.bias], 1))
        return scored(self.tiles, _dot(k[...], q[...], 1, 1), self.queries, self.keys, self.window, bias)

    def dropped(self, x: jax.Array) -> jax.Array:
        return self.drop(x, *self.numbers)

    def gradients(self, q: Any, k: Any, v: Any, lse: Any, delta: Any, dout: Any) -> tuple[jax.Array, ...]:
        """Returns (the weights, the gradients of the scores, and of the products of queries and keys), each [keys,
        queries]."""
        scores, slope = self.scores(q, k)
        weights = jnp.exp(scores - lse[...])
        dweights = self.drop.scaled(self.dropped(_dot(v[...], dout[...], 1, 1)))
        dscores = weights * (dweights - delta[...])
        return weights, dscores, dscores * slope


def _spread(bias_12X: jax.Array) -> jax.Array:
    """Returns the bias of each key and query of two tiles, from that of the query's place less the key's, -X to X - 1:
    row by row the same numbers, one place further on."""
    from jax.experimental.pallas import tpu

    X = bias_12X.shape[1] // 2
    rows = jnp.broadcast_to(bias_12X, (X, 2 * X))
    return tpu.roll(rows, 0, 1, stride=1, stride_axis=0)[:, X:]


def _gathered(dscores: jax.Array) -> jax.Array:
    """Returns the sums of the scores' gradients by distance, [1, 2 X]: what `_spread` is the transposition of."""
    from jax.experimental.pallas import tpu

    X = len(dscores)
    rows = jnp.concatenate([jnp.zeros_like(dscores), dscores], 1)
    while len(rows) % 2 == 0:  # the later half of the rows is that many places further on
        half = len(rows) // 2
        rows = rows[:half] + tpu.roll(rows[half:], 2 * X - half, 1)
    first, *others = (rows[i : i + 1] for i in range(len(rows)))
    return sum((tpu.roll(row, 2 * X - i, 1) for i, row in enumerate(others, start=1)), first)


def bounds_of(bounds: Any, b: Any, count: Any, tile: Any) -> tuple[Any, Any]:
    """Returns the bounds of one of `count` tiles of a row, from all in scalar memory."""
    at = 2 * b * count + tile
    return bounds[at], bounds[at + count]


def forward(
    tiles: Tiles, window: Any, bounds: Any, q: Any, k: Any, v: Any, queries: Any, keys: Any, drawn: Any, bias: Any,
    out: Any, lse: Any, top: Any, total: Any, sums: Any,
) -> None:  # fmt: skip
    b, i, j, count = pl.program_id(0), pl.program_id(2), pl.program_id(3), pl.num_programs(3)
    begin, end = met(tiles, i, count, window[0], *bounds_of(bounds, b, pl.num_programs(2), i))
    pair = _TilePair(tiles, queries, keys, window, drawn, bias, (i, j))

    @pl.when(j == 0)
    def start() -> None:
        top[...], total[...], sums[...] = jnp.full_like(top, MIN), jnp.zeros_like(total), jnp.zeros_like(sums)

    @pl.when((j >= begin) & (j < end))
    def add() -> None:
        scores, _ = pair.scores(q, k)
        higher = jnp.maximum(top[...], scores.max(0, keepdims=True))
        weights, fade = jnp.exp(scores - higher), jnp.exp(top[...] - higher)
        top[...], total[...] = higher, total[...] * fade + weights.sum(0, keepdims=True)
        sums[...] = sums[...] * fade + _dot(v[...], pair.dropped(weights).astype(v.dtype), 0, 0)

    @pl.when(j == count - 1)
    def write() -> None:
        seen = top[...] > MIN  # else what was added is not what a query sees
        found = jnp.where(seen, total[...], 1.0)
        out[...] = jnp.where(seen, pair.drop.scaled(sums[...] / found), 0.0).T.astype(out.dtype)
        lse[...] = jnp.where(seen, top[...] + jnp.log(found), MIN)


def backward_queries(
    tiles: Tiles, window: Any, bounds: Any, q: Any, k: Any, v: Any, queries: Any, keys: Any, drawn: Any, bias: Any,
    lse: Any, delta: Any, dout: Any, dq: Any, *more: Any,
) -> None:  # fmt: skip
    b, i, j, count = pl.program_id(0), pl.program_id(2), pl.program_id(3), pl.num_programs(3)
    begin, end = met(tiles, i, count, window[0], *bounds_of(bounds, b, pl.num_programs(2), i))
    pair = _TilePair(tiles, queries, keys, window, drawn, bias, (i, j))

    *dbiases, sums = more  # the gradient of the bias, of all tiles of a row, and the gradients of the queries

    @pl.when((i == 0) & (j == 0))
    def begin_row() -> None:
        for dbias in dbiases:
            dbias[...] = jnp.zeros_like(dbias)

    @pl.when(j == 0)
    def start() -> None:
        sums[...] = jnp.zeros_like(sums)

    @pl.when((j >= begin) & (j < end))
    def add() -> None:
        _, dscores, dproducts = pair.gradients(q, k, v, lse, delta, dout)
        sums[...] += _dot(k[...], dproducts.astype(k.dtype), 0, 0)
        for dbias in dbiases:
            found, m = _gathered(dscores), i - j + count
            dbias[m - 1] += found[:, : tiles.block]
            dbias[m] += found[:, tiles.block :]

    @pl.when(j == count - 1)
    def write() -> None:
        dq[...] = sums[...].T.astype(dq.dtype)


def backward_keys(
    tiles: Tiles, window: Any, bounds: Any, q: Any, k: Any, v: Any, queries: Any, keys: Any, drawn: Any, bias: Any,
    lse: Any, delta: Any, dout: Any, dk: Any, dv: Any, key_sums: Any, value_sums: Any,
) -> None:  # fmt: skip
    b, j, i, count = pl.program_id(0), pl.program_id(2), pl.program_id(3), pl.num_programs(3)
    begin, end = met(tiles, j, count, window[0], *bounds_of(bounds, b, pl.num_programs(2), j))
    pair = _TilePair(tiles, queries, keys, window, drawn, bias, (i, j))

    @pl.when(i == 0)
    def start() -> None:
        key_sums[...], value_sums[...] = jnp.zeros_like(key_sums), jnp.zeros_like(value_sums)

    @pl.when((i >= begin) & (i < end))
    def add() -> None:
        weights, _, dproducts = pair.gradients(q, k, v, lse, delta, dout)
        key_sums[...] += _dot(dproducts.astype(q.dtype), q[...], 1, 0)
        value_sums[...] += _dot(pair.dropped(weights).astype(dout.dtype), dout[...], 1, 0)

    @pl.when(i == count - 1)
    def write() -> None:
        dk[...], dv[...] = key_sums[...].astype(dk.dtype), pair.drop.scaled(value_sums[...]).astype(dv.dtype)
