"""Trackers: each row reaches them once over all lives of a run, and none of their failures ends a training."""

import importlib.util
import json
import math
import pathlib
import struct
import threading
from typing import Any
from unittest import mock

import pytest

from tformer import config as config_lib
from tformer.config import Config, Train
from tformer.errors import Stopped, UserError
from tformer.lab.sweep import trials
from tformer.training import trackers, writers
from tformer.training.trackers import Kind, Tracked


class Noting:
    """A tracker that keeps what it is given, for each id; it fails at a step."""

    def __init__(self, kept: dict[str, list[Any]], name: str, fails_at: int | None):
        self.kept, self.fails_at = kept.setdefault(name, []), fails_at

    def write(self, step: int, numbers: dict[str, float]) -> None:
        if step == self.fails_at:
            raise ConnectionError('no route\nto host')
        self.kept.append((step, numbers))

    def close(self) -> None:
        self.kept.append('closed')


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the tracker 'noting' was given, by id; 'fails_at' is the step at which it fails."""
    found: dict[str, Any] = {}
    kind = Kind(lambda run, name: Noting(found, name, found.get('fails_at')), 'json')
    monkeypatch.setitem(trackers.TRACKERS, 'noting', kind)
    return found


def asks(*names: str) -> Config:
    return Config(train=Train(trackers=names))


def life(place: pathlib.Path, start: int, end: int, *names: str) -> None:
    """A run trains from a checkpoint to a step, and is not at its end."""
    writer = writers.MetricWriter(place, start, start, config=asks(*names))
    for step in range(start + 1, end + 1):
        writer.write(step, {'train/loss': 10.0 - step})
        if step % 2 == 0:
            writer.write(step, {'valid/loss': math.nan})
    writer.close()


def rows(start: int, end: int) -> list[Any]:
    found: list[Any] = []
    for step in range(start, end + 1):
        found.append((step, {'train/loss': 10.0 - step}))
        found += [(step, {'valid/loss': pytest.approx(math.nan, nan_ok=True)})] if step % 2 == 0 else []
    return found


def test_a_run_that_is_killed_and_resumed_is_one_run_without_double_steps(tmp_path, kept) -> None:
    life(tmp_path, 0, 5, 'noting')
    life(tmp_path, 2, 7, 'noting')  # steps 3 to 5 again
    (name,) = kept
    assert kept[name] == [*rows(1, 5), 'closed', *rows(6, 7), 'closed']
    assert json.loads((tmp_path / 'noting.json').read_text()) == {'id': name, 'rows': 10}


def test_the_final_scores_come_last_and_what_was_not_sent_comes_before(tmp_path, kept) -> None:
    kept['fails_at'] = 2
    life(tmp_path, 0, 3, 'noting')
    kept['fails_at'] = None
    trackers.finish(Tracked(tmp_path, asks('noting')), writers.read(tmp_path), {'test/loss': 0.5})
    name = json.loads((tmp_path / 'noting.json').read_text())['id']
    assert kept[name] == [*rows(1, 1), 'closed', *rows(2, 3), (3, {'test/loss': 0.5}), 'closed']
    life(tmp_path, 3, 4, 'noting')  # the run is made longer
    assert kept[name][-3:] == [*rows(4, 4), 'closed']


def test_a_tracker_that_fails_is_off_with_one_line_and_gets_what_it_lacks_when_the_run_goes_on(
    tmp_path, kept, capsys
) -> None:
    kept['fails_at'] = 3
    life(tmp_path, 0, 6, 'noting')
    name = json.loads((tmp_path / 'noting.json').read_text())['id']
    assert kept[name] == [*rows(1, 2), 'closed'] and len(writers.read(tmp_path)) == 9
    line = 'train.trackers: noting is off until the run is resumed: no route to host\n'
    assert capsys.readouterr().err == line
    kept['fails_at'] = None
    life(tmp_path, 6, 7, 'noting')
    assert kept[name] == [*rows(1, 2), 'closed', *rows(3, 7), 'closed'] and capsys.readouterr().err == ''


def test_a_tracker_that_cannot_be_opened_or_has_no_disk_is_off(tmp_path, kept, capsys, monkeypatch) -> None:
    def refused(*_: object) -> None:
        raise SystemExit(1)  # as some packages end a thread

    monkeypatch.setitem(trackers.TRACKERS, 'refused', Kind(refused, 'json'))
    (tmp_path / 'noting.json').mkdir()  # what it writes has no room
    life(tmp_path, 0, 2, 'refused', 'noting')
    said = sorted(capsys.readouterr().err.splitlines())
    assert len(said) == 2 and 'noting is off' in said[0] and 'refused is off until the run is resumed: 1' in said[1]
    assert len(writers.read(tmp_path)) == 3


def test_a_tracker_that_stands_still_holds_nothing_up(tmp_path, capsys, monkeypatch) -> None:
    go = threading.Event()

    def stands(*_: object) -> None:
        go.wait()

    monkeypatch.setitem(trackers.TRACKERS, 'stands', Kind(stands, 'json'))
    monkeypatch.setattr(trackers, 'CLOSING_SECONDS', 0.05)
    life(tmp_path, 0, 4, 'stands')
    said = 'stands is off until the run is resumed: it has not taken all rows within 0.05 s'
    assert said in capsys.readouterr().err and len(writers.read(tmp_path)) == 6
    monkeypatch.setattr(trackers, 'MOST_WAITING', 1)
    full = trackers.Trackers(Tracked(tmp_path, asks('stands')), [], 0)
    full.write({'step': 1})
    full.close()  # though there is no room for the end
    assert said in capsys.readouterr().err
    go.set()


def test_a_stop_is_no_failure_of_a_tracker(tmp_path, kept, monkeypatch) -> None:
    """A signal raises it wherever the run is."""
    monkeypatch.setattr(trackers._Sender, 'send', mock.Mock(side_effect=Stopped('SIGTERM')))
    given = trackers.Trackers(Tracked(tmp_path, asks('noting')), [], 0)
    with pytest.raises(Stopped):
        given.write({'step': 1})
    monkeypatch.undo()


def test_a_trial_is_known_by_its_sweep_and_arm(tmp_path) -> None:
    place = tmp_path / 'norms' / 'norm=rmsnorm' / 'seed_3'
    place.mkdir(parents=True)
    alone = Tracked(place, config_lib.override(asks('wandb'), {'train.seed': 3, 'model.norm': 'rmsnorm'}))
    assert (alone.sweep, alone.arm, alone.name) == (None, None, 'seed_3')
    assert trackers.TRIAL == trials.STATED
    (place / trials.STATED).touch()
    assert (alone.sweep, alone.arm, alone.name) == (tmp_path / 'norms', 'norm=rmsnorm', 'norm=rmsnorm/seed_3')
    assert alone.hyperparameters() == {'train.seed': 3, 'model.norm': 'rmsnorm'}


def test_an_unknown_tracker_or_a_missing_package_is_one_line(monkeypatch) -> None:
    trackers.check(asks('tensorboard'))
    with pytest.raises(UserError, match=r"train\.trackers='wandbb' is unknown; did you mean 'wandb'\?"):
        trackers.check(asks('wandbb'))
    monkeypatch.setitem(trackers.TRACKERS, 'absent', Kind(lambda *_: None, 'no_such_package'))
    with pytest.raises(
        UserError, match=r"train\.trackers=absent needs no_such_package: pip install 'tformer\[absent\]'"
    ):
        trackers.check(asks('absent'))


# ------------------------------------------------------------------------------------------ the packages themselves


def trial(place: pathlib.Path) -> pathlib.Path:
    home = place / 'norms' / 'norm=rmsnorm' / 'seed_3'
    home.mkdir(parents=True)
    (home / trials.STATED).touch()
    return home


@pytest.mark.proof
def test_mlflow_keeps_one_run_for_all_lives_in_a_file_of_the_sweep(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip('mlflow')
    monkeypatch.delenv('MLFLOW_TRACKING_URI', raising=False)
    home = trial(tmp_path)
    life(home, 0, 5, 'mlflow')
    life(home, 2, 7, 'mlflow')
    assert 'is off' not in capsys.readouterr().err
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f'sqlite:///{tmp_path}/norms/mlflow.db')
    experiment = client.get_experiment_by_name('norms')
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == 'norm=rmsnorm/seed_3' and run.info.status == 'FINISHED'
    assert run.data.tags['tformer.arm'] == 'norm=rmsnorm' and run.data.params['train.seed'] == '0'
    history = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, 'train/loss')]
    assert sorted(history) == [(step, 10.0 - step) for step in range(1, 8)]
    assert [each.step for each in client.get_metric_history(run.info.run_id, 'valid/loss')] == [2, 4, 6]


@pytest.mark.proof
def test_wandb_writes_a_run_offline_that_goes_on_under_its_id(tmp_path, monkeypatch, capsys) -> None:
    wandb = pytest.importorskip('wandb')
    for name in ('WANDB_API_KEY', 'WANDB_MODE', 'WANDB_PROJECT'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('NETRC', str(tmp_path / 'none'))
    home = trial(tmp_path)
    life(home, 0, 5, 'wandb')
    life(home, 2, 7, 'wandb')
    wandb.teardown()  # its process, which writes the files, ends
    assert 'is off' not in capsys.readouterr().err
    files = sorted(home.glob('wandb/offline-run-*/run-*.wandb'))
    (name,) = {file.stem.removeprefix('run-') for file in files}
    assert name == json.loads((home / 'wandb.json').read_text())['id']
    said = [record for file in files for record in records(file)]
    begun = [record.run for record in said if record.WhichOneof('record_type') == 'run']
    assert {(run.run_group, run.job_type, run.display_name) for run in begun} == {
        ('norms', 'norm=rmsnorm', 'norm=rmsnorm/seed_3')
    }
    written = []
    for record in said:
        if record.WhichOneof('record_type') == 'history':
            items = {(item.key or '/'.join(item.nested_key)): item.value_json for item in record.history.item}
            written += [(int(items['_step']), float(items['train/loss']))]
    assert written == [(step, 10.0 - step) for step in range(1, 8)]


def records(file: pathlib.Path) -> list[Any]:
    """The records of a file that W&B wrote offline: those of LevelDB's logs, in blocks, behind seven bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole, found = file.read_bytes(), 7, b'', []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # too little of the block is left for a header
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack('<HB', data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or its last part
            found.append(wandb_internal_pb2.Record.FromString(whole))
            whole = b''
    return found


@pytest.mark.proof
def test_wandb_without_a_network_is_off_with_a_line(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip('wandb')
    monkeypatch.setenv('WANDB_MODE', 'online')
    monkeypatch.setenv('WANDB_API_KEY', 'x' * 40)
    monkeypatch.setenv('WANDB_BASE_URL', 'http://127.0.0.1:9')
    monkeypatch.setattr(trackers, 'CLOSING_SECONDS', 2.0)
    life(tmp_path, 0, 3, 'wandb')
    assert capsys.readouterr().err.count('wandb is off until the run is resumed: ') == 1
    assert len(writers.read(tmp_path)) == 4


@pytest.mark.skipif(importlib.util.find_spec('tensorboardX') is None, reason='tensorboardX is not installed')
def test_a_full_disk_turns_tensorboard_off(tmp_path, capsys, monkeypatch) -> None:
    from tformer.training import tensorboard

    def full(*_: object) -> None:
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(tensorboard.Board, 'write', full)
    life(tmp_path, 0, 3, 'tensorboard')
    assert capsys.readouterr().err == (
        'train.trackers: tensorboard is off until the run is resumed: [Errno 28] No space left on device\n'
    )
    assert len(writers.read(tmp_path)) == 4
