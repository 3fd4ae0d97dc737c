"""Kernels that a compiler cannot split between devices: each device computes the rows and heads that it holds."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tformer.distributed import sharding

# (q_BNTH, k_BKSH, v_BKSU, a pytree by row, a pytree by head) -> a pytree of arrays [B, N, ...]
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any, Any], Any]


def on_each_device(
    attend: Attend, q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array, by_row: Any, by_head: Any
) -> Any:
    """Returns attend(...), each device with its own rows and heads, as the rules of the mesh split them.

    Args:
      attend: the kernel; its results begin with rows and heads.
      q_BNTH: queries; what the mesh does not divide is whole on every device.
      k_BKSH: keys.
      v_BKSU: values.
      by_row: arrays [B, ...], others are whole everywhere.
      by_head: arrays [N], [N, X], or [B or 1, N, ...].
    """
    mesh, free = jax.sharding.get_abstract_mesh(), free_axes()
    if mesh.size == 1 or not free:
        return attend(q_BNTH, k_BKSH, v_BKSU, by_row, by_head)
    rows, heads = split('batch', len(q_BNTH)), split('act_heads', q_BNTH.shape[1])
    k_BKSH, v_BKSU = (enough_heads(x, q_BNTH.shape[1]) for x in (k_BKSH, v_BKSU))
    each = P(rows, heads)
    specs = jax.tree.map(lambda x: P(rows) if jnp.ndim(x) and len(x) == len(q_BNTH) else P(), by_row)
    own = jax.tree.map(lambda x: P(heads) if x.ndim < 3 else P(rows if len(x) > 1 else None, heads), by_head)
    run = jax.shard_map(
        attend, in_specs=(each, each, each, specs, own), out_specs=each, axis_names=free, check_vma=False
    )
    return run(q_BNTH, k_BKSH, v_BKSU, by_row, by_head)


def on_own_tokens(
    function: Callable[[Any, Any], Any], shared: Any, tokens: Any, axis: str = 'length', features: str | None = None
) -> Any:
    """Returns function(shared, tokens), each device with its own tokens, as the rules of the mesh split them. Zeros
    fill a length of which the devices would have unequal parts; what else it does not divide is whole on every device.

    Args:
      function: returns a pytree of arrays [B, T], or [B, T, F] where `features` are split.
      shared: a pytree that is the same for all tokens; its gradient is summed over the devices once.
      tokens: a pytree of arrays [B, T, ...].
      axis: the logical name of T.
      features: the logical name of F, where all arrays are [B, T, F], or [F] if shared; None: F is whole everywhere.
    """
    mesh, shape = jax.sharding.get_abstract_mesh(), jax.tree.leaves(tokens)[0].shape
    named = [('batch', shape[0]), (axis, shape[1]), *([] if features is None else [(features, shape[2])])]
    found = [split(name, size) for name, size in named] if mesh.size > 1 else []
    divided = found and None not in (found[0], *found[2:])
    if divided and (filled := filled_by(axis, shape[1])):  # XLA stores what is behind them, too
        wide = jax.tree.map(lambda x: jnp.pad(x, [(0, filled if i == 1 else 0) for i in range(x.ndim)]), tokens)
        return jax.tree.map(lambda x: x[:, : shape[1]], on_own_tokens(function, shared, wide, axis, features))
    parts = [part or () for part in found]
    axes = [each for part in parts for each in part]
    rest = [axis for axis in free_axes() - set(axes) if mesh.shape[axis] > 1]
    if ways(tuple(axes)) == 1 or (None in found and len(rest) > 1):  # XLA aborts where two axes are left to it
        return function(shared, tokens)
    manual, own = set(axes) if rest else free_axes(), P(*parts)
    with sharding.without_axes(manual):
        return jax.shard_map(
            function, in_specs=(P(*parts[2:]), own), out_specs=own, axis_names=manual, check_vma=False
        )(shared, tokens)


def whole_rows(x_BV: jax.Array, features: str) -> jax.Array:
    """Constrains x [B, V] to whole rows, for what passes over each many times; devices that have the same rows share
    them out where they divide: all of them, or those that split V, by its logical name."""
    if not splits():
        return x_BV
    rows = split('batch', len(x_BV)) or ()
    for axes in (sorted(free_axes()), _axes(features)):
        shared = (*rows, *(axis for axis in axes if axis not in rows))
        if len(x_BV) % ways(shared) == 0:
            return jax.lax.with_sharding_constraint(x_BV, P(shared, None))
    return sharding.constrain(x_BV, 'batch', None)


def free_axes() -> set[str]:
    """Returns the axes of the current mesh that XLA splits arrays over."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto}


def splits() -> bool:
    """Returns whether rules split arrays over several devices here."""
    return jax.sharding.get_abstract_mesh().size > 1 and bool(nn.get_logical_axis_rules())


def split(name: str, size: int) -> tuple[str, ...] | None:
    """Returns the free axes that the rules split an axis over, by its logical name; None where it does not divide."""
    axes = _axes(name)
    return axes if size % ways(axes) == 0 else None


def filled_by(name: str, size: int) -> int:
    """Returns how many entries fill the parts of an axis that its devices do not divide; 0 where some have none."""
    count = ways(_axes(name))
    return -size % count if size > count else 0


def _axes(name: str) -> tuple[str, ...]:
    (found,) = nn.logical_to_mesh_axes((name,)) or (None,)
    named, free = (found,) if isinstance(found, str) else found or (), free_axes()
    return tuple(axis for axis in named if axis in free)


def enough_heads(x_BKSX: jax.Array, num_heads: int) -> jax.Array:
    """Returns keys or values of which each device has those that its own query heads use, repeated as far as needed."""
    K = x_BKSX.shape[1]
    least = math.lcm(K, ways(split('act_heads', num_heads) or ()))
    return x_BKSX if least == K else jnp.repeat(x_BKSX, least // K, axis=1)


def heads_to_split(num_kv_heads: int, num_heads: int) -> int:
    """Returns how many heads of keys are cached, so that each device has those that its own query heads use and no
    others: where devices that split heads do not divide those of keys, some stand there repeatedly."""
    apart = splits() and _axes('act_heads') == _axes('kv_heads')
    each = math.lcm(num_kv_heads, ways(_axes('act_heads'))) if apart else num_kv_heads
    return each if num_kv_heads > 1 and num_heads % each == 0 else num_kv_heads


def ways(axes: tuple[str, ...]) -> int:
    """Returns how many parts some axes of the current mesh make."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape[axis] for axis in axes)
