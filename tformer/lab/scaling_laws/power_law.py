"""Power laws of one variable, and the robust fit of a floor plus power laws that every scaling law here uses.

Log loss is fitted; the floor and the terms are sums of exp(a - p log x), so none can become negative. Shapes: R runs,
T terms, P = 1 + 2 T parameters (log floor, log coefficients a, exponents p), M resamples.
"""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import threadpoolctl
from scipy import optimize, stats

from tformer.errors import UserError

DELTA = 1e-3  # of Huber's loss on log loss: larger residuals count as outliers (Hoffmann et al. 2022, equation 3)
EXPONENTS = (0.1, 0.3, 0.6, 1.0, 2.0)  # each start of a fit has some of these
HUGE = 700.0  # exp of a larger log coefficient overflows float64
ONE_THREAD = threadpoolctl.threadpool_limits.wrap(1, 'blas')  # on 5 x 5 matrices, more threads are 80 times slower
AGAIN = (0.7, 1.4)  # a resample also starts from the fitted exponents times these


def checked(least: int, **columns: Any) -> list[np.ndarray]:
    """Returns the columns, float64 [R].

    Raises:
      UserError: their lengths differ, R < `least`, or a value is not a positive finite number.
    """
    arrays = {name: np.asarray(values, np.float64).reshape(-1) for name, values in columns.items()}
    if len({len(values) for values in arrays.values()}) > 1:
        raise UserError(
            f'every run needs one value of each: {", ".join(f"{name} has {len(v)}" for name, v in arrays.items())}'
        )
    for name, values in arrays.items():
        wrong = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
        if wrong.size:
            raise UserError(f'{name}[{wrong[0]}]={values[wrong[0]]:g} is not a positive finite number')
    count = len(next(iter(arrays.values())))
    if count < least:
        raise UserError(f'{", ".join(arrays)}: {count} runs are too few, this needs {least} or more')
    return list(arrays.values())


def differing(least: int, **columns: np.ndarray) -> None:
    """Raises UserError where a column has fewer than `least` different values."""
    for name, values in columns.items():
        found = np.unique(values)
        if len(found) < least:
            listed = ', '.join(f'{value:.4g}' for value in found)
            raise UserError(f'{name} takes too few values ({listed}), this needs {least} or more')


# ------------------------------------------------------------------------------------------------- y = k x^exponent
@dataclasses.dataclass(frozen=True)
class PowerLaw:
    """y = k x^exponent."""

    k: float
    exponent: float
    exponent_interval: tuple[float, float]  # Student's


def regress(x: Any, y: Any, level: float = 0.95) -> PowerLaw:
    """Returns the least-squares line of log y in log x.

    Raises:
      UserError: fewer than three points or two different x, or a value that is not positive and finite.
    """
    x, y = checked(3, x=x, y=y)
    differing(2, x=x)
    line = stats.linregress(np.log(x), np.log(y))
    half = stats.t.ppf((1 + level) / 2, len(x) - 2) * line.stderr
    return PowerLaw(
        k=float(np.exp(line.intercept)),
        exponent=float(line.slope),
        exponent_interval=(float(line.slope - half), float(line.slope + half)),
    )


