"""Fields of a sweep that its arms do not tell apart, the ends of a line, and arms that diverged."""

import numpy as np
import pytest

from tformer.lab.report import response


@pytest.mark.parametrize(
    ('first', 'second', 'together'),
    [
        ([1, 2, 3], [10, 20, 30], True),
        ([1, 2, 3], [0.5, 0.25, 0.125], True),  # one rises where the other falls
        ([1, 2, 3], [10, 30, 20], False),
        ([1, 1, 2], [5, 5, 7], True),
        ([1, 1, 2], [5, 6, 7], False),
        (['a', 'b', 'a'], [3, 4, 3], True),
        (['a', 'b', 'c'], [3, 5, 4], True),  # words have no order
    ],
)
def test_fields_are_told_apart_where_they_part_the_arms_otherwise(first, second, together):
    stated = [{'a': one, 'b': other, 'c': 0} for one, other in zip(first, second, strict=True)]
    assert response.independent(stated) == ({'a': ['b']} if together else {'a': [], 'b': []})


@pytest.mark.parametrize(('best', 'at_edge'), [(0, True), (1, False), (2, False), (3, True)])
def test_a_better_value_may_lie_beyond_either_end_of_a_line(best, at_edge):
    line = response.Line({}, np.arange(4.0), np.zeros(4), np.zeros(4), best, [], 0)
    assert line.at_edge == at_edge


@pytest.mark.parametrize('lower', [True, False])
def test_arms_that_diverged_are_the_worst_of_a_search(lower):
    rng = np.random.default_rng(0)
    rates, widths, losses = rng.random(16), rng.integers(1, 9, 16), rng.random(16)
    sign, gone = 1 if lower else -1, rates > 0.7
    stated = {f'{i}': {'rate': float(rates[i]), 'width': int(widths[i])} for i in range(16)}
    values = {f'{i}': {0: None if gone[i] else sign * losses[i], 1: None} for i in range(16)}
    found = response._search(stated, {'rate': [], 'width': []}, values, lower)
    y = np.where(gone, sign * np.inf, sign * losses)
    wanted = response.search({'rate': rates.tolist(), 'width': widths.tolist()}, y.tolist())
    assert gone.sum() > 3 and found.p == pytest.approx(wanted.p) and found.joint == pytest.approx(wanted.joint)


def test_of_fields_that_say_the_same_neither_explains_more_than_the_other():
    """Without one of them the fit is the same, so its p is 1; together they explain all."""
    rate, y = list(range(12)), [float(x) for x in range(12)]
    found = response.search({'rate': rate, 'again': [10 * x for x in rate]}, y)
    assert found.p == {'rate': 1.0, 'again': 1.0} and found.joint < 1e-6
