"""The sections of a report that set the arms against the baseline: at the end, and on the way."""

import math

from tformer.lab.report import prose
from tformer.lab.report.document import Block, Figure, Line, Table, code
from tformer.lab.report.learning import Matched
from tformer.lab.report.report_data import Report
from tformer.lab.statistics.comparison import Row


def comparison(report: Report) -> list[Block]:
    """Returns the table against the baseline, what it rests on, and the forest plot."""
    digits, level = prose.scale(report.rows), prose.level(report.alpha)
    head = ['arm', 'label', 'n (failed)', f'{prose.named(report.metric)}, mean ± sd', 'difference', f'{level}, t']
    head += [f'{level}, bootstrap', 'effect', 'p', 'p (Holm)', 'seeds to decide', 'test']
    blocks: list[Block] = [Table(head, [_compared(row, digits) for row in report.rows])]
    floor = report.rows[0].runs
    if floor.n > 1 and floor.sd_interval:
        low, high = floor.sd_interval
        blocks.append(Line(
            f'Noise floor of {code(report.baseline)}: standard deviation {digits(floor.sd)} ({level} interval '
            f'{digits(low)} to {digits(high)}) over {floor.n} seeds. Two arms of {floor.n} unpaired runs each must '
            f'differ by {digits(floor.detectable)} for a t test to see it with chance 0.8.'
        ))  # fmt: skip
    else:
        blocks.append(
            Line(f'{code(report.baseline)} has {prose.count(floor.n, "finite run")}: its noise needs two or more.')
        )
    if report.num_comparisons:
        tests = sorted({row.comparison.test for row in report.rows if row.comparison and row.runs.n})
        blocks.append(Line(
            f'Labels are of the whole table: of families of {prose.count(report.num_comparisons, "comparison")} like '
            f'this one, at most a share {report.alpha:g} calls any arm better or worse that equals the baseline in '
            'mean and noise (p by Holm), if the number of seeds was settled before any was looked at: what is within '
            'noise is settled by fresh seeds alone. Intervals are of one comparison each, the bootstrap by t (Efron & '
            f'Tibshirani 1993, 12.5), wide or unknown of few runs. Tests: {", ".join(tests)}. The effect is in '
            'standard deviations, of pairs where seeds are paired. Seeds to decide: runs a side that show a true '
            'difference of the observed size with chance 0.8; of few runs it is a rough guess.'
        ))  # fmt: skip
    blocks += _matching(report)
    if any(row.comparison and math.isfinite(row.comparison.difference) for row in report.rows):
        caption = f'Difference of {prose.named(report.metric)} from the baseline, {level} t intervals; '
        blocks.append(Figure('forest', '', f'{caption}{_side(report)}.'))
    return blocks


def _side(report: Report) -> str:
    return f'{"left" if report.lower_is_better else "right"} is better'


def _compared(row: Row, digits: prose.Scale) -> list[str]:
    runs, found = row.runs, row.comparison
    number = f'{runs.n} ({runs.failed})' if runs.failed else f'{runs.n}'
    cells = [code(row.arm), row.label, number, digits.spread(runs.mean, runs.sd)]
    if found is None:
        return [*cells, *[prose.NONE] * 8]
    effect = prose.NONE if math.isnan(found.effect) else f'{found.effect:+.2f}'
    seeds = prose.NONE if row.seeds is None else f'{row.seeds:,}'
    return [
        *cells, digits.signed(found.difference), digits.interval(found.interval), digits.interval(found.bootstrap),
        effect, prose.probability(found.p), prose.probability(row.p_holm), seeds,
        f'{found.test} of {found.n} pairs' if found.unmatched else found.test,
    ]  # fmt: skip


def _matching(report: Report) -> list[Block]:
    off: dict[str, list[str]] = {}
    for arm in report.arms:
        for quantity, percent in report.results.arms[arm][0].mismatch_percent.items():
            off.setdefault(quantity, []).append(f'{code(arm)} {percent:+.3f} %')
    return [
        Line(f'Matched in {prose.quantity(quantity)}, off by: {", ".join(each)}.') for quantity, each in off.items()
    ]


