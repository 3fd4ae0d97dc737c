"""A tile of queries and one of keys in a kernel of Pallas: their scores, what is dropped, and which tiles meet."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tformer.layers.accelerators import tile_dropout
from tformer.layers.kernels import MIN


class Tiles(NamedTuple):
    """What the kernels are told besides arrays."""

    block: int  # queries and keys of a tile
    softcap: float | None = None
    causal: bool = False
    window: bool = False  # whether there is one
    prefix: bool = False  # whether some keys are seen by earlier queries, too
    in_order: bool = False  # tiles meet where the bounds of `Tokens` and the window, counted in places, let them
    interpret: bool = False
    pairs: int | None = None  # of a query and a key that are visited in a row, for `distributed.costs`; None: all


def scored(
    tiles: Tiles, products: jax.Array, queries: Any, keys: Any, window: jax.Array, bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns (scores, `MIN` where masked, the derivative of the soft cap) of a tile, from its products.

    Args:
      tiles: what the kernels are told.
      products: of queries and keys.
      queries: the positions and segments of the queries, in shapes that broadcast with `products`.
      keys: the positions and segments of the keys, and 1 in the prefix, likewise.
      window: how far a query sees.
      bias: what is added to capped scores.
    """
    scores, slope = products, jnp.float32(1)
    if tiles.softcap is not None:
        tanh = 1 - 2 / (jnp.exp(2 * scores / tiles.softcap) + 1)
        scores, slope = tiles.softcap * tanh, 1 - tanh * tanh
    if bias is not None:
        scores += bias
    (at, own), (places, segments, prefix) = queries, keys
    seen = own == segments
    if tiles.causal:
        seen &= (at >= places) | (prefix > 0) if tiles.prefix else at >= places
    if tiles.window:
        seen &= jnp.abs(at - places) < window
    return jnp.where(seen, scores, MIN), slope


def met(tiles: Tiles, tile: Any, count: Any, window: Any, first: Any, end: Any) -> tuple[Any, Any]:
    """Returns the first of `count` tiles of keys that a tile of queries sees, and the one after the last, of those from
    `first` to `end`; or the tiles of queries that see one of keys."""
    if not tiles.in_order:
        return jnp.int32(0), jnp.int32(count)
    near = lax.div(jnp.maximum(tile * tiles.block - window + 1, 0), tiles.block)
    far = lax.div(tile * tiles.block + 2 * tiles.block - 2 + window, tiles.block)
    return jnp.maximum(first, near), jnp.minimum(end, far)


class Drop(NamedTuple):
    """Dropout of the weights of a tile, of none without an array."""

    block: int
    axes: tuple[int, int]  # of the queries and of the keys in a tile
    drawn_3: Any  # what `tile_dropout` reads, or None

    def __call__(self, x: jax.Array, queries: Any, keys: Any) -> jax.Array:
        """Returns what is kept of `x`, by the numbers of the tiles of queries and keys; it is not yet scaled."""
        if self.drawn_3 is None:
            return x
        places = []
        for number, axis in zip((queries, keys), self.axes, strict=True):
            shape = [1, 1]
            shape[axis] = self.block
            places.append(number * self.block + lax.broadcasted_iota(jnp.int32, shape, axis))
        return jnp.where(tile_dropout.kept(self.drawn_3, *places), x, 0.0)

    def scaled(self, x: jax.Array) -> jax.Array:
        """Returns `x` over 1 - rate."""
        return x if self.drawn_3 is None else x * tile_dropout.scale(self.drawn_3)
