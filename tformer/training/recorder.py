"""What a run writes as it goes, metrics, evaluations and checkpoints, and how far each of them is."""

import contextlib
import dataclasses
import math
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tformer.config import Config
from tformer.data.batches import pipeline
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.distributed import processes
from tformer.evaluation import means, scorer
from tformer.training import checkpoint, setup, writers
from tformer.training.state import TrainState, evaluation_variables


@dataclasses.dataclass(frozen=True)
class BestScore:
    """The highest score that an evaluation found, and how many evaluations since have found less."""

    score: float | None = None
    stale: int = 0

    def update(self, score: float) -> 'BestScore':
        """Returns the best after one more evaluation."""
        return BestScore(score) if self.score is None or score > self.score else BestScore(self.score, self.stale + 1)


class RunRecorder:
    """The record of a run.

    Attributes:
      best: what its evaluations found.
      evaluated: the step of the last one; 0 before the first.
      log: the steps since the last report.
      checkpoints: those of its workdir.
    """

    def __init__(
        self,
        data: setup.RunData,
        home: pathlib.Path,
        score: scorer.Scorer,
        generated: scorer.GenerationScores | None,
        last: int | None,
        keep_last: int | None = None,
    ):
        """Goes on from the checkpoint at step `last`, or begins where it is None; keep_last, if not the config's."""
        config, tokens, self._batches, self._valid = data
        self._config, self._tokens, self._home = config, tokens, home
        self._score, self._generated = score, generated
        self._metadata = setup.checkpoint_metadata(config, data.batches, tokens)
        self._length = config.train.num_steps or 0
        self._saved = last or 0
        self._unsaved_score: float | None = None
        self.best, self.metrics, self.evaluated = BestScore(), MetricAccumulator({}, 0, 0.0), 0
        if last is not None:
            before = checkpoint.read_metadata(home, last)
            self.best = BestScore(before['best']['merit'], before['best']['stale'])
            self.metrics = MetricAccumulator(**before['interval'])
            self.evaluated = before['evaluated']
        keep_last = keep_last or config.train.keep_last
        self.checkpoints = checkpoint.Checkpoints(home, keep_last, config.train.keep_every)
        self._writer = writers.MetricWriter(home if processes.first() else None, self._saved, self.evaluated)

    def close(self) -> None:
        """Ends what is under way."""
        try:
            self.checkpoints.finish()
        finally:
            self._writer.close()

    def should_evaluate(self, number: int) -> bool:
        """Returns whether an evaluation after step `number` is due and not made."""
        return self.evaluated < number and is_due(number, self._config.train.eval_every, self._length)

    def evaluate(self, number: int, state: TrainState) -> dict[str, float]:
        """Returns the scores of the validation split after step `number`."""
        found = evaluate_split(self._config, state, self._valid, self._tokens, self._score, self._generated)
        self._writer.write(number, found)
        score = checkpoint.score(self._config.train.best_metric, found[self._config.train.best_metric])
        self.best, self.evaluated, self._unsaved_score = self.best.update(score), number, score
        return found

    def should_save(self, number: int, asked: bool) -> bool:
        """Returns whether after step `number` there is a state to save, or the score of a saved one to note."""
        every = self._config.train.checkpoint_every
        unsaved = self._saved < number and (asked or is_due(number, every, self._length))
        return unsaved or self._unsaved_score is not None

    def save(self, number: int, state: TrainState) -> None:
        """Saves the state after step `number`, or what was found of it since."""
        if self._saved < number:
            so_far = {
                'best': {'merit': self.best.score, 'stale': self.best.stale},
                'interval': self.metrics.snapshot(),
                'evaluated': self.evaluated,
            }
            self.checkpoints.save(state, {**self._metadata, **so_far}, self._unsaved_score)
            self._saved = number
        elif self._unsaved_score is not None:
            self.checkpoints.note_score(number, self._unsaved_score)
        self._unsaved_score = None

    def should_report(self, number: int) -> bool:
        """Returns whether a report after step `number` is due."""
        return number % self._config.train.log_every == 0 or number == self._length

    def report(self, number: int) -> tuple[dict[str, float], str | None]:
        """Returns (the means of the steps since the last report; what is to be told if too many were skipped)."""
        shown, skipped = self.metrics.summary()
        epoch = number / self._batches.steps_per_epoch
        self._writer.write(number, {**shown, **self.metrics.totals, 'epoch': epoch})
        too_many = skipped >= self._config.train.max_skipped
        return shown, save_skipped_batch(self._home, self._batches, number, skipped) if too_many else None


