"""The directory of a sweep: the list of its trials, the config of each in its workdir, and how long they ran.

The list is written whole by whoever decides in the directory at the time, so that a kill never leaves half of it.
"""

import json
import operator
import pathlib
import secrets
import shlex
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tformer import atomic, checks, config
from tformer.config import Config, json_files, renamed
from tformer.errors import Stopped, UserError
from tformer.lab.sweep import leases
from tformer.lab.sweep.leases import Lease, Leases
from tformer.lab.sweep.overrides import SEED
from tformer.lab.sweep.trials import STATED, Trial, clear_error, error_of

LIST = 'sweep.json'
COMMAND = 'command.txt'  # the command line that began the sweep
TELL_AFTER = 30  # seconds of waiting for others to decide


def check(trials: Sequence[Trial], home: pathlib.Path) -> None:
    """Raises a `UserError` if a trial of the same name has another config, or the directory is not of a sweep."""
    if (home / 'config.json').is_file():
        raise UserError(f'{home} is the workdir of a run; use a fresh --workdir')
    for trial in trials:
        place = home / trial.directory
        if (place / STATED).is_file():
            if (place / STATED).read_text(errors='replace') == _stated(trial):  # quickly seen, of hundreds
                continue
            before = checks.settled(config.from_json(place / STATED))
            if changed := _difference(before, trial.config):
                field, (old, new) = next(iter(changed.items()))
                more = f' and {len(changed) - 1} more fields' if len(changed) > 1 else ''
                fields = f'{field} ({old!r} there, {new!r} here){more}'
                raise UserError(f'{place} holds a trial with another config: {fields}; use a fresh --workdir')
        elif (place / 'config.json').is_file():
            raise UserError(f'{place} holds a run that is not of a sweep; use a fresh --workdir')


def claim(base: Config, trials: Sequence[Trial], home: pathlib.Path, arguments: Sequence[str] | None = None) -> None:
    """Writes the list of trials, and the config of each to its workdir.

    This process is the one that decides in `home`, the sweep's directory (`leases.deciding`). If a command began it,
    `arguments` are that command's, without --workdir; they are kept for reports.

    Raises:
      UserError: as `check`; nothing is written.
    """
    check(trials, home)
    try:
        seconds = times(home)
    except UserError as error:
        print(f'{error}; it is written anew, without the seconds that its trials have run', flush=True)
        seconds = {}
    gone = [entry['directory'] for entry in _dropped(trials, home)]
    if gone := sorted(name for name in gone if (home / name).is_dir()):
        print(f'no longer in the sweep, but still in {home}: {", ".join(gone)}', flush=True)
    for trial in trials:
        _state(trial, home)
    write(base, trials, home, seconds)
    if arguments is not None:
        atomic.write(home / COMMAND, shlex.join(['tformer', 'sweep', *arguments]) + '\n')


def _lists(trials: Sequence[Trial], home: pathlib.Path) -> bool:
    """Returns whether the list has all of these trials; not if it cannot be read."""
    try:
        listed = {entry['directory'] for entry in json_files.read(home / LIST)['trials']}
    except (UserError, OSError, LookupError, TypeError):
        return False
    return all(trial.directory in listed for trial in trials)


