"""Where the rows of a batch stand on several devices."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from tformer.distributed import sharding
from tformer.layers.cache import KeyValues


def spread_over(mesh: Mesh, rules: sharding.Rules) -> Callable[[Any], Any]:
    """Returns what keeps a tree of arrays [B, ...] split over a mesh as the rules say, rows and heads, and the slots of
    caches as the tokens of a row.

    What a program gives is then always split alike, so that none is compiled again for what another one gave.
    """

    def place(x: jax.Array, names: Sequence[str | None]) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, sharding.spec(x.shape, names, rules, mesh)))

    def along(x: jax.Array, axis: int) -> jax.Array:
        return place(x, ['batch', 'kv_heads', *('length' if each == axis else None for each in range(2, x.ndim))])

    def spread(x: Any) -> Any:
        if isinstance(x, KeyValues):
            return x.along_slots(along)
        return place(x, ['batch', *[None] * (x.ndim - 1)][: x.ndim])

    return functools.partial(jax.tree.map, spread, is_leaf=lambda x: isinstance(x, KeyValues))
