"""Draws of a sweep, mismatches and times, by hand."""

import numpy as np
import pytest

from tformer.lab.sweep import matching, overrides


def test_two_fields_draw_independently_and_a_field_draws_evenly():
    draws = overrides.sample({'a': overrides.uniform(0, 1), 'b': overrides.uniform(0, 1)}, 500)
    a, b = (np.array([draw[name] for draw in draws]) for name in 'ab')
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / 500**0.5
    assert np.histogram(a, [0, 0.25, 0.5, 0.75, 1])[0].min() > 125 - 4 * 10
    other = overrides.sample({'b': overrides.uniform(0, 1)}, 3)
    assert [draw['b'] for draw in other] == b[:3].tolist()


def test_half_of_a_logarithmic_range_lies_below_the_geometric_mean():
    of = overrides.log_uniform(1e-4, 1.0)
    assert [of(share) for share in (0.0, 0.25, 0.5, 0.75)] == [1e-4, 1e-3, 1e-2, 1e-1]
    assert [overrides.uniform(2, 6)(share) for share in (0.0, 0.25, 0.5)] == [2, 3, 4]
    assert [overrides.choice(['a', 'b'])(share) for share in (0.0, 0.49, 0.5, 0.99)] == ['a', 'a', 'b', 'b']


def test_seeds_count_up_from_the_first():
    assert overrides.seeds(2) == [{'train.seed': 0}, {'train.seed': 1}]
    assert overrides.seeds(2, first=6) == [{'train.seed': 6}, {'train.seed': 7}]


def test_a_mismatch_is_a_share_of_what_is_matched(monkeypatch):
    monkeypatch.setitem(matching.QUANTITIES, 'parameters', lambda stated: stated)
    match = matching.Match('parameters', 'model.emb_dim', to='b')
    found = matching.misses({'a': 50.0, 'b': 100.0, 'c': 130.0}, match)
    assert found == {'a': -50, 'b': 0, 'c': pytest.approx(30)}
