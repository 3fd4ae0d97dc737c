"""The metric of a sweep along one numeric field, and the scaling law of its model sizes and tokens."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, TypeVar

import numpy as np

from tformer import config
from tformer.config import Config
from tformer.errors import UserError
from tformer.lab.report.costs import Costs
from tformer.lab.report.results import Results, Run
from tformer.lab.scaling_laws import isoflop, scaling
from tformer.lab.statistics import family, noise
from tformer.lab.sweep.overrides import SEED

LEAST = 3  # points of a line, and values of N and of D
RATE = 'optimizer.learning_rate'
LOSSES = ('loss', 'nll')  # in nats a token, as the laws take them
TASK = ('train.objective', 'model.family')
AMOUNTS = tuple(  # of the data of one task
    f'data.{name}'
    for name in 'length encoder_length batching batch_tokens row_multiple train_examples num_buckets overlong '
    'prefetch num_threads num_workers cache_dir'.split()
)

T = TypeVar('T')
Values = Mapping[str, Mapping[int, float | None]]
Curve = tuple[float, np.ndarray, np.ndarray]


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
class Response:
    """The lines along one field."""

    field: str
    lines: Sequence[Line]


def response(results: Results, values: Values, lower_is_better: bool, alpha: float) -> Response | None:
    """Returns the metric along the one field of numbers that varies, in a line for each value of up to two others.

    If several such fields vary, it is the learning rate, or else the one with the most values. Fields that change
    together count as one. None if no line has three points.
    """
    stated = {arm: _fields(runs[0].stated) for arm, runs in results.arms.items()}
    varied = _independent(list(stated.values()))
    field = _swept_field(stated, varied)
    if field is None:
        return None
    others = [name for name in varied if name != field]
    groups: dict[str, list[str]] = {}
    for arm, fields in stated.items():
        groups.setdefault(repr([fields[name] for name in others]), []).append(arm)
    lines = []
    for arms in groups.values():
        x = {arm: float(stated[arm][field]) for arm in arms}
        fixed = {name: stated[arms[0]][name] for name in others}
        lines.append(_line(fixed, x, values, lower_is_better, alpha, results.ended))
    found = [line for line in lines if line]
    return Response(field, found) if found else None


def _swept_field(stated: Mapping[str, Mapping[str, Any]], varied: Sequence[str]) -> str | None:
    """Returns the field of numbers that the lines run along, None if there is none or too many fields vary."""
    numbers = {}
    for field in varied:
        values = [fields[field] for fields in stated.values()]
        if all(type(value) in (int, float) for value in values) and len(set(values)) >= LEAST:
            numbers[field] = len(set(values))
    if not numbers or len(varied) > 3:
        return None
    return RATE if RATE in numbers else max(numbers, key=numbers.__getitem__)


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


def _independent(stated: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the fields that vary; of fields that separate the arms in the same way, only the first."""
    found: dict[tuple[int, ...], str] = {}
    for field in stated[0]:
        values = [repr(fields[field]) for fields in stated]
        found.setdefault(tuple(map(values.index, values)), field)
    found.pop((0,) * len(stated), None)
    return list(found.values())


def _fields(stated: Config) -> dict[str, Any]:
    return {field: value for field, value in config.values(stated).items() if field != SEED}


@dataclasses.dataclass
class Scaling:
    """R runs and their scaling laws, or the reason why there is none."""

    N: np.ndarray  # parameters of each run, [R]
    D: np.ndarray  # the tokens that it had read when its loss was scored, [R]
    loss: np.ndarray  # [R]
    C: np.ndarray  # FLOPs of the whole run as counted, by which iso-FLOP designs have their budgets, [R]
    curves: Sequence[Curve] = ()  # of training, each with its N, its FLOPs so far and its loss there
    left_out: int = 0  # arms that are not the best of their size and tokens
    pooled: Sequence[str] = ()  # fields besides numbers in which the arms differ
    early: int = 0  # runs whose loss is not that of their last step
    law: scaling.Law | None = None  # the fit; None where `why` says why not
    why: str | None = None
    bounds: Mapping[str, tuple[Any, Any]] | None = None  # of `scaling.intervals`, with the optimal sizes at `budgets`
    no_bounds: str | None = None  # why there are none
    budgets: Sequence[float] = ()  # FLOPs as 6 N D: the least, the most, and ten times that
    held_out_error: float | None = None  # relative, of a law without the largest budget on it; None: too few runs
    profiles: isoflop.Profiles | None = None  # of iso-FLOP designs
    no_profiles: str | None = None  # why there are none
    envelope: isoflop.Envelope | None = None  # of the curves
    no_envelope: str | None = None  # why there is none