def others(report: Report) -> list[Block]:
    """Returns the table of the metrics that do not decide."""
    if not report.others:
        return []
    digits = {metric: prose.scale(rows) for metric, rows in report.others.items()}
    by_arm = {metric: {row.arm: row for row in rows} for metric, rows in report.others.items()}
    rows = [[code(arm), *(_short(by_arm[metric][arm], digits[metric]) for metric in digits)] for arm in report.arms]
    told = 'Mean ± sd, the difference from the baseline, and its label.'
    if report.num_comparisons:
        told += ' Each metric is a family of its own: of many, some labels are chance.'
    return [Line(told), Table(['arm', *map(code, digits)], rows)]


def _short(row: Row, digits: prose.Scale) -> str:
    text = digits.spread(row.runs.mean, row.runs.sd)
    if row.comparison is None or math.isnan(row.comparison.difference):
        return text
    return f'{text}, {digits.signed(row.comparison.difference)} {row.label}'


def texts(report: Report) -> list[Block]:
    """Returns whether other examples would change which of two runs of a seed is better."""
    rows = []
    for found in report.texts:
        seeds = found.seeds.values()
        digits = prose.Scale(4 if max(abs(each.baseline) for each in seeds) < 2 else 2)
        told = [f'{digits.signed(each.difference)} ({digits.interval(each.interval)})' for each in seeds]
        p = [prose.probability(each.p) for each in seeds]
        rows.append([code(found.arm), code(found.metric), f'{found.examples:,}', ', '.join(map(str, found.seeds)),
                     '; '.join(told), '; '.join(p)])  # fmt: skip
    if not rows:
        return []
    note = (
        "Each run against the baseline's of the same seed, by paired bootstrap of the examples (Koehn 2004): whether "
        'other examples would change their order. Other seeds are not in it, and p is of one comparison.'
    )
    level = prose.level(report.alpha)
    head = ['arm', 'metric', 'examples', 'seeds', f'difference by seed ({level})', 'p by seed']
    return [Line(note), Table(head, rows)]


# ------------------------------------------------------------------------------------------------------------- curves


def learning(report: Report) -> list[Block]:
    """Returns the curves, the arms at matched cost, and when each reaches what the baseline ends with."""
    blocks: list[Block] = []
    for name, by_arm in report.curves.items():
        several = any(band.runs > 1 for band in by_arm.values())
        bands = '; bands are one standard deviation each way' if several else ''
        caption = f'{prose.named(name)}: of each arm the mean of the runs that are done{bands}.'
        caption += ' The first tenth of the steps may lie beyond the frame.'
        blocks.append(Figure('curves', name, caption + prose.drawn(report)))
    for found in report.matched:
        blocks += at_cost(report, found)
    if report.speed_ups:
        blocks.append(
            Line(
                f"The baseline's mean {prose.named(report.curve or '')} ends with {report.speed_ups[0].value:.4g}. "
                'Reached by:'
            )
        )
        rows = [
            [code(each.arm), prose.amount(each.steps), prose.NONE if each.why else f'{each.factor:.2f}',
             prose.said(each.why)]
            for each in sorted(report.speed_ups, key=lambda each: report.arms.index(each.arm))
        ]  # fmt: skip
        blocks.append(Table(['arm', 'after steps', 'times sooner than the baseline', 'why not known'], rows))
    return blocks


def at_cost(report: Report, found: Matched) -> list[Block]:
    same = ''
    if found.same:
        same = f' (and {prose.joined([prose.quantity(name) for name in found.same])}: all arms have as many a step)'
    name, level = prose.named(report.curve or ''), prose.level(report.alpha)
    if found.why:
        return [Line(f'Not compared at matched {prose.quantity(found.quantity)}: {prose.said(found.why)}.')]
    digits = prose.scale(found.rows)
    rows = [
        [code(row.arm), digits.spread(row.runs.mean, row.runs.sd)]
        + ([prose.NONE] * 3 if row.comparison is None else [
            digits.signed(row.comparison.difference), digits.interval(row.comparison.interval),
            prose.probability(row.p_holm),
        ]) + [row.label]
        for row in found.rows
    ]  # fmt: skip
    return [
        Line(f'{name} at matched {prose.quantity(found.quantity)}, after {prose.amount(found.at)}{same}:'),
        Table(['arm', 'mean ± sd', 'difference', f'{level}, t', 'p (Holm)', 'label'], rows),
    ]
