"""What a search trains next: the choice of jobs by what its arms have left in the sweep's directory.

DIR/search.json is the list of its draws. How far an arm is stands in the workdirs of its runs alone: a rung is reached
when a checkpoint is there or beyond, so a run that is killed on its way to one counts as it did before.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Collection, Sequence
from typing import Any

from tformer import atomic, config
from tformer.checks import derived
from tformer.config import Config, json_files
from tformer.errors import UserError, nearest
from tformer.lab.sweep import decisions, draws, jobs, manifest, optuna_study, rungs
from tformer.lab.sweep.decisions import Draw, Drawn, Over, RunState, Train, Waiting
from tformer.lab.sweep.distributions import Choice
from tformer.lab.sweep.jobs import Job, State, Wait
from tformer.lab.sweep.matching import Match
from tformer.lab.sweep.overrides import SEED, Overrides
from tformer.lab.sweep.searches import BUDGETS, Search
from tformer.lab.sweep.trials import ERROR, RESULT, Trial, error_of, is_done
from tformer.lab.sweep.trials import trials as make_trials
from tformer.training import checkpoint, wall_time, writers

LIST = 'search.json'


class SearchJobs:
    """The `NextJob` of a search."""

    def __init__(self, search: Search, base: Config, match: Sequence[Match] | Match | None = ()):
        """Raises a `UserError` where a value of the space does not fit the base, or the base has no room for rungs."""
        optuna_study.check(search.sampler)
        self.search, self.base, self.match = search, config.override(base, search.baseline), match
        self.steps = search.steps(self.base)
        self._made: list[list[Trial] | str] = []  # the searched runs of each draw, or why there are none
        self._seen: dict[str, tuple[Any, RunState]] = {}  # of each run what was read when, by its directory
        for field, of in search.space.items():
            for value in of.options if isinstance(of, Choice) else (of(0.0), of(1.0)):
                if not isinstance(found := self.arm({field: value}), list):
                    raise UserError(f'search: {field}={value!r} does not fit the base: {found}')

    @property
    def last(self) -> int:
        return len(self.steps) - 1

    # ------------------------------------------------------------------------------------------------------ trials

    def arm(self, overrides: Overrides) -> list[Trial] | str:
        """Returns the searched runs of an arm; or why the overrides do not fit the base."""
        try:
            made = self._trials(overrides, self.search.arm_seeds(self.base))
        except UserError as error:
            return str(error).partition(': ')[2]  # without the number of the arm
        train = made[0].config.train
        every = derived.whole_steps(train.eval_every or train.num_steps or 0, train.num_steps or 0)
        for step in self.steps[:-1]:
            if step is not None and step < (train.num_steps or math.inf) and (not every or step % every):
                return f'train.eval_every={train.eval_every!r} evaluates nothing at step {step}, where a rung is'
        return [dataclasses.replace(trial, is_searched=True) for trial in made]

    def confirming(self, overrides: Overrides) -> list[Trial]:
        """Returns the runs of an arm with fresh seeds."""
        return self._trials(overrides, fresh) if (fresh := self.search.fresh_seeds(self.base)) else []

    def _trials(self, overrides: Overrides, seeds: Sequence[int]) -> list[Trial]:
        wanted = [{**overrides, SEED: seed} for seed in seeds]
        return make_trials(self.base, [{}, *wanted], self.match)[-len(wanted) :]

    def made(self, drawn: Sequence[Overrides]) -> list[list[Trial] | str]:
        """Returns the arms of all draws."""
        self._made += map(self.arm, drawn[len(self._made) :])
        return self._made

    def runs(self, drawn: Sequence[Overrides]) -> list[Trial]:
        """Returns the searched runs of all draws, each once."""
        return _unique([trial for runs in self.made(drawn) if isinstance(runs, list) for trial in runs])

    def listed(self, home: pathlib.Path | None) -> list[Trial]:
        """Returns the trials so far: the baseline with fresh seeds, all that were drawn, and the best arm once it is
        being confirmed."""
        if home is None:
            return self.confirming({})
        drawn, fresh = read(home, self.search), self.confirming({})
        seeds = self.search.fresh_seeds(self.base)
        for overrides, runs in zip(drawn, self.made(drawn), strict=True):
            if isinstance(runs, list) and any((home / runs[0].name / f'seed_{seed}').is_dir() for seed in seeds):
                fresh += self.confirming(overrides)
        return _unique([*fresh, *self.runs(drawn)])

    def plan(self, home: str | pathlib.Path | None) -> str:
        """Returns what the search will do, in a few lines."""
        search, steps = self.search, [step for step in self.steps if step is not None]
        aim = 'least' if search.lower_is_better else 'greatest'
        fields = '\n'.join(f'  {field}: {of}' for field, of in search.space.items())
        lines = [f'a search for the {aim} {search.metric} by {search.sampler}, of up to {search.trials} arms:', fields]
        if search.rungs is not None:
            rule = type(search.rungs).__name__.lower()
            lines.append(f'{rule} pauses arms after steps {", ".join(map(str, steps))} of {self.base.train.num_steps}')
        lines += [f'it ends after {amount:g} {name}' for name, amount in search.budget.items()]
        if search.confirm:
            lines.append(f'then the best arm and the baseline run with {search.confirm} fresh seeds each')
        if home is not None and (drawn := read(pathlib.Path(home), search)):
            lines.append(f'{len(drawn)} arms have been drawn')
        return '\n'.join(lines)

    # ---------------------------------------------------------------------------------------------------- decisions

    def __call__(self, state: State) -> Job | Wait | None:
        search, home = self.search, state.home
        while True:
            overrides = read(home, search)
            drawn = self.look(overrides, state)
            is_spent = bool(search.budget) and self._is_spent(home, drawn)
            closed = self._closed(state)
            found = decisions.decide(drawn, search.rungs, self.last, search.trials, is_spent, closed)
            known = draws.Known(home, overrides, [each.arm for each in drawn], self.last, search.lower_is_better)
            if search.sampler in draws.LEARNED and isinstance(found, Draw | Over):
                optuna_study.tell(search.space, known, end=isinstance(found, Over))
            if isinstance(found, Train):
                made = self._made[found.number]
                assert isinstance(made, list)  # others have failed
                return Job((made[found.run],), self.steps[found.rung])
            if isinstance(found, Waiting):
                return Wait('the search waits for runs that others train', may_come=True)
            if not isinstance(found, Draw):
                break
            self._write(home, [*overrides, draws.SAMPLERS[search.sampler](search.space, search.seed, known)])
        manifest.add(self.base, self.runs(overrides), home)  # another host may have written the list meanwhile
        best = rungs.leader(known.arms)
        fresh = self.confirming({}) + (self.confirming(overrides[best]) if best is not None else [])
        return jobs.first_free(state, _unique(fresh))

    def _is_spent(self, home: pathlib.Path, drawn: Sequence[Drawn]) -> bool:
        """Returns whether the budget is used up, once the runs that train now have come to their rungs.

        What they will need is estimated by what a step of the search has needed so far.
        """
        total, steps, missing = dict.fromkeys(BUDGETS, 0.0), 0, 0
        for each in drawn:
            made = self._made[each.arm.number]
            if isinstance(made, str) or each.is_repeated:
                continue
            for trial, run in zip(made, each.runs, strict=True):
                place = home / trial.directory
                at = max(checkpoint.steps(place), default=0)
                steps += at
                if run.is_leased:
                    missing += max((self.steps[min(each.target, self.last)] or self.base.train.num_steps or 0) - at, 0)
                for name, amount in spent(place).items():
                    total[name] += amount
        share = (steps + missing) / max(steps, 1)
        return any(total[name] * share >= amount for name, amount in self.search.budget.items())

    def _write(self, home: pathlib.Path, drawn: Sequence[Overrides]) -> None:
        """Writes the draws, with what a report needs: the name of each arm, or why it is none."""
        draws = [
            {'overrides': overrides, **({'error': made} if isinstance(made, str) else {'arm': made[0].name})}
            for overrides, made in zip(drawn, self.made(drawn), strict=True)
        ]
        found = {'search': self.search.identity(), 'steps': self.steps, 'draws': draws}
        atomic.write(home / LIST, json.dumps(found, default=repr, indent=1) + '\n')

    def look(self, overrides: Sequence[Overrides], state: State) -> list[Drawn]:
        """Returns how far each arm is."""
        seen, drawn = set(), []
        for number, made in enumerate(self.made(overrides)):
            first = self.search.rungs.first(number, self.last) if self.search.rungs else 0
            if isinstance(made, str):
                drawn.append(Drawn.of(number, [RunState({}, has_failed=True)], first))
                continue
            runs = [self.run_state(state.home, trial, state.of(trial) == jobs.LEASED) for trial in made]
            drawn.append(Drawn.of(number, runs, first, is_repeated=made[0].directory in seen))
            seen.add(made[0].directory)
        return drawn

    def run_state(self, home: pathlib.Path, trial: Trial, is_leased: bool = False) -> RunState:
        """Returns how far a run is, read anew if it may have changed."""
        place = f'{home}/{trial.directory}'
        version = is_leased, *(_changed(f'{place}/{name}') for name in ('checkpoints', RESULT, ERROR))
        if self._seen.get(trial.directory, (None,))[0] != version:
            self._seen[trial.directory] = version, self._read(pathlib.Path(place), is_leased)
        return self._seen[trial.directory][1]

    def _read(self, place: pathlib.Path, is_leased: bool) -> RunState:
        done = is_done(place)
        at = math.inf if done else max(checkpoint.steps(place), default=0)
        ends = [math.inf if step is None else step for step in self.steps]
        curve = evaluations(place, self.search.metric) if at >= ends[0] else []
        seen = {math.inf, *(step for step, _ in curve)}
        # A run that was stopped at a rung, and saved there, has yet to be evaluated.
        passed = [end for end in ends if at > end or (at == end and (end in seen or is_evaluated(place, int(end))))]
        if passed and (not curve or not (done or seen.issuperset(passed))):
            raise UserError(f'search: {place / "metrics.jsonl"} lacks evaluations; delete {place} to train it again')
        reached = range(len(passed))
        sign = 1.0 if self.search.lower_is_better else -1.0
        values = {rung: best_so_far([sign * value for step, value in curve if step <= ends[rung]]) for rung in reached}
        begun = not done and at > max((ends[rung] for rung in reached), default=0)
        return RunState(values, begun, is_leased, not done and error_of(place) is not None)

    def _closed(self, state: State) -> set[int]:
        """Returns the numbers of the arms that are pruned, or of which a run has stopped or was asked to."""
        pruned = jobs.pruned(state.home)
        return {
            number
            for number, made in enumerate(self._made)
            if isinstance(made, list)
            and (made[0].name in pruned or any(state.of(trial) == jobs.STOPPED for trial in made))
        }


def _unique(trials: Sequence[Trial]) -> list[Trial]:
    return list({trial.directory: trial for trial in trials}.values())


# ------------------------------------------------------------------------------------------------------------ files


def read(home: pathlib.Path, search: Search) -> list[Overrides]:
    """Returns the draws so far, by number. Raises a `UserError` if the directory holds another search."""
    file = home / LIST
    if not file.is_file():
        return []
    found = json_files.read(file)
    try:
        there, listed = dict(found['search']), [dict(each['overrides']) for each in found['draws']]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f'{file} is not the list of a search: {error}') from error
    for name, value in search.identity().items():
        if there.get(name) != value:
            values = f'{name} is {there.get(name)!r} there, {value!r} here'
            raise UserError(f'{home} holds another search: {values}; use a fresh --workdir')
    check_draws(file, listed, search.space)
    return [_typed(each, search) for each in listed]


def check_draws(file: pathlib.Path, drawn: Sequence[Overrides], space: Collection[str]) -> None:
    """Raises a `UserError` if a draw of the list in `file` is not of the fields of the space."""
    for number, each in enumerate(drawn, start=1):
        for field in sorted(each.keys() ^ set(space)):
            what = f'has {field}, which is not in the space' if field in each else f'lacks {field}'
            raise UserError(f'{file} is not the list of a search: draw {number} {what}')


def _typed(drawn: Overrides, search: Search) -> Overrides:
    """Returns a draw of the list with the choices themselves, which JSON may write otherwise."""
    found = {}
    for field, value in drawn.items():
        options = getattr(search.space[field], 'options', ())
        found[field] = next((each for each in options if json.loads(json.dumps(each, default=repr)) == value), value)
    return found


def spent(place: pathlib.Path) -> dict[str, float]:
    """Returns the tokens, FLOPs and hours of a run up to its latest checkpoint; {} if it is just being replaced."""
    try:
        step = max(checkpoint.steps(place), default=0)
        return {**_totals(place, step), 'hours': wall_time.total_seconds(place) / 3600} if step else {}
    except UserError:
        return {}


@functools.lru_cache(maxsize=100_000)
def _totals(place: pathlib.Path, step: int) -> dict[str, float]:
    interval = checkpoint.read_metadata(place, step)['interval']
    return {name: float(interval.get(name) or 0.0) for name in ('tokens', 'flops')}


def evaluations(place: pathlib.Path, metric: str) -> list[tuple[int, float]]:
    """Returns the evaluations of a run, (step, value) each, nan where one is not finite."""
    rows = writers.read(place)
    found = [(row['step'], math.nan if row[metric] is None else row[metric]) for row in rows if metric in row]
    known = sorted({name for row in rows for name in row if name.startswith('valid/')})
    if known and not found:
        raise UserError(f'search: metric={metric} is in no evaluation of {place}{nearest(metric, known)}')
    return found


def is_evaluated(place: pathlib.Path, step: int) -> bool:
    """Returns whether a run has been evaluated at its checkpoint of a step; one that was stopped there has not."""
    try:
        return bool(checkpoint.read_metadata(place, step)['evaluated'] >= step)
    except UserError:  # it is damaged, and the run goes on from the one before
        return False


def _changed(file: str) -> int:
    """Returns when a file has changed last; 0 if there is none."""
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return 0


def best_so_far(values: Sequence[float]) -> float:
    """Returns the least of the values; nan if the last is not finite, as of a run that has diverged."""
    return min(value for value in values if math.isfinite(value)) if values and math.isfinite(values[-1]) else math.nan
