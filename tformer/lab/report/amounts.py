"""The sections of a report about amounts: what the arms cost, one field's effect, the scaling law, and time."""

import statistics
from collections.abc import Mapping

import numpy as np

from tformer.lab.report import comparisons, prose
from tformer.lab.report.document import Block, Figure, Line, List, Table, code
from tformer.lab.report.report_data import Report
from tformer.lab.report.scaling_analysis import Scaling
from tformer.lab.scaling_laws import power_law

FRONT = 'front'
NOTHING = 1e-9  # nats: a loss below it is none


def cost(report: Report) -> list[Block]:
    """Returns what a run of each arm costs, and Pareto's fronts."""
    digits, means = prose.scale(report.rows), {row.arm: row.runs.mean for row in report.rows}
    head = [
        'arm',
        'parameters',
        'FLOPs',
        'tokens',
        'steps',
        'scored after',
        prose.named(report.metric),
        'on the front by',
    ]
    rows = []
    for arm in report.arms:
        spent = report.costs[arm]
        amounts = [prose.amount(x) for x in (spent.parameters, spent.flops, spent.tokens, spent.steps, spent.scored)]
        fronts = ', '.join(prose.quantity(name) for name, arms in report.fronts.items() if arm in arms)
        rows.append([code(arm), *amounts, digits(means[arm]), fronts or prose.NONE])
    told = (
        'Of one run: FLOPs forward and backward, padding among them; tokens of both sides, without padding. An arm is '
        'on a front (Pareto) where no other has a mean as good for as little.'
    )
    figures = [_pareto(report, name, arms) for name, arms in report.fronts.items() if arms and _differ(report, name)]
    return [Table(head, rows), Line(told), *figures]


def _differ(report: Report, name: str) -> bool:
    return len({getattr(report.costs[arm], name) for arm in report.arms} - {None}) > 1


def _pareto(report: Report, name: str, front: set[str]) -> Figure:
    better = 'lower' if report.lower_is_better else 'higher'
    caption = (
        f'{prose.named(report.metric)} ({better} is better) against {prose.quantity(name)}; the line is the front.'
    )
    return Figure('pareto', name, caption + prose.drawn(report))


def timing(report: Report) -> list[Block]:
    """Returns what a clock measured."""
    if report.timing is None:
        return []
    spent = [(arm, report.costs[arm]) for arm in report.arms]
    if all(each.seconds is None and each.tokens_per_second is None for _, each in spent):
        return []
    rows = []
    for arm, each in spent:
        seconds = [run.seconds for run in report.results.arms[arm] if run.seconds and run.scores]
        spread = f' ± {statistics.stdev(seconds):,.1f}' if len(seconds) > 1 else ''
        front = FRONT if arm in report.timing.front else ''
        took = prose.NONE if each.seconds is None else f'{each.seconds:,.1f}{spread}'
        rows.append([code(arm), took, prose.amount(each.tokens_per_second), front])
    blocks: list[Block] = [
        Line(
            'This section alone rests on a clock, and differs between machines and executions (`--timing=false` leaves '
            'it out). Seconds are of a run, start, compilation, evaluations and repeated steps among them; where one '
            'program trained several, an equal share of its. Tokens a second are of training steps alone, without '
            'padding.'
        ),
        Table(['arm', 'seconds, mean ± sd', 'tokens a second, median', 'on the front by seconds'], rows),
    ]
    for found in report.timing.matched:
        blocks.append(Line('The mean seconds of an arm are spread evenly over its steps.'))
        blocks += comparisons.at_cost(report, found)
    if report.timing.front and _differ(report, 'seconds'):
        blocks.append(_pareto(report, 'seconds', report.timing.front))
    return blocks


def response(report: Report) -> list[Block]:
    """Returns the metric along the field that varies, with the best value of each line."""
    found = report.response
    if found is None:
        return []
    digits, rows = prose.scale(report.rows), []
    for line in found.lines:
        near = f'within noise of it: {prose.joined([code(f"{x:g}") for x in line.near])}' if line.near else ''
        edge = 'at the end of the values tried: the best may lie beyond' if line.at_edge else ''
        best = digits.spread(float(line.mean[line.best]), float(line.sd[line.best]))
        rows.append([_fixed(line.fixed), code(f'{line.x[line.best]:g}'), best, '; '.join(filter(None, (near, edge)))])
    head = ['line', f'best {code(found.field)}', f'{prose.named(report.metric)}, mean ± sd', 'note']
    caption = f'{prose.named(report.metric)} along {code(found.field)}, mean ± sd over the seeds; the best is ringed.'
    return [Table(head, rows), Figure('response', '', caption)]


def _fixed(fixed: Mapping[str, object]) -> str:
    return ', '.join(code(f'{field}={value}') for field, value in fixed.items()) or 'all'


