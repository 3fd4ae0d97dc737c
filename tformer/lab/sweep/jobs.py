"""What is trained next: jobs, the state of a sweep's directory that they are chosen by, and the choice of a list.

A choice is a function of what is on the disk. Every host makes it for itself, and again after a kill.
"""

import json
import pathlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from tformer.lab.sweep.batched_trials import groups
from tformer.lab.sweep.leases import Leases
from tformer.lab.sweep.trials import Trial, error_of, is_done
from tformer.training import stopping

PRUNED = 'pruned.jsonl'  # in the sweep's directory: a line an arm that is not to begin, {"arm": NAME}
TOGETHER = 'together.json'  # in the workdir of a trial: the directories of those that it trains with in one program

DONE, FAILED, PRUNED_ARM, LEASED, STOPPED, FREE = 'done', 'failed', 'pruned', 'leased', 'stopped', 'free'


class Job(NamedTuple):
    """Trials to train in one process."""

    trials: tuple[Trial, ...]  # usually one; several are slices of one program
    until: int | None = None  # the step to train to; None: to their end


class Wait(NamedTuple):
    """Nothing can begin now; something may, once others are done or gone."""

    why: str
    may_come: bool = False  # whether there may be more to train then than what they leave


class State:
    """The state of the trials in a sweep's directory, as of the latest `look`; nothing is written."""

    def __init__(self, home: pathlib.Path, leases: Leases):
        self.home, self.leases = home, leases
        self.stopped: set[str] = set()  # directories of trials that stopped by themselves here
        self.failed: dict[str, int] = {}  # the exit codes of trials that failed here, by their directories
        self.busy: dict[str, float] = {}  # when to try trials again whose workdirs other processes have
        self._done: set[str] = set()
        self._pruned: Collection[str] = ()

    def look(self) -> None:
        """Reads which trials are leased, and which arms are pruned."""
        self.leases.look()
        self._pruned = pruned(self.home)

    def of(self, trial: Trial) -> str:
        """Returns whether a trial is `done`, `leased`, `failed`, `stopped`, also if asked to, `pruned` or `free`."""
        place = self.home / trial.directory
        if trial.directory in self._done or is_done(place):
            self._done.add(trial.directory)
            return DONE
        if self.leases.is_held(trial.directory) or time.monotonic() < self.busy.get(trial.directory, 0.0):
            return LEASED
        if trial.directory in self.failed or error_of(place) is not None:
            return FAILED
        if trial.directory in self.stopped or stopping.is_stopped(place):
            return STOPPED
        if trial.name in self._pruned and not (place / 'config.json').exists():
            return PRUNED_ARM
        return FREE

    def has_killed(self, trial: Trial) -> bool:
        """Returns whether a process has died of training a trial."""
        return self.leases.read(trial.directory).deaths > 0


NextJob = Callable[[State], Job | Wait | None]  # None: nothing is left to do


def first_free(state: State, trials: Sequence[Trial], together: int = 1) -> Job | Wait | None:
    """Returns the job of the first trial that is neither done, failed, pruned nor leased, with those that join it.

    Up to `together` trials train in one program (`programs`).
    """
    free = [trial for trial in trials if state.of(trial) == FREE] if together > 1 else _first(state, trials)
    if not free:
        leased = sum(state.of(trial) == LEASED for trial in trials)
        return Wait(f'{leased} trials are trained by others') if leased else None
    if together == 1:
        return Job((free[0],))
    return Job(programs(state.home, free, trials, together, state.has_killed)[0])


def programs(
    home: pathlib.Path | None,
    left: Sequence[Trial],
    trials: Sequence[Trial],
    together: int,
    has_killed: Callable[[Trial], bool] = lambda trial: False,
) -> list[tuple[Trial, ...]]:
    """Returns the trials that are left in groups of up to `together`, each of which one program trains.

    Those of `trials` that have begun together go on together, because with vmap the slices of a program depend on their
    number by roundings. A trial that a process has died of trains alone.
    """
    if together == 1:
        return [(trial,) for trial in left]
    found: list[tuple[Trial, ...]] = []
    anew = []
    for trial in left:
        if has_killed(trial):
            found.append((trial,))
        elif begun := () if home is None else _begun_with(home, trial, trials, together):
            found += [] if begun in found else [begun]
        else:
            anew.append(trial)
    place = {trial.directory: number for number, trial in enumerate(left)}
    made = [*found, *map(tuple, groups(anew, together))]
    return sorted(made, key=lambda group: min(place[each.directory] for each in group if each.directory in place))


def _first(state: State, trials: Sequence[Trial]) -> list[Trial]:
    """Returns the first trial that is free, in a list; of a thousand others nothing is read."""
    return next(([trial] for trial in trials if state.of(trial) == FREE), [])


def _begun_with(home: pathlib.Path, trial: Trial, trials: Sequence[Trial], together: int) -> tuple[Trial, ...]:
    """Returns the trials that one has begun to train with; () if it has not, or they are no longer to be together."""
    file = home / trial.directory / TOGETHER
    if not file.is_file() or not (home / trial.directory / 'config.json').is_file():
        return ()
    known = {each.directory: each for each in trials}
    try:
        names = json.loads(file.read_text())
        found = tuple(known[name] for name in names)
    except (ValueError, KeyError, TypeError):
        return ()
    return found if trial in found and 1 < len(found) <= together else ()


def pruned(home: pathlib.Path) -> set[str]:
    """Returns the names of the arms that are not to begin; lines that are cut, or something else, say nothing."""
    try:
        lines = (home / PRUNED).read_text(errors='replace').splitlines()
    except OSError:
        return set()
    found = set()
    for line in lines:
        try:
            found.add(str(json.loads(line)['arm']))
        except (ValueError, KeyError, TypeError):
            continue
    return found
