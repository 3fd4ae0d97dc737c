"""Learning curves of a report: the mean of each arm over its seeds, arms at matched cost, and speed-ups."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from tformer.errors import UserError, nearest
from tformer.evaluation import metrics
from tformer.lab.report.costs import Costs
from tformer.lab.report.results import DONE, FAILED, Results, Run
from tformer.lab.statistics import comparison, curves

POINTS = 150  # of a drawn curve; neighbours are averaged if a log has more
QUANTITIES = ('steps', 'tokens', 'flops')  # costs that do not depend on a clock
MEASURED = ('seconds',)  # those that do


@dataclasses.dataclass(frozen=True)
class Band:
    """A number over the steps: the mean of an arm's finished runs, at the steps that all of them report."""

    steps: np.ndarray  # [n]
    mean: np.ndarray  # [n]
    sd: np.ndarray  # standard deviation over the runs, [n]; 0 for a single run
    runs: int


@dataclasses.dataclass(frozen=True)
class Matched:
    """The arms compared at an equal cost."""

    quantity: str  # 'steps', 'tokens', 'flops' or 'seconds'
    same: tuple[str, ...] = ()  # quantities with the same comparison: all arms spend equally much of them per step
    at: float = math.nan  # the amount: the last one that all runs reach
    rows: Sequence[comparison.Row] = ()  # of `comparison.summary`
    why: str | None = None  # the reason where no rows could be made


@dataclasses.dataclass(frozen=True)
class SpeedUp:
    """When the mean curve of an arm first reaches the last value of the baseline."""

    arm: str
    value: float  # the last value of the baseline
    steps: float = math.nan  # that the arm needs for it
    factor: float = math.nan  # the steps that the baseline needs for it / those of the arm: above 1 the arm is faster
    why: str | None = None  # the reason if it is unknown


@dataclasses.dataclass(frozen=True)
class Reach:
    """When runs first reach a value of a number in metrics.jsonl."""

    name: str
    value: float
    steps: Mapping[str, Sequence[float | None]]  # by arm, of each run that has ended; None if it never reaches it
    at_once: Mapping[str, int]  # by arm, how many runs have it in their first report, and may have reached it earlier

    def __str__(self) -> str:
        return f'{self.name}={self.value:g}'


def curve_name(results: Results, metric: str) -> str | None:
    """Returns the curve that stands for a metric: of its own name, of the valid split, the valid loss, or None."""
    names = {name for run in results.done for row in run.log for name in row}
    own = [metric, f'valid/{metric.partition("/")[2]}', 'valid/loss']
    return next((name for name in own if name in names), None)


def bands(results: Results, name: str) -> dict[str, Band]:
    """Returns the curves of a number in metrics.jsonl by arm, without arms that have no finite point."""
    found = {}
    for arm, runs in results.arms.items():
        done = [run.curve(name) for run in runs if run.state == DONE]
        logs = [dict(zip(*curve, strict=True)) for curve in done if curve[0]]
        steps = sorted(set.intersection(*map(set, logs))) if logs else []
        values = np.array([[log[step] for step in steps] for log in logs])  # [runs, n]
        if steps and (finite := np.isfinite(values).all(0)).any():
            found[arm] = _band(np.array(steps, float)[finite], values[:, finite])
    return found


def _band(steps: np.ndarray, values: np.ndarray) -> Band:
    if len(steps) > POINTS:
        parts = np.array_split(np.arange(len(steps)), POINTS)
        steps = np.array([steps[part].mean() for part in parts])
        values = np.stack([values[:, part].mean(1) for part in parts], axis=1)
    sd = values.std(0, ddof=1) if len(values) > 1 else np.zeros(len(steps))
    return Band(steps, values.mean(0), sd, len(values))


