"""Schedules of any length: between zero and the peak, without a jump, up and then down, to the stated end."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tformer.optim import schedules

POINTS = np.linspace(0, 1, 101, dtype=np.float32)  # one shape, so that each schedule is compiled once
SIZES = st.tuples(st.integers(1, 500), st.integers(1, 500))
FRACTIONS = st.floats(0, 1, width=32)
ROUNDING = 1e-5


@pytest.fixture(params=sorted(schedules.SCHEDULES), scope='module')
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def rates(name: str, steps: np.ndarray, warmup: int, num_steps: int, final: float = 0.1, decay: float = 0.2):
    """The rates over the peak; noam's peak is at the end of its warm-up."""
    peak = warmup**-0.5 / 4 if name == 'noam' else 1.0
    found = schedules.SCHEDULES[name](
        steps.astype(np.float32), 3.0, warmup, num_steps=num_steps, final=final, decay=decay, emb_dim=16
    )
    return np.asarray(found, np.float64) / 3.0 / peak


@settings(max_examples=30)
@given(sizes=SIZES, final=FRACTIONS, decay=FRACTIONS)
def test_a_rate_is_never_negative_nor_above_the_peak(name: str, sizes, final: float, decay: float) -> None:
    warmup, more = sizes
    found = rates(name, 1 + POINTS * (warmup + more - 1), warmup, warmup + more, final, decay)
    assert found.min() >= 0 and found.max() <= 1 + ROUNDING


@settings(max_examples=30)
@given(sizes=SIZES, final=FRACTIONS, decay=FRACTIONS)
def test_a_rate_rises_to_the_end_of_its_warmup_and_then_never_again(name: str, sizes, final: float, decay: float):
    warmup, more = sizes
    up = rates(name, 1 + POINTS * (warmup - 1), warmup, warmup + more, final, decay)
    down = rates(name, warmup + POINTS * more, warmup, warmup + more, final, decay)
    assert (np.diff(up) >= -ROUNDING).all() and (np.diff(down) <= ROUNDING).all()
    assert up[-1] == pytest.approx(1, abs=ROUNDING) and down[0] == pytest.approx(1, abs=ROUNDING)
    if name == 'inverse_sqrt':  # flat, where the others start at 1 / warmup
        assert up == pytest.approx(1, abs=ROUNDING)
    else:
        line = 1 if warmup == 1 else (1 + POINTS * (warmup - 1)) / warmup
        assert up == pytest.approx(line, abs=ROUNDING)


@settings(max_examples=30)
@given(sizes=SIZES, final=FRACTIONS, decay=FRACTIONS)
def test_a_rate_is_continuous_where_its_pieces_join(name: str, sizes, final: float, decay: float) -> None:
    warmup, more = sizes
    total = warmup + more
    for joint in (warmup, max(total * (1 - decay), warmup), total):
        found = rates(name, max(joint - 1, 1) + 2 * POINTS, warmup, total, final, decay)
        assert np.abs(np.diff(found)).max() <= 0.02 * np.pi / 2 + 1e-3  # a whole cosine in one step is the steepest


@settings(max_examples=30)
@given(sizes=SIZES, final=FRACTIONS, decay=st.floats(0.0625, 1, width=32))
@pytest.mark.parametrize('falling', ['linear', 'cosine', 'wsd'])
def test_the_last_step_has_the_final_fraction_and_so_has_every_later_one(falling: str, sizes, final, decay) -> None:
    warmup, more = sizes
    assume(falling != 'wsd' or decay * (warmup + more) >= 1)  # a decay of a part of a step ends one step later
    later = rates(falling, warmup + more + 100 * POINTS, warmup, warmup + more, final, decay)
    assert later == pytest.approx(final, abs=1e-4)


def test_pieces_by_hand() -> None:
    """Warm-up of 10 in 110 steps to a fifth. Half way down, after 60: linear and cosine 0.6. wsd falls from 88 on."""
    at = {name: rates(name, np.array([5.0, 60, 88, 99, 110]), 10, 110, 0.2) for name in ('linear', 'cosine', 'wsd')}
    assert at['linear'] == pytest.approx([0.5, 0.6, 1 - 0.8 * 0.78, 1 - 0.8 * 0.89, 0.2], abs=ROUNDING)
    assert at['cosine'][[0, 1, 4]] == pytest.approx([0.5, 0.6, 0.2], abs=ROUNDING)
    assert at['wsd'] == pytest.approx([0.5, 1, 1, 0.6, 0.2], abs=ROUNDING)
