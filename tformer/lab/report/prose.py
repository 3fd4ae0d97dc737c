"""How a report writes its numbers and names."""

import dataclasses
import math
import re
import statistics
from collections.abc import Sequence

import numpy as np

from tformer.lab.report.results import FAILED, PRUNED, UNFINISHED, UNREADABLE, Run
from tformer.lab.statistics.comparison import Row
from tformer.lab.statistics.noise import Interval

NONE = '-'  # a number that is not known
TOLD, LISTED = 20, 50  # arms that have a sentence, and arms that have a row in every table: the baseline and the best
DRAWN = 10  # arms that a drawing with a legend has at most, the baseline and the best
FEW = 6  # values that are written out
DIGITS = 7  # of a mean, at most
MOST_DECIMALS, LARGE = 15, 1e15  # numbers beyond them are written with an exponent
NOTHING = 1e-9  # nats: a loss below it is none
CODE = re.compile(r'`([^`]*)`')
LONG = re.compile(r'(?<==)-?\d+\.\d{5,}(e-?\d+)?(?=,|$)')
CONTROL = re.compile(r'[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+')


@dataclasses.dataclass(frozen=True)
class Scale:
    """How the numbers of one metric are written: all with as many decimals."""

    decimals: int

    def __call__(self, value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return NONE
        return format(value, self._form(value))

    def signed(self, value: float) -> str:
        return format(value, f'+{self._form(value)}') if math.isfinite(value) else NONE

    def _form(self, value: float) -> str:
        return '.4g' if self.decimals > MOST_DECIMALS or abs(value) >= LARGE else f',.{self.decimals}f'

    def interval(self, ends: Interval | None) -> str:
        return NONE if ends is None else f'{self.signed(ends[0])} to {self.signed(ends[1])}'

    def spread(self, mean: float, sd: float) -> str:
        return self(mean) + (f' ± {self(sd)}' if math.isfinite(sd) else '')


def scale(rows: Sequence[Row]) -> Scale:
    """Returns decimals that show two digits of the arms' median noise and one of every difference's.

    Where no noise is known, four digits of the means.
    """
    means = [abs(row.runs.mean) for row in rows if math.isfinite(row.runs.mean)]
    size = math.floor(math.log10(max(means))) if means and max(means) > 0 else 0
    least = 10.0 ** (size - DIGITS)  # below it a spread is of rounding
    own = [row.runs.sd for row in rows if least < row.runs.sd < math.inf]
    between = [row.comparison.sd for row in rows if row.comparison and least < row.comparison.sd < math.inf]
    wanted = [1 - math.floor(math.log10(statistics.median(own)))] if own else [3 - size]
    wanted += [-math.floor(math.log10(sd)) for sd in between]
    return Scale(max(0, min(max(wanted), DIGITS - 1 - size)))


def plain(text: str) -> str:
    """Returns text in one line, without what a terminal or a page would obey."""
    return CONTROL.sub(' ', text).strip()


def code(text: object) -> str:
    """Returns what others wrote, as code in a line."""
    return '`' + (plain(str(text)).replace('`', "'") or ' ') + '`'


def brief(name: str) -> str:
    """Returns the name of an arm with four digits of each long number in it."""
    return LONG.sub(lambda found: f'{float(found[0]):.4g}', plain(name))


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


def exactly(p: float) -> str:
    """Returns a probability with all of its digits."""
    return NONE if math.isnan(p) else repr(float(p))


def equals(p: float) -> str:
    """Returns a probability with its sign, e.g. '= 0.012'."""
    text = probability(p)
    return text if text.startswith('<') else f'= {text}'


def amount(value: float | None) -> str:
    """Returns a count or an amount: whole below 10 ** 10."""
    if value is None or not math.isfinite(value):
        return NONE
    return f'{value:,.0f}' if abs(value) < 1e10 and abs(value) >= 100 else f'{value:.4g}'


def coefficient(value: float) -> str:
    return f'{value:.4g}' if value > NOTHING else '0'


def rounded(value: float) -> str:
    """Returns three digits."""
    return f'{float(f"{value:.3g}"):,.0f}' if 100 <= abs(value) < 1e7 else f'{value:.3g}'


def mean_sd(values: Sequence[float], decimals: int) -> str:
    """Returns mean ± standard deviation."""
    if not values:
        return NONE
    return Scale(decimals).spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan)


def level(alpha: float) -> str:
    return f'{100 * (1 - alpha):g} %'


def count(number: int, what: str) -> str:
    return f'{number:,} {what}{"" if number == 1 else "s"}'


def joined(parts: Sequence[str]) -> str:
    """Returns 'a, b and c'."""
    *most, last = parts
    return f'{", ".join(most)} and {last}' if most else last


def first(parts: Sequence[str]) -> str:
    """Returns 'a, b and c', of many the first ones and how many more there are."""
    more = [f'{len(parts) - TOLD:,} more'] if len(parts) > TOLD else []
    return joined([*parts[:TOLD], *more])


def value(of: object) -> str:
    """Returns a field's value: four digits of a number that is not whole."""
    return f'{of:.4g}' if isinstance(of, float) else str(of)


def span(values: Sequence[object]) -> str:
    """Returns which values a field has: all if they are few, or else the ends of numbers, or how many."""
    known = {repr(each): each for each in values}
    if len(known) <= FEW:
        return ', '.join(map(value, known.values()))
    numbers = [each for each in known.values() if isinstance(each, int | float) and not isinstance(each, bool)]
    ends = f': {value(min(numbers))} to {value(max(numbers))}' if len(numbers) == len(known) else ''
    return f'{len(known):,} values{ends}'


def states(runs: Sequence[Run]) -> list[str]:
    """Returns how many runs failed, have not ended, are pruned or cannot be read, without zeros."""
    counts = {state: sum(run.state == state for run in runs) for state in (FAILED, UNFINISHED, PRUNED, UNREADABLE)}
    return [f'{number} {state}' for state, number in counts.items() if number]


def between(ends: Interval) -> str:
    return ' to '.join(map(rounded, ends)) if np.isfinite(ends).all() else 'unbounded'
