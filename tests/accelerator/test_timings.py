"""The timings' table and arithmetic, and how their processes talk; the full script runs in `make accelerator`."""

import datetime
import functools
import io
import json
import os
import sys

import pytest

import talking_sides
import timings
import workloads
from timings import FULL, REHEARSAL, Row


@pytest.fixture
def talking(monkeypatch):
    return functools.partial(talking_sides.put, monkeypatch)


def test_the_rate_the_utilization_and_the_ratio_of_train_steps(talking) -> None:
    """Steps of 32 x 1,024 tokens in 0.1 and 0.15 s; 5e13 operations in 0.1 s are half of a peak of 1e15."""
    own = talking_sides.Talking({'flops': 5e13, 'peak_flops': 1e15, 'device': 'chip', 'jax': '1'}, 0.1)
    other = talking_sides.Talking({'torch': '2'}, 0.15)
    talking(own, other)
    row, facts, rate = timings.train_row('gpt2_124m', FULL)
    assert rate == pytest.approx(327_680) and facts is own.facts
    line = '| train gpt2_124m | 327,680 tokens/s | MFU 50.0 % | 218,453 tokens/s, torch 2 | 1.50 (1.50 to 1.50) |'
    assert row.markdown() == line
    assert own.asked == other.asked == [('steps', 10)] * 5


def test_generation_reads_parameters_and_cache_at_each_token_after_the_first(talking) -> None:
    """255 steps of 3e9 bytes in 2.55 s of the 3.55: 3e11 bytes a second, a tenth of 3e12."""
    facts = {'params_bytes': 1e9, 'cache_bytes': 2e9, 'first_token_s': 1.0, 'peak_bandwidth': 3e12}
    talking(talking_sides.Talking(facts, 3.55))
    assert timings.generate_row('gpt2_124m', FULL).markdown() == (
        '| generate gpt2_124m, greedy | 2,308 tokens/s | bandwidth 10.0 % |  |  |'
    )


def test_an_unknown_peak_leaves_its_column_empty(talking) -> None:
    talking(talking_sides.Talking({'flops': 5e13, 'peak_flops': None}, 0.1))
    assert timings.train_row('mt_base', FULL)[0].markdown() == '| train mt_base | 327,680 tokens/s |  |  |  |'


def test_a_part_that_fails_is_named_and_the_others_go_on(monkeypatch) -> None:
    def fails(*_):
        raise ChildProcessError('it ended')

    rate = Row('train', '1 tokens/s')
    monkeypatch.setattr(timings, 'train_row', lambda name, amount: (rate, {'device': 'chip', 'jax': '1'}, 1.0))
    monkeypatch.setattr(timings, 'generate_row', fails)
    monkeypatch.setattr(timings, 'trials_row', lambda *_: Row('trials', '2 steps/s', '', '1 steps/s', [2.0]))
    monkeypatch.setattr(timings, 'data_row', lambda *_: Row('data', '3 tokens/s'))
    machine, rows, failed = timings.measure(REHEARSAL)
    assert failed == ['generate gpt2_124m', 'generate mt_base']
    text = timings.table(machine, rows, REHEARSAL, datetime.date(2026, 1, 2))
    assert text.startswith('2026-01-02, one chip, jax 1, bfloat16; medians of 2 blocks.\n\n| what |')
    assert text.splitlines()[-3:] == [row.markdown() for row in rows][-3:] and len(rows) == 5


def test_a_side_answers_with_its_facts_and_the_seconds_of_each_block(monkeypatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(os, 'dup', lambda _: writing)
    monkeypatch.setattr(sys, 'stdin', io.StringIO('block 3\nblock 1\n'))
    calls = []
    workloads.serve({'fact': 1}, {'block': calls.append})
    with os.fdopen(reading) as answers:
        facts, *seconds = map(json.loads, answers)
    assert facts == {'fact': 1} and calls == [3, 1] and len(seconds) == 2 and min(seconds) >= 0


def test_the_tokens_of_a_step_are_those_of_both_sides() -> None:
    counted = {name: workloads.tokens(each, 'train') for name, each in workloads.WORKLOADS.items()}
    assert counted == {'gpt2_124m': 32_768, 'bert_base': 32_768, 'mt_base': 32_768}
    assert workloads.tokens(workloads.WORKLOADS['mt_base'], 'generate') == 16_384


class Answering:
    """A process by its name: one is absent, one broken, the others answer."""

    def __init__(self, name):
        self.name, self.closed = name, False

    def answer(self):
        if self.name == 'broken':
            raise ChildProcessError('broken ended with 1')
        return {'absent': 'it is not installed'} if self.name == 'absent' else {'fact': self.name}

    def close(self):
        self.closed = True


def test_a_second_side_that_is_absent_or_fails_is_left_out_with_a_line(monkeypatch, capsys) -> None:
    monkeypatch.setattr(timings, 'Side', Answering)
    with timings.sides(('own',), ('other',), ('absent',), ('broken',)) as found:
        assert [facts for _, facts in found] == [{'fact': 'own'}, {'fact': 'other'}]
    assert all(side.closed for side, _ in found)
    assert capsys.readouterr().err.splitlines() == [
        'timings: absent is left out: it is not installed',
        'timings: broken is left out: broken ended with 1',
    ]
    with pytest.raises(ChildProcessError), timings.sides(('broken',)):
        raise AssertionError('it has no first side')
