"""The processes that train the trials of a sweep: how one starts, on which cores, and how its trials ended."""

import contextlib
import dataclasses
import enum
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from tformer.config import extensions
from tformer.errors import STOPPED
from tformer.lab.sweep.trials import LOG, STATED, Trial, clear_error, error_of, is_done, write_error
from tformer.training import workdir, writers

TRAIN = (sys.executable, '-m', 'tformer', 'train')

# What a process runs before it becomes the training. Linux kills it when its parent ends (1 is PR_SET_PDEATHSIG):
# otherwise an orphaned trial would keep its workdir locked when the sweep is started again.
BOUND = """
import ctypes, os, signal, sys
if sys.platform.startswith('linux'):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
ERROR_LINE = re.compile(r'tformer: .*|[\w.]*(Error|Exception|Interrupt)\b.*')


End = enum.Enum('End', 'DONE FAILED STOPPED')  # how a trial ended


@dataclasses.dataclass
class TrialProcess:
    """A process that trains one trial, or several together."""

    trials: list[Trial]  # those that were not done when it began
    process: subprocess.Popen[bytes]
    began: float  # when, on the monotonic clock
    log: pathlib.Path  # the file of what it prints
    log_start: int  # the length of the log before it, in bytes

    def outcome(self, trial: Trial, home: pathlib.Path, code: int, asked: bool) -> tuple[End, str]:
        """Returns how one of the trials ended and a line about it; writes an error to its workdir, if that is free.

        `code` is the exit code of the process, and `asked` says whether it was asked to stop.
        """
        place = home / trial.directory
        if is_done(place):
            results = writers.results(place).items()
            losses = [f'{split} loss {scores["loss"]:.4g}' for split, scores in results if 'loss' in scores]
            return End.DONE, ', '.join(['done', *losses])
        if code == STOPPED or (asked and code in (-signal.SIGTERM, 128 + signal.SIGTERM)):
            return End.STOPPED, 'stopped'
        free = not workdir.is_locked(place, workdir.LOCK_SECONDS)
        error = error_of(place) if free else None
        if error is None:
            error = f'ended by {signal.Signals(-code).name}' if code < 0 else self._last_error(code)
            if free:
                write_error(place, error)
        return End.FAILED, f'failed: {error} ({self.log})'

    def _last_error(self, code: int) -> str:
        """Returns the last line of the log that looks like an error, or else the last line."""
        with self.log.open('rb') as log:
            log.seek(self.log_start)
            lines = [line for line in log.read().decode(errors='replace').splitlines() if line.strip()]
        lines = [line for line in lines if ERROR_LINE.match(line)] or lines
        return lines[-1].strip() if lines else f'exit code {code}'


def start(
    group: Sequence[Trial], home: pathlib.Path, number: int, transform: str | None, cores: set[int]
) -> TrialProcess:
    """Starts the process that trains a group; trials that are done are left out, and those that failed run again.

    The number of the group names the log of several trials. An empty set of cores is all of them.
    """
    left = [trial for trial in group if not is_done(home / trial.directory)]
    for trial in left:
        clear_error(home / trial.directory)
    file = home / group[0].directory / LOG if len(group) == 1 else home / f'together_{number}.txt'
    with file.open('ab') as log:
        process = subprocess.Popen(
            [sys.executable, '-c', BOUND, str(os.getpid()), *TRAIN, *train_arguments(group, home, transform)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,  # so that Ctrl-C reaches it through the sweep alone
        )
        if cores:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(process.pid, cores)
        return TrialProcess(left, process, time.monotonic(), file, log.tell())


def train_arguments(group: Sequence[Trial], home: pathlib.Path, transform: str | None) -> list[str]:
    """Returns what `tformer train` takes to train a group."""
    places = [home / trial.directory for trial in group]
    files = list(dict.fromkeys(file for trial in group for file in extensions.files(trial.config)))
    more = [f'--extensions={",".join(files)}'] if files else []
    if len(group) == 1:
        return [f'--config={places[0] / STATED}', f'--workdir={places[0]}', *more]
    return [*map(str, places), *([f'--transform={transform}'] if transform else []), *more]


def share_of_cores(slot: int, parallel: int) -> set[int]:
    """Returns the cores of one of `parallel` processes; the empty set, which is all, if there are too few for each."""
    if parallel == 1 or not hasattr(os, 'sched_getaffinity'):
        return set()
    return set(sorted(os.sched_getaffinity(0))[slot::parallel]) if len(os.sched_getaffinity(0)) >= parallel else set()


@contextlib.contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Gives a list that grows by the number of each signal that asks the sweep to stop."""
    received: list[int] = []
    numbers = [each for each in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, lambda number, _: received.append(number)) for each in numbers}
    try:
        yield received
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