def _training(results: Results, costs: Mapping[str, Costs], arms: Collection[str]) -> list[Curve]:
    """Returns the training curves of the runs of some arms: parameters, FLOPs so far, and the reported mean losses."""
    curves = []
    for run in (run for run in results.runs if run.arm in arms):
        rows = [(row.get('train/flops'), row.get('train/loss')) for row in run.log]
        flops, loss = np.array([row for row in rows if None not in row], float).reshape(-1, 2).T
        N = costs[run.arm].parameters
        if N and len(flops) > 1:
            curves.append((N, flops, loss))
    return curves


def scaling_law(results: Results, metric: str, costs: Mapping[str, Costs], alpha: float) -> Scaling | None:
    """Returns the scaling law where sizes and tokens vary; None where they do not, or the metric is no loss.

    Of arms of the same size and tokens the best one counts. D is what a run had read when it had the loss scored.
    """
    finite = {arm: noise.finite(runs) for arm, runs in results.values(metric).items()}
    arms = [arm for arm in finite if finite[arm] and all((costs[arm].parameters, costs[arm].tokens, costs[arm].flops))]
    sizes = {arm: (costs[arm].parameters, costs[arm].tokens) for arm in arms}
    counts = [len({each[i] for each in sizes.values()}) for i in range(2)]
    if metric.rpartition('/')[2] not in LOSSES or min(counts) < LEAST:
        return None
    varied = _varied(results, arms)
    if tasks := [name for name in varied if name in TASK or (name.startswith('data.') and name not in AMOUNTS)]:
        nothing = np.zeros(0)
        why = f'runs that differ in {", ".join(tasks)} have no law in common'
        return Scaling(nothing, nothing, nothing, nothing, why=why)
    best = {sizes[arm]: arm for arm in sorted(arms, key=lambda arm: -np.mean(list(finite[arm].values())))}
    chosen = set(best.values())
    runs = [run for run in results.runs if run.arm in chosen and run.seed in finite[run.arm]]
    split = metric.partition('/')[0]
    N, D, loss, C = np.array([_point(run, finite[run.arm][run.seed], split, costs[run.arm]) for run in runs]).T
    found = Scaling(
        N, D, loss, C, _training(results, costs, chosen),
        left_out=len(arms) - len(best),
        pooled=[
            field for field, values in _varied(results, best.values()).items()
            if any(type(value) not in (int, float, NoneType) for value in values)
        ],
        early=sum(run.scored.get(split, run.num_steps) != run.num_steps for run in runs),
    )  # fmt: skip
    return fitted(found, 1 - alpha)


def _varied(results: Results, arms: Iterable[str]) -> dict[str, list[Any]]:
    """Returns the fields that vary over some arms, and their values."""
    stated = [_fields(results.arms[arm][0].stated) for arm in arms]
    values = {field: [fields[field] for fields in stated] for field in stated[0]}
    return {field: each for field, each in values.items() if any(value != each[0] for value in each)}


def _point(run: Run, loss: float, split: str, spent: Costs) -> tuple[float, ...]:
    """Returns a run's N, D, loss and C: D where its loss was scored, C of the whole run, which is its budget."""
    steps = [step for step in (run.scored.get(split), run.num_steps) if step is not None]
    (D,) = run.spent('tokens', steps[:1]) or (spent.tokens,)
    return tuple(float(each or 0.0) for each in (spent.parameters, D, loss, run.last('train/flops') or spent.flops))


def fitted(found: Scaling, level: float) -> Scaling:
    """Adds the law, the parabolas and the envelope that the runs have."""
    N, D, loss = found.N, found.D, found.loss
    found.profiles, found.no_profiles = _attempt(lambda: isoflop.profiles(N, D, loss, found.C, level))
    found.envelope, found.no_envelope = _attempt(lambda: isoflop.envelope(found.curves, level))
    law, found.why = _attempt(lambda: scaling.fit(N, D, loss))
    if law is None:
        return found
    least, most = (isoflop.PER_TOKEN * end(N * D) for end in (np.min, np.max))
    found.law, found.budgets = law, (least, most, 10 * most)
    found.held_out_error, _ = _attempt(lambda: scaling.held_out_error(N, D, loss))
    found.bounds, found.no_bounds = _attempt(
        lambda: scaling.intervals(scaling.bootstrap(N, D, loss, law), found.budgets, level)
    )
    return found


def _attempt(call: Callable[[], T]) -> tuple[T | None, str | None]:
    """Returns (what `call` returns, None), or (None, the reason why it fails)."""
    try:
        return call(), None
    except UserError as error:
        return None, str(error)
