"""A report of finished runs as plain data: the comparisons, their statistics and the costs. Nothing is drawn here."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tformer.errors import UserError, nearest
from tformer.evaluation import metrics
from tformer.lab.report import costs as costs_lib
from tformer.lab.report import learning, results, scaling_analysis, texts
from tformer.lab.report.costs import Costs
from tformer.lab.report.learning import Band, Matched, Reach, SpeedUp
from tformer.lab.report.results import DONE, Results
from tformer.lab.report.scaling_analysis import Response, Scaling
from tformer.lab.report.texts import Compared
from tformer.lab.statistics import comparison
from tformer.lab.statistics.comparison import Row

METRICS = ('test/loss', 'valid/loss')  # the default metric is the first of these that the runs have
TRAIN, VALID = 'train/loss', 'valid/loss'  # curves of metrics.jsonl that are always drawn


@dataclasses.dataclass(frozen=True)
class Timing:
    """Measured times, which differ between executions of the same runs.

    Attributes:
      matched: the arms compared at equal seconds.
      front: the arms on the Pareto front of the metric against seconds.
    """

    matched: Sequence[Matched]
    front: set[str]


@dataclasses.dataclass(frozen=True)
class Report:
    """The contents of a report on a directory of runs.

    Attributes:
      results: the runs.
      metric: the metric that decides, e.g. 'test/loss'.
      lower_is_better: whether less of it is better.
      alpha: the accepted probability of one false label or more.
      baseline: the arm that the others are compared with.
      rows: of `comparison.summary`, the baseline's first.
      lacking: workdirs of finished runs without the metric.
      others: the rows of every other metric that all finished runs share.
      costs: by arm.
      fronts: by cost, the arms on the Pareto front of the metric.
      curves: learning curves by their name in metrics.jsonl, then by arm.
      curve: the name of the curve that stands for the metric; None if no log has one.
      matched: comparisons of that curve at matched cost.
      speed_ups: when each arm reaches the last value of the baseline.
      reaches: when runs reach the values that the user asked for.
      differences: by arm, the fields that differ from the baseline: field -> (baseline's value, arm's value).
      response: the metric along one field.
      scaling: the scaling law of model sizes and tokens.
      texts: comparisons of generated text by resampling the examples.
      timing: measured times; None if the user omits them.
    """

    results: Results
    metric: str
    lower_is_better: bool
    alpha: float
    baseline: str
    rows: Sequence[Row]
    lacking: Sequence[str]
    others: Mapping[str, Sequence[Row]]
    costs: Mapping[str, Costs]
    fronts: Mapping[str, set[str]]
    curves: Mapping[str, Mapping[str, Band]]
    curve: str | None
    matched: Sequence[Matched]
    speed_ups: Sequence[SpeedUp]
    reaches: Sequence[Reach]
    differences: Mapping[str, Mapping[str, tuple[Any, Any]]]
    response: Response | None
    scaling: Scaling | None
    texts: Sequence[Compared]
    timing: Timing | None

    @property
    def arms(self) -> list[str]:
        """The arms in the order of the table."""
        return [row.arm for row in self.rows]

    @property
    def has_differences(self) -> bool:
        """Whether any arm is compared with the baseline, so that there is something to draw."""
        return any(row.comparison is not None and math.isfinite(row.comparison.difference) for row in self.rows)

    @property
    def num_comparisons(self) -> int:
        return len(self.rows) - 1


def report(
    found: Results, metric: str | None = None, baseline: str | None = None, alpha: float = 0.05, timing: bool = True,
    reach: Sequence[str] = (),
) -> Report:  # fmt: skip
    """Returns the report of what `results.read` found.

    Args:
      found: the runs.
      metric: SPLIT/NAME; None: the first of METRICS that the runs have.
      baseline: an arm; None: the first.
      alpha: of the labels and the intervals.
      timing: whether to report measured times.
      reach: NAME=VALUE of metrics.jsonl; the report says when runs reach them.

    Raises:
      UserError: an unknown metric or arm, an alpha outside (0, 1), or as `learning.reaches`.
    """
    if not 0 < alpha < 1:
        raise UserError(f'--alpha={alpha} must be between 0 and 1')
    baseline, metric = _baseline(found, baseline), _metric(found, metric)
    lower = metrics.lower_is_better(metric)
    values = found.values(metric)
    rows = comparison.summary(values, baseline, lower, alpha)
    means = {row.arm: row.runs.mean for row in rows}
    costs = costs_lib.costs(found, metric)
    curve = learning.curve_name(found, metric)
    bands = {name: learning.bands(found, name) for name in dict.fromkeys([TRAIN, VALID, curve or VALID])}

    def front(cost: str) -> set[str]:
        return costs_lib.front({arm: getattr(spent, cost) for arm, spent in costs.items()}, means, lower)

    def matched(quantities: Sequence[str]) -> list[Matched]:
        if curve is None:
            return []
        return learning.matched(found, costs, curve, baseline, metrics.lower_is_better(curve), alpha, quantities)

    return Report(
        results=found,
        metric=metric,
        lower_is_better=lower,
        alpha=alpha,
        baseline=baseline,
        rows=rows,
        lacking=[run.directory for run in found.runs if run.state == DONE and metric not in run.scores],
        others=_others(found, metric, baseline, alpha),
        costs=costs,
        fronts={name: front(name) for name in costs_lib.AMOUNTS},
        curves={name: by_arm for name, by_arm in bands.items() if by_arm},
        curve=curve,
        matched=matched(learning.QUANTITIES),
        speed_ups=learning.speed_ups(bands[curve], baseline, metrics.lower_is_better(curve)) if curve else [],
        reaches=learning.reaches(found, reach),
        differences={arm: results.difference(found, arm, baseline) for arm in found.arms if arm != baseline},
        response=scaling_analysis.response(found, values, lower, alpha),
        scaling=scaling_analysis.scaling_law(found, metric, costs, alpha),
        texts=texts.compared(found, metric.partition('/')[0], baseline, alpha),
        timing=Timing(matched(['seconds']), front('seconds')) if timing else None,
    )


def _baseline(found: Results, baseline: str | None) -> str:
    if baseline is None:
        return next(iter(found.arms))
    if baseline not in found.arms:
        raise UserError(f'--baseline={baseline} is not an arm{nearest(baseline, found.arms)}')
    return baseline


def _metric(found: Results, metric: str | None) -> str:
    known = sorted({name for run in found.runs for name in run.scores})
    if metric is None:
        return next((name for name in METRICS if name in known), (known or METRICS)[0])
    if known and metric not in known:
        raise UserError(f'--metric={metric} is in no result{nearest(metric, known)}')
    return metric


def _others(found: Results, metric: str, baseline: str, alpha: float) -> dict[str, list[Row]]:
    """Returns the rows of every other metric that all finished runs share."""
    done = [set(run.scores) for run in found.runs if run.state == DONE]
    shared = sorted(set.intersection(*done) - {metric}) if done else []
    made = {}
    for name in shared:
        values = found.values(name)
        made[name] = comparison.summary(values, baseline, metrics.lower_is_better(name), alpha, resamples=0)
    return made