def matched(
    results: Results, costs: Mapping[str, Costs], name: str, baseline: str, lower_is_better: bool, alpha: float,
    quantities: Sequence[str] = QUANTITIES,
) -> list[Matched]:  # fmt: skip
    """Returns the comparison at the last amount of each quantity that all runs reach, or the reason why there is none.

    Quantities of which all arms spend equally much per step share one comparison. Arms are not tested at matched
    seconds: a clock's noise is of the machine and its load, which change from arm to arm, and no seed repeats them.
    """
    known = {arm for arm, runs in results.arms.items() if any(run.state == DONE and run.curve(name)[0] for run in runs)}
    if baseline not in known or len(known) < 2:
        return []
    per_step = {q: {arm: costs[arm].per_step(q) or 0.0 for arm in results.arms if arm in known} for q in quantities}
    groups: dict[tuple[float, ...], list[str]] = {}
    found: list[Matched] = []
    for quantity, amounts in per_step.items():
        if all(amounts.values()):
            ratios = tuple(round(amount / amounts[baseline], 6) for amount in amounts.values())
            groups.setdefault(ratios, []).append(quantity)
        else:
            unknown = next(arm for arm, amount in amounts.items() if not amount)
            found.append(Matched(quantity, why=f'those of {unknown} are unknown'))
    for quantity, *same in groups.values():
        by_arm = {
            arm: {
                run.seed: _along(run, name, quantity, amount) if run.state == DONE else None
                for run in _ended(results.arms[arm], name)
            }
            for arm, amount in per_step[quantity].items()
        }
        try:
            at, values = curves.matched(by_arm)
        except UserError:
            found.append(Matched(quantity, why='no amount lies within the curves of all runs'))
            continue
        rows = comparison.summary(values, baseline, lower_is_better, alpha, 0, results.ended)
        if quantity in MEASURED:
            rows = [comparison.untested(row) for row in rows]
        found.append(Matched(quantity, tuple(same), at, rows))
    return found


def _ended(runs: Sequence[Run], name: str) -> list[Run]:
    """Returns the runs that failed, and the finished ones that report a number."""
    return [run for run in runs if run.state == FAILED or (run.state == DONE and run.curve(name)[0])]


def _along(run: Run, name: str, quantity: str, amount: float) -> curves.Curve:
    """Returns a curve of a run over what it had spent by its log or its clock, or else over `amount` per step."""
    steps, values = run.curve(name)
    if quantity in MEASURED and run.seconds and run.num_steps:
        amount = run.seconds / run.num_steps
    return run.spent(quantity, steps) or amount * np.array(steps, float), values


def speed_ups(found: Mapping[str, Band], baseline: str, lower_is_better: bool) -> list[SpeedUp]:
    """Returns when the mean curve of each other arm reaches the last value of the baseline."""
    if baseline not in found:
        return []
    means = {arm: (band.steps, band.mean) for arm, band in found.items()}
    ours = means.pop(baseline)
    value = float(ours[1][-1])
    made = []
    for arm, curve in means.items():
        try:
            steps = curves.first_reach(curve, value, lower_is_better)
            made.append(SpeedUp(arm, value, steps, curves.speed_up(curve, ours, value, lower_is_better)))
        except UserError as error:
            made.append(SpeedUp(arm, value, why=str(error)))
    return made


def reaches(results: Results, wanted: Sequence[str]) -> list[Reach]:
    """Returns when the runs reach each of `wanted`, NAME=VALUE.

    Raises:
      UserError: one is not NAME=VALUE, or no run has that number.
    """
    known = {name for run in results.done for row in run.log for name in row} - {'step'}
    made = []
    for name, value in targets(wanted):
        if name not in known:
            raise UserError(f'--reach={name}={value:g}: no metrics.jsonl has {name}{nearest(name, sorted(known))}')
        lower = metrics.lower_is_better(name)
        ended = {arm: [run.curve(name) for run in _ended(runs, name)] for arm, runs in results.arms.items()}
        steps = {arm: [_first(*curve, value, lower) for curve in found] for arm, found in ended.items()}
        at_once = {
            arm: sum(first in reported[:1] for first, (reported, _) in zip(steps[arm], found, strict=True))
            for arm, found in ended.items()
        }
        made.append(Reach(name, value, steps, at_once))
    return made


def targets(wanted: Sequence[str]) -> list[tuple[str, float]]:
    """Returns the name and the value of each NAME=VALUE. Raises a `UserError` if one is something else."""
    found = []
    for text in wanted:
        name, _, number = text.partition('=')
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not name or not math.isfinite(value):
            raise UserError(f'--reach={text} is not NAME=VALUE, such as valid/accuracy=0.99')
        found.append((name, value))
    return found


def _first(steps: Sequence[float], values: Sequence[float], value: float, lower_is_better: bool) -> float | None:
    if values and (values[0] <= value if lower_is_better else values[0] >= value):
        return steps[0]
    try:
        return curves.first_reach((steps, values), value, lower_is_better) if values else None
    except UserError:
        return None
