"""Runs the trials of a sweep, each a process that trains in a workdir of its own; what is done is not done again."""

import contextlib
import dataclasses
import itertools
import math
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tformer import atomic, config
from tformer.config import Config
from tformer.errors import STOPPED, Stopped, UserError, choose
from tformer.lab.sweep import manifest
from tformer.lab.sweep.batched_trials import TRANSFORMS, groups
from tformer.lab.sweep.trials import LOG, RESULT, STATED, Trial, clear_error, error_of, is_done, write_error
from tformer.training import workdir

TRAIN = (sys.executable, '-m', 'tformer', 'train')
EVERY = 10.0  # seconds, after which the list has those that each trial has run so far
FAR = 5.0  # percent that a match may miss without a word

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
    """A process that trains a trial, or some together: those of them that are not done, and its log."""

    trials: list[Trial]
    process: subprocess.Popen[bytes]
    began: float
    log: pathlib.Path
    logged: int  # bytes of its log before it


def sweep(
    base: Config, trials: Sequence[Trial], directory: str | pathlib.Path, parallel: int = 1, together: int = 1,
    transform: str | None = None, command: Sequence[str] = TRAIN, arguments: Sequence[str] | None = None,
) -> int:  # fmt: skip
    """Runs the trials that are not done; returns the exit code: 0, 2 where all that failed were the user's mistakes,
    else 1.

    Each trains in DIRECTORY/ARM/seed_N. One that fails leaves its error there in error.txt, and the rest go on.

    Args:
      base: what they change.
      trials: of a sweep.
      directory: of the sweep.
      parallel: processes that run at once.
      together: trials that one process trains in one program, at most, where they differ in numbers alone.
      transform: how it makes one program of theirs, a key of slices.TRANSFORMS; None: what suits the device.
      command: what trains.
      arguments: of the command that began the sweep, if one did, for reports to repeat it.

    Raises:
      UserError: the directory holds a trial of the same name with another config.
      Stopped: by a signal; the trials that ran have saved what they had.
    """
    home = pathlib.Path(directory)
    _check(parallel, together, transform)
    with workdir.lock(home), _signals() as heard:
        seconds = manifest.claim(base, trials, home, arguments)
        done = sum(is_done(home / trial.directory) for trial in trials)
        print(f'{len(trials)} trials, {done} of them done', flush=True)
        for name, off in {trial.name: trial.mismatch_percent for trial in trials}.items():
            for quantity in (each for each in off if abs(off[each]) > FAR):
                print(f'{name}: {off[quantity]:+.1f} % off the {quantity} that it was to match', flush=True)
        every = groups(trials, together)
        waiting = [group for group in every if not all(is_done(home / trial.directory) for trial in group)]
        lives: dict[int, Life] = {}
        failed: dict[str, int] = {}
        stopped, told, written = [], 0, time.monotonic()
        while lives or (waiting and not heard):
            asked = len(heard)
            for slot in range(parallel):
                if waiting and slot not in lives and not heard:
                    group = waiting.pop(0)
                    lives[slot] = _begin(group, home, every.index(group), transform, command, _share(slot, parallel))
            for slot, life in list(lives.items()):
                if (code := life.process.poll()) is not None:
                    del lives[slot]
                    seconds = ran(seconds, [life])
                    for trial in life.trials:
                        said = _end(trial, life, home, code, asked=bool(told))
                        if said.startswith('failed'):
                            failed[trial.directory] = code or 2  # of a group that went on without it
                        elif said.startswith('stopped'):
                            stopped.append(trial)
                        else:
                            done += 1
                        ended = done + len(failed) + len(stopped)
                        took = seconds[trial.directory]
                        print(f'{ended}/{len(trials)}  {trial.directory}  {took:,.0f} s  {said}', flush=True)
                    written = -math.inf
                elif told < asked:
                    life.process.terminate()  # it saves and stops; at the second, at once
            told = asked
            if time.monotonic() > written + EVERY:
                written = time.monotonic()
                manifest.write(base, trials, home, ran(seconds, lives.values()))
            time.sleep(0.05)
    if waiting or stopped:
        done = sum(is_done(home / trial.directory) for trial in trials)
        why = signal.Signals(heard[0]).name if heard else f'{stopped[0].directory} stopped'
        raise Stopped(f'{why}: {done} of {len(trials)} trials are done; the same command goes on')
    if all(is_done(home / trial.directory) for trial in trials):
        return 0
    return 2 if set(failed.values()) == {2} else 1


