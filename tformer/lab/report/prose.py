"""The numbers and the findings of a report, in prose."""

import dataclasses
import math
import re
import statistics
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from tformer.lab.report.report_data import Report
from tformer.lab.report.scaling_analysis import Line, Scaling
from tformer.lab.report.texts import Compared
from tformer.lab.scaling_laws import power_law
from tformer.lab.statistics.comparison import Row
from tformer.lab.statistics.noise import Interval

NONE = '-'  # a number that is not known
DRAWN = 10  # arms that a drawing with a legend has at most, the baseline and the best
DIGITS = 7  # of a mean, at most
NOTHING = 1e-9  # nats: a loss below it is none
CODE = re.compile(r'`([^`]*)`')
CONTROL = re.compile(r'[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+')

Figure = tuple[str, str, str]  # a key of `plots.DRAWINGS`, which one of its kind, and its caption


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


def plain(text: str) -> str:
    """Returns text in one line, without what a terminal or a page would obey."""
    return CONTROL.sub(' ', text).strip()


def code(text: object) -> str:
    """Returns what others wrote, as code in a line."""
    return '`' + (plain(str(text)).replace('`', "'") or ' ') + '`'


def named(metric: str | None) -> str:
    """Returns a metric's name as words."""
    return re.sub(r'[\W_]+', ' ', metric or '').strip()


def quantity(name: str) -> str:
    return 'FLOPs' if name == 'flops' else named(name)


def reason(why: str | None) -> str:
    """Returns a reason as part of a line."""
    return plain(why or '').rstrip('.').replace('`', "'")


def number(value: float | None, form: str) -> str:
    """Returns a number formatted by `form`, e.g. '+.2f'."""
    return NONE if value is None or math.isnan(value) else format(value, form)


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
    return f' Only the baseline and the {DRAWN - 1} best other arms are drawn.' if len(report.rows) > DRAWN else ''


def level(alpha: float) -> str:
    return f'{100 * (1 - alpha):g} %'


def count(number: int, what: str) -> str:
    return f'{number:,} {what}{"" if number == 1 else "s"}'


def joined(parts: Sequence[str]) -> str:
    """Returns 'a, b and c'."""
    *most, last = parts
    return f'{", ".join(most)} and {last}' if most else last


# ------------------------------------------------------------------------------------------- parts of the template


def tests(report: Report) -> str:
    """Returns the names of the tests that the comparisons rest on."""
    return ', '.join(sorted({row.comparison.test for row in report.rows if row.comparison and row.runs.n}))


def mismatches(report: Report) -> list[str]:
    """Returns one line for each quantity that the arms are matched in."""
    missed: dict[str, list[str]] = {}
    for arm in report.arms:
        for name, percent in report.results.arms[arm][0].mismatch_percent.items():
            missed.setdefault(name, []).append(f'{code(arm)} {percent:+.3f} %')
    return [f'Matched in {quantity(name)}, with these errors: {", ".join(arms)}.' for name, arms in missed.items()]


def short(rows: Sequence[Row], arm: str) -> str:
    """Returns an arm's mean, its difference from the baseline and its label in one cell."""
    digits, row = scale(rows), next(row for row in rows if row.arm == arm)
    text = digits.spread(row.runs.mean, row.runs.sd)
    if row.comparison is None or math.isnan(row.comparison.difference):
        return text
    return f'{text}, {digits.signed(row.comparison.difference)} {row.label}'


def by_seed(found: Compared) -> str:
    """Returns the differences of generated text, seed by seed, and their intervals."""
    digits = Scale(4 if max(abs(each.baseline) for each in found.seeds.values()) < 2 else 2)
    return '; '.join(
        f'{digits.signed(each.difference)} ({digits.interval(each.interval)})' for each in found.seeds.values()
    )


def curve_figures(report: Report) -> list[Figure]:
    """Returns the learning curves, each with its caption."""
    figures = []
    for name, by_arm in report.curves.items():
        several = any(band.runs > 1 for band in by_arm.values())
        bands = '; bands are one standard deviation each way' if several else ''
        caption = f'{named(name)}: the mean over the finished runs of each arm{bands}. '
        caption += 'The first tenth of the steps may lie outside the frame.'
        figures.append(('curves', name, caption + drawn(report)))
    return figures


