"""Optuna: it draws for a search by what the search knows, and rates which fields matter. The extra `search`.

DIR/optuna.log is Optuna's journal of the search, in which every draw is a trial; its dashboard shows it. What it lacks
is added from the search's own list, so a file that is lost or cut only costs CMA-ES its state.
"""

import contextlib
import dataclasses
import importlib.util
import math
import pathlib
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tformer.errors import UserError
from tformer.lab.sweep.distributions import Choice, Distribution, Range
from tformer.lab.sweep.overrides import Overrides
from tformer.lab.sweep.rungs import Arm

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

JOURNAL = 'optuna.log'
NAME = 'search'  # of the study in the journal
LEAST = 8  # arms from which fields are rated
PACKAGES = {'tpe': ('optuna',), 'cmaes': ('optuna', 'cmaes')}  # that samplers need
MISSING = "pip install 'tformer[search]'"


@dataclasses.dataclass(frozen=True)
class Known:
    """What a sampler may know when it draws."""

    home: pathlib.Path  # the sweep's directory, whose lock this process holds
    drawn: Sequence[Overrides]  # the draws so far, by number
    arms: Sequence[Arm]  # how far each of them is
    last: int  # the rung that is the end
    lower_is_better: bool = True  # of the metric; less is better of the arms' values


def is_installed() -> bool:
    """Returns whether fields can be rated."""
    return importlib.util.find_spec('optuna') is not None


def check(sampler: str) -> None:
    """Raises a `UserError` if a sampler lacks its packages."""
    for package in PACKAGES.get(sampler, ()):
        if importlib.util.find_spec(package) is None:
            raise UserError(f'sampler {sampler} needs the package {package}: {MISSING}')


def ask(sampler: str, space: Mapping[str, Distribution], seed: int, known: Known) -> Overrides:
    """Returns the next draw of Optuna's sampler 'tpe' or 'cmaes', and adds it to the journal.

    The sampler has a seed of its own for each draw, so a draw depends on the search's seed and what is known alone.
    A draw that is in the journal but not in the search's list was made by a process that ended between the two.

    Raises:
      UserError: Optuna is not installed, or its journal cannot be read.
    """
    with _quiet() as optuna:
        journal, _ = _journal(optuna, space, known)
        number = len(known.drawn)
        if len(journal.trials) == number:
            view = optuna.create_study(sampler=_sampler(optuna, sampler, seed, number))
            finite = [arm.values[arm.rung] for arm in known.arms if math.isfinite(arm.values.get(arm.rung, math.inf))]
            worst = max(finite, default=0.0)
            for trial, arm in zip(journal.trials, known.arms, strict=True):
                view.add_trial(_seen(optuna, trial, arm, known.last, worst, prune=sampler == 'tpe'))
            view.ask({field: _distribution(optuna, of) for field, of in space.items()})
            (asked,) = view.get_trials(deepcopy=False)[number:]
            params = {field: _within(space[field], value) for field, value in asked.params.items()}
            journal.add_trial(_trial(optuna, space, params, asked.system_attrs))
        return {field: _option(space[field], value) for field, value in journal.trials[number].params.items()}


def tell(space: Mapping[str, Distribution], known: Known, end: bool = False) -> None:
    """Writes to the journal, if there is one, what it does not know yet: the values of arms at rungs, by rung number.

    An arm that has reached the end is complete. `end` says that the search is over: arms that did not are pruned.
    """
    if not (known.home / JOURNAL).exists():
        return
    with _quiet() as optuna:
        (journal, storage), states = _journal(optuna, space, known), optuna.trial.TrialState
        sign = 1 if known.lower_is_better else -1
        for trial, arm in zip(journal.trials, known.arms, strict=False):
            if trial.state.is_finished():
                continue
            for rung in sorted(arm.values.keys() - trial.intermediate_values.keys()):
                storage.set_trial_intermediate_value(trial._trial_id, rung, sign * arm.values[rung])
            if known.last in arm.values and math.isfinite(arm.values[known.last]):
                journal.tell(trial.number, sign * arm.values[known.last])
            elif math.inf in arm.values.values():
                journal.tell(trial.number, state=states.FAIL)
            elif end:
                journal.tell(trial.number, state=states.PRUNED)


def importance(
    space: Mapping[str, Distribution], drawn: Sequence[Overrides], values: Sequence[float]
) -> dict[str, float]:
    """Returns the share of each field in the variance of the values' ranks, by fANOVA (Hutter et al. 2014).

    Ranks bear diverged arms, whose value is inf. Optuna weighs a range evenly whatever its scale, so one by ratios is
    told as that of the logarithms. The trees of fANOVA are scikit-learn's.

    Raises:
      UserError: Optuna is not installed, or the arms are too few.
    """
    from scipy import stats  # slow to import, and every command that knows sweeps comes by here

    if len(drawn) < LEAST:
        raise UserError(f'{len(drawn)} arms are too few to rate fields: {LEAST}')
    with _quiet() as optuna:
        study = optuna.create_study()
        even = {field: _evenly(of) for field, of in space.items()}
        for arm, rank in zip(drawn, stats.rankdata(values), strict=True):
            params = {
                field: math.log(arm[field]) if even[field] != of else _written(of, arm[field])
                for field, of in space.items()
            }
            study.add_trial(_trial(optuna, even, params, {}, optuna.trial.TrialState.COMPLETE, value=float(rank)))
        rated = optuna.importance.FanovaImportanceEvaluator(seed=0)
        found = optuna.importance.get_param_importances(study, evaluator=rated)
        return {field: float(share) for field, share in found.items()}


