"""A directory of runs while they train: which there are, how far each is, and what the results so far would say."""

import dataclasses
import functools
import itertools
import math
import pathlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tformer import config
from tformer.config import Config, json_files
from tformer.errors import UserError, nearest
from tformer.evaluation import metrics
from tformer.lab.live.trial import DONE, ENDED, FAILED, PAUSED, RUNNING, STATES, UNREADABLE, WAITING, Curve, LiveTrial
from tformer.lab.report.report_data import METRICS, TRAIN, VALID
from tformer.lab.statistics import comparison
from tformer.lab.statistics.comparison import Row
from tformer.lab.sweep import jobs, manifest, runner, trials
from tformer.lab.sweep.leases import Leases

PATIENCE = 10  # verdicts are computed anew after this many times the seconds that they took


class Listed(NamedTuple):
    """A trial as a sweep's list has it."""

    arm: str
    seed: int
    searched: bool = False  # an arm may have been chosen by it, so it decides nothing
    expect: Callable[[pathlib.Path, Config | None], None] = lambda place, resolved: None  # as `manifest.expect`


class Watched:
    """A sweep, a directory of workdirs, or one workdir. `refresh` reads what is new of all of them.

    Attributes:
      home: the directory.
      trials: in the order of the sweep, or by name.
      metric: that verdicts are by; None: no result is there yet.
      version: grows with each refresh that finds something; `changed[i]` is that in which trial number i last changed.
    """

    def __init__(self, directory: str | pathlib.Path, metric: str | None = None, baseline: str | None = None):
        """Reads the directory. Raises a `UserError` if there are no runs, or an argument names what does not exist."""
        self.home = pathlib.Path(directory)
        self.trials: list[LiveTrial] = []
        self.changed: list[int] = []
        self.metric = self._asked_metric = metric
        self.version = 0
        self._baseline = baseline
        self._list: object = None
        self._leases: Leases | None = None
        self._verdicts: dict[str, Row] = {}
        self._judged: object = None
        self._judge_at = -math.inf
        self.refresh()
        if baseline is not None and baseline not in self.arms:
            raise UserError(f'--baseline={baseline} is not an arm{nearest(baseline, self.arms)}')

    def refresh(self) -> bool:
        """Reads what is new; returns whether anything is.

        Raises:
          UserError: no run is there, or the metric that was asked for is in no result.
        """
        added = self._find()
        pruned, leased = jobs.pruned(self.home), self._leased()
        news = [
            number
            for number, trial in enumerate(self.trials)
            if trial.refresh(trial.arm in pruned, trial.directory in leased)
        ]
        if news or added or not self.version:
            self.version += 1
            for number in news:
                self.changed[number] = self.version
            self._check_metric()
        return bool(news or added)

    def _check_metric(self) -> None:
        """Raises a `UserError` if runs have scores, and neither these nor curves are of the metric asked for."""
        metric, known = self._asked_metric, sorted({name for trial in self.trials for name in trial.scores})
        if metric is None or not known or metric in known or any(trial.curves.get(metric) for trial in self.trials):
            return
        raise UserError(f'--metric={metric} is in no result{nearest(metric, known)}')

    def _leased(self) -> set[str]:
        """Returns the directories of the trials that the workers of any host train now."""
        if self._leases is None and (self.home / runner.LEASES).is_dir():
            self._leases = Leases(self.home / runner.LEASES)
        if self._leases is None:
            return set()
        self._leases.look()
        return {name for name in self._leases.names() if self._leases.is_held(name)}

    @property
    def arms(self) -> list[str]:
        """The names of the arms, the baseline first."""
        arms = list(dict.fromkeys(trial.arm for trial in self.trials))
        return sorted(arms, key=lambda arm: arm != self._baseline)

    def by_arm(self) -> dict[str, list[LiveTrial]]:
        """Returns the trials of each arm, the baseline's first."""
        found: dict[str, list[LiveTrial]] = {arm: [] for arm in self.arms}
        for trial in self.trials:
            found[trial.arm].append(trial)
        return found

    def seconds_left(self) -> float | None:
        """Returns the time until all are done, if as many as now go on at once; None if no speed is known.

        A trial that waits takes what the median of its arm took, or of all; a paused one of a search may never go on.
        """
        took = {trial: trial.seconds for trial in self.trials if trial.state == DONE and trial.seconds}
        running = [trial for trial in self.trials if trial.state == RUNNING]
        total = 0.0
        for trial in self.trials:
            if trial.state == RUNNING and trial.left is not None:
                total += trial.left
            elif trial.state in (RUNNING, WAITING) or (trial.state == PAUSED and not trial.searched):
                alike = [seconds for other, seconds in took.items() if other.arm == trial.arm] or [*took.values()]
                if not alike:
                    return None
                total += statistics.median(alike)
        return total / max(1, len(running)) if total else None

    # --------------------------------------------------------------------------------------------------- verdicts

    @property
    def judged(self) -> list[LiveTrial]:
        """The trials whose results count: of a search those that were run again, once there are any."""
        return [trial for trial in self.trials if not trial.searched] or self.trials

    @property
    def baseline(self) -> str:
        """The arm that the others are compared with."""
        arms = [trial.arm for trial in self.judged]
        return self._baseline if self._baseline in arms else arms[0]

    @property
    def is_ended(self) -> bool:
        """Whether every trial that is judged has ended and none chose its arm, so that a verdict is one."""
        return all(trial.state in ENDED and not trial.searched for trial in self.judged)

    def verdicts(self) -> Mapping[str, Row]:
        """Returns the rows that a report would have by the results so far, by arm: a peek while not `is_ended`.

        Labels that are looked at while seeds are added are false more often than alpha says.
        """
        known = {name for trial in self.judged for name in trial.scores}
        if self._asked_metric is None:
            self.metric = next((name for name in METRICS if name in known), min(known, default=None))
        if self.metric is None or self.metric not in known:
            return {}
        values: dict[str, dict[int, float | None]] = {trial.arm: {} for trial in self.judged}
        for trial in self.judged:
            if trial.state == FAILED or self.metric in trial.scores:
                values[trial.arm][trial.seed] = trial.scores.get(self.metric)
        judged = repr(values)
        if judged != self._judged and (time.monotonic() >= self._judge_at or self.is_ended):
            began = time.monotonic()
            lower = metrics.lower_is_better(self.metric)
            rows = comparison.summary(values, self.baseline, lower, resamples=0)
            self._verdicts, self._judged = {row.arm: row for row in rows}, judged
            self._judge_at = time.monotonic() + PATIENCE * (time.monotonic() - began)
            self.version += 1
        return self._verdicts

    # --------------------------------------------------------------------------------------------------- what there is

    def _find(self) -> bool:
        """Finds the trials of the directory; returns whether there are others than before."""
        listed = self.home / manifest.LIST
        if listed.is_file():
            found = self._listed(listed)
        elif (self.home / 'config.json').is_file():
            found = {self.home: Listed(self.home.resolve().name, _stated(self.home).train.seed)}
        else:
            found = self._workdirs()
        if found is not None and not found:
            raise UserError(f'{self.home}: no runs are here: neither {manifest.LIST} nor */config.json')
        if found is None or [*found] == [trial.place for trial in self.trials]:
            return False
        before = {trial.place: (trial, version) for trial, version in zip(self.trials, self.changed, strict=True)}
        names = dict.fromkeys([TRAIN, VALID, *([self._asked_metric] if self._asked_metric else [])])
        self.trials, self.changed = [], []
        for place, listed_as in found.items():
            directory = place.relative_to(self.home).as_posix()
            arm, seed, searched, expect = listed_as
            made = LiveTrial(arm, seed, searched, place, directory, names, expect)
            trial, version = before.get(place, (made, self.version + 1))
            self.trials.append(trial)
            self.changed.append(version)
        return True

    def _listed(self, file: pathlib.Path) -> dict[pathlib.Path, Listed] | None:
        """Returns the trials by workdir as a sweep's list says; None if it has not changed."""
        seen = file.stat().st_mtime_ns, file.stat().st_ino
        if seen == self._list:
            return None
        try:
            listed = json_files.read(file)
            fields = manifest.varied(listed)
            found = {
                self.home / entry['directory']: Listed(
                    str(entry['name']),
                    int(entry['seed']),
                    bool(entry.get('searched')),
                    functools.partial(manifest.expect, entry=entry, base=listed.get('base'), fields=fields),
                )
                for entry in listed['trials']
            }
            for place in found:
                place.relative_to(self.home)  # a ValueError if it is elsewhere
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f'{file} is not the list of a sweep: {error}') from error
        self._list = seen
        return found

    def _workdirs(self) -> dict[pathlib.Path, Listed]:
        """Returns the trials by workdir in the directory or one level further down, named as in a report."""
        files = sorted({*self.home.glob('*/config.json'), *self.home.glob('*/*/config.json')})
        files.sort(key=lambda file: not file.relative_to(self.home).as_posix().startswith(trials.BASELINE))
        known = {trial.place: Listed(trial.arm, trial.seed) for trial in self.trials}
        if [*known] == [file.parent for file in files]:
            return known
        stated = {file.parent: _stated(file.parent) for file in files}
        first = next(iter(stated.values()), Config())
        return {place: Listed(trials.arm_name(first, own), own.train.seed) for place, own in stated.items()}


