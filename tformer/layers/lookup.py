"""Rows of a table by their numbers."""

from typing import Any

import jax
import jax.numpy as jnp

from tformer.distributed import sharding
from tformer.layers.parallel.each_device import split, splits


@jax.custom_vjp
def lookup(table_VW: jax.Array, rows_BT: jax.Array) -> jax.Array:
    """Returns the rows of a table, whose gradient is added up in float32: of a row that is read often, narrow sums lose
    what is added last, and on a GPU they take hundreds of times as long."""
    return table_VW[rows_BT]


def _lookup_forward(table_VW: jax.Array, rows_BT: jax.Array) -> tuple[jax.Array, Any]:
    return table_VW[rows_BT], (table_VW, rows_BT)


def _lookup_backward(read: Any, dx_BTW: jax.Array) -> tuple[jax.Array, None]:
    table_VW, rows_BT = read
    rows_BT, dx_BTW = _in_equal_parts(rows_BT), _in_equal_parts(dx_BTW)
    sums_VW = jnp.zeros_like(table_VW, jnp.float32).at[rows_BT].add(dx_BTW.astype(jnp.float32))
    return sums_VW.astype(table_VW.dtype), None


def _in_equal_parts(x: jax.Array) -> jax.Array:
    """Returns an array [B, T, ...] of which devices have equal parts, or all: what XLA adds up by rows of a table, it
    adds with what fills smaller parts."""
    if not splits():
        return x
    parts = [split(name, size) for name, size in zip(('batch', 'length'), x.shape, strict=False)]
    return sharding.divided(x, [part or () for part in parts]) if None in parts else x


lookup.defvjp(_lookup_forward, _lookup_backward)
