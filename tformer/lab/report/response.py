"""The metric of a sweep along one numeric field, and which fields of a random search it depends on."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import special, stats

from tformer import config
from tformer.config import Config
from tformer.lab.report.results import Results
from tformer.lab.statistics import family, noise
from tformer.lab.sweep.overrides import SEED

LEAST = 3  # points of a line, and residual degrees of freedom of a search
RATE = 'optimizer.learning_rate'

Values = Mapping[str, Mapping[int, float | None]]


@dataclasses.dataclass(frozen=True)
class Line:
    """The metric along a field, the other fields fixed."""

    fixed: Mapping[str, Any]  # the other fields that vary, and their values here
    x: np.ndarray  # rising, [n]
    mean: np.ndarray  # over the seeds, [n]
    sd: np.ndarray  # likewise, nan of a single run
    best: int  # the index of the best mean
    near: Sequence[float]  # the values that are not told apart from the best (`family.near_best`)
    failed: int  # runs of the best without a finite result

    @property
    def at_edge(self) -> bool:
        """Whether a better value may lie beyond those that were tried."""
        return self.best in (0, len(self.x) - 1)


@dataclasses.dataclass(frozen=True)
class Search:
    """Which fields the metric depends on, where arms differ in several at once."""

    p: Mapping[str, float]  # of each field, given all the others, by Holm's method; nan if the arms are too few
    joint: float  # that of all fields together


@dataclasses.dataclass(frozen=True)
class Response:
    """The lines along one field."""

    field: str  # '' if no field of a search is seen to matter, or none alone
    lines: Sequence[Line] = ()
    together: Sequence[str] = ()  # fields that change with it, so that these runs do not tell them apart from it
    search: Search | None = None  # of arms whose numbers are drawn at random


def response(results: Results, values: Values, lower_is_better: bool, alpha: float) -> Response | None:
    """Returns the metric along the one field of numbers that varies, in a line for each value of up to two others.

    If several such fields vary, it is the learning rate, or else the one with the most values. None if no line has
    three points. Where no arms share the other fields, as in a random search, the line is along the field that the
    metric is seen to depend on.
    """
    stated = {arm: fields(runs[0].stated) for arm, runs in results.arms.items()}
    varied = independent(list(stated.values()))
    field = _swept_field(stated, list(varied))
    others = [name for name in varied if name != field]
    groups: dict[str, list[str]] = {}
    for arm, own in stated.items():
        groups.setdefault(repr([own[name] for name in others]), []).append(arm)
    lines = []
    for arms in groups.values() if field else ():
        x = {arm: float(stated[arm][field]) for arm in arms}
        fixed = {name: stated[arms[0]][name] for name in others}
        lines.append(_line(fixed, x, values, lower_is_better, alpha, results.ended))
    found = [line for line in lines if line]
    several = sum(len(arms) > 1 for arms in groups.values()) != 1  # one group is a sweep of one field at a time
    searched = _search(stated, varied, values, lower_is_better) if several and results.ended else None
    if found:
        return Response(field, found, varied[field], searched)
    if searched is None:
        return None
    field = min(numbers(stated, list(varied)), key=lambda name: searched.p[name])
    if not searched.p[field] <= alpha:
        return Response('', search=searched)
    x = {arm: float(own[field]) for arm, own in stated.items()}
    line = _line({}, x, values, lower_is_better, alpha, ended=True)
    return Response(field, [line] if line else [], varied[field], searched)


def _search(
    stated: Mapping[str, Mapping[str, Any]], varied: Mapping[str, Sequence[str]], values: Values, lower_is_better: bool
) -> Search | None:
    """Returns the search that the arms are; None if they vary in one field, or in no number that most arms draw."""
    floors = {arm: noise.noise_floor(values[arm]) for arm in stated}
    worst = np.inf if lower_is_better else -np.inf
    y = {arm: floor.mean if floor.n else worst for arm, floor in floors.items() if floor.n or floor.failed}
    drawn = max(numbers(stated, list(varied)).values(), default=0)
    if len(varied) < 2 or 2 * drawn <= len(stated) or not y:
        return None
    return search({name: [stated[arm][name] for arm in y] for name in varied}, list(y.values()))


def search(columns: Mapping[str, Sequence[Any]], y: Sequence[float]) -> Search:
    """Returns whether the metric depends on each field, by an F test of it given all the others.

    A field that only varies along with another one, which explains the metric, has no effect given that one. The
    model is of ranks (Conover & Iman 1981), which do not depend on scales and bear diverged runs: the metric's rank is
    a parabola in the rank of each number, and has a level for each value of another field.

    Args:
      columns: the values of each field, by arm, [n].
      y: the metric of each arm, infinite where it diverged, [n].
    """
    terms = {}
    for name, column in columns.items():
        if all(type(value) in (int, float) for value in column):
            rank = stats.rankdata(column) / len(y) - 0.5
            terms[name] = np.stack([rank, rank**2], 1)
        else:
            kinds = list(map(repr, column))
            terms[name] = np.array([[kind == other for other in sorted(set(kinds))[1:]] for kind in kinds], float)
    target = stats.rankdata(y)

    def left(names: Sequence[str]) -> tuple[float, int]:
        """Returns the residual sum of squares of a model with some fields, and its rank."""
        design = np.concatenate([np.ones((len(y), 1)), *(terms[name] for name in names)], 1)
        fitted, _, rank, _ = np.linalg.lstsq(design, target, rcond=1e-9)
        return float(((target - design @ fitted) ** 2).sum()), int(rank)

    full, rank = left(list(terms))
    df = len(y) - rank

    def p(names: Sequence[str]) -> float:
        squares, smaller = left(names)
        if df < LEAST:
            return np.nan
        if smaller == rank:  # the others say as much
            return 1.0
        F = (squares - full) / (rank - smaller) / max(full / df, 1e-12)
        return float(special.fdtrc(rank - smaller, df, max(F, 0.0)))

    alone = [p([other for other in terms if other != name]) for name in terms]
    return Search(dict(zip(terms, family.holm(alone).tolist(), strict=True)), p([]))


def numbers(stated: Mapping[str, Mapping[str, Any]], varied: Sequence[str]) -> dict[str, int]:
    """Returns the fields of numbers with LEAST values or more, and how many values each has."""
    values = {field: [own[field] for own in stated.values()] for field in varied}
    return {
        field: len(set(each))
        for field, each in values.items()
        if all(type(value) in (int, float) for value in each) and len(set(each)) >= LEAST
    }


def _swept_field(stated: Mapping[str, Mapping[str, Any]], varied: Sequence[str]) -> str:
    """Returns the field of numbers that the lines run along, '' if there is none or too many fields vary."""
    found = numbers(stated, varied)
    if not found or len(varied) > 3:
        return ''
    return RATE if RATE in found else max(found, key=found.__getitem__)


def _line(
    fixed: Mapping[str, Any], x: Mapping[str, float], values: Values, lower_is_better: bool, alpha: float, ended: bool
) -> Line | None:
    """Returns the line through some arms, whose values of the field are `x`; None of fewer than three with a result."""
    floors = {arm: noise.noise_floor(values[arm]) for arm in x}
    arms = sorted((arm for arm in x if floors[arm].n), key=lambda arm: x[arm])
    if len(arms) < LEAST:
        return None
    mean = np.array([floors[arm].mean for arm in arms])
    best = int(mean.argmin() if lower_is_better else mean.argmax())
    near = family.near_best({arm: values[arm] for arm in arms}, arms[best], alpha) if ended else []
    sd = np.array([floors[arm].sd for arm in arms])
    tried = np.array([x[arm] for arm in arms])
    return Line(fixed, tried, mean, sd, best, sorted(x[arm] for arm in near), floors[arms[best]].failed)


def independent(stated: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Returns the fields that vary, each with those that it is not told apart from.

    These separate the arms in the same way, and if they are numbers, they rise or fall with it.
    """
    found: dict[str, list[str]] = {}
    columns = {field: [own[field] for own in stated] for field in stated[0]}
    for field, values in columns.items():
        if all(repr(value) == repr(values[0]) for value in values):
            continue
        twin = next((name for name in found if _tied(columns[name], values)), None)
        found.setdefault(twin or field, []).extend([field] if twin else [])
    return found


def _tied(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Returns whether two fields separate the arms alike, and numbers by rising or falling together."""
    if _partition(first) != _partition(second):
        return False
    if not all(type(value) in (int, float) for value in (*first, *second)):
        return True
    return abs(np.corrcoef(stats.rankdata(first), stats.rankdata(second))[0, 1]) > 1 - 1e-9


def _partition(values: Sequence[Any]) -> list[int]:
    """Returns for each value the number of distinct ones before it, in their order: what separates the arms."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(repr(value), len(numbers)) for value in values]


def fields(stated: Config) -> dict[str, Any]:
    """Returns the fields of a config by their dotted names, without the seed."""
    return {field: value for field, value in config.values(stated).items() if field != SEED}
