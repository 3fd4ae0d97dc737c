"""Bootstrap intervals, which do not assume a normal distribution: runs or examples are resampled with a fixed seed."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from tformer.errors import UserError

Groups = Sequence[np.ndarray]
BLOCK = 10_000_000  # counts in memory at once


def percentile_t(
    groups: Groups,
    estimate: Callable[[Groups], tuple[np.ndarray, np.ndarray]],
    alpha: float = 0.05,
    resamples: int = 9999,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Returns the bootstrap-t interval at 1 - alpha (Efron & Tibshirani 1993, 12.5), in the units of the estimate.

    It is None below three runs, and where so many resamples are constant, with an infinite t, that an end would be
    infinite: three pairs at alpha 0.05, or ties. The means of resamples stay within the range of the runs, so an
    interval of their percentiles would be too narrow for few runs.

    Args:
      groups: [n] each, drawn independently.
      estimate: of groups [..., n], a value [...] and its standard error [...].
    """
    if min(map(len, groups)) < 3 or not resamples:
        return None
    rng = np.random.default_rng(seed)
    value, error = estimate(groups)
    values, errors = estimate([group[rng.integers(len(group), size=(resamples, len(group)))] for group in groups])
    with np.errstate(divide='ignore', invalid='ignore'):
        t = np.nan_to_num((values - value) / errors, nan=0.0, posinf=np.inf, neginf=-np.inf)
    low, high = np.quantile(t, [alpha / 2, 1 - alpha / 2], method='inverted_cdf')
    ends = float(value - high * error), float(value - low * error)
    return ends if np.isfinite(ends).all() else None


@dataclasses.dataclass(frozen=True)
class CorpusComparison:
    """Two systems on the same examples, in the metric's units."""

    arm: float  # the metric on all examples
    baseline: float  # likewise
    difference: float  # arm - baseline
    interval: tuple[float, float]  # of the difference, between percentiles of the resamples, at 1 - alpha
    wins: float  # share of the resamples where the arm's metric is the higher one, ties as half (Koehn 2004, 4)
    p: float  # two-sided, from the resamples on the rarer side of 0, counting the observed one


def compare_corpora(
    arm_NK: np.ndarray,
    baseline_NK: np.ndarray,
    metric: Callable[[np.ndarray], np.ndarray],
    alpha: float = 0.05,
    resamples: int = 1000,
    seed: int = 0,
) -> CorpusComparison:
    """Returns the paired bootstrap over N examples of a corpus metric of K sums (Koehn 2004, 4).

    It says whether other examples could change the order of two sets of predictions; it does not cover other seeds.

    Args:
      arm_NK: terms of the K sums for each example, e.g. BLEU's matches, counts and lengths.
      baseline_NK: those of the same examples, in the same order.
      metric: totals [..., K] -> values [...].

    Raises:
      UserError: the shapes differ, or there are no examples.
    """
    if arm_NK.shape != baseline_NK.shape or arm_NK.ndim != 2 or not len(arm_NK):
        raise UserError(
            f'statistics of the same examples: arm {list(arm_NK.shape)}, baseline {list(baseline_NK.shape)}; '
            'both must be [examples, statistics]'
        )
    rng, N = np.random.default_rng(seed), len(arm_NK)
    pairs_2NK = np.stack([arm_NK, baseline_NK]).astype(np.float64)
    block = max(BLOCK // N, 1)
    sizes = [min(block, resamples - start) for start in range(0, resamples, block)]
    counts = (rng.multinomial(N, np.full(N, 1 / N), size=size).astype(np.float64) for size in sizes)
    totals_2RK = np.concatenate([counts_RN @ pairs_2NK for counts_RN in counts], axis=1)
    differences = np.subtract(*metric(totals_2RK))
    arm, baseline = (float(value) for value in metric(pairs_2NK.sum(1)))
    low, high = np.quantile(differences, [alpha / 2, 1 - alpha / 2])
    below, above = np.sum(differences <= 0), np.sum(differences >= 0)
    return CorpusComparison(
        arm,
        baseline,
        arm - baseline,
        (float(low), float(high)),
        wins=float(np.mean(differences > 0) + np.mean(differences == 0) / 2),
        p=min(2 * (int(min(below, above)) + 1) / (resamples + 1), 1.0),
    )
