"""The verdicts of a family: which arms differ from one baseline, with few false labels in the whole table.

`verdicts` applies this rule, in this order:

1. No arm has a label before every run that the sweep declares has ended: labels that are looked at while seeds are
   added are false more often.
2. An arm all of whose runs failed is worse. Otherwise both sides need LEAST finite runs.
3. Noise is pooled over all arms, and seeds that the arms share with the baseline are blocks: what a seed adds to every
   arm does not count as noise. Each difference is a t in pooled standard errors; its p is the probability that the
   largest |t| of equal arms is as large (Dunnett 1955, in one step), simulated for the counts and seeds at hand.
4. Pooling needs equal noise. If the baseline or an arm has too large a share of the squared residuals, every arm has
   its own t test (Welch 1947), with p corrected by Holm (1979).
5. An arm's own runs must agree with the pooled noise: an arm whose own test has p > OWN keeps at least that p. This
   catches heavy tails, whose extremes noise pooled over many arms understates.
6. Runs without spread show no noise; they are judged by all orders of the runs (Fisher 1935, 21).
7. A side that fails more often than the other looks better than it is, so no label favours it.

How often a family of arms that all equal the baseline gets a label, at alpha 0.05 (tests/lab/test_family.py):

- Noise of equal spread that is normal, heavy-tailed or skewed: at most 0.06, for any number of arms, counts or seeds.
- Equal noise in two clusters, such as runs that get stuck: at most 0.08 to 20 arms, 0.11 to 100.
- Noise up to 10 times larger in some arms, which few runs do not show: at most 0.2 with 3 runs of an arm, 0.15 with 5,
  0.1 with 10 (to 20 arms).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from tformer.lab.statistics import power
from tformer.lab.statistics.noise import Floor, Interval, Runs, finite, noise_floor

LEAST = 3  # finite runs of an arm, and of the baseline, below which there is no label
ROUNDING = 2 * float(np.finfo(np.float32).eps)  # a spread below this share of the values is float32's, not the runs'
OWN = 0.15  # the largest p of an arm's own test that agrees with a label
UNEQUAL = 0.015  # level of the test of equal noise over the arms: a false alarm costs power, more so for many arms
SEEDS_MATTER = 0.05  # level of the F test by which an arm's own test takes out what seeds have in common
DRAWS, BLOCK = 100_000, 10_000  # families simulated for the largest |t|, and how many at once

BETTER, WORSE, WITHIN, UNKNOWN = 'better', 'worse', 'within noise', 'noise unknown'
NOT_YET, FEW, NO_RESULT = 'not yet', 'too few runs', 'no result'
FAILS, BASELINE_FAILS = 'fails more often', 'baseline fails more often'
DUNNETT, WELCH, ORDERS = 'Dunnett', 'Welch and Holm', 'all orders and Holm'


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The decision on one arm, in the metric's units; nan or None where there is no test."""

    label: str
    method: str = ''  # the test, DUNNETT, WELCH or ORDERS
    difference: float = math.nan  # arm - baseline, within seeds where seeds are blocks
    interval: Interval | None = None  # of the difference; the intervals of all arms hold together, at 1 - alpha
    p: float = math.nan  # adjusted for all arms
    seeds: int | None = None  # a side, with which a true difference of this size is seen with probability 0.8


def verdicts(
    arms: Mapping[str, Runs], baseline: str, lower_is_better: bool, alpha: float = 0.05, ended: bool = True
) -> dict[str, Verdict]:
    """Returns the verdict on every arm but the baseline; `ended`: every declared run has ended."""
    floors = {name: noise_floor(runs) for name, runs in arms.items()}
    others = [name for name in arms if name != baseline]
    if not ended:
        return dict.fromkeys(others, Verdict(NOT_YET))
    tested = [name for name in others if min(floors[name].n, floors[baseline].n) >= LEAST]
    found = {name: _untested(floors[name], floors[baseline]) for name in others if name not in tested}
    if not tested:
        return found
    decision = decide(*table([finite(arms[name]) for name in [baseline, *tested]]), alpha)
    paired = decision.blocked and len(tested) == 1
    for i, name in enumerate(tested):
        difference, half, p, sd = (float(each[i]) for each in decision[:4])
        orders = half == 0  # no noise is shown
        effect = difference / sd / (math.sqrt(2) if paired else 1) if sd else math.nan
        seeds = power.seeds_needed(effect, paired, alpha / len(tested))
        found[name] = Verdict(
            label(difference, p, lower_is_better, alpha, floors[name], floors[baseline], orders),
            ORDERS if orders else DUNNETT if decision.pooled else WELCH,
            difference,
            None if orders else (difference - half, difference + half),
            p,
            seeds and max(seeds, LEAST),
        )
    return {name: found[name] for name in others}


