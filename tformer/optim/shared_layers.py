"""Matrices of a stack, which devices share out among them, whole, whether they hold parts or all of each."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from tformer.distributed import sharding
from tformer.layers.parallel.each_device import free_axes
from tformer.optim.parameters import STACKED

Parts = list[tuple[str, ...]]  # the axes of the mesh that split each axis of an array


def whole(x: jax.Array, names: PartitionSpec) -> jax.Array:
    """Returns an array whose axes have these logical names, of whose layers each device has some, with whole matrices.

    Where the devices do not divide the layers of a stage, layers of zeros follow these. Axes of the mesh for which no
    layers are left split matrices as before, and slices with the same matrices do the same.
    """
    if way := _way(x.shape, names):
        ways = _count(way[-1], names)
        x = _resized(x, names, _count(way[0], names), math.ceil(x.shape[_at(names)] / ways) * ways)
    for parts in way:
        x = sharding.divided(x, parts)
    return x


def stored(x: jax.Array, names: PartitionSpec, shape: Sequence[int]) -> jax.Array:
    """Returns what `whole` gives of an array of this shape, or what is made of it, where the parameter is."""
    way = _way(shape, names)
    for parts in reversed(way):
        x = sharding.divided(x, parts)
    return _resized(x, names, _count(way[0], names), shape[_at(names)]) if way else x


def _way(shape: Sequence[int], names: PartitionSpec) -> list[Parts]:
    """Returns the parts of a parameter where it is, and each time an axis of the mesh has gone over to the layers, one
    that splits matrices before others: XLA exchanges parts along one axis, and gathers them along several."""
    mesh, rules = jax.sharding.get_abstract_mesh(), nn.get_logical_axis_rules()
    if mesh.size == 1 or not rules or 'layers' not in names:
        return []
    way: list[Parts] = [sharding.axes_of(shape, names, rules, mesh)]
    split = [axis for name, part in zip(names, way[0], strict=True) for axis in part if name not in STACKED]
    free = free_axes() - {axis for part in way[0] for axis in part} - {sharding.far()}
    others = [axis for axis in mesh.shape if axis in free]
    for axis in [*split, *others]:
        if mesh.shape[axis] > 1 and shape[_at(names)] > _count(way[-1], names):
            rest = [tuple(each for each in part if each != axis) for part in way[-1]]
            rest[_at(names)] += (axis,)
            way.append(rest)
    return way


def _resized(x: jax.Array, names: PartitionSpec, stages: int, layers: int) -> jax.Array:
    """Returns an array of so many layers in all: zeros follow those of each stage, or are cut off."""
    at = _at(names)
    if layers == x.shape[at]:
        return x
    x = x.reshape(*x.shape[:at], stages, -1, *x.shape[at + 1 :])
    more = [(0, layers // stages - size if axis == at + 1 else 0, 0) for axis, size in enumerate(x.shape)]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), more)
    return x.reshape(*x.shape[:at], layers, *x.shape[at + 2 :])


def _at(names: PartitionSpec) -> int:
    """Returns the place of the axis of layers."""
    return list(names).index('layers')


def _count(parts: Parts, names: PartitionSpec) -> int:
    """Returns in how many parts layers are."""
    return math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in parts[_at(names)])
