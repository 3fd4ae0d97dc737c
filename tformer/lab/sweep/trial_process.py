"""The processes that train the trials of a sweep: how they start, with which cores and devices, and how a trial ended.

A warm process trains job after job; each trial's numbers are those of a process of its own, to the bit.
"""

import contextlib
import dataclasses
import enum
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tformer import atomic
from tformer.config import extensions
from tformer.errors import STOPPED
from tformer.lab.sweep.devices import Share
from tformer.lab.sweep.jobs import TOGETHER, Job
from tformer.lab.sweep.trials import LOG, STATED, Trial, clear_error, error_of, is_done, write_error
from tformer.training import workdir, writers

TRAIN = (sys.executable, '-m', 'tformer', 'train')
LEAVING_SECONDS = 20  # that a process has to end by itself: one that has no more jobs, or others of a trial that failed

# What a process runs before it becomes the training. Linux kills it when its parent ends (1 is PR_SET_PDEATHSIG):
# otherwise an orphaned trial would keep its workdir locked when the sweep is started again.
BOUND = """
import ctypes, os, signal, sys
if sys.platform.startswith('linux'):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
if sys.argv[2] == 'SIGINT':
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[3], sys.argv[3:])
"""
ERROR_LINE = re.compile(r'tformer: .*|[\w.]*(Error|Exception|Interrupt)\b.*')


ASKED = {sign * number + add for number in (signal.SIGTERM, signal.SIGINT) for sign, add in ((-1, 0), (1, 128))}

End = enum.Enum('End', 'DONE PAUSED FAILED STOPPED DIED BUSY')  # how a trial ended; BUSY: another process has it


class Trainer:
    """A warm process that trains jobs, one after another, or waits for one."""

    def __init__(self, share: Share, scheduled: bool = False):
        """A scheduler's SIGTERM reaches every process of its job, so that of a `scheduled` sweep heeds SIGINT alone."""
        self._stop = signal.SIGINT if scheduled else signal.SIGTERM
        streams = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE}
        self._process = _start([*TRAIN, '--jobs'], share, self._stop, **streams)
        os.set_blocking(self._process.stdout.fileno(), False)  # type: ignore[union-attr]
        self.is_ending = False  # whether it takes no more jobs
        self._answered = b''

    def give(self, job: Job, home: pathlib.Path, log: pathlib.Path, transform: str | None) -> None:
        """Tells it what to train."""
        places = [str(home / trial.directory) for trial in job.trials]
        line = {'homes': places, 'log': str(log), 'until': job.until, 'transform': transform}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `answer` tells
            self._process.stdin.write(json.dumps({**line, 'extensions': extension_files(job.trials)}).encode() + b'\n')
            self._process.stdin.flush()

    def answer(self) -> int | None:
        """Returns the exit code of its job, or that of the process if it has ended; None: it trains or waits."""
        assert self._process.stdout is not None
        code = self._process.poll()
        with contextlib.suppress(BlockingIOError):
            self._answered += self._process.stdout.read() or b''
        line, end, rest = self._answered.partition(b'\n')
        if end:
            self._answered, found = rest, json.loads(line)
            self.is_ending = found.get('ends', False)
            return int(found['code'])
        self.is_ending |= code is not None
        return code

    def stop(self) -> None:
        """Has it save and stop; a second time ends it at once."""
        self._process.send_signal(self._stop)

    def end(self, kill: bool = False) -> None:
        """Ends it, and waits until it has; one that trains is killed."""
        if kill:
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        try:
            self._process.wait(LEAVING_SECONDS)
        except subprocess.TimeoutExpired:  # a thread keeps it
            self._process.kill()
            self._process.wait()


class TrialProcesses:
    """Several processes that train one job as one, and end with it."""

    def __init__(self, shares: Sequence[Share]):
        self._shares = shares
        self._processes: list[subprocess.Popen[bytes]] = []
        self._port: socket.socket | None = None
        self._failed: tuple[int, float] | None = None  # the first failure: its exit code and when it was seen
        self.is_ending = False

    def give(self, job: Job, home: pathlib.Path, log: pathlib.Path, transform: str | None) -> None:
        """Starts them."""
        place = home / job.trials[0].directory
        self._port = socket.socket()  # holds the port until the server of process 0, which reuses addresses, has it
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(('127.0.0.1', 0))
        files = extension_files(job.trials)
        command = [*TRAIN, f'--config={place / STATED}', f'--workdir={place}']
        command += [f'--extensions={",".join(files)}'] if files else []
        command += [] if job.until is None else [f'--until={job.until}']
        command += [f'--coordinator=127.0.0.1:{self._port.getsockname()[1]}', f'--num_processes={len(self._shares)}']
        self._failed, self.is_ending = None, True
        with log.open('ab') as file:
            self._processes = [
                _start([*command, f'--process_id={index}'], share, stdin=subprocess.DEVNULL, stdout=file)
                for index, share in enumerate(self._shares)
            ]

    def answer(self) -> int | None:
        """Returns the exit code of the job: the first that is not 0; the others get some seconds to end by themselves.

        None: one of them still runs.
        """
        codes = [process.poll() for process in self._processes]
        bad = [code for code in codes if code]
        if bad and self._failed is None:
            self._failed = bad[0], time.monotonic()
        if None not in codes:
            return self._failed[0] if self._failed else 0
        if self._failed is not None and time.monotonic() - self._failed[1] > LEAVING_SECONDS:
            for process in self._processes:
                process.kill()
        return None

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()

    def end(self, kill: bool = False) -> None:
        for process in self._processes:
            if kill:
                process.kill()
            process.wait()
        if self._port is not None:
            self._port.close()


