"""Scaling laws of finished runs: loss = E + A / N^alpha + B / D^beta, and the compute-optimal size that follows.

Hoffmann et al. 2022, approach 3 (section 3.3), as corrected by Besiroglu et al. 2024. N parameters, D tokens, loss in
nats per token, C training FLOPs. Approaches 1 and 2 are in `isoflop`.
"""

import dataclasses
from typing import Any

import numpy as np

from tformer.errors import UserError
from tformer.lab.scaling_laws import isoflop, power_law

RUNS = 6  # one more than the fitted numbers
VALUES = 3  # of N and of D: with two, the term cannot be told from the floor
BUDGET = 1.5  # runs whose C differ by a smaller factor count as one budget


@dataclasses.dataclass(frozen=True)
class Law:
    """loss = E + A / N^alpha + B / D^beta; of a bootstrap, each number is an array [M]."""

    E: Any  # the irreducible loss, nats: the limit of infinite parameters and tokens
    A: Any
    B: Any
    alpha: Any
    beta: Any

    def predict(self, N: Any, D: Any) -> Any:
        N, D = np.asarray(N, np.float64), np.asarray(D, np.float64)
        return self.E + self.A * N**-self.alpha + self.B * D**-self.beta

    @property
    def size_exponent(self) -> Any:
        """The a of N_opt ~ C^a; tokens have 1 - a."""
        return self.beta / (self.alpha + self.beta)

    def optimal(self, flops: Any, per_token: float = isoflop.PER_TOKEN) -> tuple[Any, Any]:
        """Returns the N and D of the least loss on `flops` = `per_token` N D (equation 4)."""
        product = np.asarray(flops, np.float64) / per_token
        G = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        return G * product**self.size_exponent, product ** (1 - self.size_exponent) / G


def _checked(N: Any, D: Any, loss: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    N, D, loss = power_law.checked(RUNS, N=N, D=D, loss=loss)
    power_law.differing(VALUES, N=N, D=D, loss=loss)
    if abs(np.corrcoef(np.log(N), np.log(D))[0, 1]) > 0.9999:
        raise UserError('D is a power of N in all runs, so their terms cannot be told apart; vary one alone')
    return N, D, loss


def fit(N: Any, D: Any, loss: Any, delta: float = power_law.DELTA) -> Law:
    """Returns the law with the least sum of Huber's losses on log loss; an infinite `delta` gives least squares.

    N, D and loss are [R], with the D trained on when the loss was measured.

    Raises:
      UserError: fewer than six runs, fewer than three values of N or of D, a value that is not positive and finite, D
        that is a power of N, or a loss that does not fall with one of them.
    """
    N, D, loss = _checked(N, D, loss)
    e, a, b, alpha, beta = power_law.fit_sum(np.log([N, D]), np.log(loss), delta).tolist()
    for name, log_coefficient, exponent in (('N', a, alpha), ('D', b, beta)):
        if exponent <= 0 or abs(log_coefficient) > power_law.HUGE:
            raise UserError(f'the loss does not fall with {name} as a power: fitted exponent {exponent:.3g}')
    return Law(float(np.exp(e)), float(np.exp(a)), float(np.exp(b)), alpha, beta)


def bootstrap(
    N: Any, D: Any, loss: Any, law: Law, resamples: int = 200, seed: int = 0, delta: float = power_law.DELTA
) -> Law:
    """Returns the laws of resampled runs, each number [M]; `law` is the fit of all runs.

    Raises:
      UserError: as `fit`, or some resamples have no law.
    """
    N, D, loss = _checked(N, D, loss)
    theta = np.array([*np.log(np.maximum([law.E, law.A, law.B], 1e-300)), law.alpha, law.beta])
    e, a, b, alpha, beta = power_law.resample_sum(theta, np.log([N, D]), np.log(loss), resamples, seed, delta)
    return Law(np.exp(e), np.exp(a), np.exp(b), alpha, beta)


def intervals(laws: Law, flops: Any = (), level: float = 0.95) -> dict[str, tuple[Any, Any]]:
    """Returns percentiles (low, high) of the numbers in the laws of `bootstrap`, by name.

    They are the five numbers of a law, `size_exponent`, and the optimal `N` and `D` at budgets `flops` [K], [K] each.
    """
    samples = {field.name: getattr(laws, field.name) for field in dataclasses.fields(laws)}
    sizes, tokens = laws.optimal(np.asarray(flops, np.float64).reshape(-1, 1))
    samples |= {'size_exponent': laws.size_exponent, 'N': sizes, 'D': tokens}
    ends = [(1 - level) / 2, (1 + level) / 2]
    return {name: tuple(np.quantile(values, ends, axis=-1)) for name, values in samples.items()}


def held_out_error(N: Any, D: Any, loss: Any) -> float:
    """Returns how far a law without the runs of the largest budget misses them, which measures extrapolation.

    It is the root mean square of log loss - log prediction; 0.01 is about 1 %. A run is held out if its C = 6 N D times
    `BUDGET` exceeds the largest C.
    """
    N, D, loss = power_law.checked(RUNS, N=N, D=D, loss=loss)
    C = isoflop.PER_TOKEN * N * D
    largest = C.max() < BUDGET * C
    predicted = fit(N[~largest], D[~largest], loss[~largest]).predict(N[largest], D[largest])
    return float(np.sqrt(np.mean((np.log(loss[largest]) - np.log(predicted)) ** 2)))
