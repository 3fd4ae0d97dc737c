"""The trials that a sweep makes of its base config: their names, and what is matched between them."""

import contextlib
import dataclasses
import functools
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tformer import atomic, checks, config
from tformer.config import Config, extensions, hashing, python_files
from tformer.distributed import processes
from tformer.errors import UserError, choose
from tformer.lab.sweep import matching
from tformer.lab.sweep.declaration import Sweep
from tformer.lab.sweep.matching import Match
from tformer.lab.sweep.overrides import SEED, Overrides
from tformer.lab.sweep.searches import Search
from tformer.training import trackers, workdir

BASELINE = 'baseline'
STATED = 'trial.json'  # a trial's config in its workdir, before it is resolved into config.json
RESULT, ERROR, LOG = 'result.json', 'error.txt', 'log.txt'
LONGEST = 150  # characters of a name: file systems take 255
UNSAFE = re.compile(r'[^\w.+-]+', re.ASCII)
ROUNDS = 10  # in which several matches take turns


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    name: str  # of its arm: the differences from the baseline before matching
    seed: int  # train.seed
    overrides: Overrides  # of the sweep's base, with the adjustments of matching
    config: Config  # not resolved
    mismatch_percent: dict[str, float]  # by quantity, how far it is from the amount that it is matched to
    is_searched: bool = False  # an arm may be chosen by it, so it gets no verdict

    @property
    def directory(self) -> str:
        """Its workdir in that of the sweep."""
        return f'{self.name}/seed_{self.seed}'


def listed(base: Config, sweep: Sweep, overrides: Mapping[str, str] | None = None) -> list[Trial]:
    """Returns the trials of what `opened` returns with these overrides; of a search, its baseline.

    Raises:
      UserError: an arm has a mistake, which the message gives the number of, or an override has no effect.
    """
    found = trials(base, [{}] if isinstance(sweep.arms, Search) else sweep.arms, sweep.match)
    for field in overrides or {}:
        stated = config.values(base)[field]
        if all(config.values(trial.config)[field] != stated for trial in found):
            raise UserError(f'--config.{field}={stated} has no effect in any arm')
    return found


def opened(spec: str, overrides: Mapping[str, str] | None = None) -> tuple[Config, Sweep]:
    """Returns (the base config with the overrides, what a sweep file, `FILE[:argument]`, returns).

    Raises:
      UserError: the file or the base has a mistake, or the sweep varies a field of the overrides itself.
    """
    path, argument = config.split(spec)
    sweep = config.execute(path, 'get_sweep', *filter(None, [argument]))
    if not isinstance(sweep, Sweep):
        raise UserError(f'{path}: get_sweep returns {type(sweep).__name__}, not a Sweep')
    if isinstance(sweep.base, str):
        base = config.load(str(pathlib.Path(path).parent / sweep.base))
    else:
        with python_files.one_line(path):
            base = config.from_dict(sweep.base)
    base = config.override(base, overrides or {})
    base = extensions.load(base, trusted=True, place=path, beside=pathlib.Path(path).parent)
    varied = [sweep.arms.space] if isinstance(sweep.arms, Search) else sweep.arms
    with beginning(spec):
        for field in overrides or {}:
            if any(field in arm for arm in varied):
                raise UserError(f'--config.{field}: the sweep varies this field itself')
    return base, sweep


@contextlib.contextmanager
def beginning(spec: str) -> Iterator[None]:
    """The message of a `UserError` in the block begins with the file of the sweep."""
    try:
        yield
    except UserError as error:
        raise UserError(f'{config.split(spec)[0]}: {error}') from error


def trials(base: Config, arms: Sequence[Overrides], match: Sequence[Match] | Match | None = ()) -> list[Trial]:
    """Returns the trials of a sweep in the order of its arms; arms that make the same config are one trial.

    Raises:
      UserError: there are no arms, or an arm has an unknown field or value, or fields that conflict or have no effect.
    """
    if not arms:
        raise UserError('the sweep has no arms')
    made: dict[Config, Trial] = {}
    told: set[str] = set()
    baseline: Config | None = None
    for number, arm in enumerate(arms, start=1):
        try:
            if not isinstance(arm, Mapping):
                raise UserError(f'{arm!r} is not a dict of fields')
            stated = extensions.load(config.override(base, arm), trusted=True, place='the sweep')
            name = arm_name(baseline := baseline or stated, stated)
            settled = checks.settle(stated, arm, functools.partial(_tell, told, name))
            checks.check(settled)
            trackers.kinds(settled)
        except UserError as error:
            raise UserError(f'arm {number} of {len(arms)}: {error}') from error
        made.setdefault(settled, Trial(name, stated.train.seed, _changes(base, stated), settled, {}))
    return _matched(base, list(made.values()), _listed(match))


def _tell(told: set[str], name: str, line: str) -> None:
    """Prints a line about an arm, once for all arms that it fits."""
    if line not in told:
        told.add(line)
        print(f'{name}: {line}', file=sys.stderr, flush=True)


