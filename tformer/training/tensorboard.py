"""TensorBoard's files, written and read by tensorboardX, without TensorFlow."""

import contextlib
import importlib.util
import pathlib
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from tformer.errors import UserError

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
        later = f'.{len(list(directory.iterdir()))}'  # of files that are begun in one second
        self._events = event_file_writer.EventsWriter(str(directory / 'events'), later)  # without its thread and queue
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


# ------------------------------------------------------------------------------------------------------------ reading


class Scalars(NamedTuple):
    """What an event says."""

    step: int
    wall_time: float  # seconds since 1970
    numbers: dict[str, float]
    restarts_at: int | None  # the run began again here: what was written of this step and later ones is void


def require() -> None:
    """Raises a `UserError` without tensorboardX."""
    if importlib.util.find_spec('tensorboardX') is None:
        raise UserError("TensorBoard files are read by tensorboardX: pip install 'tformer[logging]'")


def read(file: pathlib.Path) -> Iterator[Scalars]:
    """Yields the events of a file in order; a last one that is cut, as a kill leaves it, is none.

    A record is its length, the length's checksum, an event, and the event's checksum.

    Raises:
      UserError: the file is damaged, after the events before.
    """
    with without_torch():
        from tensorboardX.crc32c import crc32c
        from tensorboardX.proto import event_pb2

    def masked(data: bytes) -> bytes:
        crc = crc32c(data)
        return struct.pack('<I', (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)

    with file.open('rb') as opened:
        number = 0
        while len(head := opened.read(12)) == 12:
            number += 1
            if masked(head[:8]) != head[8:]:
                raise UserError(f'{file}: record {number} is damaged; what follows it is left out')
            length = struct.unpack('<Q', head[:8])[0]
            data = opened.read(length)
            if len(check := opened.read(4)) < 4:
                return
            try:
                if masked(data) != check:
                    raise ValueError
                event = event_pb2.Event.FromString(data)
            except Exception as error:  # protobuf's own
                raise UserError(f'{file}: record {number} is damaged; what follows it is left out') from error
            start = event.HasField('session_log') and event.session_log.status == event_pb2.SessionLog.START
            numbers = {value.tag: scalar for value in event.summary.value if (scalar := _scalar(value)) is not None}
            yield Scalars(event.step, event.wall_time, numbers, event.step if start else None)


def _scalar(value: Any) -> float | None:
    """Returns the number of a summary, as TensorBoard 1 and 2 write it; None of a summary that is no scalar."""
    if value.HasField('simple_value'):
        return float(value.simple_value)
    plugin = value.metadata.plugin_data.plugin_name
    if not value.HasField('tensor') or plugin not in ('scalars', ''):
        return None
    tensor = value.tensor
    kind = {1: '<f4', 2: '<f8', 3: '<i4', 9: '<i8'}.get(tensor.dtype)
    if kind is not None and tensor.tensor_content:
        numbers = np.frombuffer(tensor.tensor_content, kind).tolist()
    else:
        numbers = [*tensor.float_val, *tensor.double_val, *tensor.int_val, *tensor.int64_val]
    return float(numbers[0]) if len(numbers) == 1 else None
