"""Stopping early: on a signal, a time limit or a request the training saves a checkpoint and exits with its own code.

A request is a file in the workdir, so that it also reaches runs of other hosts: `tformer watch --stop` writes it.
"""

import contextlib
import math
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.experimental import multihost_utils

from tformer.data import store_copies
from tformer.distributed import processes
from tformer.errors import STOPPED, Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT)
REQUEST, OBEYED = 'stop', 'stopped'  # files of a workdir: that its run should stop, and that it has been told
LOOK_SECONDS = 1.0  # between looks for a request


def request(workdir: pathlib.Path) -> None:
    """Asks the run of a workdir, on whatever host, to save and stop at its next step."""
    (workdir / REQUEST).touch()


def is_stopped(workdir: pathlib.Path) -> bool:
    """Returns whether the run of a workdir was asked to stop and not to go on since: a sweep leaves it out."""
    return (workdir / REQUEST).exists() or (workdir / OBEYED).exists()


def release(workdir: pathlib.Path) -> None:
    """Lets a run that was asked to stop go on when somebody trains it again."""
    for name in (REQUEST, OBEYED):
        (workdir / name).unlink(missing_ok=True)


class StopMonitor:
    """A context in which SIGTERM, SIGINT, a time limit and a file in one of `workdirs` request a stop.

    After the first signal `reason` returns it; the training asks after every step. Before the first step there is
    nothing to save, and the signal ends the process with the code `STOPPED` (`processes.leave`). A second signal ends
    the process at once, with 128 plus its number. Signals that were ignored before stay ignored. The processes of one
    run stop after the same step: jax forwards a SIGTERM that any of them receives. Without `training` a signal ends
    this process at once, even if it is one of several. max_minutes=None: no limit.
    """

    def __init__(self, max_minutes: float | None, *, training: bool = True, workdirs: Sequence[pathlib.Path] = ()):
        self.has_step = False  # whether there is a step to save; the training sets it
        self._shared = training and jax.process_count() > 1
        self._deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._limit = f'train.max_minutes={max_minutes}'
        self._workdirs, self._looked = workdirs, -math.inf
        self._signal: str | None = None  # its name
        self._own: str | None = None  # the limit or the request
        self._raises = False
        self._pipe_end: int | None = None  # open while signals come to this monitor

    def __enter__(self) -> 'StopMonitor':
        self._before: dict[Any, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread receives signals: the caller has to handle them
        ours = (signal.SIGINT,) if self._shared else SIGNALS
        for each in ours:
            if signal.getsignal(each) is not signal.SIG_IGN:
                self._before[each] = signal.signal(each, self._on_signal)
        pipe, self._pipe_end = os.pipe()
        os.set_blocking(self._pipe_end, False)
        self._wakeup_before = signal.set_wakeup_fd(self._pipe_end, warn_on_full_buffer=False)
        if not self._shared:  # each process handles its own signals, and one that another received before this point
            processes.meet('handling signals')
            if processes.any_of(self._signal is not None) and self._signal is None:
                os.kill(os.getpid(), signal.SIGTERM)
        threading.Thread(target=self._watch, args=(pipe,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._pipe_end is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            for each, handler in self._before.items():
                signal.signal(each, handler)
            os.close(self._pipe_end)

    def reason(self, step: int) -> str | None:
        """Returns why the run must stop after `step`; None: it continues."""
        if self._signal is None and self._own is None:
            self._own = self._own_reason()
            if self._own is not None and self._shared:
                os.kill(os.getpid(), signal.SIGTERM)  # forwarded to all processes
        return self.signalled(step) or (None if self._shared else self._own)

    def signalled(self, step: int) -> str | None:
        """Returns the signal, of whatever process, because of which the run must stop after `step`."""
        if not self._shared:
            return self._signal
        return (self._signal or self._own or 'SIGTERM') if multihost_utils.reached_preemption_sync_point(step) else None

    def _own_reason(self) -> str | None:
        """Returns why this process itself asks for a stop: the time limit, or a request, which is then obeyed."""
        now = time.monotonic()
        if self._deadline is not None and now > self._deadline:
            return self._limit
        if not self._workdirs or now < self._looked + LOOK_SECONDS:
            return None
        self._looked, asked = now, []
        for workdir in self._workdirs:
            with contextlib.suppress(OSError):  # the file system fails for a moment, or the request was withdrawn
                if (workdir / REQUEST).exists():
                    asked.append(workdir / REQUEST)
                    os.replace(workdir / REQUEST, workdir / OBEYED)
        return f'requested by {asked[0]}' if asked else None

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """A stop requested inside the block raises `Stopped` wherever it is: for work that can be repeated."""
        if self._shared:  # all processes leave the block together, at its end
            yield
            return
        self._raises = True
        try:
            if reason := self._signal or self._own:
                raise Stopped(reason)
            yield
        finally:
            self._raises = False

    def _on_signal(self, number: int, _: object) -> None:
        self._signal = signal.Signals(number).name
        if self._shared:
            os.kill(os.getpid(), signal.SIGTERM)
        if self._raises:
            raise Stopped(self._signal)

    def _watch(self, pipe: int) -> None:
        """Answers signals at once, even while the main thread compiles for minutes."""
        received = 0
        with os.fdopen(pipe, 'rb', buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] not in self._before:
                    continue
                received += 1
                name = signal.Signals(number[0]).name
                if received > 1:
                    os._exit(128 + number[0])
                if not self.has_step:
                    print(f'tformer: received {name}: exiting; there is nothing to save', file=sys.stderr, flush=True)
                    store_copies.leave()
                    processes.leave(STOPPED)
                    os._exit(STOPPED)
                line = 'saving a checkpoint, then exiting; send it again to exit immediately'
                print(f'tformer: received {name}: {line}', file=sys.stderr, flush=True)
