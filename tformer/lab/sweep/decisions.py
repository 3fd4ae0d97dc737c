"""What a search does next, as a pure function of how far its arms are."""

import dataclasses
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from tformer.lab.sweep import rungs
from tformer.lab.sweep.rungs import Arm, Rule


class RunState(NamedTuple):
    """How far one run of an arm is."""

    values: Mapping[int, float]  # by the rungs that it has reached; less is better, and nan is of a diverged one
    has_begun: bool = False  # to train beyond these
    is_leased: bool = False  # it trains
    has_failed: bool = False


@dataclasses.dataclass(frozen=True)
class Train:
    """A run is to be trained to a rung."""

    number: int  # of the draw
    run: int  # of the arm
    rung: int


@dataclasses.dataclass(frozen=True)
class Draw:
    """Another arm is to be drawn."""


@dataclasses.dataclass(frozen=True)
class Waiting:
    """Nothing can be begun before a run that trains has ended."""


@dataclasses.dataclass(frozen=True)
class Over:
    """The search has ended."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """An arm of a search and its runs."""

    arm: Arm
    runs: Sequence[RunState]
    first: int  # the first rung at which it is compared
    is_repeated: bool = False  # an earlier draw is the same arm

    @classmethod
    def of(cls, number: int, runs: Sequence[RunState], first: int, is_repeated: bool = False) -> 'Drawn':
        """The value of an arm at a rung is the mean over its runs, once all have reached it; inf if one diverged or
        failed."""
        reached = sorted(set.intersection(*(set(run.values) for run in runs)))
        means = {rung: statistics.fmean(run.values[rung] for run in runs) for rung in reached if rung >= first}
        values = {rung: mean if math.isfinite(mean) else math.inf for rung, mean in means.items()}
        target = max(values, default=first - 1) + 1
        if any(run.has_failed for run in runs):
            values[target] = math.inf
        busy = any(run.is_leased or run.has_begun or target in run.values for run in runs)
        return cls(Arm(number, values, busy), runs, first, is_repeated)

    @property
    def target(self) -> int:
        """The rung that it trains to next."""
        return max(self.arm.values, default=self.first - 1) + 1

    @property
    def has_failed(self) -> bool:
        return math.inf in self.arm.values.values()

    def waiting_run(self) -> int | None:
        """Returns the first of its runs that is not at the target and does not train."""
        idle = (n for n, run in enumerate(self.runs) if not run.is_leased and self.target not in run.values)
        return next(idle, None)


def decide(
    drawn: Sequence[Drawn], rule: Rule | None, last: int, most: int, is_spent: bool, closed: Collection[int] = ()
) -> Train | Draw | Waiting | Over:
    """Returns what is next: to finish what has begun, then what goes on past its rung, then a new draw.

    Args:
      drawn: by number, all that were drawn.
      rule: which arms go on; None: all train to rung 0, the end.
      last: the rung that is the end.
      most: how many arms are drawn.
      is_spent: nothing may begin any more.
      closed: the numbers of arms that do not go on.
    """
    arms = [each for each in drawn if not each.is_repeated]
    any_leased = any(run.is_leased for each in arms for run in each.runs)
    if not is_spent:
        for each in arms:
            unfinished = each.target <= last and (each.arm.is_busy or not each.arm.values)
            unfinished = unfinished and not each.has_failed and each.arm.number not in closed
            if unfinished and (run := each.waiting_run()) is not None:
                return Train(each.arm.number, run, each.target)
        if (number := _promoted(arms, rule, last, closed)) is not None:
            return Train(number, 0, drawn[number].target)
        if len(drawn) < most:
            return Draw()
        if not any_leased and (number := _unopposed(arms, last, closed)) is not None:
            return Train(number, 0, drawn[number].target)
    return Waiting() if any_leased else Over()


def _promoted(arms: Sequence[Drawn], rule: Rule | None, last: int, closed: Collection[int]) -> int | None:
    """Returns the number of an arm that goes on to its next rung."""
    if rule is None:
        return None
    stay = [dataclasses.replace(each.arm, is_busy=True) if each.arm.number in closed else each.arm for each in arms]
    return rule.next(stay, last)


def _unopposed(arms: Sequence[Drawn], last: int, closed: Collection[int]) -> int | None:
    """Returns the number of an arm that goes on alone: the best of those that begin at a rung, where none of them has
    reached the end, and no other can."""
    for first in sorted({each.first for each in arms}):
        own = [each.arm for each in arms if each.first == first and each.arm.number not in closed]
        best = rungs.leader(own)
        if best is not None and next(arm for arm in own if arm.number == best).rung < last:
            return best
    return None
