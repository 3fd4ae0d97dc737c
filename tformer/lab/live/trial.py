"""One trial while it trains: its state, its step, its curves and the time that it still takes."""

import math
import os
import pathlib
from collections.abc import Callable, Collection

from tformer import config
from tformer.config import Config, json_files
from tformer.errors import UserError
from tformer.lab.live.following import Follower
from tformer.lab.report import prose, results
from tformer.lab.sweep import trials
from tformer.training import stopping, wall_time, workdir, writers

RUNNING, WAITING, DONE, FAILED, PAUSED, STOPPED, PRUNED, UNREADABLE = STATES = (
    'running', 'waiting', 'done', 'failed', 'paused', 'stopped', 'pruned', 'unreadable',
)  # fmt: skip
ENDED = (DONE, FAILED, PRUNED)  # those of which a verdict knows how they came out, or that they never will
TAIL = 16384  # bytes of a log that are looked at

Curve = dict[int, float]  # step -> value, rising; nan where it was not finite


class LiveTrial:
    """A trial, read again by `refresh`, which reads only what has changed.

    Attributes:
      arm, seed: whose it is; a `searched` one decides nothing, because its arm may have been chosen by it.
      directory: its workdir, relative to that of the sweep; `place` is the same as a path.
      state: one of `STATES`. A paused trial has begun and nobody trains it; a stopped one was asked to stop.
      error: the line that says why it failed, or what cannot be read.
      step: the last one that it reported.
      num_steps: of the whole run; None if unknown.
      scores: of a finished one, such as 'test/loss'; nan where not finite.
      curves: of the names that are followed.
      left: seconds that a running one still takes, by its speed so far; None if unknown.
      seconds: that a finished one took; None if unknown.
    """

    def __init__(
        self,
        arm: str,
        seed: int,
        searched: bool,
        place: pathlib.Path,
        directory: str,
        names: Collection[str],
        expect: Callable[[pathlib.Path, Config | None], None] = lambda place, resolved: None,
    ):
        """`expect` raises a `UserError` if the workdir, or its resolved config, is of another trial."""
        self.arm, self.seed, self.searched, self.place, self.directory = arm, seed, searched, place, directory
        self.state = WAITING
        self.error: str | None = None
        self.step = 0
        self.num_steps: int | None = None
        self.scores: dict[str, float] = {}
        self.curves: dict[str, Curve] = {name: {} for name in names}
        self.left: float | None = None
        self.seconds: float | None = None
        self._follower = Follower(place / 'metrics.jsonl')
        self._result: object = None  # what identifies the result.json that was read
        self._config: object = None  # what identifies the configs that were read
        self._config_error: str | None = None
        self._expect = expect

    def refresh(self, pruned: bool = False, leased: bool = False) -> bool:
        """Reads what is new; returns whether anything is. `pruned`: its arm is; `leased`: a worker trains it."""
        before = self.state, self.error, self.step, self.num_steps
        self._read_config()
        anew, rows = self._follower.read()
        if anew:
            self.step, self.curves = 0, {name: {} for name in self.curves}
        for row in rows:
            self.step = row['step']
            for name, curve in self.curves.items():
                if name in row:
                    curve[row['step']] = math.nan if row[name] is None else float(row[name])
        try:
            self.state, self.error = self._state(pruned, leased)
        except (UserError, OSError) as error:
            self.state, self.error = UNREADABLE, str(error)
        if (damage := self._config_error or self._follower.error) is not None:
            self.state, self.error = UNREADABLE, damage
        if self._config_error is not None:  # whose numbers these are is not known
            self.scores, self._result, self.curves = {}, None, {name: {} for name in self.curves}
        if self.state != RUNNING:
            self.left = None
        elif rows or self.left is None:
            self.left = self._seconds_left()
        return bool(rows) or anew or before != (self.state, self.error, self.step, self.num_steps)

    def _state(self, pruned: bool, leased: bool) -> tuple[str, str | None]:
        if (result := _identity(self.place / trials.RESULT)) is not None:
            if result != self._result:
                self.scores = scored(self.place)
                self.seconds = writers.seconds(self.place).get('total')
                self._result = result
            return DONE, None
        self.scores, self._result = {}, None
        if leased or workdir.is_locked(self.place):
            return RUNNING, None
        if (error := trials.error_of(self.place)) is not None:
            return FAILED, error
        if stopping.is_stopped(self.place):
            return STOPPED, None
        if self.step or self._has_begun():
            return PAUSED, None
        return (PRUNED if pruned else WAITING), None

    def _read_config(self) -> None:
        """Reads the length of the run from its resolved config, and whether its configs are of this trial."""
        file = self.place / 'config.json'
        if (found := (_identity(file), _identity(self.place / trials.STATED))) == self._config:
            return
        if self._config_error is not None:  # what it has logged counts again, if it is mended
            self._follower, self.step = Follower(self.place / 'metrics.jsonl'), 0
        self._config, self._config_error, self.num_steps = found, None, None
        try:
            resolved = config.from_json(file) if self._has_begun() else None
            self.num_steps = resolved.train.num_steps if resolved else None
            self._expect(self.place, resolved)
        except (UserError, OSError) as error:
            self._config_error = str(error)

    def _has_begun(self) -> bool:
        return (self.place / 'config.json').exists()

    def _seconds_left(self) -> float | None:
        """Returns the time of the steps left, by what those so far took without compiling and restarts."""
        try:
            spent = json_files.read_if_there(self.place / wall_time.FILE)
            steady = float(spent['total']) - float(spent['compiling']) - float(spent['lost_to_restarts'])
            return steady / self.step * (self.num_steps - self.step) if self.step and self.num_steps else None
        except (UserError, LookupError, TypeError, ValueError):
            return None

    def tail(self, most: int) -> list[str]:
        """Returns the last lines of its log, at most so many, without what a terminal would obey."""
        try:
            with (self.place / trials.LOG).open('rb') as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
                lines = [prose.plain(line) for line in file.read().decode(errors='replace').splitlines()]
                return [line for line in lines if line][-most:]
        except OSError:
            return []


def _identity(file: pathlib.Path) -> tuple[int, int, int] | None:
    """Returns what tells whether a file has changed; None: it is not there."""
    try:
        found = os.stat(file)
        return found.st_ino, found.st_size, found.st_mtime_ns
    except OSError:
        return None


def scored(place: pathlib.Path) -> dict[str, float]:
    """Returns the scores of a finished run, by split and name. Raises a `UserError` if result.json is damaged."""
    return {
        f'{split}/{name}': math.nan if value is None else float(value)
        for split, scores in writers.results(place).items()
        for name, value in scores.items()
        if name not in results.FACTS
    }
