"""What the arms of a report cost, and which of them are on a Pareto front."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping

from tformer.lab.report.results import DONE, Results, Run
from tformer.lab.sweep import matching

AMOUNTS = ('parameters', 'flops')  # the costs that do not depend on a clock


@dataclasses.dataclass(frozen=True)
class Costs:
    """The costs of one run of an arm, each the mean over its runs; None if unknown."""

    parameters: float | None = None
    tokens: float | None = None  # read in all steps, on both sides, without padding
    flops: float | None = None  # of all steps, forward and backward, with padding (`accounting.model_flops`)
    steps: float | None = None
    seconds: float | None = None  # of a finished run, with its start, compilation and evaluations
    scored: float | None = None  # the step of the checkpoint whose scores are compared; None if there are none
    tokens_per_second: float | None = None  # of training, without padding; the median of the reports

    @property
    def scored_early(self) -> bool:
        """Whether the scored checkpoint is of an earlier step than the last; a log that is cut tells of fewer."""
        return self.scored is not None and self.steps is not None and self.scored < self.steps

    def per_step(self, quantity: str) -> float | None:
        """Returns the 'tokens', 'flops' or 'seconds' of one step; 1 for 'steps'."""
        amount = getattr(self, quantity)
        return amount / self.steps if amount is not None and self.steps else None


def costs(results: Results, metric: str) -> dict[str, Costs]:
    """Returns the costs by arm, for runs that are compared by `metric`."""
    return {arm: _costs(runs, metric.partition('/')[0]) for arm, runs in results.arms.items()}


def _costs(runs: Iterable[Run], split: str) -> Costs:
    runs = [run for run in runs if run.log]  # a run that never began cost nothing
    runs = [run for run in runs if run.state == DONE] or runs
    if not runs:
        return Costs()
    rates = [row['train/tokens_per_second'] for run in runs for row in run.log if row.get('train/tokens_per_second')]
    return Costs(
        _parameters(runs[0]),  # the same for all seeds
        _mean(run.last('train/tokens') for run in runs),
        _mean(run.last('train/flops') for run in runs),
        _mean(run.log[-1]['step'] for run in runs),
        _mean(run.seconds if run.state == DONE and run.seconds else None for run in runs),
        _mean(run.scored.get(split) for run in runs),
        statistics.median(rates) if rates else None,
    )


def _parameters(run: Run) -> float | None:
    if run.imported:
        return None
    return float(run.parameters or matching.num_parameters(run.config))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def front(spent: Mapping[str, float | None], means: Mapping[str, float], lower_is_better: bool) -> set[str]:
    """Returns the arms on the Pareto front: no other arm is at most as costly and at least as good, and better in one.

    Arms without a cost or a finite mean are not on it.
    """
    sign = 1 if lower_is_better else -1
    points = {
        arm: (cost, sign * means[arm])
        for arm, cost in spent.items()
        if cost is not None and arm in means and math.isfinite(means[arm])
    }
    return {
        arm
        for arm, point in points.items()
        if not any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in points.values())
    }
