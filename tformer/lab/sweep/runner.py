"""Runs the trials of a sweep, each in a process and a workdir of its own; trials that are done are not run again."""

import itertools
import pathlib
import shlex
import signal
import time
from collections.abc import Iterable, Mapping, Sequence

from tformer import atomic
from tformer.config import Config
from tformer.errors import Stopped, UserError, choose
from tformer.lab.sweep import manifest, trial_process
from tformer.lab.sweep.batched_trials import TRANSFORMS, groups
from tformer.lab.sweep.trial_process import End, TrialProcess
from tformer.lab.sweep.trials import Trial, is_done
from tformer.training import workdir

WRITE_EVERY = 10.0  # seconds between updates of the seconds that each trial has run
LARGEST_MISMATCH = 5.0  # percent; an arm that misses a matched quantity by more is named


def sweep(
    base: Config,
    trials: Sequence[Trial],
    directory: str | pathlib.Path,
    parallel: int = 1,
    together: int = 1,
    transform: str | None = None,
    arguments: Sequence[str] | None = None,
) -> int:
    """Runs the trials that are not done, each in DIRECTORY/ARM/seed_N.

    A trial that fails leaves its error there in error.txt, and the others go on. `arguments` are those of the command
    line, for reports to repeat it; the exit code and the other arguments are those of `tformer.sweep`.

    Raises:
      UserError: the directory holds a trial of the same name with another config.
      Stopped: by a signal; the trials that ran have saved their state.
    """
    home = pathlib.Path(directory)
    _check(parallel, together, transform)
    with workdir.lock(home), trial_process.stop_requests() as requests:
        runner = _Runner(base, trials, home, manifest.claim(base, trials, home, arguments))
        print(f'{len(trials)} trials, {runner.count_done()} of them done', flush=True)
        _print_mismatches(trials)
        runner.run(groups(trials, together), parallel, transform, requests)
    done = runner.count_done()
    if runner.waiting or runner.stopped:
        why = signal.Signals(requests[0]).name if requests else f'{runner.stopped[0].directory} stopped'
        raise Stopped(f'{why}: {done} of {len(trials)} trials are done; run the same command again to resume')
    if done == len(trials):
        return 0
    return 2 if set(runner.failed.values()) == {2} else 1


class _Runner:
    """The state of a sweep that runs."""

    def __init__(self, base: Config, trials: Sequence[Trial], home: pathlib.Path, seconds: Mapping[str, float]):
        self.base, self.trials, self.home = base, trials, home
        self.seconds = seconds  # that each trial had run when its last process ended, by its directory
        self.waiting: list[tuple[int, list[Trial]]] = []  # the groups that have not begun, with their numbers
        self.running: dict[int, TrialProcess] = {}  # by their slot from 0 to `parallel` - 1
        self.failed: dict[str, int] = {}  # the exit codes of trials that failed, by their directories
        self.stopped: list[Trial] = []  # those that saved their state and stopped
        self.num_ended = self.count_done()

    def count_done(self) -> int:
        return sum(is_done(self.home / trial.directory) for trial in self.trials)

    def run(self, every: Sequence[list[Trial]], parallel: int, transform: str | None, requests: list[int]) -> None:
        """Runs all groups; after a request to stop, waits for the processes that run."""
        self.waiting = [(number, group) for number, group in enumerate(every) if not _all_done(group, self.home)]
        passed_on, written = 0, time.monotonic()
        while self.running or (self.waiting and not requests):
            num_requests = len(requests)
            for slot in range(parallel):
                if self.waiting and slot not in self.running and not requests:
                    number, group = self.waiting.pop(0)
                    cores = trial_process.share_of_cores(slot, parallel)
                    self.running[slot] = trial_process.start(group, self.home, number, transform, cores)
            any_ended = self._collect(asked=passed_on > 0)
            if passed_on < num_requests:
                for running in self.running.values():
                    running.process.terminate()  # the first makes it save and stop; the second ends it at once
            passed_on = num_requests
            if any_ended or time.monotonic() > written + WRITE_EVERY:
                written = time.monotonic()
                manifest.write(self.base, self.trials, self.home, add_time(self.seconds, self.running.values()))
            time.sleep(0.05)

    def _collect(self, asked: bool) -> bool:
        """Records and prints how the trials of processes that have ended came out; returns whether any has ended."""
        ended = {slot: code for slot, each in self.running.items() if (code := each.process.poll()) is not None}
        for slot, code in ended.items():
            process = self.running.pop(slot)
            self.seconds = add_time(self.seconds, [process])
            for trial in process.trials:
                self._record(trial, process, code, asked)
        return bool(ended)

    def _record(self, trial: Trial, process: TrialProcess, code: int, asked: bool) -> None:
        end, text = process.outcome(trial, self.home, code, asked)
        if end is End.FAILED:
            self.failed[trial.directory] = code or 2  # 0 of a group that went on without this trial
        elif end is End.STOPPED:
            self.stopped.append(trial)
        self.num_ended += 1
        seconds = f'{self.seconds[trial.directory]:,.0f} s'
        print(f'{self.num_ended}/{len(self.trials)}  {trial.directory}  {seconds}  {text}', flush=True)


