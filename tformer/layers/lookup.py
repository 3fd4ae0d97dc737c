"""Rows of a table by their numbers."""

from typing import Any

import jax
import jax.numpy as jnp

from tformer.distributed import sharding
from tformer.layers.parallel.each_device import split, splits, ways


@jax.custom_vjp
def lookup(table_VW: jax.Array, rows_BT: jax.Array) -> jax.Array:
    """Returns the rows of a table, whose gradient is added up in float32: of a row that is read often, narrow sums lose
    what is added last, and on a GPU they take hundreds of times as long."""
    return table_VW[rows_BT]


def _lookup_forward(table_VW: jax.Array, rows_BT: jax.Array) -> tuple[jax.Array, Any]:
    return table_VW[rows_BT], (table_VW, rows_BT)


def _lookup_backward(read: Any, dx_BTW: jax.Array) -> tuple[jax.Array, None]:
    table_VW, rows_BT = read
    rows_BT, dx_BTW = _divided(rows_BT, dx_BTW, len(table_VW))
    sums_VW = jnp.zeros_like(table_VW, jnp.float32).at[rows_BT].add(dx_BTW.astype(jnp.float32))
    return sums_VW.astype(table_VW.dtype), None


def _divided(rows_BT: jax.Array, dx_BTW: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers of rows and their gradients as devices add them up: of a table that has more rows than a
    device has tokens, each adds up its own part of the width, of the tokens of all devices that split the width; of a
    smaller one its own tokens.

    Tokens that do not divide are whole everywhere: what XLA adds up by rows of a table, it adds with what fills smaller
    parts.
    """
    if not splits():
        return rows_BT, dx_BTW
    names = zip(('batch', 'length', 'embed'), dx_BTW.shape, strict=True)
    batch, length, width = (split(name, size) or () for name, size in names)
    if num_rows <= rows_BT.size // ways((*batch, *length)):
        width = ()
    batch, length = (tuple(axis for axis in axes if axis not in width) for axes in (batch, length))
    return sharding.divided(rows_BT, [batch, length]), sharding.divided(dx_BTW, [batch, length, width])


lookup.defvjp(_lookup_forward, _lookup_backward)
