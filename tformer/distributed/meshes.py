"""Meshes: the devices laid out by the axes of the config, and what a mesh makes of the rows of a batch."""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tformer import config as config_lib
from tformer import errors

AXES = config_lib.AXES
ROWS = ('data', 'fsdp', 'expert', 'pipeline')  # the axes that split the rows of a batch; in a pipeline its own does not


def nearest_size(known: int, count: int) -> str:
    """Returns in words which product of sizes would divide the devices; '' where this one does."""
    if count % known == 0:
        return ''
    if known > count:
        return f': {known} are asked for, at most {count} can be'
    nearest = min((size for size in range(1, count + 1) if count % size == 0), key=lambda size: abs(size - known))
    return f': {known} does not divide {count}; nearest that does: {nearest}'


def make_mesh(config: config_lib.Mesh, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh of `config` over `devices` (None: all, or `apart` those of this process); without a -1 it may
    use only the first ones.

    Raises:
      UserError: there are too few devices, the -1 cannot take all that remain, or they have no such layout.
    """
    devices = (jax.local_devices() if _apart.get() else jax.devices()) if devices is None else devices
    sizes = [getattr(config, axis) for axis in AXES]
    known = int(np.prod([size for size in sizes if size != -1]))
    asked = ', '.join(f'mesh.{axis}={size}' for axis, size in zip(AXES, sizes, strict=True) if size != 1)
    if known > len(devices) or (-1 in sizes and len(devices) % known):
        raise errors.UserError(
            f'{asked} do not fit the {len(devices)} devices there are{nearest_size(known, len(devices))}'
        )
    sizes = [len(devices) // known if size == -1 else size for size in sizes]
    try:
        laid_out = arrange(sizes, devices[: int(np.prod(sizes))], AXES.index(config.dcn_axis))
    except AssertionError as error:  # JAX lays out whole boxes of a torus alone
        first = f'the first {math.prod(sizes)} of {len(devices)} devices do not form a torus'
        raise errors.UserError(f'{asked}: {first}; an axis of -1 takes all of them') from error
    except (ValueError, NotImplementedError) as error:
        raise errors.UserError(f'{asked}: {str(error).splitlines()[0]}') from error
    return Mesh(laid_out, AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))


def described(mesh: Mesh) -> str:
    """Returns how many devices a mesh has, in words, and of how many where others stay idle."""
    there = jax.local_device_count() if _apart.get() else jax.device_count()
    return f'{mesh.size} device(s)' if mesh.size == there else f'{mesh.size} of {there} devices'


def mesh_of(arrays: Any) -> Mesh:
    """Returns the mesh that a tree of arrays is on; where it is on none, that of its device, or of the first one."""
    there = [x for x in jax.tree.leaves(arrays) if isinstance(x, jax.Array)]
    for x in there:
        if isinstance(x.sharding, NamedSharding) and isinstance(x.sharding.mesh, Mesh):
            return x.sharding.mesh
    devices = [device for x in there for device in x.devices()]
    return make_mesh(config_lib.Mesh(), [*devices, *jax.local_devices()][:1])


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """A context in which each of several processes has a mesh of its own devices."""
    before = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(before)


_apart = contextvars.ContextVar('apart', default=False)


def arrange(sizes: Sequence[int], devices: Sequence[jax.Device], across: int) -> np.ndarray:
    """Returns `devices` in an array of the shape `sizes`; the axis number `across` crosses slices, where there are any.

    Raises:
      ValueError: the slices do not divide that axis.
    """
    slices = count_slices(devices)
    if slices == 1:
        return _within_a_torus(mesh_utils.create_device_mesh, sizes, devices)
    if sizes[across] % slices:
        raise ValueError(f'mesh.{AXES[across]}={sizes[across]} does not divide into {slices} slices (mesh.dcn_axis)')
    between = [slices if axis == across else 1 for axis in range(len(sizes))]
    within = [size // count for size, count in zip(sizes, between, strict=True)]
    return _within_a_torus(mesh_utils.create_hybrid_device_mesh, within, between, devices)


def count_slices(devices: Iterable[jax.Device]) -> int:
    """Returns how many slices devices are of, which the data center network joins; GPUs are of one."""
    return len({getattr(device, 'slice_index', 0) for device in devices})


def _within_a_torus(create: Callable[..., np.ndarray], *layout: Any) -> np.ndarray:
    """Returns create(*layout), whose mesh axes are whole axes of a TPU's torus where there are such, else parts."""
    try:
        return create(*layout)
    except NotImplementedError:  # e.g. axes of 2 x 4 x 2 on a torus of 4 x 4
        return create(*layout, allow_split_physical_axes=True)


def jax_platform(mesh: Mesh) -> str:
    """Returns the JAX backend of a mesh's devices."""
    platform: str = mesh.devices.flat[0].platform
    return {'cuda': 'gpu'}.get(platform, platform)


def in_turn(mesh: Mesh, found: Any) -> Any:
    """Returns what a program gives that runs on the mesh; where its devices are parts of a CPU, once it has ended.

    On the few threads of a CPU, programs that are begun before others have ended may all wait for ever in their
    collectives.
    """
    return jax.block_until_ready(found) if mesh.size > 1 and jax_platform(mesh) == 'cpu' else found


def row_multiple(mesh: Mesh, config: config_lib.Mesh) -> int:
    """Returns the number that divides the rows of a batch: data-parallel size x microbatches of the pipeline, whose
    stages divide the rows, too."""
    stages = mesh.shape['pipeline']
    return batch_ways(mesh) // stages * math.lcm(stages, (config.microbatches or stages) if stages > 1 else 1)


def batch_ways(mesh: Mesh) -> int:
    """Returns how many ways the mesh splits the rows of a batch."""
    return int(np.prod([mesh.shape[axis] for axis in ROWS]))


def batch_share(mesh: Mesh) -> tuple[int, int]:
    """Returns (index, count): this process's devices hold share number `index` of `count` equal shares of the rows."""
    ways = batch_ways(mesh)
    places = batch_sharding(mesh).addressable_devices_indices_map((ways,)).values()
    rows = [place[0].indices(ways) for place in places if place is not None]
    first, last = min(start for start, _, _ in rows), max(stop for _, stop, _ in rows)
    return first // (last - first), ways // (last - first)


def place_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Returns a batch on the devices, made from this process's share of its rows."""
    placed = batch_sharding(mesh)
    return {name: jax.make_array_from_process_local_data(placed, rows) for name, rows in batch.items()}


def abstract_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes, dtypes and places of `place_batch(batch, mesh)` in a single process."""
    placed, dtype = batch_sharding(mesh), jax.dtypes.canonicalize_dtype
    return {name: jax.ShapeDtypeStruct(x.shape, dtype(x.dtype), sharding=placed) for name, x in batch.items()}


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch array `[B, ...]`: rows over `data`, `fsdp`, `expert` and `pipeline`."""
    return NamedSharding(mesh, PartitionSpec(ROWS))
