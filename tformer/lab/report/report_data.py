"""A report of finished runs as plain data: the comparisons, their statistics and the costs. Nothing is drawn here."""

import dataclasses
import json
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tformer.errors import UserError, nearest
from tformer.evaluation import metrics
from tformer.lab.report import costs as costs_lib
from tformer.lab.report import learning, scaling_analysis, searched, texts
from tformer.lab.report import response as response_lib
from tformer.lab.report.costs import Costs
from tformer.lab.report.learning import Band, Matched, Reach, SpeedUp
from tformer.lab.report.response import Response
from tformer.lab.report.results import Results, Run
from tformer.lab.report.scaling_analysis import Scaling
from tformer.lab.report.searched import Searched
from tformer.lab.report.texts import Compared
from tformer.lab.statistics import comparison
from tformer.lab.statistics.comparison import Row

METRICS = ('test/loss', 'valid/loss')  # the default metric is the first of these that the runs have
TASK = (  # fields that say what is predicted from what
    'train.objective data.source data.path data.test_path data.tfds_name data.split_by data.task data.modulus '
    'data.tokenizer data.tokenizer_vocab_size data.tokenizer_model evaluate.max_examples'
).split()
TRAIN, VALID = 'train/loss', 'valid/loss'  # curves of metrics.jsonl that are always drawn


@dataclasses.dataclass(frozen=True)
class Timing:
    """Measured times, which differ between executions of the same runs."""

    matched: Sequence[Matched]  # the arms compared at equal seconds
    front: set[str]  # the arms on the Pareto front of the metric against seconds


@dataclasses.dataclass(frozen=True)
class Report:
    """The contents of a report on a directory of runs."""

    results: Results
    metric: str  # the metric that decides, e.g. 'test/loss'
    lower_is_better: bool
    alpha: float  # the accepted probability of one false label or more
    baseline: str  # the arm that the others are compared with
    rows: Sequence[Row]  # of `comparison.summary`, the baseline's first
    lacking: Sequence[str]  # workdirs of finished runs without the metric
    tasks: Sequence[str]  # fields in which the tasks of the arms differ, so that a metric may not mean the same
    others: Mapping[str, Sequence[Row]]  # the rows of every other metric that all finished runs share
    costs: Mapping[str, Costs]  # by arm
    fronts: Mapping[str, set[str]]  # by cost, the arms on the Pareto front of the metric
    curves: Mapping[str, Mapping[str, Band]]  # learning curves by their name in metrics.jsonl, then by arm
    curve: str | None  # the curve that stands for the metric; None if no log has one
    matched: Sequence[Matched]  # comparisons of that curve at matched cost
    speed_ups: Sequence[SpeedUp]  # when each arm reaches the last value of the baseline
    reaches: Sequence[Reach]  # when runs reach the values that the user asked for
    differences: Mapping[str, Mapping[str, tuple[Any, Any]]]  # arm -> field -> (baseline's value, arm's value)
    response: Response | None  # the metric along one field
    fields: Mapping[str, Sequence[Any]]  # of a search in several numbers: what varies, and each arm's value
    scaling: Scaling | None  # the scaling law of model sizes and tokens
    texts: Sequence[Compared]  # comparisons of generated text by resampling the examples
    search: Searched | None  # the search by which the arms were chosen
    timing: Timing | None  # measured times; None if the user omits them

    @property
    def arms(self) -> list[str]:
        """The arms in the order of the table."""
        return [row.arm for row in self.rows]

    @property
    def best(self) -> int:
        """The place of the best arm in the order of the table."""
        means = [row.runs.mean for row in self.rows]
        known = [place for place, mean in enumerate(means) if math.isfinite(mean)]
        return (min if self.lower_is_better else max)(known, key=means.__getitem__, default=0)

    @property
    def num_comparisons(self) -> int:
        return len(self.rows) - 1


