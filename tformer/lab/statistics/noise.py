"""The noise floor of one config: the spread of its runs over seeds, and the difference that they could detect.

Runs are {seed: metric}. A seed is any key that two arms have in common if they share that source of noise: a number, or
a number and a data order. A value that is None, nan or infinite is a failed run.
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
    """The noise of one config under other seeds, in the metric's units; nan or None below two finite runs.

    Attributes:
      n: finite runs.
      failed: the others.
      mean: of the runs.
      interval: of the mean, by t, at 1 - alpha.
      sd: standard deviation of a run.
      sd_interval: of it, by chi-square of normal runs (Snedecor & Cochran 1989, 5.11).
      detectable: least difference of two arms of `n` unpaired runs each that a t test sees with chance 0.8.
    """

    n: int
    failed: int
    mean: float = math.nan
    interval: Interval | None = None
    sd: float = math.nan
    sd_interval: Interval | None = None
    detectable: float = math.nan


def noise_floor(runs: Runs, seeds: int | None = None, alpha: float = 0.05) -> Floor:
    """Returns the floor that repeated runs {seed: metric} or [n] show; `seeds` is the n of `detectable`, if another."""
    values = np.array(list(finite(runs).values()))
    n, failed = len(values), len(runs) - len(values)
    if n < 2:
        return Floor(n, failed, float(values[0]) if n else math.nan)
    mean, sd = float(values.mean()), float(values.std(ddof=1))
    half = float(special.stdtrit(n - 1, 1 - alpha / 2)) * sd / math.sqrt(n)
    low, high = (sd * math.sqrt((n - 1) / special.chdtri(n - 1, tail)) for tail in (alpha / 2, 1 - alpha / 2))
    detectable = sd * power.detectable_effect(seeds or n, paired=False, alpha=alpha)
    return Floor(n, failed, mean, (mean - half, mean + half), sd, (low, high), detectable)
