"""The compute-optimal size without a formula of the loss: Hoffmann et al. 2022, approach 1 (envelope of learning
curves, section 3.1) and approach 2 (iso-FLOP profiles, section 3.2).

N parameters, D tokens, loss in nats per token, C training FLOPs.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
from scipy import stats

from tformer.errors import UserError
from tformer.lab.scaling_laws import power_law

PER_TOKEN = 6.0  # training FLOPs per parameter and token
BUDGETS = 1500  # at which the envelope is read


def budgets(flops: np.ndarray, within: float = 1.1) -> np.ndarray:
    """Returns the index of each run's budget, in rising order of FLOPs.

    Runs that are neighbours in FLOPs share a budget if they differ by a factor below `within`.

    Raises:
      UserError: the runs of a budget span a factor above `within` squared.
    """
    order = np.argsort(flops, kind='stable')
    budget = np.empty(len(flops), int)
    budget[order] = np.cumsum(np.diff(np.log(flops[order]), prepend=np.log(flops.min())) > np.log(within))
    for b in range(budget.max() + 1):
        low, high = flops[budget == b].min(), flops[budget == b].max()
        if high > within**2 * low:
            raise UserError(
                f'flops: the runs from {low:.4g} to {high:.4g} do not form separate budgets; pass nominal ones'
            )
    return budget


# ------------------------------------------------------------------------------------------- approach 2: profiles
@dataclasses.dataclass(frozen=True)
class Minimum:
    """The bottom of one budget's parabola; the interval of N is (0, inf) where noise hides the curvature."""

    flops: float
    N: float
    N_interval: tuple[float, float]
    loss: float


@dataclasses.dataclass(frozen=True)
class Profiles:
    """The minima by budget, and N_opt = k C^exponent through them."""

    minima: tuple[Minimum, ...]
    law: power_law.PowerLaw


def profiles(N: Any, D: Any, loss: Any, flops: Any = None, level: float = 0.95) -> Profiles:
    """Fits each budget's loss by a parabola in log N, and the optimal sizes by a power law of the budget.

    The budgets are `flops`, or 6 N D where that is None.

    Raises:
      UserError: fewer than three budgets, fewer than four sizes in one, or a minimum outside the sizes of its budget.
    """
    N, D, loss = power_law.checked(12, N=N, D=D, loss=loss)
    _, C = power_law.checked(12, N=N, flops=PER_TOKEN * N * D if flops is None else flops)
    budget = budgets(C)
    if budget.max() < 2:
        raise UserError(f'flops: {budget.max() + 1} budgets are too few for a power law, this needs 3 or more')
    minima = []
    for b in range(budget.max() + 1):
        runs = budget == b
        minima.append(_minimum(float(np.exp(np.log(C[runs]).mean())), N[runs], loss[runs], level))
    law = power_law.regress([minimum.flops for minimum in minima], [minimum.N for minimum in minima], level)
    return Profiles(tuple(minima), law)


def _minimum(flops: float, N: np.ndarray, loss: np.ndarray, level: float) -> Minimum:
    if len(np.unique(N)) < 4:
        raise UserError(f'budget {flops:.3g}: a parabola needs 4 sizes or more, not {len(np.unique(N))}')
    centre = np.log(N).mean()
    powers = (np.log(N) - centre)[:, None] ** np.arange(3)
    inverse = np.linalg.inv(powers.T @ powers)
    height, slope, bend = inverse @ powers.T @ loss
    place = -slope / (2 * bend) if bend > 0 else -np.sign(slope) * np.inf
    if not powers[:, 1].min() <= place <= powers[:, 1].max():
        sizes, more = f'{N.min():.3g} to {N.max():.3g}', 'larger' if place > 0 else 'smaller'
        raise UserError(f'budget {flops:.3g}: the least loss lies outside the sizes run, {sizes}; run {more} ones')
    left = loss - powers @ (height, slope, bend)
    covariance = inverse * (left @ left) / (len(N) - 3)
    low, high = _root_interval(slope, 2 * bend, covariance[1:, 1:] * [[1, 2], [2, 4]], len(N) - 3, level)
    return Minimum(
        flops=flops,
        N=float(np.exp(centre + place)),
        N_interval=(float(np.exp(centre + low)), float(np.exp(centre + high))),
        loss=float(height + slope * place + bend * place**2),
    )


