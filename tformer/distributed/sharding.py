"""Sharding: logical names at each declaration, and one table of rules that maps names to the axes of the mesh.

Axes of the mesh: `data` splits the rows of a batch, `fsdp` rows and parameters, `tensor` heads, MLP columns and the
vocabulary, `context` the tokens of a row, `expert` experts and rows, `pipeline` layers, and rows outside its stages.
By the rules of FSDP all but `data` and `tensor` also split parameters that they do not split otherwise. A logical name
without a rule is an error.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from flax import linen as nn
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from tformer import config as config_lib
from tformer import errors
from tformer.distributed import meshes
from tformer.distributed.meshes import AXES, ROWS

# Logical axis names. Parameters and activations have separate ones, because FSDP shards the parameter's `embed`.
PARAMETER_AXES = (
    *('vocab', 'embed', 'factor', 'experts', 'mlp', 'heads', 'kv_heads', 'head_dim', 'layers', 'norm'),
    *('positions', 'pos_buckets', 'token_types', 'classes', 'lora', 'latent', 'cell'),
)
ACTIVATION_AXES = (
    *('batch', 'length', 'act_embed', 'act_mlp', 'act_heads', 'act_head_dim', 'act_vocab'),
    'stream_length',  # of the residual stream, norms and dropout, outside attention and feed-forward
)
NAMES = PARAMETER_AXES + ACTIVATION_AXES

T = TypeVar('T')

Rules = Sequence[tuple[str, str | tuple[str, ...] | None]]

_ALWAYS = {'batch': ROWS, 'length': 'context', 'stream_length': 'context', 'experts': 'expert', 'layers': 'pipeline'}
# Rajbhandari et al. 2020, ZeRO-3. As in Llama Team 2024, 3.3.2, devices of `context` split parameters too; those of
# `expert` and `pipeline` split what is not of their experts and layers.
_FSDP = {'embed': ('fsdp', 'expert', 'context', 'pipeline')}
_SPLIT = ('vocab', 'mlp', 'heads', 'kv_heads', 'act_mlp', 'act_heads', 'act_vocab')
_TENSOR = dict.fromkeys(_SPLIT, 'tensor')  # Shoeybi et al. 2019: columns, then rows
_SEQUENCE = {'stream_length': ('context', 'tensor')}  # Korthikanti et al. 2023, 4.2.2


def _rules(*parts: dict[str, Any]) -> Rules:
    placed = {name: axes for part in parts for name, axes in part.items()}
    return tuple((name, placed.get(name)) for name in NAMES)


RULES: dict[str, Rules] = {
    'replicated': _rules(),  # every device does all of it
    'dp': _rules(_ALWAYS),
    'fsdp': _rules(_ALWAYS, _FSDP),
    'tp': _rules(_ALWAYS, _TENSOR),
    'tp_sp': _rules(_ALWAYS, _TENSOR, _SEQUENCE),
    'fsdp_tp': _rules(_ALWAYS, _FSDP, _TENSOR),
    'fsdp_tp_sp': _rules(_ALWAYS, _FSDP, _TENSOR, _SEQUENCE),
}


def make_rules(config: config_lib.Mesh) -> Rules:
    """Returns the rules of `config`: a preset and its overrides.

    Raises:
      UserError: an unknown preset, name or axis.
    """
    rules = dict(errors.choose(RULES, config.rules, 'mesh.rules'))
    for override in config.overrides:
        name, equals, axes = override.partition('=')
        where = f'mesh.overrides: {override!r}: '
        if not equals:
            raise errors.UserError(f'{where}write NAME=AXIS, e.g. {name or "vocab"}=tensor')
        if name not in NAMES:
            raise errors.UserError(f'{where}no logical name {name!r}{errors.nearest(name, NAMES)}')
        chosen = () if axes == 'none' else tuple(axes.split('+'))
        for axis in chosen:
            if axis not in AXES:
                raise errors.UserError(f'{where}no axis {axis!r}{errors.nearest(axis, AXES)}')
        rules[name] = chosen or None
    return tuple(rules.items())


class Schedule(NamedTuple):
    """A pipeline's schedule: the number of microbatches, and how often each of them passes through the stages.

    Without a number there are up to 4 for each stage, as many as divide the rows: the more there are, the less time
    stages are idle (Huang et al. 2019, 2.3).
    """

    parts: int | None
    rounds: int

    def parts_of(self, rows: int, mesh: Any) -> int:
        """Returns the number of microbatches of a batch."""
        stages = mesh.shape['pipeline']
        if self.parts is not None:
            return self.parts
        each = rows // (meshes.batch_ways(mesh) // stages)
        return max((parts for parts in range(stages, 4 * stages + 1, stages) if each % parts == 0), default=stages)


_platform = jax.make_user_context(default_value=None)
_far = jax.make_user_context(default_value=None)
_schedule = jax.make_user_context(default_value=None)  # part of jit's cache key, like the mesh


@contextlib.contextmanager
def placed(mesh: Mesh, config: config_lib.Mesh) -> Iterator[None]:
    """A context in which arrays are placed on `mesh`, by the rules and the pipeline of `config`.

    Raises:
      UserError: `config` has an unknown rule.
    """
    stages = mesh.shape['pipeline']
    schedule = Schedule(config.microbatches, config.pipeline_repeats) if stages > 1 else None
    rules, backend = nn.logical_axis_rules(make_rules(config)), _platform(meshes.jax_platform(mesh))
    far = config.dcn_axis if meshes.count_slices(mesh.devices.flat) > 1 else None
    with jax.set_mesh(mesh), rules, _schedule(schedule), _far(far), backend:
        yield


def each_placed(mesh: Mesh, config: config_lib.Mesh, items: Iterator[T]) -> Generator[T, None, None]:
    """Yields what an iterator yields, which works `placed`; between two items the caller has its own context."""
    try:
        while True:
            with placed(mesh, config):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item
    finally:
        if isinstance(items, Generator):
            items.close()


def far() -> str | None:
    """Returns the axis of the current mesh that crosses slices; None where there is one slice."""
    axis: str | None = _far.value
    return axis


def platform() -> str:
    """Returns the JAX backend of the current mesh's devices; without a mesh that of this process."""
    return str(_platform.value or jax.default_backend())


