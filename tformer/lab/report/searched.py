"""The search that chose the arms of a report: how far each arm went, what it cost, and which fields mattered."""

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tformer.config import json_files
from tformer.errors import UserError
from tformer.evaluation import metrics
from tformer.lab.report.results import DONE, FAILED, Results, Run
from tformer.lab.sweep import optuna_study, search_jobs
from tformer.lab.sweep.distributions import Choice, Distribution, Range

SHOWN = 10  # arms in the table


@dataclasses.dataclass(frozen=True)
class SearchedArm:
    """An arm that was drawn."""

    number: int  # of its draw
    name: str | None  # None: its values do not fit together
    overrides: Mapping[str, Any]
    values: Mapping[int, float]  # its value at each rung that it reached; nan where it diverged or failed
    tokens: float  # that its runs have read
    flops: float  # that they needed
    has_failed: bool = False  # before it reached the highest of its rungs

    @property
    def rung(self) -> int:
        return max(self.values, default=-1)

    @property
    def value(self) -> float:
        """Its value at the highest rung that it reached."""
        return self.values.get(self.rung, math.nan)


@dataclasses.dataclass(frozen=True)
class Best:
    """The best arm after some draws."""

    draws: int
    tokens: float  # spent up to then, if the arms had come one after the other
    flops: float
    value: float
    name: str


@dataclasses.dataclass(frozen=True)
class Searched:
    """A search and its arms."""

    metric: str
    lower_is_better: bool
    sampler: str
    rule: str | None  # asha, hyperband or median
    steps: Sequence[int | None]  # of the rungs; the last, None, is the end
    arms: Sequence[SearchedArm]  # each once, the best first: those that got furthest, by their values
    num_draws: int
    progress: Sequence[Best]  # each arm that was the best of the first ones that reached the highest rung
    rated: int | None  # the rung at which the fields are rated
    importance: Mapping[str, float]  # of each field; {} if unknown
    why: str | None  # why it is unknown
    fresh: Sequence[float]  # of the metric, of the best arm's runs with fresh seeds

    @property
    def best(self) -> SearchedArm | None:
        return self.arms[0] if self.arms and math.isfinite(self.arms[0].value) else None

    def count(self, rung: int) -> int:
        """Returns how many arms have reached a rung."""
        return sum(rung in arm.values and not (arm.has_failed and rung == arm.rung) for arm in self.arms)

    @property
    def failed(self) -> list[str]:
        """The arms that failed: their names, or their values where these do not fit together."""
        return [arm.name or str(arm.overrides) for arm in self.arms if arm.has_failed]


def search(results: Results) -> Searched | None:
    """Returns the search of a directory of runs; None if it was none. Raises a `UserError` if its list is damaged."""
    file = results.home / search_jobs.LIST
    if not file.is_file() or not results.searched:
        return None
    try:
        return _search(results, file, json_files.read(file))
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f'{file} is not the list of a search: {error}') from error


def _search(results: Results, file: pathlib.Path, listed: Mapping[str, Any]) -> Searched:
    stated, steps, drawn = listed['search'], listed['steps'], listed['draws']
    metric, lower = stated['metric'], metrics.lower_is_better(stated['metric'])
    rule = stated['rungs'][0] if stated['rungs'] else None
    sampler, space = stated['sampler'], {field: _distribution(of) for field, of in stated['space'].items()}
    search_jobs.check_draws(file, [draw['overrides'] for draw in drawn], space)
    runs = {name: [run for run in results.searched if run.arm == name] for name in (x.get('arm') for x in drawn)}
    arms, seen = [], set()
    for number, draw in enumerate(drawn):
        if draw.get('arm') is None or draw['arm'] not in seen:
            arms.append(_arm(number, draw, runs.get(draw.get('arm'), []), metric, results.home, steps))
        seen.add(draw.get('arm'))
    sign = 1 if lower else -1
    ranked = sorted(arms, key=lambda arm: (-arm.rung, math.isnan(arm.value), sign * arm.value))
    ranked.sort(key=lambda arm: math.isnan(arm.value))
    rated = max(range(len(steps)), key=lambda rung: sum(rung in arm.values for arm in arms), default=None)
    importance, why = _importance(space, arms, rated, sign)
    best = ranked[0].name if ranked else None
    ends = [_at_end(run, metric) for run in results.arms.get(best or '', []) if not run.is_searched]
    fresh = [value for value in ends if value is not None]
    progress = _progress(arms, sign)
    return Searched(
        metric, lower, sampler, rule, steps, ranked, len(drawn), progress, rated, importance, why, fresh
    )  # fmt: skip


