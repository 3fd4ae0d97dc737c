"""Learning curves at matched cost: the metric at equal steps, tokens, FLOPs or seconds, and the cost of equal metrics.

A curve is (x, y): the increasing cost and the metric at that cost, [n] each. It is interpolated linearly and never
extrapolated. A run has failed where y is nan or infinite.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tformer.errors import UserError

Curve = tuple[Sequence[float] | np.ndarray, Sequence[float] | np.ndarray]


def _points(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    x, y = (np.asarray(values, np.float64) for values in curve)
    if x.shape != y.shape or x.ndim != 1 or not x.size:
        raise UserError(f'a curve needs equally many x and y, and at least one: {list(x.shape)} and {list(y.shape)}')
    if not np.isfinite(x).all() or (np.diff(x) <= 0).any():
        bad = int(np.argmax(~np.isfinite(x) | (np.diff(x, prepend=-np.inf) <= 0)))
        raise UserError(
            f'the x of a curve must increase: x[{bad}]={x[bad]:g}' + (f' after {x[bad - 1]:g}' if bad else '')
        )
    return x, y


def shared_range(curves: Iterable[Curve]) -> tuple[float, float]:
    """Returns the first and last x, in its own units, that every curve reaches; without any it is a `UserError`."""
    ends = [_points(curve)[0][[0, -1]] for curve in curves]
    low, high = (max(first for first, _ in ends), min(last for _, last in ends)) if ends else (0.0, -1.0)
    if low > high:
        raise UserError(f'curves share no x: {", ".join(f"{a:g} to {b:g}" for a, b in ends) or "there are none"}')
    return float(low), float(high)


def at(curve: Curve, x: float) -> float:
    """Returns y at x, in the metric's units; not finite where the run has failed by then. x must be on the curve."""
    xs, ys = _points(curve)
    if not xs[0] <= x <= xs[-1]:
        raise UserError(f'x={x:g} is outside the curve, which has {xs[0]:g} to {xs[-1]:g}')
    return float(np.interp(x, xs, ys))


def matched(arms: Mapping[str, Mapping[Any, Curve | None]]) -> tuple[float, dict[str, dict[Hashable, float]]]:
    """Returns (x, {arm: {seed: y at x}}) for `comparison.summary`, where x is the last that all curves reach.

    A run that is None has failed, and has nan at x. Curves that share no x are a `UserError`.
    """
    _, x = shared_range(curve for runs in arms.values() for curve in runs.values() if curve is not None)
    values = {
        arm: {seed: math.nan if c is None else at(c, x) for seed, c in runs.items()} for arm, runs in arms.items()
    }
    return x, values


def first_reach(curve: Curve, y: float, lower_is_better: bool) -> float:
    """Returns the first x, in its units, at which the curve is y or better.

    Raises:
      UserError: it never is, it failed before, or its first point is already better, so that x is unknown.
    """
    xs, ys = _points(curve)
    met = ys <= y if lower_is_better else ys >= y
    if not met.any():
        seen = ys[np.isfinite(ys)]
        best = f'{seen.min() if lower_is_better else seen.max():g}' if seen.size else 'none'
        raise UserError(f'never reaches {y:g}; its best is {best}')
    i = int(np.argmax(met))
    if not np.isfinite(ys[: i + 1]).all():
        raise UserError(f'reaches {y:g} at {xs[i]:g}, but failed before that')
    if i == 0 and ys[0] != y:
        raise UserError(f'is better than {y:g} from its first point on, with {ys[0]:g} at {xs[0]:g}')
    if i == 0:
        return float(xs[0])
    return float(xs[i - 1] + (xs[i] - xs[i - 1]) * (y - ys[i - 1]) / (ys[i] - ys[i - 1]))


def speed_up(arm: Curve, baseline: Curve, y: float, lower_is_better: bool) -> float:
    """Returns how many times the arm's x the baseline needs for y (`first_reach`): above 1 the arm is faster."""
    spent = first_reach(arm, y, lower_is_better)
    if spent <= 0:
        raise UserError(f'the arm has y={y:g} at x={spent:g}: no factor says how much faster that is')
    return first_reach(baseline, y, lower_is_better) / spent
