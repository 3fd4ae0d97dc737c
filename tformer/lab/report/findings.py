"""The findings of a report, in words: what was compared, what each arm came to, and what that rests on."""

import math
import statistics
from collections.abc import Sequence

from tformer.lab.report import prose
from tformer.lab.report.report_data import Report
from tformer.lab.report.results import DONE, FAILED, UNFINISHED
from tformer.lab.statistics import power
from tformer.lab.statistics.comparison import BASELINE, BETTER, ONE_RUN, PERMUTATION, UNKNOWN, WITHIN, WORSE, Row


def headline(report: Report) -> str:
    """Returns what was compared, and how far the trials are."""
    found = report.results
    better = 'lower' if report.lower_is_better else 'higher'
    arms = [row.arm for row in report.rows]
    if len(arms) > 1:
        what = f'{prose.count(len(arms) - 1, "arm")} against {prose.code(report.baseline)}'
    else:
        what = f'{prose.code(report.baseline)} alone: its noise'
    states = [f'{found.count(state)} {state}' for state in (FAILED, UNFINISHED) if found.count(state)]
    trials = f'{prose.count(len(found.runs), "trial")}: {prose.joined([f"{found.count(DONE)} {DONE}", *states])}'
    return f'{what}, by {prose.named(report.metric)} ({better} is better). {trials}.'


def arms(report: Report) -> list[str]:
    """Returns one line an arm."""
    digits = prose.scale(report.rows)
    return [_finding(report, row, digits) for row in report.rows]


def _finding(report: Report, row: Row, digits: prose.Scale) -> str:
    runs, name = row.runs, prose.named(report.metric)
    if not runs.n:
        states = [run.state for run in report.results.arms[row.arm]]
        told = [f'{states.count(state)} {state}' for state in (FAILED, UNFINISHED) if state in states]
        return f'{prose.code(row.arm)}: no finite {name}' + (f' ({prose.joined(told)})' if told else '')
    line = f'{prose.code(row.arm)}: {name} {digits.spread(runs.mean, runs.sd)}'
    failed = f'; {prose.count(runs.failed, "run")} failed' if runs.failed else ''
    if row.comparison is None:
        return f'{line}, {prose.count(runs.n, "seed")}: the {BASELINE}{failed}'
    found = row.comparison
    if math.isnan(found.difference):
        return f'{line}: not compared, because the baseline has no finite result'
    than = f'the {BASELINE}' if report.baseline == BASELINE else prose.code(report.baseline)
    if not (found.difference or found.sd):
        return f'{line}: the same as {than} in every run{failed}'
    line += f', {digits(abs(found.difference))} {"lower" if found.difference < 0 else "higher"} than {than}'
    rests_on = []
    if found.interval is not None and not math.isnan(row.p_holm):
        p = prose.probability(row.p_holm)
        rests_on.append(f'{prose.level(report.alpha)} interval {digits.interval(found.interval)}')
        rests_on.append(f'p {p if p[0] == "<" else f"= {p}"} by Holm')
    if found.unmatched:
        rests_on.append(
            f'{prose.count(found.n, "pair")}, {prose.count(found.unmatched, "run")} without a partner left out'
        )
    line += f' ({", ".join(rests_on)})' if rests_on else ''
    return f'{line}: {row.label}{_more(row)}{failed}'


def _more(row: Row) -> str:
    """Returns what a label supposes, and what would decide."""
    if row.comparison and row.comparison.test == ONE_RUN and row.label in (BETTER, WORSE):
        return ' if its noise equals that of the baseline: it is a single run'
    if row.comparison and row.comparison.test == PERMUTATION and row.label == UNKNOWN:
        return '; all runs of each side are equal, and more seeds would tell'
    if row.label == UNKNOWN:
        return '; runs with more seeds would tell'
    if row.label != WITHIN:
        return ''
    if row.seeds is None:
        return f'; {power.MOST:,} seeds would not decide'
    return f'; about {row.seeds:,} fresh seeds would decide'


def limited(report: Report) -> str | None:
    """Returns how much of a split is scored, where it is not all."""
    split = report.metric.partition('/')[0]
    limits = {run.config.evaluate.max_examples for run in report.results.runs if run.state == DONE} - {None}
    if not limits:
        return None
    most = max(limit for limit in limits if limit)
    return f'Only the first {prose.count(most, "record")} of the {split} split are scored (evaluate.max_examples).'


def scored(report: Report) -> str | None:
    """Returns which checkpoints the scores are of, where some are not the last ones."""
    steps = [spent.scored for spent in report.costs.values() if spent.scored is not None]
    if all(spent.scored in (None, spent.steps) for spent in report.costs.values()):
        return None
    runs = [run for run in report.results.runs if run.state == DONE]
    names = prose.joined([prose.code(name) for name in sorted({run.config.train.best_metric for run in runs})])
    return (
        f'The scores are those of the checkpoints best by {names}, after {prose.amount(min(steps))} to '
        f'{prose.amount(max(steps))} steps (see Cost for each arm); curves and costs are of the whole runs.'
    )


def reached(report: Report) -> list[str]:
    """Returns one line an arm and value that was asked for."""
    lines = []
    for found in report.reaches:
        for arm in report.arms:
            runs = found.steps[arm]
            steps = [each for each in runs if each is not None]
            when = f' after {_steps(steps)} steps' if steps else ''
            at_once = f', {found.at_once[arm]} of them by the first report' if found.at_once[arm] else ''
            lines.append(
                f'{prose.code(arm)}: {prose.named(found.name)} reaches {found.value:g}{when} in {len(steps)} of '
                f'{prose.count(len(runs), "run")}{at_once}'
            )
    return lines


def _steps(values: Sequence[float]) -> str:
    spread = f' ± {statistics.stdev(values):,.0f}' if len(values) > 1 else ''
    return f'{statistics.mean(values):,.0f}{spread}'
