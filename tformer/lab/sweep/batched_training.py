"""Training several trials that differ only in numbers together, by one compiled program.

Each trial has its own workdir, as if it were trained alone: its own data order, metrics, evaluations and checkpoints.
"""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tformer import checks, config
from tformer.config import Config
from tformer.data.batches import pipeline
from tformer.distributed import meshes, sharding
from tformer.errors import UserError
from tformer.evaluation import scorer
from tformer.lab.sweep.batched_trials import TRIALS, common, make_mesh, make_step, stack_hypers, stacked
from tformer.lab.sweep.trials import ERROR, STATED, is_done, write_error
from tformer.optim.hyperparameters import Hyperparameters
from tformer.training import checkpoint, digests, program_cache, setup, stopping, trackers, workdir, writers
from tformer.training.loop import Trained, train_group
from tformer.training.members import Group
from tformer.training.program import check_memory
from tformer.training.recorder import RunRecorder
from tformer.training.state import TrainState
from tformer.training.step import Batch, Step
from tformer.training.stopping import StopMonitor
from tformer.training.wall_time import Clock


def train(
    homes: Sequence[pathlib.Path], transform: str | None = None, generated: scorer.GenerationScores | None = None
) -> dict[pathlib.Path, Trained]:
    """Trains the trials that are stated in workdirs; returns the finished training of each that does not fail.

    A trial that fails leaves its error in its workdir, and the others continue. `homes` are the workdirs of all trials
    of a group, always in the same order. Without a `transform` it is 'map' on a CPU, 'vmap' elsewhere.

    Raises:
      UserError: the trials cannot be trained together.
      Stopped: a signal or train.max_minutes asked for it, and everything is saved.
    """
    stated = {home: config.load(str(home / STATED)) for home in homes}
    for home in homes:
        if common(stated[home]) is None or common(stated[home]) != common(stated[homes[0]]):
            raise UserError(f'{home} and {homes[0]} cannot be trained together: they differ in more than numbers')
    transform = transform or ('map' if jax.default_backend() == 'cpu' else 'vmap')
    trained: dict[pathlib.Path, Trained] = {}
    with contextlib.ExitStack() as contexts:
        live = []
        for home in homes:
            if not is_done(home):
                contexts.enter_context(workdir.lock(home))
                (home / ERROR).unlink(missing_ok=True)
                (home / stopping.OBEYED).unlink(missing_ok=True)
                with failing(home):
                    checks.check_here(stated[home])
                    trackers.check(stated[home])
                    checkpoint.latest_valid(home)
                    live.append(home)
        stop = contexts.enter_context(StopMonitor(stated[homes[0]].train.max_minutes, workdirs=live))
        for last, some in cohorts(live):
            trained |= _train(stated, some, last, transform, generated, stop)
    return trained


@contextlib.contextmanager
def failing(home: pathlib.Path) -> Iterator[None]:
    """Writes a `UserError` of its block to the workdir, as the error of a trial."""
    try:
        yield
    except UserError as error:
        fail(home, error)


def fail(home: pathlib.Path, why: object) -> None:
    """Writes why a trial failed to its workdir."""
    print(f'tformer: {home}: {why}', flush=True)
    write_error(home, f'tformer: {why}')


