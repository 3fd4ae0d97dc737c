"""metrics.jsonl: what a resumed run keeps of it, and numbers that JSON does not have."""

import json
import math

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
