"""The bootstrap-t interval of a skewed sample."""

import numpy as np
import pytest

from tformer.lab.statistics import resampling


def test_the_interval_of_a_mean_of_skewed_runs_reaches_further_to_the_long_side():
    """Efron & Tibshirani 1993, 12.5: value - t_high error to value - t_low error; where runs have a long right tail,
    resamples without the tail have a small error, so t_low is the larger end."""
    runs = np.array([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 3.0, 6.0])

    def estimate(groups):
        (group,) = groups
        return group.mean(-1), group.std(-1, ddof=1) / group.shape[-1] ** 0.5

    low, high = resampling.percentile_t([runs], estimate, resamples=2000)
    assert low < runs.mean() < high
    assert high - runs.mean() > 1.5 * (runs.mean() - low)


def test_resamples_without_a_difference_count_for_both_sides():
    """One of ten examples differs: it is not drawn in 0.9^10 of the resamples, which are ties."""
    baseline = np.stack([np.zeros(10), np.ones(10)], -1)
    arm = baseline + np.eye(10, 1) * [[1, 0]]
    found = resampling.compare_corpora(arm, baseline, lambda totals: totals[..., 0] / totals[..., 1], resamples=2000)
    ties = 0.9**10
    assert found.p == pytest.approx(2 * ties, abs=0.08)
    assert found.wins == pytest.approx(1 - ties / 2, abs=0.02)
    assert found.difference == pytest.approx(0.1)
