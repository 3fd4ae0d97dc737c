"""The rows of a report: an arm against the baseline by their own runs alone, and its verdict in the family.

Runs are {seed: metric}, as in `noise`. A failed run is left out together with its partner, and counted.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import special

from tformer.errors import UserError, nearest
from tformer.lab.statistics import family, resampling
from tformer.lab.statistics.family import ROUNDING, Verdict
from tformer.lab.statistics.noise import Floor, Interval, Runs, finite, noise_floor

BASELINE = 'baseline'  # the label of its row
PAIRED, WELCH, ONE_RUN, PERMUTATION, NONE = 'paired t', 'Welch t', 'one-run t', 'permutation', 'none'


# --------------------------------------------------------------------------------------------------- two arms


@dataclasses.dataclass(frozen=True)
class Comparison:
    """An arm against the baseline, in the metric's units; nan or None where the runs are too few."""

    test: str  # its name; 'permutation' for runs without spread, 'none' where no two runs show noise
    n: int  # runs of the arm that count; pairs, if paired
    n_baseline: int  # runs of the baseline that count; the same pairs
    failed: int  # runs of either side without a finite value
    unmatched: int  # finite runs of either side that a paired test leaves out because they have no partner
    difference: float = math.nan  # the mean of arm - baseline
    sd: float = math.nan  # standard deviation of the difference of two runs, one of each side
    interval: Interval | None = None  # of the difference, by t, at 1 - alpha
    bootstrap: Interval | None = None  # the same by percentile-t
    effect: float = math.nan  # difference in standard deviations of pairs' differences (d_z) or runs (g), unbiased
    p: float = math.nan  # two-sided


def unbiased(df: float) -> float:
    """Returns Hedges' factor (1981, eq. 6e) that makes an effect of `df` degrees of freedom unbiased; nan below 2."""
    if df < 2:
        return math.nan
    return math.exp(math.lgamma(df / 2) - math.lgamma((df - 1) / 2)) / math.sqrt(df / 2)


def _variances(groups: resampling.Groups) -> list[np.ndarray]:
    """Returns the variance [...] of each of one or two groups [..., n]; a group of one run takes the other's."""
    several = max(groups, key=lambda group: group.shape[-1])
    return [(group if group.shape[-1] > 1 else several).var(-1, ddof=1) for group in groups]


def _estimate(groups: resampling.Groups) -> tuple[np.ndarray, np.ndarray]:
    """Returns the difference of two groups' means, or one group's mean, [...], and its standard error [...]."""
    difference = groups[0].mean(-1) - sum(group.mean(-1) for group in groups[1:])
    parts = [v / group.shape[-1] for v, group in zip(_variances(groups), groups, strict=True)]
    return difference, np.sqrt(sum(parts))


def _t_test(groups: resampling.Groups, alpha: float) -> dict[str, Any]:
    """Returns interval, effect and p of groups [n] that have spread: Student's test of one group, Welch's of two."""
    freedom = np.array([len(group) - 1 for group in groups])
    variances = np.array(_variances(groups))
    difference, error = map(float, _estimate(groups))
    parts = variances / (freedom + 1)
    df = parts.sum() ** 2 / np.sum(parts**2 / freedom) if freedom.all() else freedom.max()
    half = special.stdtrit(df, 1 - alpha / 2) * error
    pooled = math.sqrt(freedom @ variances / freedom.sum())
    return {
        'interval': (float(difference - half), float(difference + half)),
        'effect': difference / pooled * unbiased(freedom.sum()),
        'p': 2 * float(special.stdtr(df, -abs(difference) / error)),
    }


