"""The files of finished runs, read once: those of sweeps, or of any directories of workdirs."""

import contextlib
import dataclasses
import math
import os
import pathlib
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tformer import config
from tformer.config import Config, json_files
from tformer.data import stores
from tformer.errors import UserError
from tformer.evaluation import predictions
from tformer.lab.sweep import jobs, manifest, trials
from tformer.lab.sweep.overrides import SEED
from tformer.training import checkpoint, digests, workdir, writers

DONE, FAILED, UNFINISHED, UNREADABLE, PRUNED = 'done', 'failed', 'unfinished', 'unreadable', 'pruned'
# entries of a split in result.json that are not metrics; the last one was written until `overrides` were
FACTS = ('step', 'parameters', 'averaged_checkpoints')


@dataclasses.dataclass(frozen=True)
class Run:
    """A trial and its results so far."""

    arm: str
    seed: int  # train.seed
    directory: str  # its workdir in that of the sweep
    file: str  # the config file in its workdir that `tformer train` takes
    stated: Config  # its config before it is resolved, if known
    config: Config  # the resolved config, if it exists
    state: str  # 'done', 'failed', 'unfinished', 'pruned' or, if a file of it is damaged or of another, 'unreadable'
    error: str | None  # the line that says why it failed, or which file cannot be read
    scores: Mapping[str, float]  # of the last evaluations, e.g. 'test/loss'; a value may be nan
    scored: Mapping[str, int]  # by split, the step of the checkpoint that was scored
    parameters: float | None  # of the model that was scored, if its results say so
    log: Sequence[Mapping[str, Any]]  # the lines of metrics.jsonl
    mismatch_percent: Mapping[str, float]  # by quantity, how far it is from the amount that it is matched to
    seconds: float | None  # that it ran, over all its starts; None if unknown
    is_searched: bool = False  # an arm may have been chosen by it, so it decides nothing
    imported: bool = False  # whether of another program, so that its configs say nothing of it
    has_ended: bool = True  # it has a result or an error, or is pruned before it began
    overrides: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)  # as writers.overrides

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Returns (steps, values) of a number in metrics.jsonl; nan if it was not finite."""
        rows = [row for row in self.log if name in row]
        return [row['step'] for row in rows], [math.nan if row[name] is None else row[name] for row in rows]

    def spent(self, quantity: str, steps: Sequence[float]) -> list[float] | None:
        """Returns the 'tokens' or 'flops' spent by some steps, interpolated in the log; None if the log has none."""
        reported, values = self.curve(f'train/{quantity}')
        return np.interp(steps, [0, *reported], [0, *values]).tolist() if reported else None

    def last(self, name: str) -> float | None:
        """Returns the last value of a number in metrics.jsonl; None if there is none or it is not finite."""
        return next((row[name] for row in reversed(self.log) if name in row), None)

    def log_file(self, home: pathlib.Path) -> pathlib.Path | None:
        """Returns the file of what its process printed, where a sweep kept one."""
        file = home / self.directory / trials.LOG
        return file if file.is_file() else None

    @property
    def num_steps(self) -> int | None:
        """The number of steps made, if the log says so."""
        return self.log[-1]['step'] if self.log else None


@dataclasses.dataclass(frozen=True)
class Results:
    """All runs of one or several directories, arm by arm."""

    home: pathlib.Path  # the directory; of several, the one that they lie in
    arms: Mapping[str, Sequence[Run]]  # the runs by arm, by seed, the baseline first
    commands: Sequence[str]  # the command lines of the sweeps that were kept
    searched: Sequence[Run] = ()  # the runs of a search, which are among the arms only if nothing was run again
    damaged: Sequence[str] = ()  # lines on the workdirs that are left out because their config cannot be read
    directories: Sequence[pathlib.Path] = ()  # that are compared, where they are several

    @property
    def runs(self) -> list[Run]:
        return [run for runs in self.arms.values() for run in runs]

    def versions(self) -> dict[str, list[str]]:
        """Returns the versions of each package in the checkpoints that still exist."""
        found: dict[str, set[str]] = {}
        for run in self.runs:
            with contextlib.suppress(UserError, LookupError, TypeError, AttributeError):
                workdir = self.home / run.directory
                for step in checkpoint.steps(workdir)[-1:]:
                    for name, version in checkpoint.read_metadata(workdir, step)['versions'].items():
                        found.setdefault(name, set()).add(str(version))
        return {name: sorted(versions) for name, versions in sorted(found.items())}

    @property
    def done(self) -> list[Run]:
        return [run for run in self.runs if run.state == DONE]

    @property
    def ended(self) -> bool:
        """Whether every declared run has ended, so that the number of seeds does not depend on results."""
        return all(run.has_ended and not run.is_searched for run in self.runs)

    def difference(self, arm: str, baseline: str) -> dict[str, tuple[Any, Any]]:
        """Returns the fields in which an arm differs, except the seed: {field: (baseline's value, arm's value)}."""
        found = config.difference(self.arms[baseline][0].stated, self.arms[arm][0].stated)
        return {field: values for field, values in found.items() if field != SEED}

    def values(self, metric: str) -> dict[str, dict[int, float | None]]:
        """Returns {arm: {seed: value}} for `comparison.summary`, with None for runs that failed.

        Runs that have not ended, and finished runs without that metric, are left out.
        """
        found: dict[str, dict[int, float | None]] = {arm: {} for arm in self.arms}
        for run in self.runs:
            value = run.scores.get(metric)
            if run.state == FAILED or value is not None:
                found[run.arm][run.seed] = value
        return found


def read(directory: str | pathlib.Path) -> Results:
    """Returns the runs of a sweep's directory, or of any directory with workdirs in it or one level further down.

    Without the list of a sweep, an arm is named after its differences from the first workdir in alphabetical order;
    names that begin with 'baseline' come first.

    A run with a damaged file is `UNREADABLE`, and a workdir without a config is left out; the report lists both.

    Raises:
      UserError: no run is found, the list cannot be read, or two workdirs have the same arm and seed.
    """
    home = pathlib.Path(directory)
    runs, damaged = (_listed(home), []) if (home / manifest.LIST).is_file() else _found(home)
    if not runs:
        one = ': it is one itself, so name the directory that it is in' if (home / 'config.json').is_file() else ''
        here = damaged[0] if damaged else f'neither {manifest.LIST} nor */config.json{one}'
        raise UserError(f'{home}: no runs are here: {here}')
    searched = [run for run in runs if run.is_searched]
    runs = [run for run in runs if not run.is_searched] or searched
    arms: dict[str, dict[int, Run]] = {}
    for run in runs:
        twin = arms.setdefault(run.arm, {}).setdefault(run.seed, run)
        if twin is not run:
            raise UserError(f'{home}: {twin.directory} and {run.directory} are runs of the same config and train.seed')
    command = home / manifest.COMMAND
    began = command.read_text(errors='replace').strip() if command.is_file() else None
    return Results(
        home,
        {arm: [runs[seed] for seed in sorted(runs)] for arm, runs in arms.items()},
        [f'{began} {shlex.quote(f"--workdir={home}")}'] if began else [],
        searched,
        damaged,
    )


def read_several(directories: Sequence[str | pathlib.Path]) -> Results:
    """Returns the runs of directories as `read` finds them; of several, an arm is named after its directory too.

    An arm's name is then 'DIRECTORY/ARM', with the directory as seen from the one that all lie in.

    Raises:
      UserError: no directory is given, one is on a store, given twice or in another, or as `read`.
    """
    if not directories:
        raise UserError('no directory is given')
    for directory in directories:
        stores.require_local(pathlib.Path(directory))
    if len(directories) == 1:
        return read(directories[0])
    places = [pathlib.Path(os.path.normpath(each)) for each in directories]
    whole = [place.resolve() for place in places]
    for i, place in enumerate(whole):
        if inside := [other for j, other in enumerate(whole) if i != j and place.is_relative_to(other)]:
            raise UserError(f'{places[i]}: its runs are also those of {inside[0]}; name every directory once')
    absolute = any(place.is_absolute() or place.parts[:1] == ('..',) for place in places)
    home = pathlib.Path(os.path.commonpath(whole if absolute else places) or '.')
    # What a sweep's list states is not resolved, what a workdir without one holds is: only equals are compared.
    resolved = len({(place / manifest.LIST).is_file() for place in whole}) > 1
    arms: dict[str, Sequence[Run]] = {}
    found = [read(place) for place in (whole if absolute else places)]
    for each in found:
        name = each.home.relative_to(home).as_posix()
        for arm, runs in each.arms.items():
            # What the arms of one sweep are matched to says nothing of those of another.
            arms[f'{name}/{arm}'] = [
                dataclasses.replace(
                    run,
                    arm=f'{name}/{arm}',
                    directory=f'{name}/{run.directory}',
                    stated=run.config if resolved else run.stated,
                    mismatch_percent={},
                )
                for run in runs
            ]
    commands = [command for each in found for command in each.commands]
    damaged = [line for each in found for line in each.damaged]
    return Results(home, arms, commands, damaged=damaged, directories=places)


def _listed(home: pathlib.Path) -> list[Run]:
    """Returns the trials that a sweep's list names."""
    file = home / manifest.LIST
    listed, seconds, pruned = json_files.read(file), manifest.times(home), jobs.pruned(home)
    try:
        base, fields, imported = listed['base'], manifest.varied(listed), 'imported' in listed
        runs = [
            _run(home / entry['directory'], home, entry['name'], stated, _Listed(entry, base, fields, seconds, pruned))
            for entry, stated in zip(listed['trials'], manifest.stated(listed), strict=True)
        ]
        return [
            dataclasses.replace(run, is_searched=bool(entry.get('searched')), imported=imported)
            for entry, run in zip(listed['trials'], runs, strict=True)
        ]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f'{file} is not the list of a sweep: {error}') from error