# ----------------------------------------------------------------------------------------------------------- Optuna's


@contextlib.contextmanager
def _quiet() -> Iterator[Any]:
    """Gives the package, which says nothing but errors in the block."""
    try:
        import optuna
    except ImportError as error:
        raise UserError(f'Optuna, which rates them, is not installed: {MISSING}') from error
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            yield optuna
    finally:
        optuna.logging.set_verbosity(before)


def _journal(optuna: Any, space: Mapping[str, Distribution], known: Known) -> tuple['optuna.Study', Any]:
    """Returns (the study in the journal, with a trial for each draw, and its storage)."""
    from optuna.storages import JournalStorage, journal

    file = known.home / JOURNAL
    try:
        _drop_half_line(file)
        lock: Any = _Held()  # Optuna's base class cannot be named before it is imported
        storage = JournalStorage(journal.JournalFileBackend(str(file), lock_obj=lock))
        direction = 'minimize' if known.lower_is_better else 'maximize'
        study = optuna.create_study(storage=storage, study_name=NAME, direction=direction, load_if_exists=True)
        for drawn in known.drawn[len(study.get_trials(deepcopy=False)) :]:
            params = {field: _written(of, drawn[field]) for field, of in space.items()}
            study.add_trial(_trial(optuna, space, params, {}))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f'{file} cannot be read ({error}); without it the search goes on from its own list') from error
    return study, storage


class _Held:
    """The lock of the journal: the sweep's, which this process holds. Optuna's own would stay after a kill."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _drop_half_line(file: pathlib.Path) -> None:
    """Cuts off a last line that was not written to its end."""
    text = file.read_bytes() if file.exists() else b''
    if text and not text.endswith(b'\n'):
        with file.open('r+b') as opened:
            opened.truncate(text.rfind(b'\n') + 1)


def _sampler(optuna: Any, name: str, seed: int, number: int) -> Any:
    own = random.Random(f'{seed} {number}').getrandbits(31)
    if name == 'cmaes':
        return optuna.samplers.CmaEsSampler(seed=own, warn_independent_sampling=False)
    return optuna.samplers.TPESampler(seed=own)


def _seen(optuna: Any, trial: 'FrozenTrial', arm: Arm, last: int, worst: float, prune: bool) -> 'FrozenTrial':
    """Returns a trial of the journal as a sampler sees it. To one that does not know of pruned trials, an arm that is
    paused is complete with its value at its rung."""
    states = optuna.trial.TrialState
    value = arm.values.get(arm.rung, math.nan)
    value = max(worst, np.nextafter(worst, math.inf)) if value == math.inf else value
    state = states.COMPLETE if last in arm.values or math.inf in arm.values.values() or not prune else states.PRUNED
    state = states.RUNNING if not arm.values or (arm.is_busy and not math.isinf(max(arm.values.values()))) else state
    return optuna.trial.create_trial(
        state=state,
        value=value if state == states.COMPLETE else None,
        params=trial.params,
        distributions=trial.distributions,
        system_attrs=trial.system_attrs,
        intermediate_values={rung: min(each, worst) for rung, each in arm.values.items()},
    )


def _trial(
    optuna: Any,
    space: Mapping[str, Distribution],
    params: Mapping[str, Any],
    attrs: Mapping[str, Any],
    state: Any = None,
    value: float | None = None,
) -> 'FrozenTrial':
    return optuna.trial.create_trial(
        state=state or optuna.trial.TrialState.RUNNING,
        value=value,
        params=dict(params),
        distributions={field: _distribution(optuna, of) for field, of in space.items()},
        system_attrs=dict(attrs),
    )


def _distribution(optuna: Any, of: Distribution) -> Any:
    if isinstance(of, Choice):
        return optuna.distributions.CategoricalDistribution([_written(of, option) for option in of.options])
    assert isinstance(of, Range)
    kind = optuna.distributions.IntDistribution if of.whole else optuna.distributions.FloatDistribution
    return kind(of.low, of.high, log=of.log)


def _evenly(of: Distribution) -> Distribution:
    """Returns the distribution of the logarithm where that is even, else the same."""
    return Range(math.log(of.low), math.log(of.high)) if isinstance(of, Range) and of.log else of


def _within(of: Distribution, value: Any) -> Any:
    """Returns what is tried of a value that was asked for: numbers in 4 digits."""
    return of.within(value) if isinstance(of, Range) and not of.whole else value


def _written(of: Distribution, value: Any) -> Any:
    """Returns a value as Optuna keeps it: of choices those without a type of JSON by their text."""
    return repr(value) if isinstance(of, Choice) and not isinstance(value, bool | int | float | str | None) else value


def _option(of: Distribution, value: Any) -> Any:
    """Returns the value that Optuna keeps as `value`."""
    if not isinstance(of, Choice):
        return value
    return next(
        option for option in of.options if _written(of, option) == value and type(_written(of, option)) is type(value)
    )
