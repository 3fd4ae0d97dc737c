"""Where the wall time of a run goes: seconds by part, over all the processes that trained it one after the other.

A checkpoint holds the seconds up to it. wall_time.json in the workdir has the newest ones, and those up to the end of
what the newest checkpoint holds: what a resumed run finds between the two was lost.
"""

import contextlib
import json
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from jax import monitoring

from tformer import atomic
from tformer.config import json_files
from tformer.errors import UserError

PARTS = ('steps', 'compiling', 'waiting_for_data', 'saving', 'evaluating', 'lost_to_restarts', 'other')
WALL_TIME = 'wall_time'  # of result.json and of a checkpoint's metadata
FILE = f'{WALL_TIME}.json'
LOST, KEPT = 'lost_to_restarts', 'kept'
COMPILING = '/jax/core/compile/'  # what jax calls the spans of tracing, lowering and compiling


class Clock:
    """Measures the seconds of this process by part; each belongs to the innermost block. As a context it tells
    compilations apart.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._part, self._since = 'other', time.monotonic()
        self._compiled: list[tuple[float, float]] = []  # spans on the system's clock, none inside another
        self._thread = threading.get_ident()

    def __enter__(self) -> 'Clock':
        monitoring.register_event_time_span_listener(self._on_span)
        return self

    def __exit__(self, *_: object) -> None:
        monitoring.unregister_event_time_span_listener(self._on_span)

    @contextlib.contextmanager
    def spending(self, part: str, unless: Callable[[], bool] | None = None) -> Iterator[None]:
        """Counts the time of its block as that of `part`; if `unless` is true at its end, of the block around it."""
        before = self._switch(part)
        try:
            yield
        finally:
            if unless is not None and unless():
                self._part = before
            self._switch(before)

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each of `PARTS` so far; their sum is the age of the clock."""
        self._switch(self._part)
        return dict(self._seconds)

    def _switch(self, part: str) -> str:
        now, before = time.monotonic(), self._part
        self._seconds[before] += now - self._since
        self._part, self._since = part, now
        return before

    def _on_span(self, event: str, start_time: float, end_time: float, **_: str | int) -> None:
        """Moves the time of a compilation from the part in which it happened; spans inside it have been moved."""
        if not event.startswith(COMPILING) or threading.get_ident() != self._thread:
            return
        start, end = start_time, end_time
        moved = end - start
        while self._compiled and self._compiled[-1][0] >= start:
            inside = self._compiled.pop()
            moved -= inside[1] - inside[0]
        self._compiled.append((start, end))
        self._seconds[self._part] -= moved
        self._seconds['compiling'] += moved


class Account:
    """The seconds of a run by part: those up to the checkpoint that it resumes from, lost ones, and a clock's."""

    def __init__(self, clock: Clock, workdir: pathlib.Path | None, saved: Mapping[str, float] | None, step: int = 0):
        """`saved` are the `seconds` in the checkpoint after `step`, None: it starts anew; workdir=None: nothing is
        written."""
        self.clock, self._workdir = clock, workdir
        self._kept: dict[str, float] = {}  # what is written beside the newest seconds
        total, kept = _read(workdir)
        if saved is not None and kept.get('step') == step:
            saved = self._kept = kept  # as `saved`, with the time that saving took, and evaluations after it
        self._before = {part: float((saved or {}).get(part, 0.0)) for part in PARTS}
        if workdir is not None:
            self._before[LOST] = 0.0
            self._before[LOST] = max(0.0, total - sum(self._before.values()))

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each of `PARTS`, rounded, and as `total` their sum."""
        here = self.clock.seconds()
        found = {part: round(self._before[part] + here[part], 3) for part in PARTS}
        return {**found, 'total': round(sum(found.values()), 3)}

    def write(self, kept: int | None = None) -> None:
        """Writes the seconds to the workdir, where a process that resumes the run finds them, if the disk has room.

        `kept` is the step of a checkpoint that holds all that was done until now; None: there are steps after it.
        """
        seconds = self.seconds()
        if kept is not None:
            self._kept = {'step': kept, **seconds}
        if self._workdir is not None:
            with contextlib.suppress(OSError):
                atomic.write(self._workdir / FILE, json.dumps({**seconds, KEPT: self._kept}) + '\n')


def total_seconds(workdir: pathlib.Path) -> float:
    """Returns the seconds that a run has taken so far; 0 where its file does not exist, or is damaged."""
    return _read(workdir)[0]


def _read(workdir: pathlib.Path | None) -> tuple[float, dict[str, float]]:
    """Returns (the seconds that a run has taken so far, those that its checkpoint has with the checkpoint's step)."""
    if workdir is not None:
        with contextlib.suppress(UserError, KeyError, TypeError, ValueError, AttributeError):
            found = json_files.read(workdir / FILE)
            return float(found['total']), {name: float(value) for name, value in found.get(KEPT, {}).items()}
    return 0.0, {}