def _arm(
    number: int, draw: Mapping[str, Any], runs: Sequence[Run], metric: str, home: pathlib.Path, steps: Sequence[Any]
) -> SearchedArm:
    values: dict[int, float] = {}
    for rung, step in enumerate(steps):
        own = [_at(run, metric, step) for run in runs]
        if own and None not in own:
            values[rung] = statistics.fmean(value for value in own if value is not None)
    if has_failed := any(run.state == FAILED for run in runs) or draw.get('arm') is None:
        values[max(values, default=-1) + 1] = math.nan
    spent = {name: sum(_spent(home, run, name) for run in runs) for name in ('tokens', 'flops')}
    return SearchedArm(number, draw.get('arm'), draw['overrides'], values, spent['tokens'], spent['flops'], has_failed)


def _spent(home: pathlib.Path, run: Run, name: str) -> float:
    """Returns the tokens or FLOPs of a run: of a paused one those of its checkpoint, which are later than its log."""
    kept = search_jobs.spent(home / run.directory).get(name, 0.0)
    return max(kept, run.last(f'train/{name}') or 0.0)


def _at(run: Run, metric: str, step: int | None) -> float | None:
    """Returns the value of a run at a rung, as the search took it; None if it has not reached it."""
    done = run.state == DONE
    if not done and (step is None or max((row['step'] for row in run.log), default=0) < step):
        return None
    return _value(run, metric, math.inf if step is None else step)


def _at_end(run: Run, metric: str) -> float | None:
    return _value(run, metric, math.inf) if run.state == DONE else None


def _value(run: Run, metric: str, end: float) -> float:
    steps, values = run.curve(metric)
    sign = 1 if metrics.lower_is_better(metric) else -1
    return sign * search_jobs.best_so_far([sign * v for at, v in zip(steps, values, strict=True) if at <= end])


def _progress(arms: Sequence[SearchedArm], sign: int) -> list[Best]:
    top, tokens, flops = max((arm.rung for arm in arms if math.isfinite(arm.value)), default=-1), 0.0, 0.0
    found: list[Best] = []
    for arm in arms:
        tokens, flops = tokens + arm.tokens, flops + arm.flops
        value = arm.values.get(top, math.nan)
        if arm.name and math.isfinite(value) and (not found or sign * value < sign * found[-1].value):
            found.append(Best(arm.number + 1, tokens, flops, value, arm.name))
    return found


def _importance(
    space: Mapping[str, Distribution], arms: Sequence[SearchedArm], rung: int | None, sign: int
) -> tuple[dict[str, float], str | None]:
    there = [arm for arm in arms if rung in arm.values and arm.name is not None]
    values = [
        sign * arm.values[rung] if math.isfinite(arm.values[rung]) else math.inf for arm in there if rung is not None
    ]
    try:
        return optuna_study.importance(space, [dict(arm.overrides) for arm in there], values), None
    except UserError as error:
        return {}, str(error)


def _distribution(described: Any) -> Range | Choice:
    """Returns what `Search.identity` describes; choices are as JSON has them, as those of the draws are."""
    if isinstance(described, dict):
        return Choice(tuple(described['choice']))
    low, high, *kinds = described
    return Range(low, high, log='log' in kinds, whole='whole' in kinds)