def _train(
    stated: Mapping[pathlib.Path, Config],
    homes: Sequence[pathlib.Path],
    last: int | None,
    transform: str,
    generated: scorer.GenerationScores | None,
    stop: StopMonitor,
) -> dict[pathlib.Path, Trained]:
    """Trains the trials of a cohort.

    With 'map' on one device the arrays hold only these trials. Elsewhere every trial of the group keeps its slice, so
    that its numbers stay the same to the bit; the slice of a trial that is not trained repeats another's. Trials whose
    batches of a step differ in shape have no arrays in common: their steps take turns (`GroupInTurns`).
    """
    asked = stated[homes[0]].mesh
    with contextlib.ExitStack() as contexts:
        clock = contexts.enter_context(Clock())
        opened = open_all({home: stated[home] for home in homes}, last)
        if not opened:
            return {}
        in_turns = len({data.batches.shape_order for data in opened.values()}) > 1
        slots = homes if in_turns or (transform == 'map' and jax.device_count() == 1) else list(stated)
        mesh = meshes.make_mesh(asked) if in_turns else make_mesh(asked, len(slots))
        contexts.enter_context(sharding.placed(mesh, asked))
        first = next(iter(opened.values()))
        batch = first.batches.batch(0)
        program = program_cache.program(first.config, batch, mesh)
        check_memory(program, batch)
        score = program_cache.score_of(program, first.config)
        members: dict[pathlib.Path, RunRecorder] = {}
        for home, data in opened.items():
            members[home] = RunRecorder(data, home, score, generated, last, slots.index(home), clock)
            contexts.callback(members[home].close)
        filling = next(iter(members.values()))
        of_slots = [members.get(home, filling) for home in slots]
        kind = GroupInTurns if in_turns else StackedGroup
        group = kind(program, list(members.values()), last, of_slots, transform)
        progress = writers.Progress(group.num_steps, last or 0)
        contexts.callback(progress.close)
        resumed = f', resumed at step {last}' if last else ''
        how = 'in turns' if in_turns else transform
        progress.message(f'{len(members)} trials in one program ({how}), {meshes.described(mesh)}{resumed}')
        trained = train_group(group, stop, progress)
        return dict(zip((member.directory for member in group.active), trained, strict=True))


def open_all(stated: Mapping[pathlib.Path, Config], last: int | None) -> dict[pathlib.Path, setup.RunData]:
    """Returns the data of the trials that do not fail; their resolved configs are written to their workdirs.

    A trial fails where its data has a mistake, or makes another config, as of other steps, than that of the first.
    """
    data: dict[pathlib.Path, setup.RunData] = {}
    tokenizers: dict[str, Any] = {}  # equal tokenizers become one object, so that they share a program for generation
    for home, each in stated.items():
        with failing(home):
            before = None if last is None else checkpoint.read_metadata(home, last)
            found = setup.load_data(each, home, meshes.make_mesh(each.mesh), before)
            shared = tokenizers.setdefault(found.tokenizers.fingerprint, found.tokenizers)
            found = found._replace(tokenizers=shared)
            first, other = next(iter(data.items()), (home, found))
            if common(found.config) != common(other.config):
                raise UserError(f'its data make another config of it than of {first}: --together=1 trains it')
            workdir.save_config(home, found.config)
            data[home] = found
    return data


def cohorts(homes: Sequence[pathlib.Path]) -> list[tuple[int | None, list[pathlib.Path]]]:
    """Returns groups of workdirs that resume from the same step, each with that step (None: no checkpoint).

    If one lacks the newest checkpoint of the others, all resume from the one before, and the newest is deleted, because
    it will be written again. A workdir that is further behind resumes alone.
    """
    steps = {
        home: [
            step
            for step in checkpoint.steps(home)[-2:]
            if digests.find_corruption(checkpoint.directory(home, step), contents=True) is None
        ]
        for home in homes
    }
    found: list[tuple[int | None, list[pathlib.Path]]] = []
    while steps:
        known = [step for has in steps.values() for step in has]
        last = max(known, key=lambda step: (known.count(step), step), default=None)
        some = [home for home, has in steps.items() if last in has or last is None]
        for home in some:
            for step in steps.pop(home):
                if last is not None and step > last:
                    why = f'because other trials resume from step {last}'
                    print(f'{home}: checkpoint {step} is deleted, {why}', flush=True)
                    checkpoint.delete(home, step)
        found.append((last, some))
    return found


