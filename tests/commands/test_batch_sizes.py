"""The batch that `benchmark --suggest` finds, and its number of buckets."""

import json

import pytest

from places import ROOT
from tformer import __main__ as command_line
from tformer.commands.planning import batch_sizes
from tformer.commands.planning.batch_sizes import GAIN, Batch, fastest
from tformer.errors import UserError
from whole_runs import load, overrides


def machine(memory: float, best: int):
    """Returns what tries batches on a machine whose rate grows up to a size; a row of a part needs a byte."""

    def attempt(size: int, parts: int) -> Batch | None:
        if size % parts:
            return None
        peak = size / parts
        return Batch(size, parts, peak, min(size, best) * 10.0 if peak <= memory else None)

    return attempt


@pytest.mark.parametrize('memory, best, given, found', [
    (1000, 32, (8, 1), (32, 1)),  # it grows while the rate does
    (16, 1000, (8, 1), (16, 1)),  # and while it fits
    (16, 1000, (64, 1), (64, 4)),  # a batch of the size that is asked for is computed in parts
    (2, 1000, (64, 2), (64, 32)),
    (0.5, 1000, (48, 1), None),  # not even one row
    (1000, 8, (8, 1), (8, 1)),
    (1000, 8, (8, 2), (8, 2)),  # the parts that are asked for stay
])  # fmt: skip
def test_the_smallest_batch_that_is_near_the_fastest_is_found(memory, best, given, found):
    if found is None:
        with pytest.raises(UserError, match='a batch of 3 does not fit a device'):
            fastest(machine(memory, best), *given)
    else:
        assert fastest(machine(memory, best), *given)[:2] == found


def test_a_small_gain_is_not_worth_twice_the_memory():
    def attempt(size, parts):
        return Batch(size, parts, size, 100.0 if size == 8 else 100 * GAIN - 0.1)

    assert fastest(attempt, 8, 1).size == 8


def test_a_batch_whose_parts_do_not_fit_is_halved():
    """48 rows divide into 16 parts of 3 but not into 32: where two rows fit at a time, 24 in 8 parts of 3 neither."""
    assert fastest(machine(3, 1000), 48, 1)[:2] == (48, 16)
    assert fastest(machine(2, 1000), 40, 5)[:2] == (40, 20)
    assert fastest(machine(1, 1000), 128, 1)[:2] == (64, 64)  # of at most MOST_PARTS


@pytest.mark.proof
def test_what_is_suggested_fits_and_is_given_as_flags(tmp_path, monkeypatch, capsys):
    config = load('translate.py:smoke', tmp_path)
    whole = batch_sizes.timed(config, 'train.batch_size', config.train.batch_size, 1, float('inf'), 1)
    monkeypatch.setattr(batch_sizes, 'device_memory', lambda: (whole.peak - 1) / batch_sizes.USABLE)
    flags = [f'--config.{name}={value}' for name, value in overrides('translate.py:smoke', tmp_path).items()]
    start = ['tformer', 'benchmark', f'--config={ROOT}/configs/translate.py:smoke', *flags]
    command_line.main([*start, '--suggest', '--steps=1'])
    found = json.loads(capsys.readouterr().out)
    assert found['peak_bytes'] < whole.peak
    command_line.main([*start, '--steps=1', *found['flags'].split()])
    assert json.loads(capsys.readouterr().out)['tokens_per_s'] > 0
    with pytest.raises(UserError, match='takes one of --data, --saves, --suggest'):
        command_line.main([*start, '--suggest', '--saves', '--data'])
