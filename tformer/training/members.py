"""The runs of one training loop."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tformer.data.batches import pipeline
from tformer.distributed import meshes
from tformer.errors import UserError
from tformer.optim.hyperparameters import Hyperparameters
from tformer.training import compiling, setup
from tformer.training.program import Program
from tformer.training.recorder import RunRecorder
from tformer.training.state import TrainState
from tformer.training.state import variables as state_variables
from tformer.training.step import Batch, Step
from tformer.training.stopping import StopMonitor
from tformer.training.wall_time import Clock

LOOKAHEAD = 100  # steps whose batches' shapes are compiled ahead


@dataclasses.dataclass
class Group:
    """The members of a training loop, which agree on all numbers of steps. This class holds a single run."""

    program: Program  # of any of the members, for they differ only in their hyperparameters
    members: Sequence[RunRecorder]  # all of them
    checkpoint_step: int | None  # the step that they resume from; None: they start anew
    ahead: compiling.Ahead = dataclasses.field(default_factory=compiling.Ahead, init=False)
    _compiled: set[compiling.Key] = dataclasses.field(default_factory=set, init=False)  # programs of the train step

    @property
    def step(self) -> Step:
        """The compiled train step of all members."""
        program = self.program
        return lambda state, batch, hyper: program.jitted_step(state, batch, hyper, *program.taught)

    def compile_ahead(self, scorer: Any) -> int:
        """Has a thread compile the train step and the evaluations (`scorer.Scorer`) for the shapes of their batches.

        Returns the number of these programs.
        """
        (member,), program = self.members, self.program
        first, last = self.checkpoint_step or 0, self.num_steps
        state, taught = program.abstract_state, program.taught
        variables = state_variables(state.params, state.statistics)
        reference = taught[0] if program.reference is not None else None

        def compiled(jitted: Any, *arguments: Any) -> None:
            with program.context():
                jitted.lower(*arguments).compile()

        def add(kind: str, batch: pipeline.Batch, jitted: Any, before: Any, *after: Any) -> compiling.Key:
            placed, key = meshes.abstract_batch(batch, program.mesh), compiling.shapes(kind, batch)
            self.ahead.add(key, functools.partial(compiled, jitted, before, placed, *after))
            return key

        steps = range(first, min(last, first + LOOKAHEAD))
        train, valid = member.data.batches.kinds(steps), member.data.valid
        limit = member.config.train.eval_batches or valid.steps_per_epoch
        evaluated = valid.kinds(range(int(min(limit, valid.steps_per_epoch)))) if steps else []
        keys = {add('train', batch, program.jitted_step, state, program.hyper, *taught) for batch in train}
        keys |= {add('valid', batch, scorer.step, variables, reference) for batch in evaluated}
        return len(keys)

    def compile_step(self, state: TrainState, batch: Batch, hyper: Hyperparameters) -> None:
        """Compiles the train step for the shapes of a batch; that time is not one of steps."""
        with contextlib.ExitStack() as contexts:
            for member in self.active:
                contexts.enter_context(member.metrics.paused())
            contexts.enter_context(self.clock.spending('compiling'))
            self.ahead.wait(compiling.shapes('train', batch))
            self._lower(state, batch, hyper).compile()
        self._compiled.add(compiling.shapes('train', batch))

    def is_compiled(self, batch: Batch) -> bool:
        """Returns whether `compile_step` has been called for the shapes of a batch."""
        return compiling.shapes('train', batch) in self._compiled

    def _lower(self, state: TrainState, batch: Batch, hyper: Hyperparameters) -> jax.stages.Lowered:
        return self.program.jitted_step.lower(state, batch, hyper, *self.program.taught)

    def start(self) -> tuple[TrainState, Hyperparameters]:
        """Returns (the state of the checkpoint or of the beginning, the hyperparameters)."""
        (member,) = self.members
        state = setup.load_state(self.program, member.config, member.directory, self.checkpoint_step)
        return state, self.program.hyper

    def batches(self, step: int) -> Iterator[Batch]:
        """Yields the placed batches of the steps after step number `step`."""
        (member,), mesh = self.members, self.program.mesh
        made = pipeline.iterate(member.data.batches, step, member.config, meshes.batch_share(mesh))
        return (meshes.place_batch(batch, mesh) for batch in made)

    def state_of(self, state: TrainState, member: RunRecorder) -> TrainState:
        """Returns a member's own state."""
        return state

    def fail(self, member: RunRecorder, error: str) -> None:
        """Handles a failed member. A plain run has only one, so training ends."""
        raise UserError(error)

    @property
    def clock(self) -> Clock:
        """The clock of the training."""
        return self.members[0].account.clock

    def is_computing(self) -> bool:
        """Returns whether the devices still compute the last step."""
        return self.members[0].metrics.is_pending()

    @property
    def active(self) -> list[RunRecorder]:
        """The members that have not failed."""
        return [member for member in self.members if member.error is None]

    @property
    def num_steps(self) -> int:
        return self.members[0].config.train.num_steps or 0

    def should_evaluate(self, step: int) -> bool:
        """Returns whether any member is due for an evaluation after `step` and has not had it."""
        return any(member.should_evaluate(step) for member in self.active)

    def is_evaluated(self, step: int) -> bool:
        """Returns whether every member has been evaluated after `step`."""
        return all(member.evaluated >= step for member in self.active)

    def is_out_of_patience(self) -> bool:
        """Returns whether every member has gone train.patience evaluations without a better score."""
        return all(member.is_out_of_patience() for member in self.active)

    def evaluate(self, step: int, state: TrainState, stop: StopMonitor) -> dict[str, str]:
        """Evaluates the members that have not been evaluated after `step`; returns each score, or its range, as text.

        Raises:
          Stopped: a stop was requested during it; members that are done stay so.
        """
        found = []
        with contextlib.ExitStack() as contexts:
            for member in self.active:
                contexts.enter_context(member.metrics.paused())
            contexts.enter_context(stop.interruptible())
            self._finish_steps(state)
            with self.clock.spending('compiling'):
                self.ahead.wait_for_all('valid')
            contexts.enter_context(self.clock.spending('evaluating'))
            for member in self.active:
                if member.evaluated < step:
                    found.append(member.evaluate(step, self.state_of(state, member)))
        return {name: _range([scores[name] for scores in found]) for name in found[0]}

    def save(self, step: int, state: TrainState, requested: bool) -> None:
        """Saves the members whose checkpoint after `step` is due, or `requested`."""
        for member in self.active:
            if member.should_save(step, requested):
                self._finish_steps(state)
                with self.clock.spending('saving'):
                    member.save(step, self.state_of(state, member))

    def _finish_steps(self, state: TrainState) -> None:
        """Waits for the steps that the devices still compute, so that their time counts as that of steps."""
        with self.clock.spending('steps'):
            jax.block_until_ready(state)

    def add_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Hands the metrics of one more step, still on the devices, to the members' recorders."""
        for member in self.active:
            member.metrics.add(metrics, member.index)

    def report(self, step: int) -> dict[str, float]:
        """Writes the members' reports after `step`; returns their means. Members with too many skipped steps fail."""
        with self.clock.spending('steps'):
            found = [member.report(step) for member in self.active]
        return {name: float(np.mean([means[name] for means in found if name in means])) for name in found[0]}

    def drop_failed(self, before: Sequence[RunRecorder]) -> None:
        """Ends the members of `before` that have failed since."""
        for member in before:
            if member.error is not None:
                self.fail(member, member.error)


def _range(values: Sequence[float]) -> str:
    return f'{values[0]:.4g}' if len(values) == 1 else f'{min(values):.4g} to {max(values):.4g}'
