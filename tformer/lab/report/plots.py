"""The drawings of a report, by kind."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tformer.lab.report import drawing, prose
from tformer.lab.report.drawing import GREY, HEIGHT, INK, WIDTH, dots, finish, plainly, ring, short
from tformer.lab.report.report_data import Report
from tformer.lab.scaling_laws import isoflop

CROWD = 40  # points of a line from which on they have no bars and no line
PANELS = 8  # fields that are drawn one beside the other
TICKS = 8  # an axis has a tick at every value of a field, if there are at most so many


def svg(report: Report, kind: str, of: str) -> str:
    """Returns a drawing of a report as an element of a page: `kind` is a key of DRAWINGS, `of` one of its kind."""
    return drawing.inline(file(report, kind, of, 'svg').decode())


def file(report: Report, kind: str, of: str, form: str) -> bytes:
    """Returns a drawing of a report as a file: 'svg', or a form of `drawing.FORMS`."""
    return drawing.rendered(lambda figure: DRAWINGS[kind](report, figure, of), f'{kind} {of}', form)


def _look(report: Report, arm: str) -> dict[str, Any]:
    """Returns the colour, dash and marker of an arm: the page's ink is the baseline's."""
    if arm == report.baseline:
        return {'color': INK, 'linestyle': '-', 'marker': 'o'}
    return drawing.look([name for name in report.results.arms if name != report.baseline].index(arm))


def forest(report: Report, figure: Any, of: str) -> None:
    """Draws the differences from the baseline and their intervals, one line for each arm."""
    rows = [row for row in report.rows if row.comparison and math.isfinite(row.difference)][: prose.DRAWN - 1]
    figure.set_size_inches(WIDTH, 0.9 + 0.45 * max(len(rows), 1))
    axes = figure.subplots()
    for place, row in enumerate(rows):
        look = {**_look(report, row.arm), 'linestyle': 'none'}
        axes.plot([row.difference], [place], markersize=7, **look)
        if row.verdict.interval is not None:
            axes.hlines(place, *row.verdict.interval, color=look['color'], linewidth=2)
        axes.annotate(
            f'{short(row.arm)}: {row.label}', (0.0, place), (4, 9), xycoords=('axes fraction', 'data'),
            textcoords='offset points', fontsize=9,
        )  # fmt: skip
    axes.axvline(0, color=INK, linewidth=1)
    axes.set_ylim(len(rows) - 0.4, -0.8)
    axes.set_yticks([])
    axes.spines['left'].set_visible(False)
    axes.grid(axis='y', visible=False)
    axes.set_xlabel(f'difference of {prose.named(report.metric)}')
    plainly(axes.xaxis)


def curves(report: Report, figure: Any, of: str) -> None:
    """Draws the learning curves of one number with their bands."""
    axes = figure.subplots()
    bands = report.curves[of]
    drawn = [arm for arm in report.arms if arm in bands][: prose.DRAWN]
    for arm in drawn:
        band, look = bands[arm], _look(report, arm)
        sparse = len(band.steps) <= 12
        axes.plot(band.steps, band.mean, label=short(arm), linewidth=1.6,
                  **{**look, 'marker': look['marker'] if sparse else None}, markersize=4)  # fmt: skip
        if band.sd.any():
            low, high = band.mean - band.sd, band.mean + band.sd
            axes.fill_between(band.steps, low, high, color=look['color'], alpha=0.15, linewidth=0)
    means = np.concatenate([bands[arm].mean[len(bands[arm].mean) // 10 :] for arm in drawn])
    room = 0.08 * (means.max() - means.min()) or abs(means.max()) * 0.01 or 1.0
    axes.set_ylim(means.min() - room, means.max() + room)  # whatever the width of the bands
    finish(figure, axes, 'steps', prose.named(of))


def pareto(report: Report, figure: Any, of: str) -> None:
    """Draws the metric against a cost, and the front."""
    axes = figure.subplots()
    front = report.timing.front if of == 'seconds' and report.timing else report.fronts.get(of, set())
    points = {row.arm: (getattr(report.costs[row.arm], of), row.runs) for row in report.rows if row.runs.n}
    points = {arm: point for arm, point in points.items() if point[0] is not None}
    for arm, (cost, runs) in list(points.items())[: prose.DRAWN]:
        look = {**_look(report, arm), 'linestyle': 'none'}
        error = runs.sd if math.isfinite(runs.sd) else None
        axes.errorbar(cost, runs.mean, yerr=error, label=short(arm), markersize=7, elinewidth=1, **look)
    line = sorted((points[arm][0], points[arm][1].mean) for arm in front)
    axes.plot(*zip(*line, strict=True), color=INK, linewidth=1, linestyle=':', label='front')
    costs = [cost for cost, _ in points.values()]
    finish(figure, axes, prose.quantity(of), f'{prose.named(report.metric)}, mean ± sd', costs)


def response(report: Report, figure: Any, of: str) -> None:
    """Draws the metric along a field, one curve for each line."""
    assert report.response is not None
    axes, found = figure.subplots(), report.response
    for i, line in enumerate(found.lines):
        look, best = drawing.look(i), line.best
        label = ', '.join(f'{field.partition(".")[2]}={value}' for field, value in line.fixed.items()) or found.field
        if len(line.x) > CROWD:
            dots(axes, line.x, line.mean, look['color'], short(label))
        else:
            error = np.nan_to_num(line.sd)
            axes.errorbar(line.x, line.mean, yerr=error, label=short(label), markersize=4, elinewidth=1, **look)
        ring(axes, line.x[best], line.mean[best], look['color'])
    tried = np.unique(np.concatenate([line.x for line in found.lines]))
    means = np.concatenate([line.mean for line in found.lines])
    finish(figure, axes, found.field, prose.named(report.metric), tried, means)
    if len(tried) <= TICKS:
        axes.set_xticks(tried, [f'{x:.3g}' if abs(x) < 1 else f'{x:g}' for x in tried])
        axes.set_xticks([], minor=True)


def parallel(report: Report, figure: Any, of: str) -> None:
    """Draws every arm as a line over the fields and the metric, the best ones in colour."""
    fields = {field: list(values) for field, values in report.fields.items()}
    means = [row.runs.mean for row in report.rows]
    axes, columns = figure.subplots(), [*fields.values(), means]
    figure.set_size_inches(1.3 * WIDTH, HEIGHT + 0.4)
    heights = np.array([_heights(column) for column in columns]).T  # [arms, columns]
    shown = np.isfinite(means)
    broken = np.concatenate([heights[shown], np.full((int(shown.sum()), 1), np.nan)], 1)
    places = np.append(np.arange(len(columns), dtype=float), np.nan)
    axes.plot(
        np.tile(places, len(broken)),
        broken.ravel(),
        color=GREY,
        alpha=max(0.1, min(0.5, 20 / len(broken))),
        linewidth=0.7,
    )
    for i in np.flatnonzero(shown)[: prose.DRAWN]:
        look = {**_look(report, report.arms[i]), 'marker': None, 'zorder': 3 + prose.DRAWN - i}
        axes.plot(heights[i], label=short(report.arms[i]), linewidth=1.8, **look)
    for place, column in enumerate(columns):
        for height, text in _ends(column):
            above = height > 0.5
            axes.annotate(
                text, (place, height), (0, 4 if above else -4), textcoords='offset points', ha='center',
                va='bottom' if above else 'top', fontsize=8,
            )  # fmt: skip
    axes.set_ylim(-0.14, 1.14)
    axes.set_yticks([])
    axes.grid(axis='y', visible=False)
    axes.spines['left'].set_visible(False)
    names = [field.partition('.')[2] for field in fields] + [prose.named(report.metric)]
    axes.set_xticks(
        range(len(columns)), [short(name) for name in names], rotation=30, ha='right', rotation_mode='anchor'
    )
    drawing.legend(figure, axes)


def _heights(column: Sequence[Any]) -> np.ndarray:
    """Returns where values lie on an axis, from 0 to 1; by their logarithm if they are positive and span a decade."""
    if not all(type(value) in (int, float) for value in column):
        kinds = sorted(set(map(repr, column)))
        return np.array([kinds.index(repr(value)) for value in column]) / max(len(kinds) - 1, 1)
    numbers = np.array(column, float)
    finite = numbers[np.isfinite(numbers)]
    if drawing.spans(finite):
        numbers, finite = np.log(numbers), np.log(finite)
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 1.0)
    return (numbers - low) / ((high - low) or 1.0)


def _ends(column: Sequence[Any]) -> list[tuple[float, str]]:
    """Returns the labels of an axis' two ends, and their heights."""
    if not all(type(value) in (int, float) for value in column):
        kinds = {repr(value): str(value) for value in column}
        known = sorted(kinds)
        return [(0.0, short(kinds[known[0]])), (1.0, short(kinds[known[-1]]))][: len(known)]
    finite = [value for value in column if math.isfinite(value)] or [0.0]
    return [(0.0, f'{min(finite):.3g}'), (1.0, f'{max(finite):.3g}')]


