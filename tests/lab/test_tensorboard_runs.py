"""Runs of other programs: what TensorBoard files say is what a report compares, and bad files are named."""

import importlib.util
import json
import pathlib
import struct
from typing import Any

import pytest

from tformer import __main__ as command_line
from tformer.errors import UserError
from tformer.lab.live.watched import Watched, counts
from tformer.lab.report import render, report_data, results, tensorboard_runs
from tformer.training import tensorboard, writers
from tformer.training.tensorboard import Board

if importlib.util.find_spec('tensorboardX') is None:
    pytest.skip('tensorboardX is not installed', allow_module_level=True)


def run(place: pathlib.Path, numbers: dict[int, dict[str, float]], after: int = 0) -> pathlib.Path:
    """Writes a file of events as a run that begins, or goes on, after a step; returns it."""
    place.mkdir(parents=True, exist_ok=True)
    before = {*place.rglob('*tfevents*')}
    board = Board(place, after, {'lr': 0.1})
    for step, row in numbers.items():
        board.write(step, row)
    board.close()
    (file,) = {*place.rglob('*tfevents*')} - before
    return file


def imported(logs: pathlib.Path, home: pathlib.Path, capsys: Any) -> list[str]:
    command_line.main(['tformer', 'import', str(logs), f'--workdir={home}'])
    return capsys.readouterr().out.splitlines()


def losses(arm: int, seed: int) -> dict[int, dict[str, float]]:
    last = 1.0 + arm + 0.01 * seed * (seed + arm)
    return {10: {'loss': last + 1, 'Loss/val': last + 1}, 20: {'loss': last + 0.5, 'Loss/val': last}}


@pytest.mark.parametrize('names', [('{arm}/seed_{seed}', 'a'), ('{arm}-seed={seed}/logs', 'a/logs')])
def test_a_report_compares_the_runs_of_a_directory_of_logs(names, tmp_path, capsys) -> None:
    for arm in (0, 1):
        for seed in range(3):
            run(tmp_path / 'logs' / names[0].format(arm='ab'[arm], seed=seed), losses(arm, seed))
    said = imported(tmp_path / 'logs', tmp_path / 'runs', capsys)
    assert said[0] == f'6 runs of 2 arms from {tmp_path}/logs'
    assert said[1] == 'scalars under the names of a report: Loss/val is valid/loss, loss is train/loss'
    assert len(said) == 3
    found = report_data.report(results.read(tmp_path / 'runs'))
    assert found.metric == 'valid/loss' and found.baseline == names[1]
    assert found.rows[1].runs.mean == pytest.approx(2 + 0.08 / 3) and found.rows[1].label == 'worse'
    assert found.costs[found.baseline].parameters is None and found.costs[found.baseline].steps == 20
    assert [*found.curves] == ['train/loss', 'valid/loss']
    text = render.markdown(found, drawn=False)
    assert 'tformer train' not in text and 'tformer report' in text
    assert counts(Watched(tmp_path / 'runs').trials) == {'done': 6}


def test_what_a_resumed_run_repeats_replaces_what_came_after_its_checkpoint(tmp_path) -> None:
    run(tmp_path / 'logs', {step: {'loss': 1.0 * step} for step in range(1, 8)})
    run(tmp_path / 'logs', {5: {'loss': 50.0}, 6: {'loss': float('nan')}}, after=4)
    (tmp_path / 'home').mkdir()
    tensorboard_runs.write(tmp_path / 'logs', tmp_path / 'home')
    rows = writers.read(tmp_path / 'home' / 'logs' / 'seed_0')
    assert [(row['step'], row['train/loss']) for row in rows] == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 50), (6, None)]
    result = json.loads((tmp_path / 'home' / 'logs' / 'seed_0' / 'result.json').read_text())
    assert result == {'train': {'loss': None}}


def test_directories_of_splits_are_parts_of_their_run(tmp_path) -> None:
    for seed in (0, 1):
        place = tmp_path / 'logs' / 'a' / f'seed_{seed}'
        run(place / 'train', {1: {'epoch_loss': 3.0}, 2: {'epoch_loss': 2.0, 'lr': 0.5}})
        run(place / 'validation', {2: {'epoch_loss': 2.5, 'evaluation_loss_vs_iterations': 2.5}})
    run(tmp_path / 'logs' / 'b', {1: {'loss': 3.0}})
    run(tmp_path / 'logs' / 'b' / 'eval', {1: {'loss': 4.0}})
    (tmp_path / 'home').mkdir()
    assert tensorboard_runs.write(tmp_path / 'logs', tmp_path / 'home')[0].startswith('3 runs of 2 arms')
    rows = writers.read(tmp_path / 'home' / 'a' / 'seed_1')
    assert [row['step'] for row in rows] == [1, 2]
    assert rows[1].items() >= {'train/loss': 2.0, 'train/lr': 0.5, 'valid/loss': 2.5}.items()
    assert writers.read(tmp_path / 'home' / 'b' / 'seed_0') == [{'step': 1, 'train/loss': 3.0, 'valid/loss': 4.0}]