def _found(home: pathlib.Path) -> tuple[list[Run], list[str]]:
    """Returns (the workdirs in a directory, or one level further down; a line for each that cannot be read)."""
    found = sorted({*home.glob('*/config.json'), *home.glob('*/*/config.json')})
    files = sorted(found, key=lambda file: not file.relative_to(home).as_posix().startswith(trials.BASELINE))
    configs: dict[pathlib.Path, Config] = {}
    damaged = []
    for file in files:
        try:
            configs[file] = workdir.read_config(file.parent)
        except UserError as error:
            damaged.append(str(error))
    first = next(iter(configs.values()), Config())
    return [_run(file.parent, home, trials.arm_name(first, own), own) for file, own in configs.items()], damaged


class _Listed(NamedTuple):
    """What a sweep's list says of a trial."""

    entry: Mapping[str, Any]
    base: Mapping[str, Any]
    varied: Collection[str]  # fields of the list
    seconds: Mapping[str, float]  # of all trials
    pruned: Collection[str]  # arms that are not to begin


def _run(
    place: pathlib.Path, home: pathlib.Path, arm: str, stated: Config, listed: _Listed | None = None
) -> Run:  # fmt: skip
    directory, resolved = place.relative_to(home).as_posix(), place / 'config.json'
    done, final, log = trials.is_done(place), stated, list[dict[str, Any]]()
    scored: tuple[dict[str, float], dict[str, int], float | None] = {}, {}, None
    has_ended, overrides = done, dict[str, dict[str, Any]]()
    try:
        error = None if done else trials.error_of(place)
        state = DONE if done else FAILED if error is not None else UNFINISHED
        if state == UNFINISHED and listed and arm in listed.pruned and not resolved.exists():
            state = PRUNED
        has_ended = state != UNFINISHED
        begun = workdir.read_config(place) if resolved.exists() else None
        if listed:
            manifest.expect(place, begun, listed.entry, listed.base, listed.varied)
        final = begun or stated
        found, log, overrides = _scored(place), writers.read(place), writers.overrides(place)
        for split in found[1]:
            digests.expect(place, predictions.place(place, split).name)
            predictions.read(place, split)
        scored = found
    except (UserError, OSError) as damage:
        state, error = UNREADABLE, str(damage)
    return Run(
        arm,
        stated.train.seed,
        directory,
        resolved.name if listed is None else trials.STATED,
        stated,
        final,
        state,
        error,
        *scored,
        log,
        listed.entry['off_percent'] if listed else {},
        listed.seconds.get(directory) if listed else None,
        has_ended=has_ended,
        overrides=overrides,
    )


def _scored(place: pathlib.Path) -> tuple[dict[str, float], dict[str, int], float | None]:
    """Returns (scores of a run's result.json by split and name, the scored step by split, the number of parameters)."""
    found, steps, parameters = {}, {}, None
    for split, scores in writers.results(place).items():
        parameters = scores.get('parameters', parameters)
        if 'step' in scores:
            steps[split] = scores['step']
        for name, value in scores.items():
            if name not in FACTS:
                found[f'{split}/{name}'] = math.nan if value is None else float(value)
    return found, steps, parameters
