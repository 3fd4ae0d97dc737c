"""Where teams keep results: each tracker shows the rows of metrics.jsonl to its own readers.

`TRACKERS`, at the end, holds them by their name in `train.trackers`. A tracker that fails never ends a training: a line
says what failed, and it gets no more rows until the run is resumed.
"""

import contextlib
import dataclasses
import fcntl
import functools
import importlib.util
import json
import logging
import netrc
import os
import pathlib
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tformer import atomic
from tformer import config as config_lib
from tformer.config import Config, json_files
from tformer.data import store_copies
from tformer.errors import UserError, choose
from tformer.training import tensorboard

Row = Mapping[str, float | None]  # of metrics.jsonl: its step, and numbers by name; None is not finite
TRIAL = 'trial.json'  # in the workdir of a sweep's trial, DIR/ARM/seed_N
CLOSING_SECONDS = 30.0  # that a tracker has at the end for what it has not sent
MOST_WAITING = 100_000  # rows that a tracker which stands still keeps waiting


@dataclasses.dataclass(frozen=True)
class Tracked:
    """A run as trackers are told of it."""

    workdir: pathlib.Path
    config: Config

    @property
    def sweep(self) -> pathlib.Path | None:
        """The directory of the sweep whose trial it is."""
        return self.workdir.resolve().parent.parent if (self.workdir / TRIAL).is_file() else None

    @property
    def arm(self) -> str | None:
        return self.workdir.resolve().parent.name if self.sweep else None

    @property
    def name(self) -> str:
        return f'{self.arm}/{self.workdir.name}' if self.arm else store_copies.name_of(self.workdir)

    def hyperparameters(self) -> dict[str, Any]:
        """Returns the fields that differ from the defaults, and the seed, by their dotted names."""
        changed = {name: new for name, (_, new) in config_lib.difference(Config(), self.config).items()}
        changed.pop('train.trackers', None)
        return {**changed, 'train.seed': self.config.train.seed}


class Tracker(Protocol):
    """What the rows of a run are handed to, in order."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Takes the numbers of a step, which may be nan; a step may come twice with other names."""

    def close(self) -> None:
        """Ends the run, whether or not it is at its end."""


class Kind(NamedTuple):
    """A row of the table."""

    open: Callable[..., Tracker]  # (Tracked, its id here and in earlier lives); for a `local` one (Tracked, first step)
    module: str  # the package that it needs
    local: bool = False  # it writes files at once, and knows itself what a resumed run repeats


def kinds(config: Config) -> dict[str, Kind]:
    """Returns the kinds of train.trackers by their names. Raises a `UserError` if it names an unknown tracker."""
    return {name: choose(TRACKERS, name, 'train.trackers') for name in config.train.trackers}


def check(config: Config) -> None:
    """Raises a `UserError` as `kinds`, or if the package of a tracker is missing."""
    for name, kind in kinds(config).items():
        if not kind.local and importlib.util.find_spec(kind.module) is None:
            raise UserError(f"train.trackers={name} needs {kind.module}: pip install 'tformer[{name}]'")


class Trackers:
    """The trackers of one run."""

    def __init__(self, run: Tracked, rows: Sequence[Row], start_step: int):
        """Opens those of train.trackers whose packages are there, for a run that goes on after `start_step` and `rows`.

        A row reaches a tracker once, however often a killed run repeats it, and one that was off gets what it lacks.
        """
        self._open: dict[str, Any] = {}
        for name in run.config.train.trackers:
            kind = TRACKERS[name]
            if importlib.util.find_spec(kind.module) is None:
                continue
            if not kind.local:
                self._open[name] = _Sender(name, functools.partial(kind.open, run), run.workdir, rows)
                continue
            with self._one_line(name):
                self._open[name] = kind.open(run, start_step)

    def write(self, row: Row, counts: bool = True) -> None:
        """Hands on a row, which comes after all those before; one that does not count is not of metrics.jsonl."""
        for name, tracker in [*self._open.items()]:
            with self._one_line(name):
                if isinstance(tracker, _Sender):
                    tracker.send(row, counts)
                else:
                    tracker.write(*_numbers(row))

    def close(self) -> None:
        for name, tracker in [*self._open.items()]:
            with self._one_line(name):
                tracker.close()
        self._open = {}

    @contextlib.contextmanager
    def _one_line(self, name: str) -> Any:
        """Turns a tracker off where its block fails."""
        try:
            yield
        except Exception as error:
            self._open.pop(name, None)
            _complain(name, error)


