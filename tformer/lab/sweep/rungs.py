"""Early stopping: which arm of a search goes on past its rung. Rules are pure functions of the values at the rungs.

An arm trains to a rung, is paused there and goes on if the rule says so. The last rung is the end of the run. Values
are such that less is better, and that of an arm which diverged or failed is inf: it never goes on.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Mapping, Sequence

from tformer.errors import UserError
from tformer.lab.sweep.overrides import MOST


@dataclasses.dataclass(frozen=True)
class Arm:
    """How far an arm of a search is."""

    number: int  # of its draw
    values: Mapping[int, float]  # by the rungs that it has reached
    is_busy: bool = False  # it has begun to train to its next rung

    @property
    def rung(self) -> int:
        """The highest rung that it has reached; -1: none."""
        return max(self.values, default=-1)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Arms compete at `rungs` rungs before the end, and about one in `reduction` goes on."""

    rungs: int = 3
    reduction: int = 3

    def __post_init__(self) -> None:
        rule = type(self).__name__.lower()
        for name, number in dataclasses.asdict(self).items():
            if type(number) is not int or number > MOST:
                raise UserError(f'{rule}: {name}={number!r} is not an integer up to {MOST:,}')
        if self.rungs < 1:
            raise UserError(f'{rule}: rungs={self.rungs} must be positive')
        if self.reduction < 2:
            raise UserError(f'{rule}: reduction={self.reduction} must be at least 2')

    def shares(self) -> list[float]:
        """Returns the shares of the run after which the rungs before the end are."""
        return [self.reduction ** (rung - self.rungs) for rung in range(self.rungs)]

    def steps(self, num_steps: int, eval_every: int) -> tuple[int, ...]:
        """Returns the steps of the rungs: evaluations of the run, rising; the last is the end.

        Raises:
          UserError: no evaluation is early enough.
        """
        found = {eval_every * math.ceil(share * num_steps / eval_every) for share in self.shares()}
        if not (early := sorted(step for step in found if 0 < step < num_steps)):
            line = f'one each {eval_every} steps of {num_steps}; set train.eval_every'
            raise UserError(f'rungs need earlier evaluations: {line}')
        return (*early, num_steps)

    def first(self, number: int, last: int) -> int:
        """Returns the first rung at which arm `number` is compared; `last` is the end."""
        return 0

    def next(self, arms: Sequence[Arm], last: int) -> int | None:
        """Returns the number of a paused arm that goes on to its next rung; None if there is none."""
        raise NotImplementedError


class Asha(Rule):
    """Asynchronous successive halving (Li et al. 2020, algorithm 2): the best 1 / `reduction` of a rung go on."""

    def next(self, arms: Sequence[Arm], last: int) -> int | None:
        for rung in reversed(range(last)):
            there = sorted((arm.values[rung], arm.number) for arm in arms if rung in arm.values)
            best = {number for _, number in there[: len(there) // self.reduction]}
            if (found := _best_paused([arm for arm in arms if arm.number in best], rung)) is not None:
                return found
        return None


class Hyperband(Asha):
    """Brackets of asynchronous successive halving that begin at the first rung, the second, ... and the end, with
    fewer arms each, as slow starters may win (Li et al. 2018, algorithm 1; Li et al. 2020, 3.2)."""

    def first(self, number: int, last: int) -> int:
        return _bracket(number, last, self.reduction)

    def next(self, arms: Sequence[Arm], last: int) -> int | None:
        for bracket in range(last):
            own = [arm for arm in arms if self.first(arm.number, last) == bracket]
            if (found := super().next(own, last)) is not None:
                return found
        return None


class Median(Rule):
    """An arm goes on if its value is no worse than the median of all arms that have reached its rung; so does every one
    before `reduction` have reached it (Golovin et al. 2017, 3.1, with best values in the place of running means)."""

    def shares(self) -> list[float]:
        return [(rung + 1) / (self.rungs + 1) for rung in range(self.rungs)]

    def next(self, arms: Sequence[Arm], last: int) -> int | None:
        for rung in reversed(range(last)):
            there = [arm for arm in arms if rung in arm.values]
            if there and len(there) >= self.reduction:
                bar = statistics.median_low(arm.values[rung] for arm in there)
                there = [arm for arm in there if arm.values[rung] <= bar]
            if (found := _best_paused(there, rung)) is not None:
                return found
        return None


asha, hyperband, median = Asha, Hyperband, Median  # as a sweep file calls them


def leader(arms: Sequence[Arm]) -> int | None:
    """Returns the number of the best arm: of those that got furthest, that with the least value; None if all failed."""
    finite = [(-arm.rung, arm.values[arm.rung], arm.number) for arm in arms if math.isfinite(_value(arm))]
    return min(finite)[2] if finite else None


def _value(arm: Arm) -> float:
    return arm.values.get(arm.rung, math.inf)


def _best_paused(arms: Sequence[Arm], rung: int) -> int | None:
    """Returns the number of the best arm that is paused at a rung."""
    paused = [arm for arm in arms if arm.rung == rung and not arm.is_busy and math.isfinite(_value(arm))]
    return min(((_value(arm), arm.number) for arm in paused), default=(0.0, None))[1]


@functools.lru_cache(maxsize=100_000)
def _bracket(number: int, last: int, reduction: int) -> int:
    """Returns the bracket of arm `number`: each bracket gets its share of the arms at any time."""
    sizes = [math.ceil((last + 1) / (left + 1) * reduction**left) for left in range(last, -1, -1)]
    # The arms of a bracket of share p are due at the middles of steps of 1 / p; the earliest come first.
    turns = sorted(((place + 0.5) / size, bracket) for bracket, size in enumerate(sizes) for place in range(size))
    return turns[number % len(turns)][1]
