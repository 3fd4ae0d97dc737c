"""The scaling law of the model sizes and tokens of a sweep."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, TypeVar

import numpy as np

from tformer.errors import UserError
from tformer.lab.report import response
from tformer.lab.report.costs import Costs
from tformer.lab.report.results import Results, Run
from tformer.lab.scaling_laws import isoflop, scaling
from tformer.lab.statistics import noise

LEAST = 3  # values of N and of D
LOSSES = ('loss', 'nll')  # in nats a token, as the laws take them
TASK = ('train.objective', 'model.family')
AMOUNTS = tuple(  # of the data of one task
    f'data.{name}'
    for name in 'length encoder_length batching batch_tokens row_multiple train_examples num_buckets overlong '
    'prefetch num_threads num_workers cache_dir'.split()
)

T = TypeVar('T')
Curve = tuple[float, np.ndarray, np.ndarray]


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
    stated = [response.fields(results.arms[arm][0].stated) for arm in arms]
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
