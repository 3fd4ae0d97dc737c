"""Runs the trials of a sweep, each a process that trains in a workdir of its own; what is done is not done again."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tformer import config, workdir
from tformer.config import Config
from tformer.errors import STOPPED, Stopped, UserError
from tformer.lab.trials import Trial

TRAIN = (sys.executable, '-m', 'tformer', 'train')
LIST = 'sweep.json'  # of a sweep's directory: its trials
STATED = 'trial.json'  # of a trial's workdir: its config, before config.json, which has it resolved
RESULT, ERROR, LOG = 'result.json', 'error.txt', 'log.txt'

# What a trial's process runs before it becomes the training: Linux is to kill it where its parent ends, however that
# does (1 is PR_SET_PDEATHSIG), for a trial that nobody waits for would keep its workdir from the sweep's next life.
BOUND = """
import ctypes, os, signal, sys
if sys.platform.startswith('linux'):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
ERRORS = re.compile(r'tformer: .*|[\w.]*(Error|Exception|Interrupt)\b.*')  # how an error's line begins


@dataclasses.dataclass
class Life:
    """A trial's process."""

    trial: Trial
    process: subprocess.Popen[bytes]
    began: float
    logged: int  # bytes of its log before it


def sweep(
    base: Config, trials: Sequence[Trial], directory: str | pathlib.Path, parallel: int = 1,
    command: Sequence[str] = TRAIN,
) -> int:  # fmt: skip
    """Runs the trials that are not done, `parallel` at once; returns the exit code: 0, 2 where all that failed were
    the user's mistakes, else 1.

    Each trains in DIRECTORY/ARM/seed_N. One that fails leaves its error there in error.txt, and the rest go on.

    Raises:
      UserError: the directory holds a trial of the same name with another config.
      Stopped: by a signal; the trials that ran have saved what they had.
    """
    home = pathlib.Path(directory)
    if parallel < 1:
        raise UserError(f'--parallel={parallel} must be positive')
    with workdir.held(home), _signals() as heard:
        seconds = claim(base, trials, home)
        waiting = [trial for trial in trials if not is_done(home / trial.directory)]
        print(f'{len(trials)} trials, {len(trials) - len(waiting)} of them done', flush=True)
        lives: dict[int, Life] = {}
        failed: dict[str, int] = {}
        stopped, told = [], 0
        while lives or (waiting and not heard):
            asked = len(heard)
            for slot in range(parallel):
                if waiting and slot not in lives and not heard:
                    lives[slot] = _begin(waiting.pop(0), home, command, _share(slot, parallel))
            for slot, life in list(lives.items()):
                if (code := life.process.poll()) is not None:
                    del lives[slot]
                    took = time.monotonic() - life.began
                    seconds[life.trial.directory] = seconds.get(life.trial.directory, 0.0) + took
                    _write(home / LIST, listing(base, trials, seconds))
                    said = _end(life, home, code, asked=bool(told))
                    if said.startswith('failed'):
                        failed[life.trial.directory] = code
                    elif said.startswith('stopped'):
                        stopped.append(life.trial)
                    ended = len(trials) - len(waiting) - len(lives)
                    print(f'{ended}/{len(trials)}  {life.trial.directory}  {took:,.0f} s  {said}', flush=True)
                elif told < asked:
                    life.process.terminate()  # it saves and stops; at the second, at once
            told = asked
            time.sleep(0.05)
    for name in failed:
        print(f'failed: {name}: {(home / name / ERROR).read_text().strip()} ({home / name / LOG})', flush=True)
    if waiting or stopped:
        done = sum(is_done(home / trial.directory) for trial in trials)
        why = signal.Signals(heard[0]).name if heard else f'{stopped[0].directory} stopped'
        raise Stopped(f'{why}: {done} of {len(trials)} trials are done; the same command goes on')
    return 0 if not failed else 2 if set(failed.values()) == {2} else 1


def is_done(place: pathlib.Path) -> bool:
    """Returns whether a trial has ended, which its result says."""
    return (place / RESULT).is_file()


# ------------------------------------------------------------------------------------------------------- the directory


