"""Matrices of a stack, which the devices that hold parts of each share out among them, whole."""

import math

import jax
from flax import linen as nn
from jax.sharding import PartitionSpec

from tformer.distributed import sharding
from tformer.optim.parameters import STACKED

Parts = list[tuple[str, ...]]  # the axes of the mesh that split each axis of an array


def whole(x: jax.Array, names: PartitionSpec) -> jax.Array:
    """Returns an array whose axes have these logical names, of whose layers each device has some, with whole matrices,
    as far as the mesh divides their number; else parts of all."""
    for parts in _way(x, names):
        x = sharding.divided(x, parts)
    return x


def stored(x: jax.Array, names: PartitionSpec) -> jax.Array:
    """Returns what `whole` gives, or what is made of it, where the parameter is."""
    for parts in reversed(_way(x, names)):
        x = sharding.divided(x, parts)
    return x


def _way(x: jax.Array, names: PartitionSpec) -> list[Parts]:
    """Returns the parts of a parameter where it is, and each time an axis of the mesh has gone over to the layers: XLA
    exchanges parts along one axis, and gathers them along several."""
    mesh, rules = jax.sharding.get_abstract_mesh(), nn.get_logical_axis_rules()
    if mesh.size == 1 or not rules or 'layers' not in names:
        return []
    way: list[Parts] = [sharding.axes_of(x.shape, names, rules, mesh)]
    at = list(names).index('layers')
    for axis in [axis for name, part in zip(names, way[0], strict=True) for axis in part if name not in STACKED]:
        mine = (*way[-1][at], axis)
        if x.shape[at] % math.prod(mesh.shape[each] for each in mine) == 0:
            rest = [tuple(each for each in part if each != axis) for part in way[-1]]
            way.append([mine if place == at else part for place, part in enumerate(rest)])
    return way
