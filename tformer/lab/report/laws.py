"""What a sweep over numbers shows: the metric along one field, and the scaling law of sizes and tokens."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tformer.errors import UserError
from tformer.lab import isoflop, noise, scaling
from tformer.lab.report.costs import Costs
from tformer.lab.report.results import Results
from tformer.lab.sweep import SEED

LEAST = 3  # points of a line, and values of N and of D
RATE = 'optimizer.learning_rate'
LOSSES = ('loss', 'nll')  # in nats a token, as the laws take them

Values = Mapping[str, Mapping[int, float | None]]
Curve = tuple[float, np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Line:
    """The metric along a field, the other fields fixed.

    Attributes:
      fixed: the other fields that vary, and their values here.
      x: rising, [n].
      mean: over the seeds, [n].
      sd: likewise, nan of a single run.
      best: the place of the best mean.
    """

    fixed: Mapping[str, Any]
    x: np.ndarray
    mean: np.ndarray
    sd: np.ndarray
    best: int

    @property
    def at_edge(self) -> bool:
        """Whether the best may lie beyond the values that were tried."""
        return self.best in (0, len(self.x) - 1)


@dataclasses.dataclass(frozen=True)
class Response:
    """The lines along one field."""

    field: str
    lines: Sequence[Line]


def response(results: Results, values: Values, lower_is_better: bool) -> Response | None:
    """Returns the metric along the one field of numbers that varies, in a line for each value of up to two others.

    Of several such fields it is the learning rate, or else the one with the most values; fields that change together
    count as one. None where no line would have three points.
    """
    stated = {arm: _fields(runs[0].stated) for arm, runs in results.arms.items()}
    varied = _independent(list(stated.values()))
    count = {
        field: len({fields[field] for fields in stated.values()})
        for field in varied
        if all(type(fields[field]) in (int, float) for fields in stated.values())
    }
    count = {field: number for field, number in count.items() if number >= LEAST}
    if not count or len(varied) > 3:
        return None
    field = RATE if RATE in count else max(count, key=lambda name: count[name])
    others = [name for name in varied if name != field]
    groups: dict[str, list[str]] = {}
    for arm, fields in stated.items():
        groups.setdefault(repr([fields[name] for name in others]), []).append(arm)
    lines = []
    for arms in groups.values():
        floors = {arm: noise.noise_floor(values[arm]) for arm in arms}
        arms = sorted((arm for arm in arms if floors[arm].n), key=lambda arm: stated[arm][field])
        if len(arms) >= LEAST:
            mean = np.array([floors[arm].mean for arm in arms])
            lines.append(Line(
                {name: stated[arms[0]][name] for name in others},
                np.array([stated[arm][field] for arm in arms], float),
                mean,
                np.array([floors[arm].sd for arm in arms]),
                int(mean.argmin() if lower_is_better else mean.argmax()),
            ))  # fmt: skip
    return Response(field, lines) if lines else None


def _independent(stated: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the fields that vary; of those that tell the same arms apart, the first."""
    found: dict[tuple[int, ...], str] = {}
    for field in stated[0]:
        values = [repr(fields[field]) for fields in stated]
        found.setdefault(tuple(map(values.index, values)), field)
    found.pop((0,) * len(stated), None)
    return list(found.values())


def _fields(stated: Any) -> dict[str, Any]:
    sections = dataclasses.asdict(stated)
    every = {f'{name}.{field}': value for name, section in sections.items() for field, value in section.items()}
    return {field: value for field, value in every.items() if field != SEED}


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The law of the runs, or why there is none.

    Attributes:
      N: parameters of each run, [R].
      D: its tokens, [R].
      loss: [R].
      C: FLOPs as counted, by which iso-FLOP designs have their budgets, [R].
      law: the fit; None where `why` says why not.
      bounds: of `scaling.intervals`, the optimal sizes those at `budgets`; None where `no_bounds` says why not.
      budgets: FLOPs as 6 N D: the least, the most, and ten times that.
      off: how far the law of the other runs misses those of the largest budget (`scaling.held_out`); None of too few.
      profiles: of iso-FLOP designs.
      no_profiles: why there are none.
      curves: of training, each with its N, its FLOPs so far and its loss there.
      envelope: of the curves.
      no_envelope: why there is none.
    """

    N: np.ndarray
    D: np.ndarray
    loss: np.ndarray
    C: np.ndarray
    law: scaling.Law | None = None
    why: str | None = None
    bounds: Mapping[str, tuple[Any, Any]] | None = None
    no_bounds: str | None = None
    budgets: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    off: float | None = None
    profiles: isoflop.Profiles | None = None
    no_profiles: str | None = None
    curves: Sequence[Curve] = ()
    envelope: isoflop.Envelope | None = None
    no_envelope: str | None = None


def training(results: Results, costs: Mapping[str, Costs]) -> list[Curve]:
    """Returns the training curves of all runs: parameters, FLOPs so far and the means of the loss up to there."""
    curves = []
    for run in results.runs:
        rows = [(row.get('train/flops'), row.get('train/loss')) for row in run.log]
        flops, loss = np.array([row for row in rows if None not in row], float).reshape(-1, 2).T
        N = costs[run.arm].parameters
        if N and len(flops) > 1:
            curves.append((N, flops, loss))
    return curves


def scaling_law(
    metric: str, values: Values, costs: Mapping[str, Costs], alpha: float, curves: Sequence[Curve] = ()
) -> Scaling | None:
    """Returns the scaling law where sizes and tokens vary; None where they do not, or the metric is no loss."""
    points = [
        (costs[arm].parameters, costs[arm].tokens, value, costs[arm].flops)
        for arm, runs in values.items()
        for value in noise.finite(runs).values()
        if costs[arm].parameters and costs[arm].tokens and costs[arm].flops
    ]
    N, D, loss, C = np.array(points, float).reshape(-1, 4).T
    if metric.rpartition('/')[2] not in LOSSES or min(len(np.unique(N)), len(np.unique(D))) < LEAST:
        return None
    found = Scaling(N, D, loss, C, curves=curves)
    level = 1 - alpha
    try:
        found = dataclasses.replace(found, profiles=isoflop.profiles(N, D, loss, C, level))
    except UserError as error:
        found = dataclasses.replace(found, no_profiles=str(error))
    try:
        found = dataclasses.replace(found, envelope=isoflop.envelope(curves, level))
    except UserError as error:
        found = dataclasses.replace(found, no_envelope=str(error))
    try:
        law = scaling.fit(N, D, loss)
    except UserError as error:
        return dataclasses.replace(found, why=str(error))
    least, most = (isoflop.PER_TOKEN * end(N * D) for end in (np.min, np.max))
    found = dataclasses.replace(found, law=law, budgets=np.array([least, most, 10 * most]))
    with contextlib.suppress(UserError):
        found = dataclasses.replace(found, off=scaling.held_out(N, D, loss).error)
    try:
        bounds = scaling.intervals(scaling.bootstrap(N, D, loss, law), found.budgets, level)
        return dataclasses.replace(found, bounds=bounds)
    except UserError as error:
        return dataclasses.replace(found, no_bounds=str(error))