def add_time(before: Mapping[str, float], processes: Iterable[TrialProcess]) -> dict[str, float]:
    """Returns the seconds that each trial has run, with those of its process so far, which its trials share equally."""
    now, seconds = time.monotonic(), dict(before)
    for each in processes:
        for trial in each.trials:
            seconds[trial.directory] = seconds.get(trial.directory, 0.0) + (now - each.began) / len(each.trials)
    return seconds


def _all_done(group: Sequence[Trial], home: pathlib.Path) -> bool:
    return all(is_done(home / trial.directory) for trial in group)


def _print_mismatches(trials: Sequence[Trial]) -> None:
    for name, mismatches in {trial.name: trial.mismatch_percent for trial in trials}.items():
        for quantity, percent in mismatches.items():
            if abs(percent) > LARGEST_MISMATCH:
                print(f'{name}: misses the {quantity} that it should match by {percent:+.1f} %', flush=True)


def _check(parallel: int, together: int, transform: str | None) -> None:
    for name, number in (('parallel', parallel), ('together', together)):
        if number < 1:
            raise UserError(f'--{name}={number} must be positive')
    if transform is not None:
        choose(TRANSFORMS, transform, '--transform')


def array(
    base: Config,
    trials: Sequence[Trial],
    directory: str | pathlib.Path,
    together: int = 1,
    transform: str | None = None,
    arguments: Sequence[str] | None = None,
) -> str:
    """Writes what trains the trials to DIRECTORY/trials.txt, a process a line; returns how to run those not done.

    Tasks that wait take their lines by number, so an existing list is never changed: another list has another name.
    """
    home = pathlib.Path(directory)
    _check(1, together, transform)
    with workdir.lock(home):
        manifest.claim(base, trials, home, arguments)
        every = groups(trials, together)
        left = [number for number, group in enumerate(every, 1) if not _all_done(group, home)]
        if not left:
            return 'all trials are done'
        lines = [shlex.join(trial_process.train_arguments(group, home, transform)) for group in every]
        file = _listed(home, ''.join(f'{line}\n' for line in lines))
    return f'sbatch --array={array_ranges(left)} launch/slurm_array.sbatch {shlex.quote(str(file))}'


def array_ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers as Slurm takes them: '2,5-7'."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    return ','.join(f'{a}-{b}' if a < b else str(a) for a, b in zip(starts, ends, strict=True))


def _listed(home: pathlib.Path, text: str) -> pathlib.Path:
    """Returns the file of a list of tasks: the one that has it, else a new one."""
    names = (f'trials_{number}.txt' if number > 1 else 'trials.txt' for number in itertools.count(1))
    file = next(file for file in map(home.joinpath, names) if not file.exists() or file.read_bytes() == text.encode())
    if not file.exists():
        atomic.write(file, text)
    return file
