"""The output of a run while it trains: metrics, evaluations and checkpoints, and the last step of each."""

import contextlib
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tformer.config import Config
from tformer.distributed import processes
from tformer.evaluation import means, scorer
from tformer.training import checkpoint, checkpoint_writer, copies, setup, wall_time, writers
from tformer.training.state import TrainState, evaluation_variables

# The scores of train steps that are written.
REPORTED = ('loss', 'aux_loss', 'divergence', 'reward_accuracy', 'reward_margin')


class RunRecorder:
    """A run in a training loop: writes its metrics, evaluations and checkpoints to its workdir, `directory`."""

    def __init__(
        self,
        data: setup.RunData,
        directory: pathlib.Path,
        score: Callable[..., dict[str, float]],
        generated: scorer.GenerationScores | None,
        last: int | None,
        index: int | None = None,
        clock: wall_time.Clock | None = None,
    ):
        """Resumes from the checkpoint at step `last`; None: starts anew.

        `score` computes the scores of an evaluation, and `generated` those of generated text; None: none is generated.
        `index` is the slice of the program's arrays that is the run's own; None: all of them are. `clock` is that of
        the training.
        """
        train = data.config.train
        self.data, self.directory, self.index = data, directory, index
        self.error: str | None = None  # why the run failed, if it did
        self._score, self._generated = score, generated
        self._metadata = setup.checkpoint_metadata(data)
        self._peak = setup.peak_flops(data.config)
        self._num_steps = train.num_steps or 0
        self._saved = last or 0
        self._unsaved_score: float | None = None
        self._best: float | None = None
        self.stale = 0  # how many evaluations in a row have found no higher score
        self.metrics = MetricAccumulator({}, 0, 0.0)  # of the steps since the last report
        self.evaluated = 0  # the step of the latest evaluation
        history = saved = None
        if last is not None:
            previous = checkpoint.read_metadata(directory, last)
            self._best, self.stale = previous['best']['merit'], previous['best']['stale']
            self.metrics = MetricAccumulator(**previous['interval'])
            self.evaluated = previous['evaluated']
            history, saved = previous.get('history'), previous.get('wall_time')
        # A process that is killed between the saves of two runs leaves a checkpoint of the same step in both.
        keep_last = train.keep_last if index is None else max(2, train.keep_last)
        self.checkpoints = checkpoint_writer.CheckpointWriter(directory, keep_last, train.keep_every)
        written = directory if processes.first() else None
        self._writer = writers.MetricWriter(written, self._saved, self.evaluated, history, data.config)
        self.account = wall_time.Account(clock or wall_time.Clock(), written, saved, self._saved)
        self._kept = last  # the step of a checkpoint with all but the steps that wait in `metrics`; None: there is none

    @property
    def config(self) -> Config:
        return self.data.config

    def close(self) -> None:
        """Waits for the checkpoint that is being written, and closes the files."""
        try:
            with self.account.clock.spending('saving'):
                self.checkpoints.finish()
            self.account.write(None if self.metrics.is_waiting else self._kept)
        finally:
            self._writer.close()

    def should_evaluate(self, step: int) -> bool:
        """Returns whether an evaluation after `step` is due and has not been made."""
        return self.evaluated < step and is_due(step, self.config.train.eval_every, self._num_steps)

    def evaluate(self, step: int, state: TrainState) -> dict[str, float]:
        """Returns the scores of the validation split after `step` by name, `valid/...`, and writes them."""
        config, valid, tokenizers = self.config, self.data.valid, self.data.tokenizers
        variables = evaluation_variables(state)
        scores = self._score(variables, valid, config.train.eval_batches, tokenizers)
        if config.evaluate.examples_while_training and self._generated is not None:
            most = min(config.evaluate.examples_while_training, len(valid.records))
            scores |= self._generated(config, variables, tokenizers, [valid.records[i] for i in range(most)])
        found = {f'valid/{name}': value for name, value in scores.items()}
        self._writer.write(step, found)
        score = checkpoint.score(config.train.best_metric, found[config.train.best_metric])
        is_better = self._best is None or score > self._best
        self._best, self.stale = (score, 0) if is_better else (self._best, self.stale + 1)
        self.evaluated, self._unsaved_score = step, score
        self.account.write()
        return found

    def is_out_of_patience(self) -> bool:
        """Returns whether train.patience evaluations in a row have found nothing better."""
        return self.config.train.patience is not None and self.stale >= self.config.train.patience

    def should_save(self, step: int, requested: bool) -> bool:
        """Returns whether after `step` there is a state to save, or the score of a saved one to note."""
        due = requested or is_due(step, self.config.train.checkpoint_every, self._num_steps)
        return self._unsaved_score is not None or (self._saved < step and due)

    def save(self, step: int, state: TrainState) -> None:
        """Saves the state after `step`; where it is saved already, notes its score."""
        if self._saved < step:
            best = {'merit': self._best, 'stale': self.stale}
            progress = {
                'best': best,
                'interval': self.metrics.snapshot(),
                'evaluated': self.evaluated,
                'history': self._writer.history(),
                'wall_time': self.account.seconds(),
            }
            self.checkpoints.save(state, {**self._metadata, **progress}, self._unsaved_score)
            self._saved = step
        elif self._unsaved_score is not None:
            self.checkpoints.note_score(step, self._unsaved_score)
        self._unsaved_score, self._kept = None, step
        self.account.write(step)

    def should_report(self, step: int) -> bool:
        """Returns whether a report after `step` is due."""
        return step % self.config.train.log_every == 0 or step == self._num_steps

    def report(self, step: int) -> dict[str, float]:
        """Returns the means of the steps since the last report. The run fails if too many in a row were skipped."""
        found, skipped = self.metrics.summary(self._peak)
        spent = {'train/tokens': self.metrics.tokens, 'train/flops': self.metrics.flops}
        self._writer.write(step, {**found, **spent, 'epoch': step / self.data.batches.steps_per_epoch})
        self._kept = None
        self.account.write()
        if skipped >= self.config.train.max_skipped:
            self.error = self._save_skipped_batch(step, skipped)
        return found

    def end(self, step: int, skipped: int) -> None:
        """Ends the run after `step`. It has failed if all its steps are among the last ones, which were `skipped`."""
        self.checkpoints.wait()
        copies.follow(self.directory)
        if 0 < step <= skipped:
            self.error = f'no step changed the parameters: {self._save_skipped_batch(step, skipped)}'

    def _save_skipped_batch(self, step: int, skipped: int) -> str:
        """Writes the batch of the first of the last `skipped` steps to the workdir; returns the error."""
        first = step - skipped + 1
        file = self.directory / 'skipped' / f'{first}.npz'
        if processes.first():
            file.parent.mkdir(exist_ok=True)
            np.savez(file, **self.data.batches.batch(first - 1))  # type: ignore[arg-type]
        return (
            f'steps {first:,} to {step:,} were skipped: their loss or gradient is not finite, or is a spike; the first '
            f"one's batch is {file}, and `tformer replay --workdir={self.directory} --step={first}` runs it again"
        )