def _dropped(trials: Sequence[Trial], home: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the entries of the list that are of none of these trials; [] if it cannot be read."""
    kept = {trial.directory for trial in trials}
    try:
        return [entry for entry in json_files.read(home / LIST)['trials'] if entry['directory'] not in kept]
    except (UserError, OSError, LookupError, TypeError):
        return []


def _lacks(trials: Sequence[Trial], home: pathlib.Path) -> bool:
    """Returns whether the list has trials that these lack, other than those that a search adds while it runs."""
    dropped = _dropped(trials, home)
    drawn = {entry.get('name') for entry in dropped if entry.get('searched')}
    return any(entry.get('name') not in drawn for entry in dropped)


def enter(
    base: Config,
    trials: Sequence[Trial],
    held: Leases,
    joins: bool = False,
    arguments: Sequence[str] | None = None,
    requests: Sequence[int] = (),
) -> Lease | None:
    """Claims the directory above `held`, or joins those who have; returns the lease that says that a command runs its
    sweep.

    If no other does, trials that failed are to run again, unless this one `joins`. While another process decides there
    it waits, until there are `requests` to stop; so it does until a host that is silent counts as dead, if the list
    that it left has other trials, or some have failed.

    Raises:
      UserError: as `check`, or another command runs a sweep of other trials there.
      Stopped: on request.
    """
    home, waited, told, began = held.directory.parent, 0, False, time.monotonic()
    while not requests:
        with leases.deciding(held.directory, patience=1.0) as decides:
            held.look()
            others = [name for name in held.names() if held.is_held(name)]
            is_other = bool(others) and _lacks(trials, home)
            silent = not any(map(held.is_alive, others)) and time.monotonic() - began <= leases.PATIENCE + 1
            waits = is_other or (bool(others) and silent and not joins and _has_failed(trials, home))
            if decides and not waits:
                if others and _lists(trials, home):  # it stays: more may have been drawn since
                    check(trials, home)
                    for trial in trials:
                        _state(trial, home)
                else:
                    claim(base, trials, home, arguments)
                return _session(trials, held, joins, bool(others))
        if waits:
            if is_other and not silent:
                raise UserError(f'{home} is swept by another command with other trials; use a fresh --workdir')
            if not told:
                print(f'waiting to see if hosts live that have leases in {held.directory}, or are gone', flush=True)
            told = True
            time.sleep(1.0)
        elif (waited := waited + 1) == TELL_AFTER:
            lock = held.directory / 'lock'
            print(f'waiting for {lock}, which another process holds; `fuser` names it if it is halted', flush=True)
    raise Stopped(f'{signal.Signals(requests[0]).name}: nothing has begun; run the same command again')


def _session(trials: Sequence[Trial], held: Leases, joins: bool, others: bool) -> Lease | None:
    home = held.directory.parent
    if not joins and not others:
        for trial in trials:
            clear_error(home / trial.directory)
        for name in held.names():  # of commands that were killed
            if name.startswith('session/') and (left := held.take(name)) is not None:
                left.release(done=True)
    elif not joins and _has_failed(trials, home):
        print(f'others train trials of {home}; those that failed stay so', flush=True)
    return held.take(f'session/{secrets.token_hex(8)}')


def _has_failed(trials: Sequence[Trial], home: pathlib.Path) -> bool:
    return any(error_of(home / trial.directory) is not None for trial in trials)


def add(base: Config, trials: Sequence[Trial], home: pathlib.Path) -> None:
    """Adds trials to the list of a sweep, where they are not in it yet, as `claim` does."""
    if not trials:
        return
    listed = json_files.read(home / LIST) if (home / LIST).is_file() else {'trials': []}
    known = {entry['directory'] for entry in listed['trials']}
    new = [trial for trial in trials if trial.directory not in known]
    if not new:
        return
    check(new, home)
    for trial in new:
        _state(trial, home)
    entries = [*listed['trials'], *map(_entry, new)]
    _write(home / LIST, {'base': config.to_dict(base), 'trials': entries, 'seconds': listed.get('seconds', {})})


def add_times(home: pathlib.Path, spent: Mapping[str, float]) -> None:
    """Adds seconds that trials have run, by directory, to those of the list; it may have changed since it was read."""
    if not spent or not (home / LIST).is_file():
        return
    listed, seconds = json_files.read(home / LIST), times(home)
    total = {name: round(seconds.get(name, 0.0) + spent.get(name, 0.0), 2) for name in {**seconds, **spent}}
    _write(home / LIST, {**listed, 'seconds': total})


def write(base: Config, trials: Sequence[Trial], home: pathlib.Path, seconds: Mapping[str, float]) -> None:
    """Writes the list of a sweep, from which reports are made without the sweep file."""
    rounded = {directory: round(spent, 2) for directory, spent in seconds.items()}
    _write(home / LIST, {'base': config.to_dict(base), 'trials': list(map(_entry, trials)), 'seconds': rounded})


def stated(listed: Mapping[str, Any]) -> list[Config]:
    """Returns the config of each trial of a list, before it is resolved."""
    base = config.from_dict(listed['base'])
    return [_of_entry(base, entry) for entry in listed['trials']]


def _of_entry(base: Config, entry: Mapping[str, Any]) -> Config:
    return config.override(base, {renamed.current(name): value for name, value in entry['overrides'].items()})


def varied(listed: Mapping[str, Any]) -> set[str]:
    """Returns the dotted fields in which the trials of a list differ from its base."""
    return {SEED, *(renamed.current(name) for entry in listed['trials'] for name in entry.get('overrides', ()))}


def expect(
    place: pathlib.Path,
    resolved: Config | None,
    entry: Mapping[str, Any],
    base: Mapping[str, Any] | None,
    fields: Iterable[str],
) -> None:
    """Raises a `UserError` if a workdir is not of the trial that the list has there, as one that was moved or edited.

    Args:
      place: the workdir. Without the config of a trial it is taken as it is.
      resolved: its config.json; None: there is none yet.
      entry: of the list, and the `base` that the list has.
      fields: `varied`; of the resolved config only these are compared, because others are derived.
    """
    tree = json_files.read_if_there(place / STATED)
    if base and tree and config.digest_tree(tree) != entry.get('config_digest'):
        here, there = _settled(config.from_json(place / STATED)), _settled(_of_entry(config.from_dict(base), entry))
        _refuse_differing(place / STATED, _difference(here, there))
    if resolved is None:
        return
    pairs = {field: (operator.attrgetter(field)(resolved), _value(tree, field)) for field in sorted(fields)}
    _refuse_differing(place / 'config.json', {field: each for field, each in pairs.items() if not _is_kept(*each)})


def _difference(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """Returns the fields in which a trial became another one; who is told its metrics changes none."""
    return {field: each for field, each in config.difference(before, after).items() if field != 'train.trackers'}


def _refuse_differing(file: pathlib.Path, changed: Mapping[str, tuple[Any, Any]]) -> None:
    for field, (here, there) in changed.items():
        raise UserError(f'{file} is not of the trial that {LIST} has there: {field} is {here!r} here, {there!r} there')


def _settled(stated: Config) -> Config:
    try:
        return checks.settled(stated)
    except UserError:  # it needs an extension
        return stated


def _value(tree: Mapping[str, Any], field: str) -> Any:
    section, _, name = field.partition('.')
    found = tree.get(section)
    value = found.get(name) if isinstance(found, Mapping) else None
    return tuple(value) if isinstance(value, list) else value


def _is_kept(resolved: Any, stated: Any) -> bool:
    """Returns whether a resolved value may be of what was stated: None and shares of the run stand for others."""
    is_share = isinstance(stated, float) and isinstance(resolved, int)
    return resolved == stated or resolved is None or stated is None or is_share


def _entry(trial: Trial) -> dict[str, Any]:
    return {
        'name': trial.name,
        'seed': trial.seed,
        'directory': trial.directory,
        'overrides': trial.overrides,
        'off_percent': trial.mismatch_percent,
        'config_digest': config.digest(trial.config),
        **({'searched': True} if trial.is_searched else {}),
    }


def _state(trial: Trial, home: pathlib.Path) -> None:
    """Writes the config of a trial to its workdir, unless it stands there."""
    (home / trial.directory).mkdir(parents=True, exist_ok=True)
    file = home / trial.directory / STATED
    if not file.is_file() or file.read_text() != _stated(trial):
        atomic.write(file, _stated(trial))


def _stated(trial: Trial) -> str:
    return json.dumps(config.to_dict(trial.config), indent=2) + '\n'


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