def _root_interval(slope: float, bend: float, covariance: np.ndarray, free: int, level: float) -> tuple[float, float]:
    """Returns the interval of the root of slope + bend m by Fieller's theorem; unbounded if `bend` may be 0."""
    t2 = stats.t.ppf((1 + level) / 2, free) ** 2
    a = bend**2 - t2 * covariance[1, 1]
    b = bend * slope - t2 * covariance[0, 1]
    c = slope**2 - t2 * covariance[0, 0]
    if a <= 0:
        return -np.inf, np.inf
    wide = np.sqrt(max(b**2 - a * c, 0.0))
    return (-b - wide) / a, (-b + wide) / a


# ------------------------------------------------------------------------------------------- approach 1: envelope
@dataclasses.dataclass(frozen=True)
class Envelope:
    """The least loss of any curve at each of several FLOPs, the size that has it, all [K], and N_opt = k C^exponent."""

    flops: np.ndarray
    loss: np.ndarray
    N: np.ndarray
    law: power_law.PowerLaw


def envelope(curves: Iterable[tuple[float, Any, Any]], level: float = 0.95) -> Envelope:
    """Returns the lower envelope of learning curves, and the power law of the best size.

    The law is fitted to the points where one size overtakes another: there the geometric mean of both is the best size.
    So the smallest and the largest size, which are best only because no others were run, do not bias it, and its
    interval counts overtakings, not points of the envelope. A curve that ends was not overtaken.

    Args:
      curves: (N, rising FLOPs so far, the smoothed loss there); several may have the same size.

    Raises:
      UserError: fewer than three overtakings, FLOPs that do not rise, or a value that is not positive and finite.
    """
    read = []
    for N, flops, loss in curves:
        flops, loss = power_law.checked(2, flops=flops, loss=loss)
        if not (np.diff(flops) > 0).all():
            raise UserError(f'the curve of N={N:.4g}: its flops do not rise at each point')
        read.append((float(N), np.log(flops), np.log(loss)))
    (every,) = power_law.checked(1, N=[N for N, _, _ in read])
    sizes = np.unique(every)
    ends = [end for _, x, _ in read for end in (x[0], x[-1])]
    log_C = np.linspace(min(ends), max(ends), BUDGETS)
    height = np.full((len(sizes), BUDGETS), np.inf)
    for N, x, y in read:
        row = height[np.searchsorted(sizes, N)]
        np.minimum(row, np.interp(log_C, x, y, left=np.inf, right=np.inf), out=row)
    best = height.argmin(0)
    known = np.isfinite(height.min(0))
    law = _overtakings(log_C, height, sizes, best, level)
    return Envelope(np.exp(log_C[known]), np.exp(height.min(0)[known]), sizes[best[known]], law)


def _overtakings(
    log_C: np.ndarray, height: np.ndarray, sizes: np.ndarray, best: np.ndarray, level: float
) -> power_law.PowerLaw:
    places: dict[tuple[int, int], list[float]] = {}
    for i in np.flatnonzero(best[1:] != best[:-1]):
        pair = sorted(best[i : i + 2].tolist())
        if np.isfinite(height[pair, i : i + 2]).all():
            places.setdefault((pair[0], pair[1]), []).append(log_C[i : i + 2].mean())
    if len(places) < 3:
        raise UserError(
            f'of {len(sizes)} sizes, overtakings on the envelope: {len(places)}; a power law needs 3 or more'
        )
    x = [float(np.exp(np.mean(found))) for found in places.values()]
    return power_law.regress(x, [float(np.sqrt(sizes[i] * sizes[j])) for i, j in places], level)