def is_due(step: int, every: float | None, num_steps: int) -> bool:
    """Returns whether what happens each `every` steps, or only at the end where it is None, happens after `step`."""
    return step > 0 and (step % (every or num_steps) == 0 or step == num_steps)


class MetricAccumulator:
    """Accumulates metrics over the steps since the last report; they stay on the devices until they are needed."""

    def __init__(self, sums: Mapping[str, Sequence[float]], tokens: float = math.nan, flops: float = math.nan):
        """Continues from a `snapshot`; totals that it does not have are nan."""
        self._sums = {name: (pair[0], pair[1]) for name, pair in sums.items()}
        self.tokens, self.flops = tokens, flops  # of all steps of the run that a `snapshot` has read
        self._learning_rate, self._skipped = 0.0, 0
        self._pending: list[tuple[Mapping[str, Any], int | None]] = []
        self._tokens_since, self._flops_since, self._since = 0, 0.0, time.monotonic()

    def begin(self) -> None:
        """Leaves the time until now out of the tokens per second."""
        self._since = time.monotonic()

    def add(self, metrics: Mapping[str, Any], index: int | None = None) -> None:
        """Counts one more step, of whose metrics only the slice `index` is read, if it is given."""
        self._pending.append((metrics, index))

    @property
    def is_waiting(self) -> bool:
        """Whether there are steps that no `snapshot` has read."""
        return bool(self._pending)

    def is_pending(self) -> bool:
        """Returns whether the devices still compute the last step."""
        return bool(self._pending) and not all(x.is_ready() for x in jax.tree.leaves(self._pending[-1][0]))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the time of its block out of the tokens per second."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._since += time.monotonic() - began

    def snapshot(self) -> dict[str, Any]:
        """Returns the sums as JSON values, so that a resumed run reports the same as an uninterrupted one."""
        for (_, index), metrics in zip(self._pending, jax.device_get([each for each, _ in self._pending]), strict=True):
            step = metrics if index is None else jax.tree.map(lambda x, index=index: x[index], metrics)
            self._learning_rate, self._skipped = float(step['learning_rate']), int(step['skipped'])
            self._tokens_since += int(step['tokens'])
            self.tokens += int(step['tokens'])
            self._flops_since += float(step['flops'])
            self.flops += float(step['flops'])
            found = {'skipped': (float(self._skipped > 0), 0.0)}
            if not self._skipped:
                scores = {name: pair for name, pair in step['scores'].items() if name in REPORTED}
                found |= scores | {'grad_norm': (step['grad_norm'], 1.0)}
            self._sums = means.add(self._sums, found)
        self._pending = []
        return {'sums': self._sums, 'tokens': self.tokens, 'flops': self.flops}

    def summary(self, peak: float | None = None) -> tuple[dict[str, float], int]:
        """Returns (means over the steps, how many steps in a row were skipped last), and starts anew.

        Skipped steps are counted, where there are any, and enter no mean. The learning rate is that of the last step.
        With the `peak` of the run's devices, in operations per second, `train/mfu` is the share of it that the model's
        operations need (model FLOPs utilization; Chowdhery et al. 2022, 4.1).
        """
        self.snapshot()
        skipped, _ = self._sums.pop('skipped')
        found_means = means.means({'loss': (0.0, 0.0), 'grad_norm': (0.0, 0.0)} | self._sums)
        found = {
            **{f'train/{name}': value for name, value in found_means.items()},
            **({'train/skipped': skipped} if skipped else {}),
            'train/learning_rate': self._learning_rate,
            'train/tokens_per_second': self._tokens_since / (seconds := time.monotonic() - self._since),
            **({} if peak is None else {'train/mfu': self._flops_since / (seconds * peak)}),
        }
        self._sums, self._tokens_since, self._flops_since, self._since = {}, 0, 0.0, time.monotonic()
        return found, self._skipped
