"""Stopping before the end: a signal or a time limit asks for it, the training saves and ends with an exit code."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils

from tformer.distributed import processes
from tformer.errors import STOPPED, Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopMonitor:
    """A context in which SIGTERM, SIGINT and a time limit ask for a stop.

    The first signal is answered by `reason`, which the training asks after every step; before there is a step to save
    it ends the process with `STOPPED` (`processes.leave`). A second one ends it in any case, with 128 plus its number.
    Signals that were ignored before stay so. Several processes of one run stop after the same step: jax hands the
    notice, a SIGTERM to any of them, around.

    Args:
      max_minutes: the time limit; None: no limit.
      training: whether steps are made; without any a signal ends this process, of several, too, at once.

    Attributes:
      has_step: whether there is a step that a checkpoint could hold; the training sets it.
    """

    def __init__(self, max_minutes: float | None, *, training: bool = True):
        self.has_step = False
        self._agreed = training and jax.process_count() > 1
        self._deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._limit = f'train.max_minutes={max_minutes}'
        self._why: str | None = None
        self._at_once = False

    def __enter__(self) -> 'StopMonitor':
        self._before: dict[Any, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main one gets signals: whoever called from another minds them
        ours = (signal.SIGINT,) if self._agreed else SIGNALS
        for each in ours:
            if signal.getsignal(each) is not signal.SIG_IGN:
                self._before[each] = signal.signal(each, self._heard)
        pipe, self._told = os.pipe()
        os.set_blocking(self._told, False)
        self._told_before = signal.set_wakeup_fd(self._told, warn_on_full_buffer=False)
        if not self._agreed:  # each minds its own signal, and one that another heard before it was here
            processes.meet('minding signals')
            if processes.any_of(self._why is not None) and self._why is None:
                os.kill(os.getpid(), signal.SIGTERM)
        threading.Thread(target=self._watch, args=(pipe,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._before:
            signal.set_wakeup_fd(self._told_before)
            for each, handler in self._before.items():
                signal.signal(each, handler)
            os.close(self._told)

    def reason(self, step: int) -> str | None:
        """Returns why the run is to stop after `step`, None where it is to go on."""
        if self._deadline is not None and time.monotonic() > self._deadline and self._why is None:
            self._why = self._limit
            if self._agreed:
                os.kill(os.getpid(), signal.SIGTERM)  # as the notice that all processes hear
        if not self._agreed:
            return self._why
        return (self._why or 'SIGTERM') if multihost_utils.reached_preemption_sync_point(step) else None

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Gives a block that a request to stop leaves by `Stopped`, wherever it is: what can be done again."""
        if self._agreed:  # all leave it together, at its end
            yield
            return
        self._at_once = True
        try:
            if self._why is not None:
                raise Stopped(self._why)
            yield
        finally:
            self._at_once = False

    def _heard(self, number: int, _: object) -> None:
        self._why = signal.Signals(number).name
        if self._agreed:
            os.kill(os.getpid(), signal.SIGTERM)
        if self._at_once:
            raise Stopped(self._why)

    def _watch(self, pipe: int) -> None:
        """Answers signals at once, whatever the main thread is in: it may be compiling for minutes."""
        heard = 0
        with os.fdopen(pipe, 'rb', buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] not in self._before:
                    continue
                heard += 1
                name = signal.Signals(number[0]).name
                if heard > 1:
                    os._exit(128 + number[0])
                if not self.has_step:
                    print(f'tformer: {name}: stopped; nothing was to be saved', file=sys.stderr, flush=True)
                    processes.leave(STOPPED)
                    os._exit(STOPPED)
                print(f'tformer: {name}: saves and stops; once more stops at once', file=sys.stderr, flush=True)