def _start(
    command: Sequence[str], share: Share, stop: signal.Signals = signal.SIGTERM, **streams: Any
) -> subprocess.Popen[bytes]:
    """Starts a process that ends with this one, with its share of the cores and devices."""
    process = subprocess.Popen(
        [sys.executable, '-c', BOUND, str(os.getpid()), stop.name, *command],
        stderr=subprocess.STDOUT if streams['stdout'] is not subprocess.PIPE else None,
        env={**os.environ, **share.environment},
        process_group=0,  # so that Ctrl-C reaches it through the sweep alone
        **streams,
    )
    if share.cores:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(process.pid, share.cores)
    return process


def extension_files(trials: Sequence[Trial]) -> list[str]:
    """Returns the files of the extensions of trials."""
    return list(dict.fromkeys(file for trial in trials for file in extensions.files(trial.config)))


@dataclasses.dataclass
class Training:
    """A job that a process trains."""

    job: Job
    process: Trainer | TrialProcesses
    began: float  # when, on the monotonic clock
    log: pathlib.Path  # the file of what it prints
    log_start: int  # the length of the log before it, in bytes
    left: list[Trial]  # its trials that were not done

    @classmethod
    def begin(
        cls, job: Job, home: pathlib.Path, process: Trainer | TrialProcesses, transform: str | None
    ) -> 'Training':
        """Has a process train a job; trials that are done are left out. Several have the log of the first."""
        left = [trial for trial in job.trials if not is_done(home / trial.directory)]
        log = home / job.trials[0].directory / LOG
        if len(job.trials) > 1:
            names = json.dumps([trial.directory for trial in job.trials])
            for trial in job.trials:
                atomic.write(home / trial.directory / TOGETHER, names)
        for trial in left:
            clear_error(home / trial.directory)
        with log.open('ab') as file:
            start = file.tell()
        process.give(job, home, log, transform)
        return cls(job, process, time.monotonic(), log, start, left)

    def outcome(self, trial: Trial, home: pathlib.Path, code: int, asked: bool) -> tuple[End, str]:
        """Returns how one of the trials ended and a line about it; writes an error to its workdir, if that is free.

        `code` is the exit code of the job or its process, and `asked` says whether that was asked to stop.
        """
        place = home / trial.directory
        if is_done(place):
            results = writers.results(place).items()
            losses = [f'{split} loss {scores["loss"]:.4g}' for split, scores in results if 'loss' in scores]
            return End.DONE, ', '.join(['done', *losses])
        if code == STOPPED or (asked and code in ASKED):
            return End.STOPPED, 'stopped'
        if code < 0 or code == 128 + signal.SIGABRT:
            return End.DIED, f'its process ended by {signal.Signals(-code if code < 0 else code - 128).name}'
        if any(workdir.is_locked(home / each.directory, workdir.LOCK_SECONDS) for each in self.left):
            return End.BUSY, f'is tried again later: {self._last_error(code)}'
        error = error_of(place)
        if error is None and code == 0 and self.job.until is not None:
            return End.PAUSED, f'is at step {self.job.until:,}'
        if error is None:
            write_error(place, error := self._last_error(code))
        return End.FAILED, f'failed: {error} ({self.log})'

    def fail(self, trial: Trial, home: pathlib.Path, why: str) -> str:
        """Writes to the workdir of a trial why it failed; returns a line about it."""
        if not workdir.is_locked(home / trial.directory, workdir.LOCK_SECONDS):
            write_error(home / trial.directory, why)
        return f'failed: {why} ({self.log})'

    def _last_error(self, code: int) -> str:
        """Returns the last line of the log that looks like an error, or else the last line."""
        with self.log.open('rb') as log:
            log.seek(self.log_start)
            lines = [line for line in log.read().decode(errors='replace').splitlines() if line.strip()]
        lines = [line for line in lines if ERROR_LINE.match(line)] or lines
        return lines[-1].strip() if lines else f'exit code {code}'


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