def finish(run: Tracked, rows: Sequence[Row], scores: Mapping[str, float | None]) -> None:
    """Hands the final scores of a run, such as 'test/loss', to its trackers; `rows` are all of its metrics.jsonl."""
    last = int(rows[-1]['step'] or 0) if rows else 0
    opened = Trackers(run, rows, last)
    opened.write({'step': last, **scores}, counts=False)
    opened.close()


def _complain(name: str, error: object) -> None:
    line = ' '.join(str(error).split())[:300] or type(error).__name__
    print(f'train.trackers: {name} is off until the run is resumed: {line}', file=sys.stderr, flush=True)


def _numbers(row: Row) -> tuple[int, dict[str, float]]:
    return int(row['step'] or 0), {k: float('nan') if v is None else v for k, v in row.items() if k != 'step'}


class _Sender:
    """Hands rows to a tracker from a thread of its own, so that no server and no lock holds the training up.

    NAME.json in the workdir keeps the tracker's id and how many rows it was sent; a row counts before it is sent, so
    that none is sent twice.
    """

    def __init__(self, name: str, opened: Callable[[str], Tracker], workdir: pathlib.Path, rows: Sequence[Row]):
        self._name, self._opened, self._file = name, opened, workdir / f'{name}.json'
        self._rows: queue.Queue[tuple[Row, bool] | None] = queue.Queue(len(rows) + MOST_WAITING)
        for row in rows:
            self._rows.put((row, True))
        self._off = False
        self._thread = threading.Thread(target=self._work, daemon=True, name=f'tracker {name}')
        self._thread.start()

    def send(self, row: Row, counts: bool) -> None:
        if not self._off:
            try:
                self._rows.put_nowait((row, counts))
            except queue.Full:
                raise TimeoutError(f'{MOST_WAITING:,} rows wait') from None

    def close(self) -> None:
        """Waits for what is on its way, but not for ever."""
        if not self._off:
            ends = time.monotonic() + CLOSING_SECONDS
            with contextlib.suppress(queue.Full):
                self._rows.put(None, timeout=CLOSING_SECONDS)
            self._thread.join(max(0.0, ends - time.monotonic()))
            if self._thread.is_alive():
                self._off = True
                raise TimeoutError(f'it has not taken all rows within {CLOSING_SECONDS:g} seconds of the end')

    def _work(self) -> None:
        try:
            known = _ledger(self._file)
            name, sent = known.get('id') or secrets.token_hex(4), int(known.get('rows', 0))
            self._note(name, sent)
            tracker = self._opened(name)
            try:
                self._send(tracker, name, sent)
            finally:
                tracker.close()
        except BaseException as error:  # also what a package ends a thread with
            if not self._off:  # nobody has given it up yet
                self._off = True
                _complain(self._name, error)

    def _send(self, tracker: Tracker, name: str, sent: int) -> None:
        number = 0
        while (given := self._rows.get()) is not None:
            row, counts = given
            number += counts
            if counts and number <= sent:
                continue
            self._note(name, max(number, sent))
            try:
                tracker.write(*_numbers(row))
            except BaseException:
                with contextlib.suppress(OSError):
                    self._note(name, max(number - counts, sent))
                raise

    def _note(self, name: str, rows: int) -> None:
        atomic.write(self._file, json.dumps({'id': name, 'rows': rows}) + '\n')


