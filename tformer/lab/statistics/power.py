"""The power of the t test by the noncentral t distribution, and the number of runs that decide a comparison."""

import bisect
import functools
import math

import numpy as np
from scipy import optimize, special

MOST = 10_000  # runs; a comparison that needs more is reported as undecidable


def power(effect: float, n: int, paired: bool = True, alpha: float = 0.05) -> float:
    """Returns the chance that a two-sided t test of n >= 2 pairs, or of n runs a side, sees a true effect.

    The effect is the difference in standard deviations of a pair's difference (d_z) or of a run (d) (Cohen 1988, 2).
    """
    effect = abs(effect)
    df, noncentral = (n - 1, effect * math.sqrt(n)) if paired else (2 * n - 2, effect * math.sqrt(n / 2))
    if math.isnan(effect):
        return math.nan
    t = special.stdtrit(df, 1 - alpha / 2)
    below, unseen = np.nan_to_num(special.nctdtr(df, noncentral, [-t, t]))  # nan stands for shares below 1e-12
    return float(below + 1 - unseen)


def seeds_needed(effect: float, paired: bool = True, alpha: float = 0.05, chance: float = 0.8) -> int | None:
    """Returns the least n >= 2 with `power(effect, n) >= chance`; None where that is above `MOST` or `effect` is nan.

    For an observed effect this is what would decide a true effect of that size. It is too few where the effect was
    selected because it is large, or comes from few runs (Gelman & Carlin 2014).
    """
    effect = min(abs(effect), 1e3)  # where two are enough already
    n = 2 + bisect.bisect_left(range(2, MOST + 1), True, key=lambda n: power(effect, n, paired, alpha) >= chance)
    return n if n <= MOST else None


@functools.cache
def detectable_effect(n: int, paired: bool = True, alpha: float = 0.05, chance: float = 0.8) -> float:
    """Returns the least effect with `power(effect, n) = chance`, in the units of `power`; infinite below two runs."""
    if n < 2:
        return math.inf
    high = 1.0
    while power(high, n, paired, alpha) < chance:
        high *= 2
    return float(optimize.brentq(lambda effect: power(effect, n, paired, alpha) - chance, 0.0, high))