def compare(arm: Runs, baseline: Runs, alpha: float = 0.05, resamples: int = 9999, seed: int = 0) -> Comparison:
    """Returns the comparison of an arm with the baseline: {seed: metric}, or [n] each, aligned.

    Student's t of paired differences, if the sides share two seeds or more, and half of the seeds of the smaller side.
    Otherwise Welch's t (1947), or where one side is a single run, the t that gives it the other side's variance
    (Crawford & Howell 1998). All assume normal runs. Runs that spread no more than float32 rounds have p = 1 if they
    are equal, otherwise the p of all permutations or signs (Fisher 1935, 21), which exceeds any usual alpha for few
    runs. The effect is Hedges' (1981), for pairs Lakens' (2013, eq. 6) with the same factor. An arm that often fails
    looks better than it is: see `failed`.

    Raises:
      UserError: arrays of unequal lengths, or an array against a mapping, which do not tell which runs are pairs.
    """
    aligned = [not isinstance(side, Mapping) for side in (arm, baseline)]
    if any(aligned) and not (all(aligned) and len(arm) == len(baseline)):
        raise UserError(f'runs: {len(arm)} against {len(baseline)}; both must be {{seed: value}}, or of one length')
    ours, theirs = finite(arm), finite(baseline)
    shared = [seed for seed in ours if seed in theirs]
    paired = len(shared) > 1 and 2 * len(shared) >= min(len(ours), len(theirs))
    sides = [np.array([side[seed] for seed in (shared if paired else side)]) for side in (ours, theirs)]
    groups = [sides[0] - sides[1]] if paired else sides
    test = _test(groups)
    found = Comparison(
        test,
        n=len(sides[0]),
        n_baseline=len(sides[1]),
        failed=len(arm) + len(baseline) - len(ours) - len(theirs),
        unmatched=len(ours) + len(theirs) - 2 * len(shared) if paired else 0,
        difference=float(sides[0].mean() - sides[1].mean()) if min(map(len, groups)) else math.nan,
        sd=math.nan if test == NONE else math.sqrt(sum(_variances(groups))),
    )
    rounding = ROUNDING * max((abs(value) for side in sides for value in side), default=0.0)
    if found.sd > rounding:
        bootstrap = resampling.percentile_t(groups, _estimate, alpha, resamples, seed)
        return dataclasses.replace(found, bootstrap=bootstrap, **_t_test(groups, alpha))
    if test == NONE:
        return found
    if abs(found.difference) <= rounding:
        return dataclasses.replace(found, interval=(found.difference, found.difference), p=1.0)
    return dataclasses.replace(found, test=PERMUTATION, p=_permutation_p(groups))


def _test(groups: resampling.Groups) -> str:
    """Returns the test that groups of so many runs allow: one group holds the differences of pairs."""
    few, many = min(map(len, groups)), max(map(len, groups))
    if not few or many < 2:
        return NONE
    if len(groups) == 1:
        return PAIRED
    return WELCH if few > 1 else ONE_RUN


def _permutation_p(groups: resampling.Groups) -> float:
    """Returns the p-value of runs without spread over all permutations, or over all signs of pairs' differences."""
    sizes = list(map(len, groups))
    as_far = 2 if len(set(sizes)) == 1 else 1  # the observed order, and for equal groups its mirror image
    return as_far / (2.0 ** sizes[0] if len(groups) == 1 else math.comb(sum(sizes), sizes[0]))


# ---------------------------------------------------------------------------------------------------- a table


@dataclasses.dataclass(frozen=True)
class Row:
    """An arm in a report."""

    arm: str  # its name
    runs: Floor  # the arm's own mean, noise and failures
    comparison: Comparison | None = None  # with the baseline, by the two arms' runs alone; None of the baseline itself
    verdict: Verdict = Verdict(BASELINE)  # by all arms' runs

    @property
    def label(self) -> str:
        return self.verdict.label

    @property
    def difference(self) -> float:
        """The arm's mean - the baseline's: within seeds where the test is; nan where one has no finite run."""
        if math.isfinite(self.verdict.difference):
            return self.verdict.difference
        return self.comparison.difference if self.comparison else math.nan


def untested(row: Row) -> Row:
    """Returns a row without interval, p and label."""
    return Row(row.arm, row.runs, None, Verdict('', difference=row.difference))


def summary(
    arms: Mapping[str, Runs], baseline: str, lower_is_better: bool, alpha: float = 0.05, resamples: int = 9999,
    ended: bool = True,
) -> list[Row]:  # fmt: skip
    """Returns the baseline's row, then the others', the best mean first and arms without a mean last.

    Each comparison is of two arms alone, each verdict of the whole table (`family`). Without `ended`, declared runs
    have not ended, and no arm has a label.

    Raises:
      UserError: no arm is called `baseline`, or as `compare`.
    """
    if baseline not in arms:
        raise UserError(f'baseline={baseline!r} is not an arm{nearest(baseline, arms)}')
    floors = {name: noise_floor(runs, alpha=alpha) for name, runs in arms.items()}
    decided = family.verdicts(arms, baseline, lower_is_better, alpha, ended)
    rows = [
        Row(name, floors[name], compare(arms[name], arms[baseline], alpha, resamples), verdict)
        for name, verdict in decided.items()
    ]
    sign = 1 if lower_is_better else -1
    rows.sort(key=lambda row: (not row.runs.n, sign * row.runs.mean))
    return [Row(baseline, floors[baseline]), *rows]
