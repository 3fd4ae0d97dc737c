"""Training of trials that differ in numbers alone, together by one compiled program.

Each has a workdir of its own, as if it had been alone: its data in its own order, metrics, evaluations, checkpoints.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tformer import checks, config
from tformer.config import Config
from tformer.data.batches import pipeline
from tformer.distributed import sharding
from tformer.errors import Stopped, UserError
from tformer.evaluation import scorer
from tformer.lab.sweep.batched_trials import TRIALS, common, make_mesh, make_step, stack_hypers, stacked
from tformer.lab.sweep.trials import ERROR, STATED, is_done, write_error
from tformer.optim.hyperparameters import Hyperparameters
from tformer.training import checkpoint, digests, setup, workdir, writers
from tformer.training.loop import Trained
from tformer.training.program import Program, make_program
from tformer.training.recorder import RunRecorder
from tformer.training.state import TrainState, count_parameters
from tformer.training.step import Step
from tformer.training.stopping import StopMonitor


def train(
    homes: Sequence[pathlib.Path], transform: str | None = None, generated: scorer.GenerationScores | None = None
) -> dict[pathlib.Path, Trained]:
    """Trains the trials that are stated in workdirs, and returns what it leaves of each that did not fail.

    One that fails leaves its error in its workdir, and the others go on.

    Args:
      homes: the workdirs of all trials of a group, always in the same order.
      transform: a key of TRANSFORMS; None: 'map' on a CPU, else 'vmap'.
      generated: as in `train.train`.

    Raises:
      UserError: they cannot be trained together.
      Stopped: a signal or train.max_minutes asked for it, and all is saved.
    """
    stated = {home: config.from_dict(config.read_json(home / STATED)) for home in homes}
    for home in homes:
        if common(stated[home]) is None or common(stated[home]) != common(stated[homes[0]]):
            raise UserError(f'{home} and {homes[0]} cannot be trained together: they differ in more than numbers')
    transform = transform or ('map' if jax.default_backend() == 'cpu' else 'vmap')
    trained: dict[pathlib.Path, Trained] = {}
    with contextlib.ExitStack() as closing:
        live = []
        for home in homes:
            if not is_done(home):
                closing.enter_context(workdir.lock(home))
                (home / ERROR).unlink(missing_ok=True)
                with failing(home):
                    checks.check_here(stated[home])
                    checkpoint.latest_valid(home, print)
                    live.append(home)
        stops = closing.enter_context(StopMonitor(stated[homes[0]].train.max_minutes))
        for last, some in cohorts(live):
            trained |= _train(stated, some, last, transform, generated, stops)
    return trained


@contextlib.contextmanager
def failing(home: pathlib.Path) -> Iterator[None]:
    """Makes a `UserError` of its block the error of a trial."""
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
    stops: StopMonitor,
) -> dict[pathlib.Path, Trained]:
    """Trains the trials of a cohort.

    On one device a map's slices are of these alone. Elsewhere all trials keep theirs, so that the numbers of each stay
    the same to the bit: those that are not trained now have the numbers of one that is.
    """
    places = homes if transform == 'map' and jax.device_count() == 1 else list(stated)
    asked = stated[homes[0]].mesh
    mesh = make_mesh(asked, len(places))
    with contextlib.ExitStack() as closing:
        closing.enter_context(sharding.placed(mesh, asked))
        data = open_all({home: stated[home] for home in homes}, last)
        if not data:
            return {}
        first = next(iter(data.values()))
        program = make_program(first.config, first.batches.batch(0), mesh)
        score = scorer.make_scorer(program.model, first.config, mesh)
        members: dict[pathlib.Path, Member] = {}
        for home, found in data.items():
            # One that is killed between the saves of two has a checkpoint of the same step in both.
            recorder = RunRecorder(found, home, score, generated, last, keep_last=max(2, found.config.train.keep_last))
            members[home] = Member(places.index(home), home, found, recorder)
            closing.callback(recorder.close)
        filling = next(iter(members.values()))
        slices = [members.get(home, filling) for home in places]
        group = Group(mesh, program, make_step(program, mesh, transform), list(members.values()), slices)
        progress = writers.Progress(group.length, last or 0)
        closing.callback(progress.close)
        resumed = f', resumed at step {last}' if last else ''
        progress.say(f'{len(members)} trials in one program ({transform}), {mesh.size} device(s){resumed}')
        return loop(group, last, stops, progress)


def open_all(stated: Mapping[pathlib.Path, Config], last: int | None) -> dict[pathlib.Path, setup.RunData]:
    """Returns the data of trials, and their resolved configs, written to their workdirs; those that fail are left out.

    One fails whose data fail, or have batches of other shapes than the first one's.
    """
    data: dict[pathlib.Path, setup.RunData] = {}
    tokenizers: dict[str, Any] = {}  # those that are the same become one, for which one program generates
    for home, each in stated.items():
        with failing(home):
            before = None if last is None else checkpoint.read_metadata(home, last)
            found = setup.load_data(each, home, sharding.make_mesh(each.mesh), before)
            found = found._replace(tokens=tokenizers.setdefault(found.tokens.fingerprint, found.tokens))
            first, other = next(iter(data.items()), (home, found))
            if common(found.config) != common(other.config) or shapes(found.batches) != shapes(other.batches):
                raise UserError(f'its batches have other shapes than those of {first}: --together=1 trains it')
            workdir.save_config(home, found.config)
            data[home] = found
    return data


def shapes(batches: pipeline.Batches) -> Any:
    """Returns the shapes that the batches of a run have."""
    return batches.shapes, batches.widths


def cohorts(homes: Sequence[pathlib.Path]) -> list[tuple[int | None, list[pathlib.Path]]]:
    """Returns the workdirs that go on from the same step, with that step, None where there is no checkpoint.

    One whose newest checkpoint is missing goes on with the others from the one before, and theirs is deleted: it comes
    again. One that is further behind goes on by itself.
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
                    print(f'{home}: step {step} comes again, for others have {last}', flush=True)
                    checkpoint.delete(home, step)
        found.append((last, some))
    return found