def _untested(arm: Floor, baseline: Floor) -> Verdict:
    return Verdict(FEW if arm.n else WORSE if arm.failed and baseline.n else NO_RESULT)


def label(
    difference: float, p: float, lower_is_better: bool, alpha: float, arm: Floor, baseline: Floor, orders: bool = False
) -> str:
    """Returns the label of an arm that was tested; `orders`: no run shows any noise."""
    if not p <= alpha:
        return UNKNOWN if orders and p < 1 else WITHIN
    failed, baseline_failed = (side.failed / (side.n + side.failed) for side in (arm, baseline))
    if (difference < 0) == lower_is_better:
        return FAILS if failed > baseline_failed else BETTER
    return BASELINE_FAILS if baseline_failed > failed else WORSE


def near_best(arms: Mapping[str, Runs], best: str, alpha: float = 0.05) -> list[str]:
    """Returns the arms that are not told apart from `best`, which has the best mean of them.

    The best is chosen by the same runs, so p is that of the largest difference of any two arms (Tukey's range, of
    unequal counts by Kramer 1956): if some arms equal the true best, all of them are returned in at least 1 - alpha of
    such families, however the best is picked (cf. Hsu 1984). Arms with fewer than LEAST finite runs are left out.
    """
    runs = {name: found for name in arms if len(found := finite(arms[name])) >= LEAST}
    others = [name for name in runs if name != best]
    if best not in runs or not others:
        return []
    decision = decide(*table([runs[name] for name in [best, *others]]), alpha, any_pair=True)
    return [name for name, p in zip(others, decision.p, strict=True) if p > alpha]


# -------------------------------------------------------------------------------------------------- the test


class Decision(NamedTuple):
    """The test of K arms in each of some families, whose shape [...] stands for."""

    difference: np.ndarray  # arm - baseline, within seeds where seeds are blocks, [..., K]
    half: np.ndarray  # half of its interval's width; 0 where no noise is shown, [..., K]
    p: np.ndarray  # adjusted for all arms, [..., K]
    sd: np.ndarray  # the noise of a run by which it is tested, [..., K]
    pooled: np.ndarray  # whether noise is pooled, [...]
    blocked: bool  # whether seeds are blocks


