"""TensorBoard's files, written and read by tensorboardX, without TensorFlow."""

import contextlib
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

METRICS = ('train/loss', 'valid/loss')  # which the plugin of hyperparameters shows beside them


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """Keeps tensorboardX from importing an installed torch, which takes seconds."""
    hidden = 'torch' not in sys.modules
    if hidden:
        sys.modules['torch'] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules['torch']


class Board:
    """Writes the scalars of a run to DIR/tensorboard, and what its plugin of hyperparameters shows."""

    def __init__(self, workdir: pathlib.Path, last_step: int, hyperparameters: Mapping[str, Any]):
        """Begins a file. TensorBoard hides what earlier files have after `last_step`, which a resumed run repeats."""
        with without_torch():
            from tensorboardX import event_file_writer, summary
            from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._summary, self._event = summary, Event
        directory = workdir / 'tensorboard'
        directory.mkdir(exist_ok=True)
        self._events = event_file_writer.EventsWriter(str(directory / 'events'))  # without its thread and queue
        start = SessionLog(status=SessionLog.START)
        self._events.write_event(Event(wall_time=time.time(), step=last_step + 1, session_log=start))
        plain = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in hyperparameters.items()}
        with without_torch():
            experiment, begins, self._ends = summary.hparams(plain, dict.fromkeys(METRICS))
        for each in (experiment, begins):
            self._events.write_event(Event(wall_time=time.time(), step=0, summary=each))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            found = self._summary.scalar(name, value)
            self._events.write_event(self._event(wall_time=time.time(), step=step, summary=found))
        self._events.flush()

    def close(self) -> None:
        self._events.write_event(self._event(wall_time=time.time(), step=0, summary=self._ends))
        self._events.close()