def is_due(number: int, every: int | None, length: int) -> bool:
    """Returns whether what happens `every` so many steps, or else at the end alone, happens after step `number`."""
    return number > 0 and (number % (every or length) == 0 or number == length)


def evaluate_split(
    config: Config,
    state: TrainState,
    valid: pipeline.Batches,
    tokens: Tokenizers,
    score: scorer.Scorer,
    generated: scorer.GenerationScores | None,
) -> dict[str, float]:
    """Returns the scores of the validation split by name, `valid/...`."""
    evaluated = evaluation_variables(state)
    found = score(evaluated, valid, config.train.eval_batches, tokens)
    if config.evaluate.examples_while_training and generated is not None:
        most = min(config.evaluate.examples_while_training, len(valid.records))
        found |= generated(config, evaluated, tokens, [valid.records[i] for i in range(most)])
    return {f'valid/{name}': value for name, value in found.items()}


def save_skipped_batch(home: pathlib.Path, batches: pipeline.Batches, number: int, skipped: int) -> str:
    """Writes the batch of the first of the last `skipped` steps to the workdir; returns what to tell of them."""
    first = number - skipped + 1
    file = home / 'skipped' / f'{first}.npz'
    if processes.first():
        file.parent.mkdir(exist_ok=True)
        np.savez(file, **batches.batch(first - 1))  # type: ignore[arg-type]
    return (
        f'steps {first:,} to {number:,} were not made: their loss or gradient is no number, or a spike; '
        f"the first one's batch is {file}, and `tformer replay --workdir={home} --step={first}` runs it again"
    )


class MetricAccumulator:
    """The steps since the last report: their metrics, left on the devices until asked for, and their time; and what
    all steps of the run have read and computed."""

    def __init__(self, sums: Mapping[str, Sequence[float]], tokens: float = math.nan, flops: float = math.nan):
        """Goes on from what `snapshot` gave; of what all steps spent, nan is not known."""
        self._sums = {name: (pair[0], pair[1]) for name, pair in sums.items()}
        self._tokens, self._flops = tokens, flops
        self._rate, self._skipped = 0.0, 0
        self._pending: list[dict[str, Any]] = []
        self._read, self._since = 0, time.monotonic()

    @property
    def totals(self) -> dict[str, float]:
        """The tokens and operations of all steps that `snapshot` has seen."""
        return {'train/tokens': self._tokens, 'train/flops': self._flops}

    def add(self, numbers: dict[str, Any]) -> None:
        """Counts one more step."""
        self._pending.append(numbers)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the time of its block out of the tokens a second."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._since += time.monotonic() - began

    def snapshot(self) -> dict[str, Any]:
        """Returns the sums of the steps, as JSON has them, so that a resumed run reports what an unbroken one does."""
        for step in jax.device_get(self._pending):
            self._rate, self._skipped = float(step['learning_rate']), int(step['skipped'])
            self._read += int(step['tokens'])
            self._tokens += int(step['tokens'])
            self._flops += float(step['flops'])
            found = {'skipped': (float(self._skipped > 0), 0.0)}
            if not self._skipped:
                scores = {name: pair for name, pair in step['scores'].items() if name in ('loss', 'aux_loss')}
                found |= scores | {'grad_norm': (step['grad_norm'], 1.0)}
            self._sums = means.add(self._sums, found)
        self._pending = []
        return {'sums': self._sums, 'tokens': self._tokens, 'flops': self._flops}

    def summary(self) -> tuple[dict[str, float], int]:
        """Returns (the means over the steps, the last one's learning rate among them; how many in a row were skipped).

        Steps that were skipped are counted where there are any, and are in no mean. Begins anew.
        """
        self.snapshot()
        skipped, _ = self._sums.pop('skipped')
        found_means = means.means({'loss': (0.0, 0.0), 'grad_norm': (0.0, 0.0)} | self._sums)
        found = {
            **{f'train/{name}': value for name, value in found_means.items()},
            **({'train/skipped': skipped} if skipped else {}),
            'train/learning_rate': self._rate,
            'train/tokens_per_second': self._read / (time.monotonic() - self._since),
        }
        self._sums, self._read, self._since = {}, 0, time.monotonic()
        return found, self._skipped