def _stated(place: pathlib.Path) -> Config:
    """Returns the config of a workdir, and the default one if it cannot be read: the trial then says so itself."""
    try:
        return config.from_json(place / 'config.json')
    except UserError:
        return Config()


def mean_curve(trials: Sequence[LiveTrial], name: str, points: int) -> tuple[list[float], list[float]]:
    """Returns (steps, values) of the mean over trials at the steps that any has, neighbours averaged to `points`."""
    together: dict[int, list[float]] = {}
    for trial in trials:
        for step, value in trial.curves.get(name, {}).items():
            if math.isfinite(value):
                together.setdefault(step, []).append(value)
    return thinned({step: statistics.fmean(values) for step, values in together.items()}, points)


def thinned(curve: Curve, points: int) -> tuple[list[float], list[float]]:
    """Returns (steps, values) of a curve's finite values by step, neighbours averaged to at most `points`."""
    steps = sorted(step for step, value in curve.items() if math.isfinite(value))
    parts = min(len(steps), points)
    cuts = [round(i * len(steps) / parts) for i in range(parts + 1)] if parts else []
    groups = [steps[low:high] for low, high in itertools.pairwise(cuts)] if parts else []
    return (
        [statistics.fmean(group) for group in groups],
        [statistics.fmean(curve[step] for step in group) for group in groups],
    )