def traced_for(backend: str) -> contextlib.AbstractContextManager[Any]:
    """A context in which programs are traced for a JAX backend, whichever this process has."""
    return _platform(backend)


def unpipelined() -> contextlib.AbstractContextManager[Any]:
    """A context without a pipeline: every device computes all layers, for batches of any number of rows."""
    return _schedule(None)


def schedule() -> Schedule | None:
    """Returns the schedule of the current pipeline; None where there is none."""
    return _schedule.value


def without_axes(without: Collection[str]) -> contextlib.AbstractContextManager[Any]:
    """A context whose rules split nothing over these axes of the mesh, for what each device computes by itself."""

    def rest(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
        return tuple(each for each in ((axes,) if isinstance(axes, str) else axes or ()) if each not in without)

    return nn.logical_axis_rules([(name, rest(axes) or None) for name, axes in nn.get_logical_axis_rules()])


def partitioned(initializer: Callable[..., jax.Array], *names: str) -> Callable[..., Any]:
    """Returns `initializer` with a logical name for each axis of its parameter."""
    unknown = [name for name in names if name not in PARAMETER_AXES]
    if unknown:
        raise ValueError(f'unknown logical axis {unknown[0]!r}{errors.nearest(unknown[0], PARAMETER_AXES)}')
    return nn.with_logical_partitioning(initializer, names)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrains an activation to the sharding that the rules give its logical names; an axis of None, or of one entry,
    is not split.

    Without a mesh it has no effect.
    """
    unknown = [name for name in names if name is not None and name not in ACTIVATION_AXES]
    if unknown:
        raise ValueError(f'unknown logical axis {unknown[0]!r}{errors.nearest(unknown[0], ACTIVATION_AXES)}')
    names = tuple(name if size > 1 else None for name, size in zip(names, x.shape, strict=True))
    return nn.with_logical_constraint(x, names, fallback=nn.spmd.RulesFallback.RAISE_ERROR)


def unboxed(tree: Any) -> Any:
    """Returns `tree` without the boxes that hold the logical names of its arrays."""

    def boxed(x: Any) -> bool:
        return isinstance(x, nn.Partitioned)

    return jax.tree.map(lambda x: x.value if boxed(x) else x, tree, is_leaf=boxed)


def tree_shardings(abstract: Any, mesh: Mesh, rules: Rules) -> Any:
    """Returns the shardings of a tree of (boxed) abstract arrays."""

    def place(names: PartitionSpec, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        return NamedSharding(mesh, spec(leaf.shape, names, rules, mesh))

    return jax.tree.map(place, nn.get_partition_spec(abstract), unboxed(abstract))


def as_stored(grads: Any, abstract: Any) -> Any:
    """Returns gradients, or what stands for those of frozen parameters, whole along the axes of their (boxed) abstract
    parameters that the mesh would split and does not divide.

    Each device computes its part first. Else XLA would update parts, and gather the parameter, its moments and its
    average; or it would gather what the gradient is computed from.
    """
    mesh, rules = jax.sharding.get_abstract_mesh(), nn.get_logical_axis_rules()
    if mesh.empty or not rules:
        return grads

    def place(names: PartitionSpec, leaf: jax.ShapeDtypeStruct, grad: Any) -> Any:
        parts = spec([size * mesh.size for size in leaf.shape], names, rules, mesh)
        whole = spec(leaf.shape, names, rules, mesh)
        if parts == whole or not isinstance(grad, jax.Array):
            return grad
        return divided(divided(grad, parts), whole)

    return jax.tree.map(place, nn.get_partition_spec(abstract), unboxed(abstract), grads)


def on_host(shardings: Any, abstract: Any) -> Any:
    """Returns the shardings of a tree of (boxed) abstract arrays; those of more than one number go to the host."""

    def place(where: NamedSharding, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        return where.with_memory_kind('pinned_host') if leaf.size > 1 else where

    return jax.tree.map(place, shardings, unboxed(abstract))


def divided(x: jax.Array, axes: Iterable[Any]) -> jax.Array:
    """Returns an array constrained to be split by these axes of the current mesh, along each of its own."""
    place = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(*axes))
    return jax.lax.with_sharding_constraint(x, place)


def spec(shape: Sequence[int], names: Iterable[str | None], rules: Rules, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns `axes_of` as JAX takes them."""
    found = axes_of(shape, names, rules, mesh)
    return PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in found))


def axes_of(
    shape: Sequence[int], names: Iterable[str | None], rules: Rules, mesh: Mesh | AbstractMesh
) -> list[tuple[str, ...]]:
    """Returns the axes of the mesh that split an array. Each splits the first axis whose size it divides."""
    found: list[tuple[str, ...]] = []
    for size, name in zip(shape, names, strict=False):
        axes = next(axes for ruled, axes in rules if ruled == name) if name is not None else None
        kept: tuple[str, ...] = ()
        for axis in (axes,) if isinstance(axes, str) else axes or ():
            free = mesh.shape[axis] > 1 and not any(axis in taken for taken in found)
            if free and size % math.prod(mesh.shape[each] for each in (*kept, axis)) == 0:
                kept += (axis,)
        found.append(kept)
    return found