def scaling(report: Report) -> list[Block]:
    """Returns the law of the loss, the optimal sizes, and the iso-FLOP minima."""
    found = report.scaling
    if found is None:
        return []
    if not len(found.N):
        return [Line(f'No law: {prose.said(found.why)}.')]
    blocks: list[Block] = [Line(
        f'L = E + A / N^a + B / D^b of {prose.count(len(found.loss), "run")}: L {prose.named(report.metric)}, N '
        'parameters, D tokens (Hoffmann et al. 2022, approach 3, by the robust fit of log loss).'
    )]  # fmt: skip
    if found.law is None:
        blocks.append(Line(f'No law: {prose.said(found.why)}.'))
    else:
        blocks += _law(report, found)
        blocks.append(Figure('scaling', '', 'Loss against FLOPs as 6 N D; lines are the law, one for each size.'))
    return [*blocks, *_profiles(report, found), *_envelope(report, found), *map(Line, _supposed(found))]


def _supposed(found: Scaling) -> list[str]:
    """Returns what the laws pass over, in prose."""
    told = []
    if found.left_out:
        told.append(f'Of arms of the same size and tokens the best alone counts; {found.left_out} are left out.')
    if found.pooled:
        told.append(f'Besides size and tokens the arms differ in {prose.joined(list(map(code, found.pooled)))}.')
    if found.early:
        told.append(
            f'{prose.count(found.early, "run")} had the loss before the end: D is of that step, C of the whole run.'
        )
    return told


def _profiles(report: Report, found: Scaling) -> list[Block]:
    if found.profiles is None:
        return [Line(f'No iso-FLOP parabolas: {prose.said(found.no_profiles)}.')]
    rows = [
        [f'{m.flops:.3g}', prose.rounded(m.N), _between(m.N_interval), f'{m.loss:.4g}'] for m in found.profiles.minima
    ]
    return [
        Line(f'Iso-FLOP parabolas (approach 2): {_exponent(report, found.profiles.law)}.'),
        Table(['FLOPs', 'N of the least loss', f'{prose.level(report.alpha)} interval', 'loss there'], rows),
        Figure('profiles', '', 'Loss against size at each budget of FLOPs; rings are the minima of the parabolas.'),
    ]


def _between(ends: tuple[float, float]) -> str:
    return ' to '.join(map(prose.rounded, ends)) if np.isfinite(ends).all() else 'unbounded'


def _envelope(report: Report, found: Scaling) -> list[Block]:
    if found.envelope is None:
        return [Line(f'No envelope of the training curves: {prose.said(found.no_envelope)}.')]
    return [
        Line(f'The envelope of the training curves (approach 1): {_exponent(report, found.envelope.law)}.'),
        Figure('envelope', '', 'Training loss against FLOPs so far; the envelope is the least at each.'),
    ]


def _exponent(report: Report, law: power_law.PowerLaw) -> str:
    low, high = law.exponent_interval
    return f'N_opt ~ C^{law.exponent:.3f} ({prose.level(report.alpha)} interval {low:.3f} to {high:.3f})'


def _law(report: Report, found: Scaling) -> list[Block]:
    law, level = found.law, prose.level(report.alpha)
    assert law is not None
    bounds = found.bounds or {}

    def said(value: float) -> str:
        return f'{value:.4g}' if value > NOTHING else '0'

    def spread(name: str, value: float, ends: tuple[float, float] | None) -> str:
        text = f'{name} = {said(value)}'
        return text if ends is None else f'{text} ({said(ends[0])} to {said(ends[1])})'

    names = {'E': law.E, 'A': law.A, 'B': law.B, 'alpha': law.alpha, 'beta': law.beta}
    names['size_exponent'] = law.size_exponent
    symbols = {'alpha': 'a', 'beta': 'b', 'size_exponent': 'exponent of N_opt in C'}
    items = [spread(symbols.get(name, name), value, bounds.get(name)) for name, value in names.items()]
    N, D = law.optimal(found.budgets)
    predicted = law.predict(N, D)
    rows = []
    for i, budget in enumerate(found.budgets):
        cells = [prose.rounded(N[i]), prose.rounded(D[i])]
        for place, name in enumerate(('N', 'D')):
            if name in bounds:
                low, high = (np.asarray(end)[i] for end in bounds[name])
                cells[place] += f' ({prose.rounded(low)} to {prose.rounded(high)})'
        rows.append([f'{budget:.3g}', *cells, f'{predicted[i]:.4g}'])
    note = f'In brackets: {level} intervals by resampling runs.'
    if found.bounds is None:
        note = f'No intervals: {prose.said(found.no_bounds)}.'
    if found.held_out_error is not None:
        note += f' Fitted without the largest budget, the law misses its losses by {100 * found.held_out_error:.2g} %.'
    return [
        List(items),
        Line(note),
        Table(['FLOPs as 6 N D', 'optimal N', 'optimal D', 'loss by the law'], rows),
        Line('The budgets are the least and the most of the runs, and ten times the most, which is an extrapolation.'),
    ]