# ------------------------------------------------------------------------------------------ floor + sum of k_t x_t^-p_t
def _terms(theta_P: np.ndarray, logs_TR: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log of the sum [R] and its derivatives [P, R] at parameters [P] and log x [T, R]."""
    T = len(logs_TR)
    power_TR = theta_P[1 : T + 1, None] - theta_P[T + 1 :, None] * logs_TR
    terms = np.concatenate([np.full_like(logs_TR[:1], theta_P[0]), power_TR])
    log_sum_R = np.logaddexp.reduce(terms, axis=0)
    shares = np.exp(terms - log_sum_R)
    return log_sum_R, np.concatenate([shares, -shares[1:] * logs_TR])


def huber(
    theta_P: np.ndarray, logs_TR: np.ndarray, log_loss_R: np.ndarray, delta: float = DELTA
) -> tuple[float, np.ndarray]:
    """Returns the sum of Huber's losses of the log residuals and its gradient [P], in units of DELTA^2.

    It is a sum in small units, so that it is large: the optimizer's tolerances are absolute below 1 and would stop too
    soon at a mean (Besiroglu et al. 2024, section 3). A `delta` of infinity gives least squares.
    """
    log_sum_R, derivatives_PR = _terms(theta_P, logs_TR)
    off = log_sum_R - log_loss_R
    clipped = np.clip(off, -delta, delta)
    return float(clipped @ (off - clipped / 2)) / DELTA**2, derivatives_PR @ clipped / DELTA**2


def _descend(
    theta_P: np.ndarray, logs_TR: np.ndarray, log_loss_R: np.ndarray, delta: float
) -> tuple[float, np.ndarray]:
    """Returns (the minimum, its parameters [P]) that L-BFGS finds from `theta_P`."""
    # In coordinates where the Gauss-Newton Hessian at the start is the identity: floor, coefficients and exponents are
    # so correlated that L-BFGS would take tiny steps in their own.
    _, derivatives_PR = _terms(theta_P, logs_TR)
    hessian = derivatives_PR @ derivatives_PR.T / DELTA**2
    ridge = 1e-9 * np.trace(hessian) * np.eye(len(hessian))
    axes = np.linalg.inv(np.linalg.cholesky(hessian + ridge)).T

    def objective(z: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = huber(theta_P + axes @ z, logs_TR, log_loss_R, delta)
        return value, axes.T @ gradient

    options = {'maxiter': 5000, 'maxfun': 10000, 'ftol': 1e-14, 'gtol': 1e-8, 'maxcor': 20}
    with np.errstate(all='ignore'):  # a line search may try a point that overflows; it then steps back
        found = optimize.minimize(objective, np.zeros_like(theta_P), jac=True, method='L-BFGS-B', options=options)
    return float(found.fun), theta_P + axes @ found.x


def _start(exponents: Iterable[float], logs_TR: np.ndarray, log_loss_R: np.ndarray) -> np.ndarray:
    """Returns [P] with these exponents and, by linear non-negative least squares, the best floor and coefficients."""
    p_T = np.array(list(exponents))
    terms = np.concatenate([np.ones_like(logs_TR[:1]), np.exp(-p_T[:, None] * logs_TR)])
    coefficients, _ = optimize.nnls((terms / np.exp(log_loss_R)).T, np.ones_like(log_loss_R))
    return np.concatenate([np.log(np.maximum(coefficients, 1e-3 * coefficients.max())), p_T])


def _best(starts: Iterable[np.ndarray], logs_TR: np.ndarray, log_loss_R: np.ndarray, delta: float) -> np.ndarray:
    return min((_descend(start, logs_TR, log_loss_R, delta) for start in starts), key=lambda found: found[0])[1]


@ONE_THREAD
def fit_sum(logs_TR: np.ndarray, log_loss_R: np.ndarray, delta: float = DELTA) -> np.ndarray:
    """Returns the parameters [P] with the least sum of Huber's losses, from a grid of starts."""
    centre_T1 = logs_TR.mean(1, keepdims=True)
    centred = logs_TR - centre_T1
    grid = itertools.product(EXPONENTS, repeat=len(logs_TR))
    theta_P = _best([_start(p, centred, log_loss_R) for p in grid], centred, log_loss_R, delta)
    return _shifted(theta_P[:, None], centre_T1)[:, 0]


def _shifted(theta_PM: np.ndarray, by_T1: np.ndarray) -> np.ndarray:
    """Returns the parameters of the same laws for log x + `by_T1`."""
    floor, coefficients, exponents = np.split(theta_PM, [1, 1 + len(by_T1)])
    return np.concatenate([floor, coefficients + exponents * by_T1, exponents])


@ONE_THREAD
def resample_sum(
    theta_P: np.ndarray, logs_TR: np.ndarray, log_loss_R: np.ndarray, resamples: int, seed: int, delta: float = DELTA
) -> np.ndarray:
    """Returns the fits of resampled runs, [P, M], each from the full fit `theta_P` and a few starts near it.

    Raises:
      UserError: some resamples have no law: an exponent is at or below zero, or a coefficient overflows float64.
    """
    T, centre_T1 = len(logs_TR), logs_TR.mean(1, keepdims=True)
    centred, here = logs_TR - centre_T1, _shifted(theta_P[:, None], -centre_T1)[:, 0]
    rng, fits = np.random.default_rng(seed), []
    for _ in range(resamples):
        rows = rng.integers(len(log_loss_R), size=len(log_loss_R))
        sample = centred[:, rows], log_loss_R[rows]
        fits.append(_best([here, *(_start(times * here[T + 1 :], *sample) for times in AGAIN)], *sample, delta))
    found_PM = _shifted(np.array(fits).T, centre_T1)
    lawless = int((~((found_PM[T + 1 :] > 0) & (np.abs(found_PM[1 : T + 1]) < HUGE)).all(0)).sum())
    if lawless:
        raise UserError(
            f'bootstrap: {lawless} of {resamples} resamples have no law; use more runs or a wider range of them'
        )
    return found_PM
