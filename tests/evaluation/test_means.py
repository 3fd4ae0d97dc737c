"""Means of a split, by hand."""

import math

import pytest

from tformer.evaluation import means


def test_batches_count_by_their_weights_and_not_alike():
    totals = means.add(means.add({}, {'nll': (1.0, 1.0)}), {'nll': (9.0, 3.0), 'accuracy': (1.0, 2.0)})
    assert totals == {'nll': (10, 4), 'accuracy': (1, 2)}
    assert means.means(totals) == {'nll': 2.5, 'accuracy': 0.5, 'perplexity': pytest.approx(math.exp(2.5))}


def test_nothing_has_no_mean_and_a_perplexity_has_a_bound():
    assert math.isnan(means.means({'loss': (0.0, 0.0)})['loss'])
    assert means.means({'nll': (1000.0, 1.0)})['perplexity'] == pytest.approx(means.MAX_PERPLEXITY)