@dataclasses.dataclass
class Member:
    """A trial that is trained: its slice, its workdir, its data and its record; and why it failed, if it did."""

    slice: int
    home: pathlib.Path
    data: setup.RunData
    recorder: RunRecorder
    fault: str | None = None

    @property
    def config(self) -> Config:
        return self.data.config


@dataclasses.dataclass
class Group:
    """Trials of one program: the members, and for each slice of the arrays whose numbers it has."""

    mesh: Mesh
    program: Program
    step: Step
    members: list[Member]
    slices: list[Member]

    @property
    def length(self) -> int:
        return self.slices[0].config.train.num_steps or 0

    @property
    def going(self) -> list[Member]:
        return [member for member in self.members if member.fault is None]

    def place(self, tree: Any, *axes: Any) -> Any:
        """Returns arrays `[trials, ...]` on the mesh."""
        return jax.device_put(tree, NamedSharding(self.mesh, P(TRIALS, *axes)))

    def begin(self, last: int | None) -> tuple[TrainState, Hyperparameters]:
        """Returns (the states of all slices, from the checkpoints at step `last` on; their hypers)."""
        of = {}  # in the host's memory: a device has room for its own trials
        for member in self.members:
            state = setup.load_state(self.program, member.config, member.home, last, Hyperparameters.of(member.config))
            of[member.slice] = jax.device_get(state)
        states = jax.tree.map(lambda *x: np.stack(x), *(of[member.slice] for member in self.slices))
        states = jax.device_put(states, stacked(self.program.shardings))
        return states, self.place(stack_hypers([Hyperparameters.of(member.config) for member in self.slices]))

    def feeds(self, last: int) -> dict[int, Any]:
        """Returns what yields the batches of each seed from step `last` on."""
        configs = {member.config.train.seed: member for member in self.members}
        return {seed: pipeline.iterate(of.data.batches, last, of.config) for seed, of in configs.items()}

    def batch(self, made: Mapping[int, pipeline.Batch]) -> Any:
        """Returns the batches of all slices on the mesh, from those of each seed."""
        rows = [made[member.config.train.seed] for member in self.slices]
        return self.place({name: np.stack([each[name] for each in rows]) for name in rows[0]}, sharding.ROWS)

    def make_slicer(self) -> Callable[[TrainState, int], TrainState]:
        """Returns one(states, slice) -> the state of a trial."""
        return jax.jit(
            lambda states, index: jax.tree.map(lambda x: x[index], states), out_shardings=self.program.shardings
        )