def pareto_figures(report: Report, fronts: Mapping[str, Collection[str]]) -> list[Figure]:
    """Returns the metric against each cost in which the arms differ, with its front."""
    better = 'lower' if report.lower_is_better else 'higher'
    figures = []
    for cost, arms in fronts.items():
        if arms and len({getattr(report.costs[arm], cost) for arm in report.arms} - {None}) > 1:
            caption = f'{named(report.metric)} ({better} is better) against {quantity(cost)}'
            figures.append(('pareto', cost, f'{caption}; the dotted line is the Pareto front.{drawn(report)}'))
    return figures


def fronts(report: Report, arm: str) -> str:
    """Returns the costs on whose Pareto front an arm is."""
    return ', '.join(quantity(name) for name, arms in report.fronts.items() if arm in arms) or NONE


def timed(report: Report) -> bool:
    """Returns whether a clock measured anything."""
    spent = report.costs.values()
    return any(each.seconds is not None or each.tokens_per_second is not None for each in spent)


def seconds(report: Report, arm: str) -> str:
    """Returns the seconds that a run of an arm took, mean ± standard deviation."""
    mean = report.costs[arm].seconds
    if mean is None:
        return NONE
    each = [run.seconds for run in report.results.arms[arm] if run.seconds and run.scores]
    return f'{mean:,.1f}' + (f' ± {statistics.stdev(each):,.1f}' if len(each) > 1 else '')


def fixed(line: Line) -> str:
    """Returns the fields that are fixed along a line, in a cell."""
    return ', '.join(code(f'{field}={value}') for field, value in line.fixed.items()).replace('|', r'\|') or 'all'


def note(line: Line) -> str:
    """Returns what qualifies the best value of a line."""
    near = f'within noise of it: {joined([code(f"{x:g}") for x in line.near])}' if line.near else ''
    edge = 'at the edge of the values tried: a better one may lie beyond' if line.at_edge else ''
    return '; '.join(filter(None, (near, edge)))


def law_items(found: Scaling) -> list[str]:
    """Returns one line for each number of the law, with its interval."""
    assert found.law is not None
    names = {'E': 'E', 'A': 'A', 'B': 'B', 'alpha': 'a', 'beta': 'b', 'size_exponent': 'exponent of N_opt in C'}

    def written(value: float) -> str:
        return f'{value:.4g}' if value > NOTHING else '0'

    lines = []
    for name, symbol in names.items():
        ends = (found.bounds or {}).get(name)
        spread = '' if ends is None else f' ({written(ends[0])} to {written(ends[1])})'
        lines.append(f'{symbol} = {written(getattr(found.law, name))}{spread}')
    return lines


def optimal_rows(found: Scaling) -> list[list[str]]:
    """Returns the compute-optimal sizes at each budget: FLOPs, parameters, tokens and the loss by the law."""
    assert found.law is not None
    optimal = dict(zip('ND', found.law.optimal(found.budgets), strict=True))
    predicted = found.law.predict(**optimal)
    rows = []
    for i, budget in enumerate(found.budgets):
        cells = [f'{budget:.3g}']
        for name, values in optimal.items():
            ends = (found.bounds or {}).get(name)
            spread = '' if ends is None else f' ({" to ".join(rounded(np.asarray(end)[i]) for end in ends)})'
            cells.append(rounded(values[i]) + spread)
        rows.append([*cells, f'{predicted[i]:.4g}'])
    return rows


def between(ends: Interval) -> str:
    return ' to '.join(map(rounded, ends)) if np.isfinite(ends).all() else 'unbounded'


def exponent(report: Report, law: power_law.PowerLaw) -> str:
    low, high = law.exponent_interval
    return f'N_opt ~ C^{law.exponent:.3f} ({level(report.alpha)} interval {low:.3f} to {high:.3f})'