def test_a_damaged_file_is_one_line_and_a_cut_one_ends_where_it_is_cut(tmp_path, capsys) -> None:
    numbers = {step: {'valid/loss': 0.5 * step} for step in range(1, 5)}
    whole = run(tmp_path / 'logs' / 'whole', numbers)
    size = len(whole.read_bytes())
    cut, flipped, length, nonsense = (
        run(tmp_path / 'logs' / name, numbers) for name in ('cut', 'flip', 'long', 'none')
    )
    cut.write_bytes(whole.read_bytes()[: size - 60])  # within the last records
    data = bytearray(flipped.read_bytes())
    at = data.index(struct.pack('<f', 1.5))
    data[at] ^= 1
    flipped.write_bytes(data)
    data = bytearray(length.read_bytes())
    data[0] ^= 1
    length.write_bytes(data)
    nonsense.write_text('no events at all')
    said = imported(tmp_path / 'logs', tmp_path / 'runs', capsys)
    assert said[0].startswith('3 runs of 3 arms')
    assert [line for line in said if ' is damaged; ' in line] == [
        f'{flipped}: record 7 is damaged; what follows it is left out',
        f'{length}: record 1 is damaged; what follows it is left out',
        f'{nonsense}: record 1 is damaged; what follows it is left out',
    ]
    steps = {arm: [row['step'] for row in writers.read(tmp_path / 'runs' / arm / 'seed_0')] for arm in ('cut', 'flip')}
    assert steps == {'cut': [1, 2, 3, 4], 'flip': [1, 2]}


def test_scalars_of_tensorboard_2_are_read(tmp_path) -> None:
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboardX.proto.tensor_pb2 import TensorProto

    def value(tag: str, plugin: str, **tensor: Any) -> Any:
        about = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=plugin))
        return Summary.Value(tag=tag, metadata=about, tensor=TensorProto(**tensor))

    events = EventsWriter(str(tmp_path / 'events'))
    found = [
        value('a', 'scalars', dtype=1, tensor_content=struct.pack('<f', 2.5)),
        value('b', 'scalars', dtype=1, float_val=[1.5]),
        value('c', 'scalars', dtype=2, double_val=[0.25]),
        value('d', 'scalars', dtype=9, int64_val=[7]),
        value('e', 'histograms', dtype=2, double_val=[0.25]),
        value('f', 'scalars', dtype=1, float_val=[1.5, 2.5]),
    ]
    events.write_event(Event(step=3, wall_time=5.0, summary=Summary(value=found)))
    events.close()
    (file,) = tmp_path.iterdir()
    *_, last = tensorboard.read(file)
    assert last == (3, 5.0, {'a': 2.5, 'b': 1.5, 'c': 0.25, 'd': 7.0}, None)


def test_names_of_scalars_and_runs() -> None:
    tags = [
        'loss',
        'Loss/val',
        'eval/loss',
        'val_accuracy',
        'train/grad_norm',
        'epoch',
        'lr-Adam',
        'a/b/c',
        'bleu/test',
    ]
    assert tensorboard_runs.named(tags) == {
        'loss': 'train/loss', 'Loss/val': 'valid/loss', 'eval/loss': 'eval/loss', 'val_accuracy': 'valid/accuracy',
        'train/grad_norm': 'train/grad_norm', 'epoch': 'train/epoch', 'lr-Adam': 'train/lr-adam', 'a/b/c': 'a/b/c',
        'bleu/test': 'test/bleu',
    }  # fmt: skip
    named = {path: tensorboard_runs.arm_and_seed(path, 'logs') for path in (
        '.', 'a', 'a/seed_3', 'lr=1,seed=12', 'a_seed4/x', 'seed_5', 'a/seed_3/tensorboard', 'proceed_2',
    )}  # fmt: skip
    assert named == {
        '.': ('logs', 0), 'a': ('a', 0), 'a/seed_3': ('a', 3), 'lr=1,seed=12': ('lr=1', 12), 'a_seed4/x': ('a/x', 4),
        'seed_5': ('logs', 5), 'a/seed_3/tensorboard': ('a', 3), 'proceed_2': ('proceed_2', 0),
    }  # fmt: skip


def test_what_cannot_be_imported_is_one_line(tmp_path, capsys) -> None:
    logs = tmp_path / 'logs'
    for name in ('a/seed_1', 'a-seed1'):
        run(logs / name, {1: {'valid/mse': 1.0}})
    with pytest.raises(UserError, match=r'a/seed_1 and .*a-seed1 are both seed 1 of a: name'):
        imported(logs, tmp_path / 'runs', capsys)
    assert not (tmp_path / 'runs').exists()
    assert 'valid/mse: a report takes more of it for better' in imported(logs / 'a', tmp_path / 'runs', capsys)
    with pytest.raises(UserError, match='runs exists and is not empty; use a fresh directory'):
        imported(logs / 'a', tmp_path / 'runs', capsys)
    with pytest.raises(UserError, match=r'have no --config'):
        command_line.main(['tformer', 'import', str(logs / 'a'), '--workdir=x', '--config.train.seed=1'])
    for file in logs.rglob('*tfevents*'):
        file.write_bytes(b'')
    with pytest.raises(UserError, match='logs: no scalar is in its TensorBoard files'):
        imported(logs, tmp_path / 'more', capsys)
