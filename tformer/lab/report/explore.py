"""What readers explore in the drawings of a page: a row for each arm, a column for each number, and the curves."""

import json
import math
from typing import Any

from tformer.lab.report import prose
from tformer.lab.report.report_data import Report

CURVES = 40  # arms whose curves are in the page: the baseline and the best
NUMBERS = (int, float)


def data(report: Report) -> str:
    """Returns the data of a page's drawings as JSON that may stand in an HTML element."""
    spent = [report.costs[arm] for arm in report.arms]
    fronts = {**report.fronts, **({} if report.timing is None else {'seconds': report.timing.front})}
    columns: dict[str, list[Any]] = {
        'mean': [row.runs.mean for row in report.rows],
        'sd': [row.runs.sd for row in report.rows],
        'difference': [row.difference if row.comparison else None for row in report.rows],
        'low': [row.verdict.interval and row.verdict.interval[0] for row in report.rows],
        'high': [row.verdict.interval and row.verdict.interval[1] for row in report.rows],
        **{cost: [getattr(each, cost) for each in spent] for cost in fronts},
    }
    fields = {
        field: values
        for field, values in report.fields.items()
        if all(type(value) in NUMBERS for value in values) and len(set(values)) > 1
    }
    curves, steps = {}, dict[tuple[float | None, ...], int]()
    for name, bands in report.curves.items():
        curves[name] = {
            number: [
                steps.setdefault(tuple(_number(step, 9) for step in bands[arm].steps), len(steps)),
                _numbers(bands[arm].mean),
                _numbers(bands[arm].sd) if bands[arm].sd.any() else 0,
            ]
            for number, arm in enumerate(report.arms[:CURVES])
            if arm in bands
        }
    found = {
        'metric': prose.named(report.metric),
        'drawn': prose.DRAWN,
        'arms': [prose.brief(arm) for arm in report.arms],
        'labels': [row.label for row in report.rows],
        'columns': {name: _numbers(values) for name, values in columns.items()},
        'fields': {prose.plain(field): _numbers(values) for field, values in fields.items()},
        'fronts': {
            cost: [number for number, arm in enumerate(report.arms) if arm in on] for cost, on in fronts.items()
        },
        'steps': list(map(list, steps)),
        'curves': curves,
    }
    text = json.dumps(found, separators=(',', ':'), allow_nan=False)
    return text.replace('<', r'\u003c').replace('>', r'\u003e').replace('&', r'\u0026')


def _numbers(values: Any) -> list[float | None]:
    return [_number(value) for value in values]


def _number(value: float | None, digits: int = 5) -> float | None:
    """Returns a number of few digits, whole where it can be; None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f'{value:.{digits}g}')
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
