"""Writers of a run's metrics: metrics.jsonl, which trackers are shown, and the terminal."""

import contextlib
import datetime
import errno
import json
import math
import os
import pathlib
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from tformer import atomic
from tformer.config import Config, json_files
from tformer.errors import UserError
from tformer.training import digests, trackers
from tformer.training.wall_time import WALL_TIME

OVERRIDES = 'overrides'  # of result.json


def read(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the rows of a workdir's metrics.jsonl, in order, without a half-written last line.

    Raises:
      UserError: another line cannot be read, has no step, or has a value that is not a number.
    """
    file = workdir / 'metrics.jsonl'
    rows = json_files.read_rows(file, unfinished=True) if file.exists() else []
    for number, row in enumerate(rows, start=1):
        check_row(row, f'{file}:{number}')
    return rows


def check_row(row: Mapping[str, Any], where: str) -> None:
    """Raises a `UserError` if a row of metrics.jsonl has no step, or a value that is not a number."""
    if type(row.get('step')) is not int:
        raise UserError(f'{where}: it has no step')
    _check_numbers(row, where)


def results(workdir: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Returns the scores of each evaluated split in a workdir's result.json; {} where there is no file.

    Raises:
      UserError: the file holds something else.
    """
    return {split: scores for split, scores in _result(workdir).items() if split not in (WALL_TIME, OVERRIDES)}


def overrides(workdir: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Returns by split the fields and flags by which its scores are others than the run's own, with their values."""
    return _result(workdir).get(OVERRIDES, {})


def seconds(workdir: pathlib.Path) -> dict[str, float]:
    """Returns the seconds that training took by part, `wall_time` in result.json; {} where it is not known."""
    return _result(workdir).get(WALL_TIME, {})


def _result(workdir: pathlib.Path) -> dict[str, dict[str, Any]]:
    file = workdir / 'result.json'
    if not file.exists():
        return {}
    digests.expect(workdir, file.name)
    found = json_files.read(file)
    for split, scores in found.items():
        if not isinstance(scores, dict):
            raise UserError(f'{file}: {split!r} holds no scores')
        if split != OVERRIDES:
            _check_numbers(scores, f'{file}: {split}')
    return found


def _check_numbers(values: Mapping[str, Any], where: str) -> None:
    for name, value in values.items():
        if value is not None and type(value) is not float and not (type(value) is int and abs(value) < 2**63):
            raise UserError(f'{where}: {name!r} is not a number: {str(value)[:40]!r}')


class MetricWriter:
    """Appends metrics to metrics.jsonl, and shows them to the trackers of the run."""

    def __init__(
        self,
        workdir: pathlib.Path | None,
        start_step: int,
        evaluated: int,
        history: Mapping[str, Any] | None = None,
        config: Config | None = None,
    ):
        """Resumes after `start_step`, the latest evaluation being that of step `evaluated`: later rows are cut off.

        A line says where the others are not those of the checkpoint's `history`. workdir=None: nothing is written.
        `config` is the run's, whose trackers are shown each row; None: none is.
        """
        self._rows, self._digest = 0, 0
        self._file: Any = None
        self._trackers: trackers.Trackers | None = None
        if workdir is None:
            return
        rows = [row for row in read(workdir) if row['step'] <= start_step]
        kept = [row for row in rows if row['step'] <= evaluated or not any(name.startswith('valid/') for name in row)]
        file = workdir / 'metrics.jsonl'
        for row in kept:
            self._count(row)
        if history is not None and history != self.history():
            wrote = f'the {history.get("rows")} rows that the run wrote up to step {start_step}'
            print(f'{file} has {self._rows} rows, which are not {wrote}; the run goes on', file=sys.stderr, flush=True)
        atomic.write(file, ''.join(json.dumps(row) + '\n' for row in kept))
        self._file = file.open('ab', buffering=0)
        if config is not None:
            self._trackers = trackers.Trackers(trackers.Tracked(workdir, config), kept, start_step)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._file is None:
            return
        row = {'step': step, **{k: rounded(v) for k, v in numbers.items()}}
        line = json.dumps(row) + '\n'
        try:
            if self._file.write(line.encode()) < len(line.encode()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise UserError(f'{self._file.name}: {error.strerror}') from error
        self._count(row)
        if self._trackers is not None:
            self._trackers.write(row)

    def history(self) -> dict[str, Any]:
        """Returns the number of rows and their digest, without measured times, as JSON values."""
        return {'rows': self._rows, 'crc32': f'{self._digest:08x}'}

    def _count(self, row: Mapping[str, Any]) -> None:
        lasting = {name: value for name, value in row.items() if not name.endswith(('per_second', 'mfu'))}
        self._rows, self._digest = self._rows + 1, zlib.crc32(json.dumps(lasting).encode(), self._digest)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._trackers is not None:
            self._trackers.close()


def rounded(value: float) -> float | None:
    """Returns 8 digits; None (null in JSON) where the value is not finite."""
    return float(np.format_float_positional(value, precision=8, fractional=False)) if math.isfinite(value) else None


LINES_APART = 10.0  # seconds between lines about programs that are compiled


class Progress:
    """Shows steps, loss, tokens per second and time left: a live bar in a terminal, one line per report elsewhere."""

    def __init__(self, num_steps: int, start_step: int):
        self._num_steps, self._start = num_steps, start_step
        self._since: float | None = None  # None: before the first step
        self._last_line = time.monotonic()
        self._bar: Any = None
        if sys.stdout.isatty():
            from rich import progress

            self._bar = progress.Progress(
                progress.TextColumn('{task.description}'),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TextColumn('{task.fields[numbers]}'),
            )
            self._task = self._bar.add_task('training', total=num_steps, completed=start_step, numbers='')
            self._bar.start()

    def update(self, step: int, numbers: Mapping[str, float]) -> None:
        """Shows the metrics of the latest steps."""
        text = '  '.join(f'{name.removeprefix("train/")} {_short(value)}' for name, value in numbers.items())
        now, done = time.monotonic(), step - self._start
        left = (now - (now if self._since is None else self._since)) / max(done, 1) * (self._num_steps - step)
        text += f'  left {datetime.timedelta(seconds=int(left))}'
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=text)
        else:
            print(f'step {step}/{self._num_steps}  {text}', flush=True)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Says that a program is compiled. The time left is by that since the first one, without that of the others."""
        began = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, description='compiling')
        yield
        now = time.monotonic()
        self._since = now if self._since is None else self._since + now - began
        if self._bar is not None:
            self._bar.update(self._task, description='training')

    def compiled(self, done: int, of: int) -> None:
        """Says how many programs are compiled: in the bar, or in a line if the last one is some time ago."""
        if self._bar is not None:
            self._bar.update(self._task, description='training' if done == of else f'compiling {done}/{of}')
        elif time.monotonic() > self._last_line + LINES_APART:
            self.message(f'compiled {done} of {of} programs')

    def message(self, text: str) -> None:
        """Prints a line above the bar."""
        self._last_line = time.monotonic()
        (self._bar.console.print if self._bar is not None else print)(text)
        sys.stdout.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _short(value: float) -> str:
    return f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.4g}'


def format_table(rows: Iterable[tuple[str, float | str]]) -> str:
    """Returns names and values as aligned lines."""
    rows = [(name, value if isinstance(value, str) else _short(value)) for name, value in rows]
    width = max((len(name) for name, _ in rows), default=0)
    return '\n'.join(f'  {name:<{width}}  {value}' for name, value in rows)
