"""A report of finished runs as plain data: what was compared, what it is worth, what it cost. Nothing is drawn here."""

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

METRICS = ('test/loss', 'valid/loss')  # the first that there is, where none is named
TRAIN, VALID = 'train/loss', 'valid/loss'  # of metrics.jsonl: curves that are always drawn


@dataclasses.dataclass(frozen=True)
class Timing:
    """What a clock measured; it differs from one execution of the same runs to the next.

    Attributes:
      matched: the arms where each has run the same seconds.
      front: the arms on Pareto's front of the metric against seconds.
    """

    matched: Sequence[Matched]
    front: set[str]


@dataclasses.dataclass(frozen=True)
class Report:
    """What a directory of runs says.

    Attributes:
      results: the runs.
      metric: that decides, e.g. 'test/loss'.
      lower_is_better: of it.
      alpha: the chance of one false label or more that is accepted.
      baseline: the arm that the others are compared with.
      rows: of `statistics.summary`, the baseline's first.
      lacking: workdirs that are done and do not have the metric.
      others: rows of every other metric that all runs that are done share.
      costs: by arm.
      fronts: by cost, the arms on Pareto's front of the metric.
      curves: by the name in metrics.jsonl, by arm.
      curve: the one that stands for the metric; None where no log has one.
      matched: comparisons of it at matched cost.
      speed_ups: when each arm reaches what the baseline's ends with.
      reaches: when runs have the values that were asked for.
      differences: of each arm's config from the baseline's: field -> (there, here).
      response: the metric along a field.
      scaling: the law of sizes and tokens.
      texts: of generated text, by paired resampling of the examples.
      timing: None where it is left out.
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
      metric: SPLIT/NAME; None is the first of METRICS that there is.
      baseline: an arm; None is the first.
      alpha: of the labels and the intervals.
      timing: whether to report what a clock measured.
      reach: values of metrics.jsonl, NAME=VALUE, of which to report when runs have them.

    Raises:
      UserError: no such metric or arm, an alpha that is no share, or as `learning.reaches`.
    """
    if not 0 < alpha < 1:
        raise UserError(f'--alpha={alpha} must be between 0 and 1')
    baseline = next(iter(found.arms)) if baseline is None else baseline
    if baseline not in found.arms:
        raise UserError(f'--baseline={baseline} is not an arm{nearest(baseline, found.arms)}')
    metric = _metric(found, metric)
    lower = metrics.lower_is_better(metric)
    values = found.values(metric)
    rows = comparison.summary(values, baseline, lower, alpha)
    costs = costs_lib.costs(found, metric)
    means = {row.arm: row.runs.mean for row in rows}
    curve = learning.curve_name(found, metric)
    curve_lower = curve is None or metrics.lower_is_better(curve)
    drawn = {name: learning.bands(found, name) for name in dict.fromkeys([TRAIN, VALID, curve or VALID])}
    clock = None
    if timing:
        clock = Timing(
            learning.matched(found, costs, curve, baseline, curve_lower, alpha, ('seconds',)) if curve else [],
            costs_lib.front({arm: cost.seconds for arm, cost in costs.items()}, means, lower),
        )
    return Report(
        found,
        metric,
        lower,
        alpha,
        baseline,
        rows,
        [run.directory for run in found.runs if run.state == DONE and metric not in run.scores],
        _others(found, metric, baseline, alpha),
        costs,
        {
            name: costs_lib.front({arm: getattr(cost, name) for arm, cost in costs.items()}, means, lower)
            for name in costs_lib.AMOUNTS
        },
        {name: by_arm for name, by_arm in drawn.items() if by_arm},
        curve,
        learning.matched(found, costs, curve, baseline, curve_lower, alpha) if curve else [],
        learning.speed_ups(drawn[curve], baseline, curve_lower) if curve else [],
        learning.reaches(found, reach),
        {arm: results.difference(found, arm, baseline) for arm in found.arms if arm != baseline},
        scaling_analysis.response(found, values, lower, alpha),
        scaling_analysis.scaling_law(found, metric, costs, alpha),
        texts.compared(found, metric.partition('/')[0], baseline, alpha),
        clock,
    )


def _metric(found: Results, metric: str | None) -> str:
    known = sorted({name for run in found.runs for name in run.scores})
    if metric is None:
        return next((name for name in METRICS if name in known), (known or METRICS)[0])
    if known and metric not in known:
        raise UserError(f'--metric={metric} is in no result{nearest(metric, known)}')
    return metric


def _others(found: Results, metric: str, baseline: str, alpha: float) -> dict[str, list[Row]]:
    """Returns the rows of every other metric that all runs that are done share."""
    done = [set(run.scores) for run in found.runs if run.state == DONE]
    shared = sorted(set.intersection(*done) - {metric}) if done else []
    made = {}
    for name in shared:
        values = found.values(name)
        made[name] = comparison.summary(values, baseline, metrics.lower_is_better(name), alpha, resamples=0)
    return made
