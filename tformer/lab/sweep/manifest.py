"""The directory of a sweep: the list of its trials, the config of each in its workdir, and how long they ran."""

import json
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tformer import atomic, checks, config
from tformer.config import Config, json_files
from tformer.errors import UserError
from tformer.lab.sweep.trials import STATED, Trial

LIST = 'sweep.json'
COMMAND = 'command.txt'  # the command line that began the sweep


def check(trials: Sequence[Trial], home: pathlib.Path) -> None:
    """Raises a `UserError` if a trial of the same name has another config, or the directory is not of a sweep."""
    if (home / 'config.json').is_file():
        raise UserError(f'{home} is the workdir of a run; use a fresh --workdir')
    for trial in trials:
        place = home / trial.directory
        if (place / STATED).is_file():
            before = checks.settled(config.from_json(place / STATED))
            if changed := config.difference(before, trial.config):
                field, (old, new) = next(iter(changed.items()))
                more = f' and {len(changed) - 1} more fields' if len(changed) > 1 else ''
                fields = f'{field} ({old!r} there, {new!r} here){more}'
                raise UserError(f'{place} holds a trial with another config: {fields}; use a fresh --workdir')
        elif (place / 'config.json').is_file():
            raise UserError(f'{place} holds a run that is not of a sweep; use a fresh --workdir')


def claim(
    base: Config, trials: Sequence[Trial], home: pathlib.Path, arguments: Sequence[str] | None = None
) -> dict[str, float]:
    """Writes the list of trials, and the config of each to its workdir; returns the seconds that each has run.

    This process holds `home`, the sweep's directory. If a command began it, `arguments` are that command's, without
    --workdir; they are kept for reports.

    Raises:
      UserError: as `check`; nothing is written.
    """
    check(trials, home)
    seconds = times(home)
    gone = sorted(seconds.keys() - {trial.directory for trial in trials})
    if gone := [name for name in gone if (home / name).is_dir()]:
        print(f'no longer in the sweep, but still in {home}: {", ".join(gone)}', flush=True)
    for trial in trials:
        (home / trial.directory).mkdir(parents=True, exist_ok=True)
        _write(home / trial.directory / STATED, config.to_dict(trial.config))
    write(base, trials, home, seconds)
    if arguments is not None:
        atomic.write(home / COMMAND, shlex.join(['tformer', 'sweep', *arguments]) + '\n')
    return seconds


def write(base: Config, trials: Sequence[Trial], home: pathlib.Path, seconds: Mapping[str, float]) -> None:
    """Writes the list of a sweep, from which reports are made without the sweep file."""
    entries = [
        {
            'name': trial.name,
            'seed': trial.seed,
            'directory': trial.directory,
            'overrides': trial.overrides,
            'off_percent': trial.mismatch_percent,
            'config_digest': config.digest(trial.config),
            **({'searched': True} if trial.is_searched else {}),
        }
        for trial in trials
    ]
    rounded = {directory: round(spent, 2) for directory, spent in seconds.items()}
    _write(home / LIST, {'base': config.to_dict(base), 'trials': entries, 'seconds': rounded})


def times(home: pathlib.Path) -> dict[str, float]:
    """Returns the seconds that each trial has run over all its starts, by directory; unstarted trials are absent."""
    file = home / LIST
    try:
        found = json_files.read(file)['seconds'] if file.is_file() else {}
        return {directory: float(spent) for directory, spent in found.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f'{file} is not the list of a sweep: {error}') from error


def _write(file: pathlib.Path, tree: Mapping[str, Any]) -> None:
    atomic.write(file, json.dumps(tree, indent=2) + '\n')
