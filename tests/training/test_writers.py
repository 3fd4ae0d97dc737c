"""metrics.jsonl: what a resumed run keeps of it, and numbers that JSON does not have."""

import io
import json
import math
import re
import sys

import pytest

from tformer.errors import UserError
from tformer.training import writers


def test_a_resumed_run_keeps_the_rows_up_to_its_step_and_evaluations_up_to_its_own(tmp_path):
    file = tmp_path / 'metrics.jsonl'
    rows = [{'step': 1, 'train/loss': 3.0}, {'step': 2, 'train/loss': 2.0}, {'step': 2, 'valid/loss': 2.5}]
    more = [{'step': 3, 'train/loss': 1.0}, {'step': 4, 'train/loss': 0.5}, {'step': 4, 'valid/loss': 1.5}]
    for start, evaluated, kept in ((4, 2, [*rows, *more[:2]]), (4, 4, [*rows, *more]), (2, 2, rows), (2, 0, rows[:2])):
        file.write_text(''.join(json.dumps(row) + '\n' for row in [*rows, *more]) + '{"step": 5, "tr')
        writer = writers.MetricWriter(tmp_path, start, evaluated)
        writer.close()
        assert writers.read(tmp_path) == kept
        assert writer.history()['rows'] == len(kept)


def test_a_number_that_is_not_finite_is_null(tmp_path):
    writer = writers.MetricWriter(tmp_path, 0, 0)
    writer.write(1, {'nan': math.nan, 'much': math.inf, 'little': -math.inf, 'third': 1 / 3})
    writer.close()
    (line,) = (tmp_path / 'metrics.jsonl').read_text().splitlines()
    assert line == '{"step": 1, "nan": null, "much": null, "little": null, "third": 0.33333333}'


def test_the_history_is_of_the_rows_without_measured_times(tmp_path):
    histories = []
    for speed in (10.0, 20.0):
        (tmp_path / 'metrics.jsonl').unlink(missing_ok=True)
        writer = writers.MetricWriter(tmp_path, 0, 0)
        writer.write(1, {'train/loss': 2.0, 'train/tokens_per_second': speed})
        histories.append(writer.history())
        writer.close()
    assert histories[0] == histories[1]


def test_a_result_that_holds_no_scores_is_named(tmp_path):
    (tmp_path / 'result.json').write_text('{"test": {"loss": 1.5}, "valid": [2.5]}')
    with pytest.raises(UserError, match=r"result\.json: 'valid' holds no scores$"):
        writers.results(tmp_path)


def test_without_tensorboard_the_numbers_are_still_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'tensorboardX', None)
    writer = writers.MetricWriter(tmp_path, 0, 0)
    writer.write(1, {'train/loss': 2.0})
    writer.close()
    assert writers.read(tmp_path) == [{'step': 1, 'train/loss': 2.0}] and not (tmp_path / 'tensorboard').exists()


def test_the_time_left_is_by_the_steps_that_this_process_has_made(monkeypatch, capsys):
    now = [1000.0]
    monkeypatch.setattr(writers.time, 'monotonic', lambda: now[0])
    shown = writers.Progress(1000, 500)
    now[0] += 70  # of reading a checkpoint
    with shown.compiling():
        now[0] += 100
    now[0] += 10
    shown.update(600, {'train/loss': 2.5})  # 400 more at 10 a second
    with shown.compiling():  # for batches of another shape
        now[0] += 50
    now[0] += 30
    shown.update(800, {'train/loss': 2.0})  # 200 more at 300 in 40 seconds
    assert capsys.readouterr().out.splitlines() == [
        'step 600/1000  loss 2.5  left 0:00:40', 'step 800/1000  loss 2  left 0:00:26',
    ]  # fmt: skip


def test_compiling_says_how_far_it_is_in_a_line_now_and_then(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(writers.time, 'monotonic', lambda: now[0])
    shown = writers.Progress(1000, 0)
    shown.message('compiling')
    for done, later in enumerate((1, 9, 1, 5, 7), start=1):
        now[0] += later
        shown.compiled(done, 5)
    assert capsys.readouterr().out.splitlines() == ['compiling', 'compiled 3 of 5 programs', 'compiled 5 of 5 programs']


def test_a_terminal_shows_a_bar_below_the_messages(monkeypatch):
    pytest.importorskip('rich')
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    for name, value in {'TERM': 'xterm', 'COLUMNS': '100', 'NO_COLOR': '1', 'TTY_COMPATIBLE': '1'}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, 'stdout', screen)
    shown = writers.Progress(1000, 250)
    shown.message('resumed at step 250')
    shown.compiled(1, 2)
    shown._bar.refresh()
    assert 'compiling 1/2' in screen.getvalue()
    shown.compiled(2, 2)
    shown.update(500, {'train/loss': 2.5, 'train/tokens_per_second': 12345.6})
    shown.close()
    text = re.sub(r'\x1b\[[0-9;?]*[A-Za-z]', '', screen.getvalue())
    assert 'resumed at step 250\n' in text
    last = text.rstrip().splitlines()[-1]
    assert last.startswith('training ') and ' 500/1000 ' in last and 'loss 2.5  tokens_per_second 12,346' in last