def _ledger(file: pathlib.Path) -> dict[str, Any]:
    try:
        return json_files.read_if_there(file)
    except UserError:
        return {}  # damaged: a new run of the tracker


# -------------------------------------------------------------------------------------------------- Weights & Biases


class _Wandb:
    def __init__(self, run: Tracked, name: str):
        """Opens the run `name`, grouped by its sweep and typed by its arm; $WANDB_PROJECT and its like decide where.

        Without a key of the service the run is written to DIR/wandb, from where `wandb sync` sends it.
        """
        import wandb

        mode = os.environ.get('WANDB_MODE') or ('online' if _has_wandb_key() else 'offline')
        self._run: Any = wandb.init(
            project=os.environ.get('WANDB_PROJECT', 'tformer'), id=name, name=run.name, resume='allow',
            mode=mode, dir=str(run.workdir), group=run.sweep.name if run.sweep else None, job_type=run.arm,
            config=config_lib.to_dict(run.config), reinit='create_new',
            settings=wandb.Settings(console='off', silent=True),
        )  # fmt: skip

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


def _has_wandb_key() -> bool:
    """Returns whether $WANDB_API_KEY or `wandb login` says who logs in: without, wandb would ask the terminal."""
    if os.environ.get('WANDB_API_KEY'):
        return True
    host = os.environ.get('WANDB_BASE_URL', 'https://api.wandb.ai').partition('://')[2].split('/')[0].split(':')[0]
    try:
        return netrc.netrc(os.environ.get('NETRC')).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


# ------------------------------------------------------------------------------------------------------------ MLflow


class _Mlflow:
    def __init__(self, run: Tracked, name: str):
        """Opens the run whose tag `tformer.id` is `name`, in the experiment of its sweep, with its arm as a tag.

        $MLFLOW_TRACKING_URI decides where; without it the file mlflow.db in the directory of the sweep, or the workdir.
        """
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        logging.getLogger('mlflow').setLevel(logging.WARNING)
        self._metric, home = Metric, (run.sweep or run.workdir).resolve()
        uri = os.environ.get('MLFLOW_TRACKING_URI') or f'sqlite:///{home}/mlflow.db?timeout=60'
        with _alone(home / 'mlflow.lock'):  # of trials that begin at once, one makes the tables
            self._client = MlflowClient(uri)
            title = os.environ.get('MLFLOW_EXPERIMENT_NAME') or (run.sweep.name if run.sweep else 'tformer')
            found = self._client.get_experiment_by_name(title)
            artifacts = (home / 'mlruns').as_uri() if uri.startswith('sqlite:') else None
            experiment = found.experiment_id if found else self._client.create_experiment(title, artifacts)
        known = self._client.search_runs([experiment], f"tags.`tformer.id` = '{name}'", max_results=1)
        if known:
            self._id = known[0].info.run_id
            self._client.update_run(self._id, status='RUNNING')
            return
        tags = {'tformer.id': name, 'tformer.arm': run.arm or '', 'tformer.sweep': run.sweep.name if run.sweep else ''}
        self._id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        params = [Param(field, str(value)[:6000]) for field, value in run.hyperparameters().items()]
        for first in range(0, len(params), 100):  # as many as it takes at once
            self._client.log_batch(self._id, params=params[first : first + 100])

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(
            self._id, metrics=[self._metric(name, value, now, step) for name, value in numbers.items()]
        )

    def close(self) -> None:
        self._client.set_terminated(self._id)


@contextlib.contextmanager
def _alone(file: pathlib.Path) -> Any:
    """Lets one process of this host at a time into its block, where the file system has locks."""
    with file.open('a') as held:
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


TRACKERS: dict[str, Kind] = {
    'tensorboard': Kind(
        lambda run, step: tensorboard.Board(run.workdir, step, run.hyperparameters()), 'tensorboardX', True
    ),
    'wandb': Kind(_Wandb, 'wandb'),
    'mlflow': Kind(_Mlflow, 'mlflow'),
}