def table(arms: list[dict]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (values, arm, seed) of runs {seed: value}, [N] each, for `decide`."""
    seeds: dict = {}
    rows = [
        (value, i, seeds.setdefault(seed, len(seeds))) for i, runs in enumerate(arms) for seed, value in runs.items()
    ]
    values, arm, seed = map(np.array, zip(*rows, strict=True))
    return values, arm, seed


def decide(
    values: np.ndarray, arm: np.ndarray, seed: np.ndarray, alpha: float = 0.05, any_pair: bool = False
) -> Decision:
    """Returns the test of every arm against arm 0, the baseline.

    Args:
      values: the metric of N runs, in each of some families, [..., N].
      arm: of each run, 0 to K, [N]; each has LEAST runs.
      seed: of each run, from 0 on, the same number where arms share it, [N].
      alpha: of the intervals.
      any_pair: the baseline is the arm with the best mean, so that p allows for every pair of arms.
    """
    groups, size = np.eye(arm.max() + 1)[arm], np.bincount(arm)
    K = len(size) - 1
    scale = np.maximum(abs(values).max(-1, keepdims=True), 1e-300)
    values = values / scale  # so that no square overflows
    largest = np.stack([abs(values[..., arm == i]).max(-1) for i in range(K + 1)], -1)
    tiny = ROUNDING * np.maximum(largest[..., 1:], largest[..., :1]) + 1e-150  # not 0, also squared
    blocked = shares_seeds(arm, seed)
    plain = _fit(values, groups, K + 1)
    fit = _fit(values, np.concatenate([groups, np.eye(seed.max() + 1)[seed]], 1), K + 1) if blocked else plain
    df = round(fit.freedom.sum())
    noise = np.sqrt(fit.squares.sum(-1, keepdims=True) / df)
    error = np.maximum(noise, ROUNDING) * np.sqrt(np.diag(fit.covariance))
    comparisons = K * (K + 1) / 2 if any_pair else K
    p, critical = _largest(abs(fit.difference) / error, alpha, comparisons, _simulated(*_design(fit, any_pair), df), df)
    least, most = np.minimum(size[1:], size[0]), size[1:] + size[0]
    orders = np.where(size[1:] == size[0], 2, 1) / special.comb(most, least)
    own = _own(plain, size, tiny, alpha / comparisons, orders)
    own_seeds = _seeds_matter(plain, fit) if blocked else np.zeros_like(noise, bool)
    if blocked:
        within = _own(fit, size, tiny, alpha / comparisons, 2.0 ** (1 - least))
        own = tuple(np.where(own_seeds, *each) for each in zip(within, own, strict=True))
    own_p, own_half, own_sd = own
    if K > 1 or not blocked:  # a single arm's pairs are its own test already
        p = np.where(own_p > OWN, np.maximum(p, own_p), p)
    alone = np.minimum(own_p * comparisons, 1) if any_pair else holm(own_p)
    pooled = (noise > ROUNDING)[..., 0] & _equal_noise(plain, fit, blocked)
    mask = pooled[..., None]
    return Decision(
        np.where(mask | own_seeds, fit.difference, plain.difference) * scale,
        np.where(mask, critical * error, own_half) * scale, np.where(mask, p, alone),
        np.where(mask, noise, own_sd) * scale, pooled, blocked,
    )  # fmt: skip


def shares_seeds(arm: np.ndarray, seed: np.ndarray) -> bool:
    """Returns whether each arm shares LEAST seeds with the baseline, and half of those of the smaller side."""
    first, *others = (set(seed[arm == i].tolist()) for i in range(arm.max() + 1))
    return all(len(first & each) >= max(LEAST, min(len(first), len(each)) / 2) for each in others)


class _Fit(NamedTuple):
    """Least squares of the effects of arms, and of seeds where they are blocks."""

    difference: np.ndarray  # [..., K]
    covariance: np.ndarray  # of the differences, for noise of variance 1, [K, K]
    squares: np.ndarray  # squared residuals of each arm, the baseline's first, [..., K + 1]
    freedom: np.ndarray  # the degrees of freedom that each arm has of them, [K + 1]


def _fit(values: np.ndarray, design: np.ndarray, arms: int) -> _Fit:
    """Returns the fit of values [..., N] by a design [N, P], whose first columns are those of the arms."""
    products = design.T @ design
    if arms == design.shape[1]:  # exact, so that an arm does not see rounding of another that diverged
        inverse = np.diag(1 / np.diag(products))
    else:
        cut = len(products) * np.finfo(float).eps  # rounding of the value that is 0: arms and seeds share a constant
        inverse = np.linalg.pinv(products, rcond=cut, hermitian=True)
    effects = values @ design @ inverse
    residuals = values - effects @ design.T
    leverage = (design @ inverse * design).sum(-1)
    contrasts = np.concatenate([-np.ones((arms - 1, 1)), np.eye(arms - 1)], 1)
    return _Fit(
        effects[..., 1:arms] - effects[..., :1],
        contrasts @ inverse[:arms, :arms] @ contrasts.T,
        residuals**2 @ design[:, :arms],
        (1 - leverage) @ design[:, :arms],
    )


def _equal_noise(plain: _Fit, fit: _Fit, blocked: bool) -> np.ndarray:
    """Returns whether no arm has so large a share of the squares that its noise is larger, [...].

    Of normal runs with equal noise, a share has a beta distribution. Blocks spread an arm's noise over the others, and
    without blocks the seeds' effects hide it, so that both are looked at. A single arm's pairs need no equal noise.
    """
    K = len(plain.freedom) - 1
    if blocked and K == 1:
        return np.ones(plain.squares.shape[:-1], bool)
    least = np.ones(plain.squares.shape)
    for each in (plain, fit) if blocked else (plain,):
        squares = np.maximum(each.squares, 1e-300)
        others = 1 - squares / squares.sum(-1, keepdims=True)
        own, rest = each.freedom, each.freedom.sum() - each.freedom
        least = np.minimum(least, 2 * special.betainc(rest / 2, own / 2, np.clip(others, 0, 1)))
    arms, baseline = max(UNEQUAL, 0.2 / max(K, 2)), max(1.5 * UNEQUAL, 0.1 / max(K, 2))
    return (least[..., 0] > baseline) & (least[..., 1:].min(-1) > arms / K)


def _seeds_matter(plain: _Fit, fit: _Fit) -> np.ndarray:
    """Returns whether an F test sees effects of seeds that all arms share, [..., 1]."""
    df, removed = fit.freedom.sum(), plain.freedom.sum() - fit.freedom.sum()
    left = np.maximum(fit.squares.sum(-1, keepdims=True), ROUNDING**2)
    F = np.maximum(plain.squares.sum(-1, keepdims=True) / left - 1, 0) * df / removed
    return special.fdtrc(removed, df, F) < SEEDS_MATTER


def _own(fit: _Fit, size: np.ndarray, tiny: np.ndarray, alpha: float, orders: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns (p, half of the interval's width, noise) of each arm's own test, [..., K].

    It is Welch's, or Student's where that has the larger p: a few runs that happen to be in one cluster have a variance
    that is far too small, which Welch's takes at its word. Without spread, p is `orders`, or 1 for no difference.
    """
    parts = fit.squares / fit.freedom / size
    error = np.sqrt(parts[..., 1:] + parts[..., :1])
    least = (parts**2 / fit.freedom)[..., 1:] + (parts**2 / fit.freedom)[..., :1]
    df = np.maximum(error**4 / np.maximum(least, 1e-300), 1.0)
    both, counts = fit.freedom[1:] + fit.freedom[0], 1 / size[1:] + 1 / size[0]
    student = np.sqrt((fit.squares[..., 1:] + fit.squares[..., :1]) / both * counts)
    spread = error > tiny
    t = [
        2 * special.stdtr(n, -abs(fit.difference) / np.where(spread, e, 1.0)) for e, n in ((error, df), (student, both))
    ]
    p = np.where(spread, np.maximum(*t), np.where(abs(fit.difference) > tiny, orders, 1.0))
    half = np.maximum(error * special.stdtrit(df, 1 - alpha / 2), student * special.stdtrit(both, 1 - alpha / 2))
    return p, np.where(spread, half, 0.0), np.where(spread, error / np.sqrt(counts), 0.0)


def _design(fit: _Fit, any_pair: bool) -> tuple[bytes | None, int]:
    """Returns (the correlation of the differences, None if of any pair, and their number), by which draws are kept."""
    error = np.sqrt(np.diag(fit.covariance))
    return None if any_pair else np.round(fit.covariance / np.outer(error, error), 9).tobytes(), len(error)


def _largest(t: np.ndarray, alpha: float, comparisons: float, draws: np.ndarray, df: int) -> tuple[np.ndarray, float]:
    """Returns (the p of each |t| among the largest of equal arms [..., K], the largest |t| at alpha).

    Neither exceeds Bonferroni's, which is exact in the tail where few draws lie.
    """
    p = (1 + DRAWS - np.searchsorted(draws, t)) / (1 + DRAWS)
    bonferroni = float(special.stdtrit(df, 1 - alpha / comparisons / 2))
    critical = min(float(np.quantile(draws, 1 - alpha)), bonferroni)
    return np.minimum(p, 2 * comparisons * special.stdtr(df, -t)), critical


@functools.lru_cache(maxsize=64)
def _simulated(correlation: bytes | None, K: int, df: int) -> np.ndarray:
    """Returns the largest |t| of K equal arms against a baseline, or of all pairs of K + 1 arms, rising, [DRAWS]."""
    rng = np.random.default_rng(0)
    root = np.eye(K)
    if correlation is not None:
        variances, vectors = np.linalg.eigh(np.frombuffer(correlation).reshape(K, K))
        root = vectors * np.sqrt(np.maximum(variances, 0))
    largest = np.empty(DRAWS)
    for start in range(0, DRAWS, BLOCK):
        if correlation is None:
            drawn = np.ptp(rng.normal(size=(BLOCK, K + 1)), axis=1) / math.sqrt(2)
        else:
            drawn = abs(rng.normal(size=(BLOCK, K)) @ root.T).max(1)
        largest[start : start + BLOCK] = drawn
    return np.sort(largest / np.sqrt(rng.chisquare(df, DRAWS) / df))


def holm(p: npt.ArrayLike) -> np.ndarray:
    """Returns the adjusted p-values of families [..., m] (Holm 1979). nan stays nan and counts as a member."""
    p = np.asarray(p, np.float64)
    order = np.argsort(p, -1)  # nan last
    ranked = np.take_along_axis(p, order, -1) * np.arange(p.shape[-1], 0, -1)
    adjusted = np.empty_like(p)
    np.put_along_axis(adjusted, order, np.minimum(np.maximum.accumulate(ranked, -1), 1), -1)
    return adjusted