def fields(report: Report, figure: Any, of: str) -> None:
    """Draws the metric over each field of numbers, a point for each arm, the best ones in colour."""
    columns = {
        field: np.array(values, float) for field, values in report.fields.items()
        if all(type(value) in (int, float) for value in values)
    }  # fmt: skip
    columns = dict(list(columns.items())[:PANELS])
    means = np.array([row.runs.mean for row in report.rows])
    shown = np.isfinite(means)
    figure.set_size_inches(WIDTH, 2.3 * math.ceil(len(columns) / 2) + 0.2)
    panels = figure.subplots(math.ceil(len(columns) / 2), 2, squeeze=False, sharey=True).ravel()
    for axes, (field, x) in zip(panels, columns.items(), strict=False):
        dots(axes, x[shown], means[shown], GREY)
        for i in np.flatnonzero(shown)[: prose.DRAWN]:
            axes.plot([x[i]], [means[i]], markersize=5, **{**_look(report, report.arms[i]), 'linestyle': 'none'})
        axes.set_xlabel(short(field.partition('.')[2]))
        plainly(axes.xaxis, x[shown])
        plainly(axes.yaxis, means[shown])
        axes.xaxis.set_major_locator(drawing.few_ticks(x[shown]))
    for axes in panels[len(columns) :]:
        axes.set_visible(False)
    figure.supylabel(prose.named(report.metric), fontsize=10)


