"""The values that a field may take in a random sample or a search: ranges of numbers, and choices."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tformer.errors import UserError

Distribution = Callable[[float], Any]  # its quantiles: a number in [0, 1) -> a value


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, or the integers among them; all, or all ratios if `log`, are equally likely."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def __str__(self) -> str:
        kind = 'integers ' if self.whole else ''
        return f'{kind}{self.low:g} to {self.high:g}{", by ratios" if self.log else ""}'

    def __call__(self, share: float) -> float:
        # An integer stands for the numbers that are rounded to it.
        low, high = (self.low - 0.5, self.high + 0.5) if self.whole else (self.low, self.high)
        value = low * (high / low) ** share if self.log else low + (high - low) * share
        return min(max(round(value), int(self.low)), int(self.high)) if self.whole else self.within(value)

    def within(self, value: float) -> float:
        """Returns 4 digits of a number, or the end of the range that they would leave."""
        return float(min(max(rounded(value), self.low), self.high))


@dataclasses.dataclass(frozen=True)
class Choice:
    """Values without an order, all equally likely."""

    options: Sequence[Any]

    def __str__(self) -> str:
        return f'one of {", ".join(map(str, self.options))}'

    def __call__(self, share: float) -> Any:
        return self.options[int(share * len(self.options))]


def uniform(low: float, high: float) -> Distribution:
    """Returns the uniform distribution from `low` to `high`, in 4 digits."""
    _ordered('uniform', low, high)
    return Range(low, high)


def log_uniform(low: float, high: float) -> Distribution:
    """Returns the distribution whose logarithm is uniform from that of `low` to that of `high`, in 4 digits."""
    _ordered('log_uniform', low, high)
    if low <= 0:
        raise UserError(f'log_uniform({low}, {high}): both must be positive')
    return Range(low, high, log=True)


def integers(low: int, high: int, log: bool = False) -> Distribution:
    """Returns the distribution of the integers from `low` to `high`, both included; `log` favours small ones."""
    if type(low) is not int or type(high) is not int:
        raise UserError(f'integers({low}, {high}): both must be integers')
    _ordered('integers', low, high)
    if log and low < 1:
        raise UserError(f'integers({low}, {high}, log=True): both must be positive')
    return Range(low, high, log, whole=True)


def choice(values: Iterable[Any]) -> Distribution:
    """Returns the distribution in which all of `values` are equally likely."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise UserError(f'choice: expected a list of values, not {values!r}')
    if not (options := tuple(values)):
        raise UserError('choice: its list of values is empty')
    return Choice(options)


def rounded(value: float) -> float:
    """Returns 4 digits."""
    return float(f'{value:.4g}')


def _ordered(name: str, low: float, high: float) -> None:
    if not all(isinstance(end, numbers.Real) and math.isfinite(end) for end in (low, high)):
        raise UserError(f'{name}({low!r}, {high!r}): both must be finite numbers')
    if not low < high:
        raise UserError(f'{name}({low}, {high}): the first must be the smaller')