@dataclasses.dataclass(frozen=True)
class ArmLine:
    """An arm in a table of what is watched."""

    arm: str
    counts: Mapping[str, int]  # its trials by state
    step: float  # the mean of its trials
    num_steps: int | None
    train: float  # the mean of the last train loss of its trials; nan if there is none
    valid: float  # likewise
    row: Row | None  # by the results so far

    @property
    def mean(self) -> float | None:
        """The mean of the metric so far; None: no trial has it."""
        return self.row.runs.mean if self.row is not None and self.row.runs.n else None


def counts(trials: Sequence[LiveTrial]) -> dict[str, int]:
    """Returns how many trials are in each state, without zeros."""
    counted = Counter(trial.state for trial in trials)
    return {state: counted[state] for state in STATES if counted[state]}


def arm_lines(watched: Watched) -> list[ArmLine]:
    """Returns a line for each arm: the baseline, the arms that run, the others, each by the metric so far."""
    rows = watched.verdicts()
    sign = 1 if metrics.lower_is_better(watched.metric or TRAIN) else -1
    lines = []
    for arm, own in watched.by_arm().items():
        num_steps = max((trial.num_steps for trial in own if trial.num_steps), default=None)
        step = statistics.fmean(trial.step for trial in own)
        lines.append(ArmLine(arm, counts(own), step, num_steps, _last(own, TRAIN), _last(own, VALID), rows.get(arm)))

    def place(line: ArmLine) -> tuple[bool, bool, bool, float]:
        unknown, mean = line.mean is None, 0.0 if line.mean is None else sign * line.mean
        return line.arm != watched.baseline, RUNNING not in line.counts, unknown, mean

    return sorted(lines, key=place)


def _last(trials: Sequence[LiveTrial], name: str) -> float:
    last = [curve[max(curve)] for trial in trials if (curve := trial.curves.get(name))]
    finite = [value for value in last if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan


def is_broken(trial: LiveTrial) -> bool:
    """Returns whether a trial needs somebody to look at it."""
    return trial.state in (FAILED, UNREADABLE)