@dataclasses.dataclass
class StackedGroup(Group):
    """Several runs, each of which has a slice of all arrays of the program."""

    slots: list[RunRecorder]  # for each slice the run whose numbers it has
    transform: str  # a key of TRANSFORMS

    @functools.cached_property
    def step(self) -> Step:
        made: Step = self.program.once(
            (self.transform, len(self.slots)), lambda: make_step(self.program, self.program.mesh, self.transform)
        )
        return made

    def _lower(self, state: TrainState, batch: Batch, hyper: Hyperparameters) -> jax.stages.Lowered:
        return self.step.lower(state, batch, hyper)  # type: ignore[attr-defined]

    def start(self) -> tuple[TrainState, Hyperparameters]:
        """Returns (the states of all slices, their hyperparameters)."""
        of = {}  # in the host's memory: a device has room for its own trials
        for member in {member.index: member for member in self.slots}.values():
            state = setup.load_state(self.program, member.config, member.directory, self.checkpoint_step)
            of[member.index] = jax.device_get(state)
        states = jax.tree.map(lambda *x: np.stack(x), *(of[member.index] for member in self.slots))
        states = jax.device_put(states, stacked(self.program.shardings))
        return states, self._place(stack_hypers([Hyperparameters.of(member.config) for member in self.slots]))

    def batches(self, step: int) -> Iterator[Batch]:
        """Yields the batches of all slices; slices of the same seed have the same."""
        of_seed = {member.config.train.seed: member for member in self.slots}
        feeds = {seed: pipeline.iterate(of.data.batches, step, of.config) for seed, of in of_seed.items()}
        while True:
            made = {seed: next(feed) for seed, feed in feeds.items()}
            rows = [made[member.config.train.seed] for member in self.slots]
            yield self._place({name: np.stack([each[name] for each in rows]) for name in rows[0]}, meshes.ROWS)

    def state_of(self, state: TrainState, member: RunRecorder) -> TrainState:
        return self._slice(state, member.index)

    def fail(self, member: RunRecorder, error: str) -> None:
        fail(member.directory, error)

    @functools.cached_property
    def _slice(self) -> Any:
        shardings = self.program.shardings
        return jax.jit(lambda states, index: jax.tree.map(lambda x: x[index], states), out_shardings=shardings)

    def _place(self, tree: Any, *axes: Any) -> Any:
        """Returns arrays `[trials, ...]` on the mesh."""
        return jax.device_put(tree, NamedSharding(self.program.mesh, P(TRIALS, *axes)))


@dataclasses.dataclass
class GroupInTurns(StackedGroup):
    """Several runs whose batches of a step differ in shape: each has a state of its own, and their steps take turns.

    Each step is that of the run alone, to the bit; states, hyperparameters, batches and metrics are lists.
    """

    @functools.cached_property
    def step(self) -> Step:
        def step(states: list[TrainState], batches: list[Batch], hypers: list[Hyperparameters]) -> tuple[Any, Any]:
            one, mesh = self.program.jitted_step, self.program.mesh
            made = [meshes.in_turn(mesh, one(*each)) for each in zip(states, batches, hypers, strict=True)]
            return [state for state, _ in made], [metrics for _, metrics in made]

        return step

    def compile_step(self, state: Any, batch: Any, hyper: Any) -> None:
        """Compiles the train step for the shapes of all batches."""
        for own_state, own_batch, own_hyper in zip(state, batch, hyper, strict=True):
            if not super().is_compiled(own_batch):
                super().compile_step(own_state, own_batch, own_hyper)

    def is_compiled(self, batch: Any) -> bool:
        """Returns whether `compile_step` has been called for the shapes of all batches."""
        return all(Group.is_compiled(self, own) for own in batch)

    def _lower(self, state: TrainState, batch: Batch, hyper: Hyperparameters) -> jax.stages.Lowered:
        return Group._lower(self, state, batch, hyper)

    def start(self) -> tuple[Any, Any]:
        """Returns (the states, their hyperparameters)."""
        every = [(self.program, each.config, each.directory, self.checkpoint_step) for each in self.slots]
        return [setup.load_state(*each) for each in every], [Hyperparameters.of(each.config) for each in self.slots]

    def batches(self, step: int) -> Iterator[Any]:
        """Yields the batches of all runs."""
        feeds = [pipeline.iterate(each.data.batches, step, each.config) for each in self.slots]
        while True:
            yield [meshes.place_batch(next(feed), self.program.mesh) for feed in feeds]

    def state_of(self, state: Any, member: RunRecorder) -> TrainState:
        found: TrainState = state[member.index or 0]
        return found

    def add_metrics(self, metrics: Any) -> None:
        for member in self.active:
            member.metrics.add(metrics[member.index or 0])
