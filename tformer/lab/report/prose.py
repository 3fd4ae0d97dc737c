"""The numbers and the findings of a report, in prose."""

import dataclasses
import math
import re
import statistics
from collections.abc import Sequence

from tformer.lab.report import document
from tformer.lab.report.report_data import Report
from tformer.lab.report.results import DONE, FAILED, UNFINISHED
from tformer.lab.statistics import power
from tformer.lab.statistics.comparison import BASELINE, BETTER, ONE_RUN, PERMUTATION, UNKNOWN, WITHIN, WORSE, Row
from tformer.lab.statistics.noise import Interval

NONE = '-'  # a number that is not known
DRAWN = 10  # arms that a drawing with a legend has at most, the baseline and the best
DIGITS = 7  # of a mean, at most


@dataclasses.dataclass(frozen=True)
class Scale:
    """How the numbers of one metric are written: all with as many decimals."""

    decimals: int

    def __call__(self, value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return NONE
        return f'{value:,.{self.decimals}f}'

    def signed(self, value: float) -> str:
        return f'{value:+,.{self.decimals}f}' if math.isfinite(value) else NONE

    def interval(self, ends: Interval | None) -> str:
        return NONE if ends is None else f'{self.signed(ends[0])} to {self.signed(ends[1])}'

    def spread(self, mean: float, sd: float) -> str:
        """Returns mean ± standard deviation."""
        return self(mean) + (f' ± {self(sd)}' if math.isfinite(sd) else '')


def scale(rows: Sequence[Row]) -> Scale:
    """Returns decimals that show two digits of the arms' median noise and one of every difference's.

    Where no noise is known, four digits of the means.
    """
    means = [abs(row.runs.mean) for row in rows if math.isfinite(row.runs.mean)]
    size = math.floor(math.log10(max(means))) if means and max(means) > 0 else 0
    least = 10.0 ** (size - DIGITS)  # below it a spread is of rounding
    own = [row.runs.sd for row in rows if row.runs.sd > least]
    between = [row.comparison.sd for row in rows if row.comparison and row.comparison.sd > least]
    wanted = [1 - math.floor(math.log10(statistics.median(own)))] if own else [3 - size]
    wanted += [-math.floor(math.log10(sd)) for sd in between]
    return Scale(max(0, min(max(wanted), DIGITS - 1 - size)))


def named(metric: str) -> str:
    """Returns a metric's name as words."""
    return re.sub(r'[\W_]+', ' ', metric).strip()


def quantity(name: str) -> str:
    return 'FLOPs' if name == 'flops' else named(name)


def said(why: str | None) -> str:
    """Returns a reason as part of a line."""
    return document.plain(why or '').rstrip('.').replace('`', "'")


def probability(p: float) -> str:
    return NONE if math.isnan(p) else '< 0.001' if p < 0.001 else f'{p:.3f}'


def amount(value: float | None) -> str:
    """Returns a count or an amount: whole below 10 ** 10."""
    if value is None or not math.isfinite(value):
        return NONE
    return f'{value:,.0f}' if abs(value) < 1e10 and abs(value) >= 100 else f'{value:.4g}'


def rounded(value: float) -> str:
    """Returns three digits."""
    return f'{float(f"{value:.3g}"):,.0f}' if 100 <= abs(value) < 1e7 else f'{value:.3g}'


def drawn(report: Report) -> str:
    """Returns what a caption adds where not all arms are drawn."""
    return f' Drawn are the baseline and the {DRAWN - 1} best of the others.' if len(report.rows) > DRAWN else ''


def level(alpha: float) -> str:
    return f'{100 * (1 - alpha):g} %'


def count(number: int, what: str) -> str:
    return f'{number:,} {what}{"" if number == 1 else "s"}'


def joined(parts: Sequence[str]) -> str:
    """Returns 'a, b and c'."""
    *most, last = parts
    return f'{", ".join(most)} and {last}' if most else last


# ------------------------------------------------------------------------------------------------------ the findings


def headline(report: Report) -> str:
    """Returns what was compared, and how far the trials are."""
    found = report.results
    better = 'lower' if report.lower_is_better else 'higher'
    arms = [row.arm for row in report.rows]
    if len(arms) > 1:
        what = f'{count(len(arms) - 1, "arm")} against {document.code(report.baseline)}'
    else:
        what = f'{document.code(report.baseline)} alone: its noise'
    states = [f'{found.count(state)} {state}' for state in (FAILED, UNFINISHED) if found.count(state)]
    trials = f'{count(len(found.runs), "trial")}: {joined([f"{found.count(DONE)} {DONE}", *states])}'
    return f'{what}, by {named(report.metric)} ({better} is better). {trials}.'


def findings(report: Report) -> list[str]:
    """Returns one line an arm."""
    digits = scale(report.rows)
    return [_finding(report, row, digits) for row in report.rows]


def _finding(report: Report, row: Row, digits: Scale) -> str:
    runs, name = row.runs, named(report.metric)
    if not runs.n:
        states = [run.state for run in report.results.arms[row.arm]]
        told = [f'{states.count(state)} {state}' for state in (FAILED, UNFINISHED) if state in states]
        return f'{document.code(row.arm)}: no finite {name}' + (f' ({joined(told)})' if told else '')
    line = f'{document.code(row.arm)}: {name} {digits.spread(runs.mean, runs.sd)}'
    failed = f'; {count(runs.failed, "run")} failed' if runs.failed else ''
    if row.comparison is None:
        return f'{line}, {count(runs.n, "seed")}: the {BASELINE}{failed}'
    found = row.comparison
    if math.isnan(found.difference):
        return f'{line}: not compared, for the baseline has no finite result'
    than = f'the {BASELINE}' if report.baseline == BASELINE else document.code(report.baseline)
    if not (found.difference or found.sd):
        return f'{line}: the same as {than} in every run{failed}'
    line += f', {digits(abs(found.difference))} {"lower" if found.difference < 0 else "higher"} than {than}'
    rests_on = []
    if found.interval is not None and not math.isnan(row.p_holm):
        p = probability(row.p_holm)
        rests_on.append(f'{level(report.alpha)} interval {digits.interval(found.interval)}')
        rests_on.append(f'p {p if p[0] == "<" else f"= {p}"} by Holm')
    if found.unmatched:
        rests_on.append(f'{count(found.n, "pair")}, {count(found.unmatched, "run")} without a partner left out')
    line += f' ({", ".join(rests_on)})' if rests_on else ''
    return f'{line}: {row.label}{_more(row)}{failed}'


def _more(row: Row) -> str:
    """Returns what a label supposes, and what would decide."""
    if row.comparison and row.comparison.test == ONE_RUN and row.label in (BETTER, WORSE):
        return ' if its noise is that of the baseline: it is one run'
    if row.comparison and row.comparison.test == PERMUTATION and row.label == UNKNOWN:
        return ", for each side's runs are all the same; more would tell"
    if row.label == UNKNOWN:
        return '; runs with other seeds would tell'
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
    return f'Scored are the first {count(most, "record")} of the {split} split, of any size (evaluate.max_examples).'


def scored(report: Report) -> str | None:
    """Returns which checkpoints the scores are of, where some are not the last ones."""
    steps = [spent.scored for spent in report.costs.values() if spent.scored is not None]
    if all(spent.scored in (None, spent.steps) for spent in report.costs.values()):
        return None
    runs = [run for run in report.results.runs if run.state == DONE]
    named = joined([document.code(name) for name in sorted({run.config.train.best_metric for run in runs})])
    return (
        f'The scores are those of the checkpoints best by {named}, after {amount(min(steps))} to {amount(max(steps))} '
        'steps (Cost has each arm); curves and costs are of the whole runs.'
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
                f'{document.code(arm)}: {named(found.name)} reaches {found.value:g}{when} in {len(steps)} of '
                f'{count(len(runs), "run")}{at_once}'
            )
    return lines


def _steps(values: Sequence[float]) -> str:
    spread = f' ± {statistics.stdev(values):,.0f}' if len(values) > 1 else ''
    return f'{statistics.mean(values):,.0f}{spread}'
