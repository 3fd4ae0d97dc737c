"""Searches whose runs are curves on paper: workers take jobs, leave what a training leaves, and may die on the way."""

import json
import math
import pathlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from small_sweeps import TINY
from tformer import config
from tformer.config import Config
from tformer.lab.sweep import jobs, log_uniform
from tformer.lab.sweep.jobs import Job, Wait
from tformer.lab.sweep.overrides import Overrides
from tformer.lab.sweep.search_jobs import SearchJobs
from tformer.lab.sweep.searches import Search
from tformer.lab.sweep.trials import Trial, is_done
from tformer.training import stopping

BASE = config.override(TINY, {'train.num_steps': 270, 'train.eval_every': 10})
SPACE = {'optimizer.learning_rate': log_uniform(1e-4, 1.0), 'optimizer.weight_decay': log_uniform(1e-4, 1.0)}


def curve(trial: Trial, step: int) -> float:
    """A loss that falls to a bowl around rate 0.03 (weight decay matters a tenth as much); from 0.5 on it diverges."""
    rate, decay = trial.config.optimizer.learning_rate, max(1e-4, trial.config.optimizer.weight_decay)
    if rate > 0.5:
        return math.nan
    bowl = math.log10(rate / 0.03) ** 2 + 0.1 * math.log10(decay / 0.01) ** 2
    noise = 0.02 * random.Random(f'{trial.directory}').gauss(0, 1)
    return 1 + bowl + noise + 3 * math.exp(-step / 60)


class Jobs(SearchJobs):
    """Makes the trials of a draw once for all searches, because that takes long."""

    made_before: ClassVar[dict[str, list[Trial]]] = {}

    def _trials(self, overrides: Overrides, seeds: Sequence[int]) -> list[Trial]:
        key = json.dumps([overrides, list(seeds), config.to_dict(self.base)], default=str)
        if key not in self.made_before:
            self.made_before[key] = super()._trials(overrides, seeds)
        return list(self.made_before[key])


class Worker:
    """Takes jobs of a search in turn, as the trainers of one or several hosts do."""

    def __init__(self, home: pathlib.Path, search: Search, base: Config = BASE, curve: Callable = curve):
        self.jobs, self.home, self.base, self.curve = Jobs(search, base), home, base, curve
        self.leased: set[str] = set()
        home.mkdir(exist_ok=True)
        self.asked: list[tuple[str, int | None]] = []
        self.steps = 0  # that were trained, also in vain

    def again(self) -> 'Worker':
        """Returns what begins where this one has died: it knows the directory alone, and whom others train."""
        other = Worker(self.home, self.jobs.search, self.base, self.curve)
        other.leased = self.leased
        return other

    def of(self, trial: Trial) -> str:
        if is_done(self.home / trial.directory):
            return jobs.DONE
        if trial.directory in self.leased:
            return jobs.LEASED
        return jobs.STOPPED if stopping.is_stopped(self.home / trial.directory) else jobs.FREE

    def next(self) -> Job | Wait | None:
        found = self.jobs(self)
        if isinstance(found, Job):
            (trial,) = found.trials
            assert trial.directory not in self.leased and not is_done(self.home / trial.directory)
            assert found.until is None or self.at(trial) < found.until
            self.leased.add(trial.directory)
            self.asked.append((trial.directory, found.until))
        return found

    def at(self, trial: Trial) -> int:
        return max((int(each.name) for each in (self.home / trial.directory / 'checkpoints').glob('*')), default=0)

    def train(self, job: Job, dies_at: int | None = None) -> None:
        """Trains a job; `dies_at` is the step at which its process is killed."""
        (trial,), start = job.trials, self.at(job.trials[0])
        place, end = self.home / trial.directory, job.until or self.base.train.num_steps
        rows = {row['step']: row for row in read_rows(place) if row['step'] <= start}
        stop = end if dies_at is None else min(dies_at, end)
        for step in range(start + 1, stop + 1):
            if step % self.base.train.eval_every == 0:
                value = self.curve(trial, step)
                rows[step] = {'step': step, 'valid/loss': value if math.isfinite(value) else None}
                write(place, rows)
                if stop == end or step < stop:
                    (place / 'checkpoints' / str(step)).mkdir(parents=True, exist_ok=True)
        self.steps += stop - start
        if stop == end == self.base.train.num_steps:
            (place / 'result.json').write_text(json.dumps({'test': {'loss': self.curve(trial, end)}}))
        self.leased.discard(trial.directory)

    def run(self) -> None:
        """Trains, one job after the other, to the end of the search."""
        while (job := self.next()) is not None:
            assert isinstance(job, Job), job
            self.train(job)

    def draws(self) -> list[Mapping[str, Any]]:
        file = self.home / 'search.json'
        return [each['overrides'] for each in json.loads(file.read_text())['draws']] if file.exists() else []


def read_rows(place: pathlib.Path) -> list[dict[str, Any]]:
    file = place / 'metrics.jsonl'
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def write(place: pathlib.Path, rows: Mapping[int, Any]) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows.values()))