def scaling(report: Report, figure: Any, of: str) -> None:
    """Draws the loss against FLOPs as 6 N D, and the law along each size."""
    assert report.scaling is not None
    axes, found = figure.subplots(), report.scaling
    law, C = found.law, isoflop.PER_TOKEN * found.N * found.D
    assert law is not None
    for i, N in enumerate(np.unique(found.N)):
        look, of_size = drawing.look(i), found.N == N
        axes.plot(C[of_size], found.loss[of_size], label=f'N = {prose.amount(N)}', markersize=5,
                  **{**look, 'linestyle': 'none'})  # fmt: skip
        D = np.geomspace(found.D[of_size].min(), found.D[of_size].max(), 60)
        axes.plot(isoflop.PER_TOKEN * N * D, law.predict(N, D), color=look['color'], linewidth=1)
    finish(figure, axes, 'FLOPs, 6 N D', prose.named(report.metric), C, found.loss)


def profiles(report: Report, figure: Any, of: str) -> None:
    """Draws the loss against size at each budget, and the minima of the parabolas."""
    assert report.scaling is not None and report.scaling.profiles is not None
    axes, found = figure.subplots(), report.scaling
    budget = isoflop.budgets(found.C)
    for i, minimum in enumerate(report.scaling.profiles.minima):
        look, here = drawing.look(i), budget == i
        N, loss = found.N[here], found.loss[here]
        axes.plot(N, loss, label=f'{minimum.flops:.3g} FLOPs', markersize=5, **{**look, 'linestyle': 'none'})
        x = np.geomspace(N.min(), N.max(), 60)
        parabola = np.polynomial.Polynomial.fit(np.log(N), loss, 2)
        axes.plot(x, parabola(np.log(x)), color=look['color'], linewidth=1)
        ring(axes, minimum.N, minimum.loss, look['color'])
    finish(figure, axes, 'parameters', prose.named(report.metric), found.N, found.loss)


def envelope(report: Report, figure: Any, of: str) -> None:
    """Draws the training curves of all sizes over their FLOPs, and their envelope."""
    assert report.scaling is not None and report.scaling.envelope is not None
    axes, found = figure.subplots(), report.scaling.envelope
    sizes = sorted({N for N, _, _ in report.scaling.curves})
    for N, flops, loss in report.scaling.curves:
        look = {**drawing.look(sizes.index(N)), 'marker': None}
        axes.plot(flops, loss, linewidth=1, **look)
    for i, N in enumerate(sizes):
        axes.plot([], [], label=f'N = {prose.amount(N)}', **{**drawing.look(i), 'marker': None})
    axes.plot(found.flops, found.loss, color=INK, linewidth=2, linestyle=':', label='envelope')
    finish(figure, axes, 'FLOPs so far', 'train loss', found.flops, found.loss)


DRAWINGS: dict[str, Callable[[Report, Any, str], None]] = {
    'forest': forest,
    'curves': curves,
    'pareto': pareto,
    'response': response,
    'parallel': parallel,
    'fields': fields,
    'scaling': scaling,
    'profiles': profiles,
    'envelope': envelope,
}