def loop(group: Group, last: int | None, stops: StopMonitor, progress: writers.Progress) -> dict[pathlib.Path, Trained]:
    """Trains a group to its end."""
    (states, hypers), one, number = group.begin(last), group.make_slicer(), last or 0
    size = count_parameters(states.params) // len(group.slices)
    feeds = group.feeds(number)
    pending: list[Any] = []  # what the devices may not have done yet
    while group.going:
        reason = stops.reason(number)
        if reason is None and any(member.recorder.should_evaluate(number) for member in group.going):
            try:
                found = evaluation(group, number, states, one, stops)
            except Stopped as stopped:
                reason = str(stopped)
            else:
                progress.say(f'step {number} valid  ' + '  '.join(f'{name[6:]} {of}' for name, of in found.items()))
        for member in group.going:
            if member.recorder.should_save(number, asked=reason is not None):
                note(group, pending)
                member.recorder.save(number, one(states, member.slice))
        if reason is not None and (number < group.length or any(m.recorder.evaluated < number for m in group.going)):
            raise Stopped(f'{reason}: stopped after step {number:,} of {group.length:,}, which is saved')
        if number >= group.length:
            break

        batch = group.batch({seed: next(feed) for seed, feed in feeds.items()})
        states, numbers = group.step(states, batch, hypers)
        number, stops.begun = number + 1, True
        pending.append(numbers)
        if group.going[0].recorder.should_report(number):
            note(group, pending)
            progress.update(number, report(group, number))
    for member in group.going:
        member.recorder.checkpoints.wait()
    return {
        member.home: Trained(member.config, member.data.tokens, number, checkpoint.best(member.home) or number, size)
        for member in group.going
    }


def note(group: Group, pending: list[Any]) -> None:
    """Hands the numbers of the steps since it was called last to the members' records."""
    for numbers in jax.device_get(pending):
        for member in group.going:
            member.recorder.metrics.add(jax.tree.map(lambda x, index=member.slice: x[index], numbers))
    pending.clear()


def evaluation(group: Group, number: int, states: TrainState, one: Any, stops: StopMonitor) -> dict[str, str]:
    """Evaluates the members; returns the range of each score in words."""
    found = []
    with contextlib.ExitStack() as paused:
        for member in group.going:
            paused.enter_context(member.recorder.metrics.paused())
        paused.enter_context(stops.at_once())
        for member in group.going:
            if member.recorder.evaluated < number:
                found.append(member.recorder.evaluate(number, one(states, member.slice)))
    ranges = {name: (min(each[name] for each in found), max(each[name] for each in found)) for name in found[0]}
    return {name: f'{low:.4g} to {high:.4g}' for name, (low, high) in ranges.items()}


def report(group: Group, number: int) -> dict[str, float]:
    """Writes the members' reports; returns their means. Whose steps were not made for too long, has failed."""
    found = []
    for member in group.going:
        shown, member.fault = member.recorder.report(number)
        found.append(shown)
        if member.fault is not None:
            fail(member.home, member.fault)
    return {name: float(np.mean([each[name] for each in found if name in each])) for name in found[0]}
