"""Trials that differ only in numbers: how they are grouped, and the program in which each is a slice of all arrays."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tformer import config
from tformer.config import Config
from tformer.config.tasks import TASKS
from tformer.data.batches.packing import BATCHING
from tformer.distributed import meshes
from tformer.distributed.compilers import jit
from tformer.errors import choose
from tformer.lab.sweep.trials import SEED, Trial
from tformer.optim.hyperparameters import Hyperparameters, standard
from tformer.training.program import Program
from tformer.training.step import Step

TRIALS = 'trials'  # the axis of the mesh that trials are split over


def groups(trials: Sequence[Trial], most: int) -> list[list[Trial]]:
    """Returns the trials in groups of at most `most` that one program can train; a group may have a single trial."""
    found: dict[Any, list[Trial]] = {}
    for number, trial in enumerate(trials):
        key = common(trial.config)
        found.setdefault(number if key is None else key, []).append(trial)
    return [group[i : i + most] for group in found.values() for i in range(0, len(group), most)]


@functools.lru_cache(maxsize=4096)
def common(stated: Config) -> Config | None:
    """Returns a config that is equal for trials that one program can train; None: the trial is trained alone.

    It has the seed where that decides the number of steps. Trials that may stop early, that have a teacher,
    experts or optimizer.offload, or whose mesh has a pipeline, context or expert axis are trained alone.
    """
    data, train = stated.data, stated.train
    if train.patience is not None or stated.model.num_experts is not None or stated.optimizer.offload:
        return None
    if TASKS[train.objective].teacher:
        return None
    if any(getattr(stated.mesh, axis) != 1 for axis in ('pipeline', 'context', 'expert')):
        return None
    lengths_differ = data.train_examples is not None or BATCHING[data.batching].packs
    seed = {SEED: train.seed} if lengths_differ and train.num_steps is None else {}
    return config.override(standard(stated), seed)


def make_mesh(asked: config.Mesh, count: int) -> Mesh:
    """Returns the mesh of `count` trials, with an axis of trials as large as divides both them and the devices."""
    devices = jax.devices()
    known = math.prod(size for axis in meshes.AXES if (size := getattr(asked, axis)) != -1)
    apart = math.gcd(count, max(len(devices) // known, 1))
    each = len(devices) // apart if -1 in dataclasses.astuple(asked) else known
    blocks = [meshes.make_mesh(asked, devices[i * each : (i + 1) * each]).devices for i in range(apart)]
    axes = (TRIALS, *meshes.AXES)
    return Mesh(np.stack(blocks), axes, axis_types=(AxisType.Auto,) * len(axes))


def stack_hypers(hypers: Sequence[Hyperparameters]) -> Hyperparameters:
    """Returns the hyperparameters stacked along a leading axis; a field that is off in only some of them is 0 there."""

    def column(*values: Any) -> Any:
        if all(value is None for value in values):
            return None
        kind = np.int32 if all(isinstance(value, int) for value in values) else np.float32
        return np.array([0 if value is None else value for value in values], kind)

    return jax.tree.map(column, *hypers, is_leaf=lambda x: x is None)


def make_step(program: Program, mesh: Mesh, transform: str) -> Step:
    """Returns the compiled step(states, batches, hypers), all of which have a leading axis of trials."""
    step = choose(TRANSFORMS, transform, '--transform')(program.step)
    if mesh.shape[TRIALS] > 1:
        step = jax.shard_map(step, mesh=mesh, in_specs=P(TRIALS), out_specs=P(TRIALS), axis_names={TRIALS})
    return jit(step, meshes.jax_platform(mesh), donate_argnums=0, out_shardings=(stacked(program.shardings), None))


def stacked(shardings: Any) -> Any:
    """Returns the shardings of arrays that have a leading axis of trials."""
    return jax.tree.map(lambda each: NamedSharding(each.mesh, P(TRIALS, *each.spec)), shardings)


def one_after_another(step: Step) -> Step:
    return lambda *args: jax.lax.map(lambda each: step(*each), args)


# How the step of one trial becomes that of many. A map computes each trial as if it were alone, to the bit on one
# device if the same terms are on in all of them, and is faster on a CPU. vmap merges the matrix products of all trials
# into one, which fills an accelerator.
TRANSFORMS: dict[str, Callable[[Step], Step]] = {'vmap': jax.vmap, 'map': one_after_another}
