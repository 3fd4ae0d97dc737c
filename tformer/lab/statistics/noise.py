"""The noise floor of one config: the spread of its runs over seeds, and the difference that they could detect.

Runs are {seed: metric}. A seed is any key that two arms have in common if they share that source of noise: a number, or
a number and a data order. A run whose value is None, nan or infinite has failed.
"""

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import special

from tformer.lab.statistics import power

Runs = Mapping[Any, float | None] | Sequence[float | None] | np.ndarray
Interval = tuple[float, float]


def finite(runs: Runs) -> dict[Hashable, float]:
    """Returns the runs that have not failed; [n] values have the seeds 0 to n - 1."""
    items = runs.items() if isinstance(runs, Mapping) else enumerate(runs)
    return {seed: float(value) for seed, value in items if value is not None and math.isfinite(value)}


@dataclasses.dataclass(frozen=True)
class Floor:
    """The noise of one config under other seeds, in the metric's units; nan or None below two finite runs."""

    n: int  # finite runs
    failed: int  # the others
    mean: float = math.nan  # of the runs
    interval: Interval | None = None  # of the mean, by t, at 1 - alpha
    sd: float = math.nan  # standard deviation of a run
    sd_interval: Interval | None = None  # of it, by chi-square of normal runs (Snedecor & Cochran 1989, 5.11)
    detectable: float = math.nan  # least difference of two arms of `n` unpaired runs that a t test sees, chance 0.8


def noise_floor(runs: Runs, seeds: int | None = None, alpha: float = 0.05) -> Floor:
    """Returns the noise floor of repeated runs {seed: metric} or [n]; `seeds` replaces the n of `detectable`."""
    values = np.array(list(finite(runs).values()))
    n, failed = len(values), len(runs) - len(values)
    if n < 2:
        return Floor(n, failed, float(values[0]) if n else math.nan)
    _, exponent = np.frexp(abs(values).max())
    scaled = np.ldexp(values, -exponent)  # exactly, so that no square overflows
    with np.errstate(over='ignore'):
        mean, sd = np.ldexp([scaled.mean(), scaled.std(ddof=1)], exponent).tolist()
    half = float(special.stdtrit(n - 1, 1 - alpha / 2)) * sd / math.sqrt(n)
    low, high = (sd * math.sqrt((n - 1) / special.chdtri(n - 1, tail)) for tail in (alpha / 2, 1 - alpha / 2))
    detectable = sd * power.detectable_effect(seeds or n, paired=False, alpha=alpha)
    return Floor(n, failed, mean, (mean - half, mean + half), sd, (low, high), detectable)
