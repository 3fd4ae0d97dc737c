"""Training of trials that differ in numbers alone, together by one compiled program.

Each has a workdir of its own, as if it had been alone: its data in its own order, metrics, evaluations, checkpoints.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tformer import checkpoint, config, digests, evaluate, metrics, resume, sharding, workdir
from tformer.config import Config
from tformer.data import pipeline
from tformer.errors import Stopped, UserError
from tformer.hyper import Hyper
from tformer.journal import Journal, count_tokens
from tformer.lab.slices import TRIALS, common, make_mesh, make_step, stack_hypers, stacked
from tformer.lab.trials import ERROR, STATED, has_ended
from tformer.state import TrainState, count_parameters
from tformer.step import Step
from tformer.stopping import Stops
from tformer.train import Trained


def train(
    homes: Sequence[pathlib.Path], transform: str | None = None, generated: evaluate.GenerationScores | None = None
) -> dict[pathlib.Path, Trained]:
    """Trains the trials that are stated in workdirs, and returns what it leaves of each that did not fail.

    Those that have ended before are trained no more, but keep their slices, so that the others' numbers stay the same
    to the bit. One that fails, whose steps are not made, leaves its error in its workdir; the others go on.

    Args:
      homes: the workdirs of all trials of a group, always in the same order.
      transform: a key of TRANSFORMS; None: 'map' on a CPU, else 'vmap'.
      generated: as in `train.train`.

    Raises:
      UserError: anything in the configs, the data or the workdirs that is the user's to mend.
      Stopped: a signal or train.max_minutes asked for it, and all is saved.
    """
    stated = {home: config.load(str(home / STATED)) for home in homes}
    asked = stated[homes[0]]
    for home in homes:
        if common(stated[home]) is None or common(stated[home]) != common(asked):
            raise UserError(f'{home} and {homes[0]} cannot be trained together: they differ in more than numbers')
    if not (live := [home for home in homes if not has_ended(home)]):
        return {}
    transform = transform or ('map' if jax.default_backend() == 'cpu' else 'vmap')
    mesh = make_mesh(asked.mesh, len(homes))
    with contextlib.ExitStack() as closing:
        closing.enter_context(sharding.placed(mesh, asked.mesh))
        for home in live:
            closing.enter_context(workdir.held(home))
        stops = closing.enter_context(Stops(asked.train.max_minutes))
        last = common_step(live)
        opened = open_all({home: stated[home] for home in live}, last)
        design = resume.make_design(opened[live[0]].config, opened[live[0]].batches, mesh)
        score = evaluate.make_scorer(design.model, opened[live[0]].config, mesh)
        members = []
        for home, found in opened.items():
            members.append(Member(homes.index(home), home, found, Journal(found, home, score, generated, last)))
            closing.callback(members[-1].journal.close)
        # The slice of a trial that has ended goes along with another's.
        slices = [members[live.index(home) if home in live else 0] for home in homes]
        group = Group(mesh, design, make_step(design, mesh, transform), members, slices)
        progress = metrics.Progress(group.length, last or 0)
        closing.callback(progress.close)
        resumed = f', resumed at step {last}' if last else ''
        trained = f'{len(homes)} trials' if live == homes else f'{len(live)} of {len(homes)} trials'
        progress.say(f'{trained} in one program ({transform}), {mesh.size} device(s){resumed}')
        return loop(group, last, stops, progress)


def open_all(stated: Mapping[pathlib.Path, Config], last: int | None) -> dict[pathlib.Path, resume.Opened]:
    """Returns the data of trials, and their resolved configs, written to their workdirs.

    Raises:
      UserError: as `resume.open_data`, or the batches of one have shapes that another's have not.
    """
    opened: dict[pathlib.Path, resume.Opened] = {}
    tokenizers: dict[str, Any] = {}  # those that are the same become one, for which one program generates
    for home, each in stated.items():
        config.check(each)
        before = None if last is None else checkpoint.record(home, last)
        found = resume.open_data(each, home, sharding.make_mesh(each.mesh), before)
        tokens = tokenizers.setdefault(found.tokens.fingerprint, found.tokens)
        opened[home] = found = found._replace(tokens=tokens)
        workdir.save_config(home, found.config)
        first, other = next(iter(opened.items()))
        if common(found.config) != common(other.config) or shapes(found.batches) != shapes(other.batches):
            raise UserError(f'{home} and {first} cannot be trained together: their batches have other shapes')
    return opened


def shapes(batches: pipeline.Batches) -> Any:
    """Returns the shapes that the batches of a run have."""
    return batches.shapes, batches.widths


def common_step(homes: Sequence[pathlib.Path]) -> int | None:
    """Returns the newest step of which all workdirs hold a checkpoint that is whole, None where there is none.

    What is newer is deleted: it comes again.
    """
    for home in homes:
        checkpoint.sound(home, print)
    shared = set.intersection(*(set(checkpoint.steps(home)) for home in homes))

    def whole(step: int) -> bool:
        return not any(digests.fault(checkpoint.place(home, step), contents=True) for home in homes)

    last = next(filter(whole, sorted(shared, reverse=True)), None)
    for home in homes:
        for step in checkpoint.steps(home):
            if step > (last or 0):
                checkpoint.delete(home, step)
    return last


@dataclasses.dataclass
class Member:
    """A trial that is trained: its slice, its workdir, its data and its record; and why it failed, if it did."""

    slice: int
    home: pathlib.Path
    opened: resume.Opened
    journal: Journal
    fault: str | None = None

    @property
    def config(self) -> Config:
        return self.opened.config


@dataclasses.dataclass
class Group:
    """Trials of one program: the members, and for each slice of the arrays whose numbers it has."""

    mesh: Mesh
    design: resume.Design
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

    def begin(self, last: int | None) -> tuple[TrainState, Hyper]:
        """Returns (the states of all slices, from the checkpoints at step `last` on; their hypers)."""
        of = {
            member.slice: resume.state_at(self.design, member.config, Hyper.of(member.config), member.home, last)
            for member in self.members
        }
        stack = jax.jit(
            lambda *states: jax.tree.map(lambda *x: jnp.stack(x), *states), out_shardings=stacked(self.design.shardings)
        )
        states = stack(*(of[member.slice] for member in self.slices))
        return states, self.place(stack_hypers([Hyper.of(member.config) for member in self.slices]))

    def feeds(self, last: int) -> dict[int, Any]:
        """Returns what yields the batches of each seed from step `last` on."""
        configs = {member.config.train.seed: member for member in self.members}
        return {seed: pipeline.iterate(of.opened.batches, last, of.config) for seed, of in configs.items()}

    def batch(self, made: Mapping[int, pipeline.Batch]) -> Any:
        """Returns the batches of all slices on the mesh, from those of each seed."""
        rows = [made[member.config.train.seed] for member in self.slices]
        return self.place({name: np.stack([each[name] for each in rows]) for name in rows[0]}, sharding.ROWS)

    def make_slicer(self) -> Callable[[TrainState, int], TrainState]:
        """Returns one(states, slice) -> the state of a trial."""
        return jax.jit(
            lambda states, index: jax.tree.map(lambda x: x[index], states), out_shardings=self.design.shardings
        )


def loop(group: Group, last: int | None, stops: Stops, progress: metrics.Progress) -> dict[pathlib.Path, Trained]:
    """Trains a group to its end."""
    (states, hypers), one, number = group.begin(last), group.make_slicer(), last or 0
    size = count_parameters(states.params) // len(group.slices)
    feeds = group.feeds(number)
    pending: list[Any] = []  # what the devices may not have done yet
    while group.going:
        reason = stops.reason(number)
        if reason is None and any(member.journal.is_evaluated_after(number) for member in group.going):
            try:
                found = evaluation(group, number, states, one, stops)
            except Stopped as stopped:
                reason = str(stopped)
            else:
                progress.say(f'step {number} valid  ' + '  '.join(f'{name[6:]} {of}' for name, of in found.items()))
        for member in group.going:
            if member.journal.is_kept_after(number, asked=reason is not None):
                note(group, pending)
                member.journal.keep(number, one(states, member.slice))
        if reason is not None and (number < group.length or any(m.journal.evaluated < number for m in group.going)):
            raise Stopped(f'{reason}: stopped after step {number:,} of {group.length:,}, which is saved')
        if number >= group.length:
            break

        made = {seed: next(feed) for seed, feed in feeds.items()}
        states, numbers = group.step(states, group.batch(made), hypers)
        number, stops.begun = number + 1, True
        pending.append(({seed: count_tokens(batch) for seed, batch in made.items()}, numbers))
        if group.going[0].journal.is_reported_after(number):
            note(group, pending)
            progress.update(number, report(group, number))
    for member in group.going:
        member.journal.checkpoints.wait()
    return {
        member.home: Trained(member.config, member.opened.tokens, number, checkpoint.best(member.home) or number, size)
        for member in group.going
    }


def note(group: Group, pending: list[Any]) -> None:
    """Hands the numbers of the steps since it was called last to the members' records."""
    for tokens, numbers in jax.device_get(pending):
        for member in group.going:
            mine = jax.tree.map(lambda x, index=member.slice: x[index], numbers)
            member.journal.log.add(tokens[member.config.train.seed], mine)
    pending.clear()


def evaluation(group: Group, number: int, states: TrainState, one: Any, stops: Stops) -> dict[str, str]:
    """Evaluates the members; returns the range of each score in words."""
    found = []
    with contextlib.ExitStack() as paused:
        for member in group.going:
            paused.enter_context(member.journal.log.paused())
        paused.enter_context(stops.at_once())
        for member in group.going:
            if member.journal.evaluated < number:
                found.append(member.journal.evaluate(number, one(states, member.slice)))
    ranges = {name: (min(each[name] for each in found), max(each[name] for each in found)) for name in found[0]}
    return {name: f'{low:.4g} to {high:.4g}' for name, (low, high) in ranges.items()}


def report(group: Group, number: int) -> dict[str, float]:
    """Writes the members' reports; returns their means. Whose steps were not made for too long, has failed."""
    found = []
    for member in group.going:
        shown, member.fault = member.journal.report(number)
        found.append(shown)
        if member.fault is not None:
            (member.home / ERROR).write_text(f'tformer: {member.fault}\n')
    return {name: float(np.mean([each[name] for each in found if name in each])) for name in found[0]}