def claim(base: Config, trials: Sequence[Trial], home: pathlib.Path) -> dict[str, float]:
    """Writes the list of trials, and the config of each to its workdir; returns the seconds that each has run.

    Raises:
      UserError: a trial of the same name has another config there; nothing is written.
    """
    for trial in trials:
        place = home / trial.directory
        if (place / STATED).is_file():
            before = config.load(str(place / STATED))
            if changed := config.difference(before, trial.config):
                field, (old, new) = next(iter(changed.items()))
                more = f' and {len(changed) - 1} more fields' if len(changed) > 1 else ''
                raise UserError(
                    f'{place} is of another config: {field} ({old!r} there, {new!r} here){more}; use a fresh --workdir'
                )
        elif (place / 'config.json').is_file():
            raise UserError(f'{place} holds a run that is not of a sweep; use a fresh --workdir')
    seconds = times(home)
    if gone := sorted(seconds.keys() - {trial.directory for trial in trials}):
        print(f'no more in the sweep, but left in {home}: {", ".join(gone)}', flush=True)
    for trial in trials:
        (home / trial.directory).mkdir(parents=True, exist_ok=True)
        _write(home / trial.directory / STATED, config.to_dict(trial.config))
    _write(home / LIST, listing(base, trials, seconds))
    return seconds


def listing(base: Config, trials: Sequence[Trial], seconds: Mapping[str, float]) -> dict[str, Any]:
    """Returns what the list of a sweep says, for reports to be made without the sweep file."""
    entries = [
        {
            'name': trial.name,
            'seed': trial.seed,
            'directory': trial.directory,
            'overrides': trial.overrides,
            'off_percent': trial.off,
            'config_digest': config.digest(trial.config),
            'seconds': round(seconds.get(trial.directory, 0.0), 2),
        }
        for trial in trials
    ]
    return {'base': config.to_dict(base), 'trials': entries}


def times(home: pathlib.Path) -> dict[str, float]:
    """Returns the seconds that each trial has run, by its directory, as the list of a sweep has them."""
    file = home / LIST
    try:
        trials = config.read_json(file)['trials'] if file.is_file() else []
        return {entry['directory']: float(entry['seconds']) for entry in trials}
    except (KeyError, TypeError) as error:
        raise UserError(f'{file}: not the list of a sweep: {error}') from error


def _write(file: pathlib.Path, tree: Mapping[str, Any]) -> None:
    partial = file.with_suffix('.tmp')
    partial.write_text(json.dumps(tree, indent=2) + '\n')
    partial.replace(file)


# ----------------------------------------------------------------------------------------------------------- processes


def _begin(trial: Trial, home: pathlib.Path, command: Sequence[str], cores: set[int]) -> Life:
    place = home / trial.directory
    (place / ERROR).unlink(missing_ok=True)
    arguments = [f'--config={place / STATED}', f'--workdir={place}']
    with (place / LOG).open('ab') as log:
        process = subprocess.Popen(
            [sys.executable, '-c', BOUND, str(os.getpid()), *command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,  # so that Ctrl-C reaches it from here alone
        )
        if cores:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(process.pid, cores)
        return Life(trial, process, time.monotonic(), log.tell())


def _end(life: Life, home: pathlib.Path, code: int, asked: bool) -> str:
    """Returns how a trial ended, in words; writes the error of one that failed to its workdir."""
    place = home / life.trial.directory
    if code == 0 and is_done(place):
        scores = [f'{split} loss {found["loss"]:.4g}' for split, found in config.read_json(place / RESULT).items()
                  if 'loss' in found]  # fmt: skip
        return ', '.join(['done', *scores])
    if code == STOPPED or (asked and code in (-signal.SIGTERM, 128 + signal.SIGTERM)):
        return 'stopped'
    with (place / LOG).open('rb') as log:
        log.seek(life.logged)
        lines = [line for line in log.read().decode(errors='replace').splitlines() if line.strip()]
    lines = [line for line in lines if ERRORS.match(line)] or lines
    how = f'ended by {signal.Signals(-code).name}' if code < 0 else lines[-1].strip() if lines else f'exit code {code}'
    (place / ERROR).write_text(how + '\n')
    return f'failed: {how}'


def _share(slot: int, parallel: int) -> set[int]:
    """Returns the cores of one of `parallel` trials at once: none in particular where there are too few for each."""
    if parallel == 1 or not hasattr(os, 'sched_getaffinity'):
        return set()
    return set(sorted(os.sched_getaffinity(0))[slot::parallel]) if len(os.sched_getaffinity(0)) >= parallel else set()


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Gives the list of the requests to stop so far."""
    heard: list[int] = []
    numbers = [each for each in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, lambda number, _: heard.append(number)) for each in numbers}
    try:
        yield heard
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