def report(
    found: Results, metric: str | None = None, baseline: str | None = None, alpha: float = 0.05, timing: bool = True,
    reach: Sequence[str] = (),
) -> Report:  # fmt: skip
    """Returns the report of what `results.read` found.

    The arguments are those of `tformer.report`: without a metric it is the first of METRICS that the runs have, without
    a baseline the first arm.

    Raises:
      UserError: an unknown metric or arm, an alpha outside (0, 1), or as `learning.reaches`.
    """
    check_alpha(alpha)
    baseline, metric = _baseline(found, baseline), _metric(found, metric)
    lower = metrics.lower_is_better(metric)
    values = found.values(metric)
    rows = comparison.summary(values, baseline, lower, alpha, ended=found.ended)
    means = {row.arm: row.runs.mean for row in rows}
    costs = costs_lib.costs(found, metric)
    curve = learning.curve_name(found, metric)
    bands = {name: learning.bands(found, name) for name in dict.fromkeys([TRAIN, VALID, curve or VALID])}

    speed_ups = learning.speed_ups(bands[curve], baseline, metrics.lower_is_better(curve)) if curve else []
    arms = [row.arm for row in rows]
    response = response_lib.response(found, values, lower, alpha)

    try:
        search = searched.search(found)
    except UserError as error:
        found, search = dataclasses.replace(found, damaged=[*found.damaged, str(error)]), None

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
        lacking=[run.directory for run in found.done if metric not in run.scores],
        tasks=_tasks(found, metric),
        others=_others(found, metric, baseline, alpha),
        costs=costs,
        fronts={name: front(name) for name in costs_lib.AMOUNTS},
        curves={name: by_arm for name, by_arm in bands.items() if by_arm},
        curve=curve,
        matched=matched(learning.QUANTITIES),
        speed_ups=sorted(speed_ups, key=lambda found: arms.index(found.arm)),
        reaches=learning.reaches(found, reach),
        differences={arm: found.difference(arm, baseline) for arm in found.arms if arm != baseline},
        response=response,
        fields=_fields(found, arms, response),
        scaling=scaling_analysis.scaling_law(found, metric, costs, alpha),
        texts=texts.compared(found, metric.partition('/')[0], baseline, alpha),
        search=search,
        timing=Timing(matched(['seconds']), front('seconds')) if timing else None,
    )


def check_alpha(alpha: float) -> None:
    """Raises a `UserError` unless alpha is between 0 and 1."""
    if not 0 < alpha < 1:
        raise UserError(f'--alpha={alpha} must be between 0 and 1')


def check_baseline(baseline: str, arms: Collection[str]) -> None:
    """Raises a `UserError` unless the baseline is one of the arms."""
    if baseline not in arms:
        raise UserError(f'--baseline={baseline} is not an arm{nearest(baseline, arms)}')


def _baseline(found: Results, baseline: str | None) -> str:
    if baseline is None:
        return next(iter(found.arms))
    check_baseline(baseline, found.arms)
    return baseline


def _metric(found: Results, metric: str | None) -> str:
    known = sorted({name for run in found.runs for name in run.scores})
    if metric is None:
        return next((name for name in METRICS if name in known), (known or METRICS)[0])
    if known and metric not in known:
        raise UserError(f'--metric={metric} is in no result{nearest(metric, known)}')
    return metric


def _tasks(found: Results, metric: str) -> list[str]:
    """Returns the fields in which runs differ so that a metric of them is not the same: those of `TASK`, and those by
    which `tformer evaluate` scored other than their configs say."""
    by_text = metric.endswith(('bits_per_byte', 'bleu', 'chrf', 'error_rate', 'exact_match'))  # whatever the tokens
    runs, split = [run for run in found.done if not run.imported], metric.partition('/')[0]
    overridden = dict.fromkeys(name for run in runs for name in run.overrides.get(split, {}))
    names = dict.fromkeys([*(name for name in TASK if not (by_text and 'tokenizer' in name)), *overridden])

    def value(run: Run, name: str) -> str:
        own = operator.attrgetter(name)(run.stated) if '.' in name else None  # a flag, such as `average`
        return json.dumps(run.overrides.get(split, {}).get(name, own))

    return [name for name in names if len({value(run, name) for run in runs}) > 1]


def _fields(found: Results, arms: Sequence[str], response: Response | None) -> dict[str, list[Any]]:
    """Returns the fields that vary, and the value of each of `arms`; none unless two or more are of numbers.

    Those of a search begin with the one that the metric is most surely seen to depend on.
    """
    stated = {arm: response_lib.fields(found.arms[arm][0].stated) for arm in arms}
    varied = list(response_lib.independent(list(stated.values())))
    if len(response_lib.numbers(stated, varied)) < 2:
        return {}
    p = response.search.p if response and response.search else {}
    order = sorted(varied, key=lambda field: p.get(field, math.inf))
    return {field: [stated[arm][field] for arm in arms] for field in order}


def _others(found: Results, metric: str, baseline: str, alpha: float) -> dict[str, list[Row]]:
    """Returns the rows of every other metric that all finished runs share."""
    shared = sorted(set.intersection(*(set(run.scores) for run in found.done)) - {metric}) if found.done else []
    return {
        name: comparison.summary(found.values(name), baseline, metrics.lower_is_better(name), alpha, 0, found.ended)
        for name in shared
    }
