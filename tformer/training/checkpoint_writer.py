"""Writing checkpoints, asynchronously by Orbax: a checkpoint is complete or absent, with digests of its files.

Retention is our own and not orbax's CheckpointManager, which deletes by metrics that are known at the save; here a
score may be noted later, a damaged checkpoint is set aside, and a deletion that is killed leaves no half checkpoint.
"""

import functools
import json
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tformer import atomic
from tformer.distributed import processes
from tformer.errors import Unsaved, UserError
from tformer.training import checkpoint, digests
from tformer.training.state import TrainState

if TYPE_CHECKING:
    from tformer.training import orbax_writer


class CheckpointWriter:
    """Writes the checkpoints of a workdir; keeps the newest `keep_last`, the best, and one every `keep_every` steps.

    Raises:
      UserError: the directory cannot be made.
    """

    def __init__(self, workdir: pathlib.Path, keep_last: int = 2, keep_every: int | None = None):
        self._workdir, self._keep_last, self._keep_every = workdir, keep_last, keep_every
        try:
            checkpoint.directory(workdir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f'{checkpoint.directory(workdir)}: {error.strerror}') from error

    @functools.cached_property
    def _writer(self) -> 'orbax_writer.Writer':
        from tformer.training import orbax_writer  # slow to import, and the first step need not wait for it

        return orbax_writer.Writer()

    def save(self, state: TrainState, run: Mapping[str, Any], score: float | None) -> None:
        """Starts writing a checkpoint; returns once the arrays are copied off the devices.

        `run` is a JSON object that a resumed run needs besides the state. More of `score` is better; None: this step
        has not been evaluated.

        Raises:
          UserError: the previous checkpoint could not be written.
        """
        self.wait()
        directory = checkpoint.directory(self._workdir, int(state.step))
        self._writer.begin(directory, {**run, 'merit': score}, checkpoint.checkpoint_items(state))

    def note_score(self, step: int, score: float) -> None:
        """Notes the score of a checkpoint that was written before its evaluation."""
        self.wait()
        if processes.first():
            with digests.recording(checkpoint.directory(self._workdir, step), 'merit.json'):
                atomic.write(checkpoint.directory(self._workdir, step) / 'merit.json', json.dumps(score))

    def finish(self) -> None:
        """Waits until the checkpoint is on disk; a `UserError` says that it could not be written, or `Unsaved` that a
        store did not take it."""
        if '_writer' not in vars(self):
            return
        try:
            self._writer.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:
            line = str(error).splitlines()[0]
            last = max(checkpoint.steps(self._workdir), default=None)
            kept = f'the newest complete one is of step {last}' if last is not None else 'there is no complete one yet'
            known = f' ({kept})' if processes.first() else ''  # the first process has them all
            kind = Unsaved if isinstance(error, Unsaved) else UserError
            raise kind(f'a checkpoint could not be written{known}: {line}') from error

    def wait(self) -> None:
        """Waits until everything is written, as `finish`, then deletes the checkpoints that are no longer kept."""
        self.finish()
        if processes.first():
            there, most = checkpoint.steps(self._workdir), checkpoint.best(self._workdir)
            for step in there[: -self._keep_last]:
                if step != most and (self._keep_every is None or step % self._keep_every):
                    checkpoint.delete(self._workdir, step)
        processes.meet('checkpoints')  # no process looks for the best one during a deletion