def _changes(base: Config, stated: Config) -> Overrides:
    return {field: new for field, (_, new) in config.difference(base, stated).items()}


def _listed(match: Sequence[Match] | Match | None) -> list[Match]:
    """Returns the matches of a sweep as a list."""
    if match is None:
        return []
    listed: list[Any] = list(match) if isinstance(match, list | tuple) else [match]
    for each in listed:
        if not isinstance(each, Match):
            raise UserError(f'match: {each!r} is not a Match')
    return listed


def _matched(base: Config, found: list[Trial], matches: list[Match]) -> list[Trial]:
    """Returns the trials with the fields of `matches` adjusted, the same for all seeds of an arm, and their overrides.

    An adjustment for one match may change the quantity of another, so they take turns until no field changes, or for
    `ROUNDS`.
    """
    arms = {trial.name: trial.config for trial in found}
    for number, match in enumerate(matches):
        if match.field in [other.field for other in matches[:number]]:
            raise UserError(f'match: two of them adjust {match.field}')
        for name, stated in arms.items():
            if match.field in config.difference(choose(arms, match.to, 'Match.to'), stated):
                raise UserError(f'{name}: {match.field} is both varied and adjusted to match the {match.quantity}')
    for _ in range(ROUNDS if len(matches) > 1 else 1):
        before = arms
        for match in matches:
            arms = matching.match_all(arms, match)
        if arms == before:
            break
    off = {match.quantity: matching.misses(arms, match) for match in matches}
    adjusted = []
    for trial in found:
        stated = config.override(arms[trial.name], {SEED: trial.seed})
        checks.check(stated)
        missed = {quantity: percent[trial.name] for quantity, percent in off.items()}
        matched = {match.field: config.values(stated)[match.field] for match in matches}
        overrides = _changes(base, config.override(base, {**trial.overrides, **matched}))
        adjusted.append(Trial(trial.name, trial.seed, overrides, stated, missed))
    return adjusted


@contextlib.contextmanager
def kept(place: pathlib.Path) -> Iterator[None]:
    """Writes an error of its block to the workdir, if that is of a trial and no other run holds it.

    If several processes run as one, only the first failure is written, not the failures that it causes in others.
    """
    if not (place / STATED).is_file():
        yield
        return
    free = bool(processes.same_number(lambda: clear_error(place)))
    try:
        yield
    except Exception as error:
        if processes.first():
            free = not workdir.is_locked(place)
        lost = processes.lost(error)
        if free and (lost is None or error_of(place) is None):
            name = 'tformer' if lost or isinstance(error, UserError) else type(error).__name__
            line, *_ = (lost or str(error)).splitlines() or ['']
            write_error(place, f'{name}: {line}')
        raise


def clear_error(place: pathlib.Path) -> bool:
    """Deletes the error of a trial if no process holds its workdir; returns whether it is free."""
    if workdir.is_locked(place):
        return False
    (place / ERROR).unlink(missing_ok=True)
    return True


def write_error(place: pathlib.Path, why: str) -> None:
    """Writes the line that a trial failed with to its workdir."""
    atomic.write(place / ERROR, f'{why}\n')


def error_of(place: pathlib.Path) -> str | None:
    """Returns the line that says why a trial failed; None if it did not fail or has begun again."""
    try:
        return (place / ERROR).read_text(errors='replace').strip()
    except FileNotFoundError:
        return None


def is_done(place: pathlib.Path) -> bool:
    """Returns whether a trial is finished: it has a result."""
    return (place / RESULT).exists()


def is_done_as(place: pathlib.Path, wanted: Config) -> bool:
    """Returns whether a workdir is of a finished trial of this config."""
    stated = place / STATED
    return is_done(place) and stated.is_file() and config.from_json(stated) == wanted


def arm_name(baseline: Config, stated: Config) -> str:
    """Returns the name of an arm: the fields that differ from the baseline's, e.g. 'norm=rmsnorm,num_heads=8'.

    A field that has no effect in the arm is left out. A field whose name is also in another section has its section. A
    name that would be too long, or has a value with characters that are unsafe in a directory, ends with a digest of
    the values.
    """
    differing = {name: new for name, (_, new) in config.difference(baseline, stated).items() if name != SEED}
    differing = {name: differing[name] for name in checks.with_effect(stated, differing)}
    if not differing:
        return BASELINE
    every = [name.partition('.')[2] for name in config.field_types()]
    short = {name: field if every.count(field := name.partition('.')[2]) == 1 else name for name in differing}
    parts = [(short[name], _written(value)) for name, value in differing.items()]
    text = ','.join(f'{field}={UNSAFE.sub("-", value)}' for field, value in parts)
    if len(text) <= LONGEST and not any(UNSAFE.search(value) for _, value in parts):
        return text
    return f'{text[:LONGEST]}~{hashing.digest_json(differing, size=4)}'


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return '+'.join(str(item).replace('+', ' ') for item in value)
    return str(value)