def array(
    base: Config,
    trials: Sequence[Trial],
    directory: str | pathlib.Path,
    together: int = 1,
    transform: str | None = None,
    arguments: Sequence[str] | None = None,
) -> str:
    """Writes what trains the trials to DIRECTORY/trials.txt, a process a line; returns how to run those not done.

    Tasks that wait take their lines by number: a list that is there stays as it is, and another one has another name.
    The arguments are those of `sweep`.

    Raises:
      UserError: as `sweep`.
    """
    home = pathlib.Path(directory)
    _check(1, together, transform)
    with workdir.lock(home):
        manifest.claim(base, trials, home, arguments)
        every = groups(trials, together)
        left = [i for i, group in enumerate(every, 1) if not all(is_done(home / each.directory) for each in group)]
        if not left:
            return 'all done'
        file = _listed(home, ''.join(f'{shlex.join(_arguments(group, home, transform))}\n' for group in every))
    return f'sbatch --array={array_ranges(left)} launch/slurm_array.sbatch {shlex.quote(str(file))}'


def array_ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers as Slurm takes them: '2,5-7'."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ','.join(f'{run[0]}-{run[-1]}' if len(run) > 1 else str(run[0]) for run in runs)


def _listed(home: pathlib.Path, text: str) -> pathlib.Path:
    """Returns the file of a list of tasks: the one that has it, else a new one."""
    names = (f'trials_{number}.txt' if number > 1 else 'trials.txt' for number in itertools.count(1))
    file = next(file for file in map(home.joinpath, names) if not file.exists() or file.read_bytes() == text.encode())
    if not file.exists():
        atomic.write(file, text)
    return file


def ran(before: Mapping[str, float], lives: Iterable[Life]) -> dict[str, float]:
    """Returns the seconds that each trial had run before, and those of its life so far; of some together, shared."""
    now, seconds = time.monotonic(), dict(before)
    for life in lives:
        for trial in life.trials:
            seconds[trial.directory] = seconds.get(trial.directory, 0.0) + (now - life.began) / len(life.trials)
    return seconds


# ----------------------------------------------------------------------------------------------------------- processes


def _begin(
    group: Sequence[Trial],
    home: pathlib.Path,
    number: int,
    transform: str | None,
    command: Sequence[str],
    cores: set[int],
) -> Life:
    """Starts the process of a group, of which some may be done; those that failed are tried again."""
    left = [trial for trial in group if not is_done(home / trial.directory)]
    for trial in left:
        clear_error(home / trial.directory)
    file = home / group[0].directory / LOG if len(group) == 1 else home / f'together_{number}.txt'
    with file.open('ab') as log:
        process = subprocess.Popen(
            [sys.executable, '-c', BOUND, str(os.getpid()), *command, *_arguments(group, home, transform)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,  # so that Ctrl-C reaches it from here alone
        )
        if cores:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(process.pid, cores)
        return Life(left, process, time.monotonic(), file, log.tell())


def _arguments(group: Sequence[Trial], home: pathlib.Path, transform: str | None) -> list[str]:
    """Returns what `tformer train` takes to train a group."""
    places = [home / trial.directory for trial in group]
    if len(group) == 1:
        return [f'--config={places[0] / STATED}', f'--workdir={places[0]}']
    return [*map(str, places), *([f'--transform={transform}'] if transform else [])]


def _check(parallel: int, together: int, transform: str | None) -> None:
    for name, number in (('parallel', parallel), ('together', together)):
        if number < 1:
            raise UserError(f'--{name}={number} must be positive')
    if transform is not None:
        choose(TRANSFORMS, transform, '--transform')


def _end(trial: Trial, life: Life, home: pathlib.Path, code: int, asked: bool) -> str:
    """Returns how a trial ended, in words; writes the error of one that failed to its workdir, if it is free."""
    place = home / trial.directory
    if is_done(place):
        scores = [f'{split} loss {found["loss"]:.4g}' for split, found in config.read_json(place / RESULT).items()
                  if 'loss' in found]  # fmt: skip
        return ', '.join(['done', *scores])
    if code == STOPPED or (asked and code in (-signal.SIGTERM, 128 + signal.SIGTERM)):
        return 'stopped'
    free = not workdir.is_locked(place, workdir.LOCK_SECONDS)
    error = error_of(place) if free else None
    if error is None:
        with life.log.open('rb') as log:
            log.seek(life.logged)
            lines = [line for line in log.read().decode(errors='replace').splitlines() if line.strip()]
        lines = [line for line in lines if ERRORS.match(line)] or lines
        how = lines[-1].strip() if lines else f'exit code {code}'
        error = f'ended by {signal.Signals(-code).name}' if code < 0 else how
        if free:
            write_error(place, error)
    return f'failed: {error} ({life.log})'


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
