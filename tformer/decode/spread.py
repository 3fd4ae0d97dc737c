"""Where the rows of a batch stand on several devices."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from tformer.distributed import sharding


def spread_over(mesh: Mesh, rules: sharding.Rules) -> Callable[[Any], Any]:
    """Returns what keeps a tree of arrays [B, ...], or [B, K, ...] of a layer, split over a mesh as the rules say.

    What a program gives is then always split alike, so that none is compiled again for what another one gave.
    """

    def spread(x: jax.Array) -> jax.Array:
        names = ('batch', 'kv_heads', None, None)[: x.ndim] if x.ndim == 4 else ('batch', None, None)[: x.ndim]
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, sharding.spec(x.shape, names, rules, mesh)))

    return functools.partial(jax.tree.map, spread)
