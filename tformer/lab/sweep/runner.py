"""Runs the trials of a sweep on this host: takes jobs from its directory, and has processes train them.

Several hosts that share the directory may do so at once (leases.py).
"""

import collections
import contextlib
import dataclasses
import functools
import pathlib
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from tformer.config import Config
from tformer.data.stores import PATIENCE
from tformer.errors import FAILING, Stopped, UserError, choose
from tformer.lab.sweep import devices, jobs, leases, manifest, trial_process
from tformer.lab.sweep.batched_trials import TRANSFORMS
from tformer.lab.sweep.jobs import Job, NextJob, State
from tformer.lab.sweep.leases import Lease, Leases
from tformer.lab.sweep.trial_process import End, Trainer, Training, TrialProcesses
from tformer.lab.sweep.trials import Trial, error_of
from tformer.training import stopping

LEASES = 'leases'  # in the sweep's directory
WRITE_EVERY = 10.0  # seconds between updates of the seconds that each trial has run
ASK_EVERY = 1.0  # seconds between looks for a job where there was none
BUSY_SECONDS = 30.0  # until a trial is tried again whose workdir another process has
MOST_DEATHS = 3  # processes that a trial may end, before it has failed
LARGEST_MISMATCH = 5.0  # percent; an arm that misses a matched quantity by more is named


@dataclasses.dataclass(frozen=True)
class Placement:
    """How the trials run on this host."""

    parallel: int | None = None  # processes at once, or one
    per_device: int | None = None  # processes at once on each device
    together: int = 1  # trials that one program trains at most
    transform: str | None = None  # a key of TRANSFORMS; None: as the device is
    processes: int = 1  # that train each trial as one
    joins: bool = False  # whether a scheduler runs it for another command: failed trials stay so, and it waits for none

    def check(self) -> None:
        """Raises a `UserError` if a field has no use or does not go with another."""
        devices.count(self.parallel, self.per_device, devices.Devices('gpu', ('0',)))
        for name, number in (('together', self.together), ('processes', self.processes)):
            if number < 1:
                raise UserError(f'--{name}={number} must be positive')
        if self.transform is not None:
            choose(TRANSFORMS, self.transform, '--transform')
            if self.together == 1:
                raise UserError('--transform is of trials that share one program: give --together')
        if self.processes > 1 and self.together > 1:
            raise UserError('--processes and --together: trials in one program need one process')


def sweep(
    base: Config,
    trials: Sequence[Trial],
    directory: str | pathlib.Path,
    here: Placement | None = None,
    arguments: Sequence[str] | None = None,
    next_job: NextJob | None = None,
) -> int:
    """Runs the trials that are not done, each in DIRECTORY/ARM/seed_N.

    A trial that fails leaves its error there in error.txt, and the others go on. `arguments` are those of the command
    line, for reports to repeat it; the exit code is that of `tformer.sweep`. `next_job` says what is trained next;
    None: the trials in turn.

    Raises:
      UserError: the directory holds a trial of the same name with another config.
      Stopped: by a signal; the trials that ran have saved their state.
    """
    home, here = pathlib.Path(directory), here or Placement()
    here.check()
    manifest.check(trials, home)
    held = Leases(home / LEASES)
    chosen = next_job or functools.partial(jobs.first_free, trials=trials, together=here.together)
    runner = _Runner(base, trials, home, held, chosen, here)
    with trial_process.stop_requests() as requests, contextlib.ExitStack() as ends:
        session = manifest.enter(base, trials, held, here.joins, arguments, requests)
        if session is not None:
            ends.callback(session.release, done=True)
        ends.callback(runner.end)
        runner.state.look()
        print(f'{len(trials)} trials, {runner.counts()[jobs.DONE]} of them done', flush=True)
        _print_mismatches(trials)
        runner.run(requests)
    return runner.code(requests)


class _Runner:
    """The state of a sweep that runs on this host."""

    def __init__(
        self,
        base: Config,
        trials: Sequence[Trial],
        home: pathlib.Path,
        held: Leases,
        next_job: NextJob,
        here: Placement,
    ):
        self.base, self.home, self.here = base, home, here
        self.trials = {trial.directory: trial for trial in trials}
        self.state = State(home, held)
        self._next_job, self._held = next_job, held
        found = devices.visible()
        self._parallel = devices.count(here.parallel, here.per_device, found)
        self._shares = [devices.shares(slot, self._parallel, here.processes, found) for slot in range(self._parallel)]
        self._trainers: dict[int, Trainer | TrialProcesses] = {}  # by their slot from 0
        self._running: dict[int, tuple[Training, list[Lease]]] = {}  # with the leases of its trials
        self._goes_on = True  # whether by the latest choice there is, or may come, something to train
        self._asks_at = self._writes_at = self._renews_at = 0.0
        self._fails: float | None = None  # since when the file system does
        self._spent: dict[str, float] = {}  # the seconds that are not in the list yet
        self._counted = time.monotonic()

    def counts(self) -> Mapping[str, int]:
        """Returns how many trials are in which state."""
        return collections.Counter(self.state.of(trial) for trial in self.trials.values())

    def run(self, requests: list[int]) -> None:
        """Trains until nothing is left to do; after a request to stop, waits for the processes that train."""
        passed_on = 0
        while True:
            num_requests = len(requests)
            self._keep_leases()
            if self._collect(asked=passed_on > 0):
                self._asks_at = 0.0
            if not num_requests and time.monotonic() >= self._asks_at:
                self._ask()
            if passed_on < num_requests:
                for slot in self._running:
                    self._trainers[slot].stop()  # the first makes it save and stop; the second ends it at once
            passed_on = num_requests
            if not self._running and (num_requests or not self._goes_on):
                break
            if time.monotonic() >= self._writes_at:
                self._write_times()
            time.sleep(0.02)

    def end(self) -> None:
        """Ends the processes, and gives the leases back."""
        for slot, process in self._trainers.items():
            process.end(kill=slot in self._running)
        for _, held in self._running.values():
            for lease in held:
                lease.release()
        self._write_times(patience=leases.RENEW_SECONDS)

    def code(self, requests: Sequence[int]) -> int:
        """Returns the exit code. Raises `Stopped` if a signal, or trials that stopped by themselves, left some."""
        self.state.look()
        counts = self.counts()
        done, num_trials = counts[jobs.DONE], len(self.trials)
        stopped = counts[jobs.STOPPED]
        if self.here.joins:  # a scheduler would begin a worker again, for trials that are to stay as they are
            stopped = sum(not stopping.is_stopped(self.home / name) for name in self.state.stopped)
        if stopped or (requests and counts[jobs.FREE] + counts[jobs.LEASED]):
            asked = 'trials were asked to stop, and `tformer watch --resume` lets them go on'
            own = next((f'{name} stopped' for name in self.state.stopped), asked)
            why = signal.Signals(requests[0]).name if requests else own
            raise Stopped(f'{why}: {done} of {num_trials} trials are done; run the same command again to resume')
        failed = any(self.state.of(trial) == jobs.FAILED and not trial.is_searched for trial in self.trials.values())
        if not failed or self.here.joins:  # a scheduler would try a worker again that failed
            return 0
        return 2 if {self._code_of(trial) for trial in self.trials.values()} <= {0, 2} else 1

    def _code_of(self, trial: Trial) -> int:
        """Returns the exit code of a trial; of one that failed on another host, as its error tells it."""
        if trial.is_searched or self.state.of(trial) != jobs.FAILED:  # the failure of a searched arm is its value
            return 0
        mistake = (error_of(self.home / trial.directory) or '').startswith('tformer: ')
        return self.state.failed.get(trial.directory, 2 if mistake else 1)

    # ------------------------------------------------------------------------------------------------------- jobs

    def _ask(self) -> None:
        """Begins jobs; a file system that fails is asked again for `PATIENCE` seconds, as it may be back soon."""
        try:
            self._begin_jobs()
            self._fails = None
        except OSError as error:
            now = time.monotonic()
            first, self._fails = self._fails is None, self._fails or now
            if error.errno not in FAILING or now > self._fails + PATIENCE:
                raise
            if first:
                print(f'{self.home}: {error.strerror}; asking again for {PATIENCE:.0f} s', file=sys.stderr, flush=True)
            self._asks_at = now + ASK_EVERY

    def _begin_jobs(self) -> None:
        """Has every process without a job begin one, as long as there are some."""
        for slot in range(self._parallel):
            if slot in self._running:
                continue
            with leases.deciding(self._held.directory, patience=0.0) as decides:
                if not decides:  # it asks again in a moment
                    self._goes_on = True
                    break
                self.state.look()
                job = self._next_job(self.state)
                held = self._take(job) if isinstance(job, Job) else []
            self._goes_on = isinstance(job, Job) or (job is not None and (job.may_come or not self.here.joins))
            if not held or not isinstance(job, Job):
                self._asks_at = time.monotonic() + ASK_EVERY
                break
            try:
                trainer = self._trainers.get(slot) or self._trainer(slot)
                self._running[slot] = Training.begin(job, self.home, trainer, self.here.transform), held
            except BaseException:
                for lease in held:
                    lease.release()
                raise

    def _trainer(self, slot: int) -> Trainer | TrialProcesses:
        own = self._shares[slot]
        self._trainers[slot] = Trainer(own[0], self.here.joins) if len(own) == 1 else TrialProcesses(own)
        return self._trainers[slot]

    def _take(self, job: Job) -> list[Lease]:
        """Returns the leases of the trials of a job that are not done; none if another host has one of them."""
        manifest.add(self.base, [trial for trial in job.trials if trial.directory not in self.trials], self.home)
        self.trials |= {trial.directory: trial for trial in job.trials}
        held: list[Lease] = []
        for trial in job.trials:
            if self.state.of(trial) == jobs.DONE:
                continue
            lease = self._held.take(trial.directory)
            if lease is None:
                for each in held:
                    each.release()
                return []
            held.append(lease)
        return held

    def _keep_leases(self) -> None:
        """Renews the leases, if it is time; ends the training of a job that another host has taken over."""
        if time.monotonic() < self._renews_at:
            return
        self._renews_at = time.monotonic() + leases.RENEW_SECONDS
        for slot, (training, held) in list(self._running.items()):
            if not all(list(map(Lease.renew, held))):
                del self._running[slot]
                self._trainers.pop(slot).end(kill=True)
                for lease in held:
                    lease.release()
                name = training.job.trials[0].directory
                print(f'{name}: another host has taken it over, because this one was silent', flush=True)

    # ----------------------------------------------------------------------------------------------- what has ended

    def _collect(self, asked: bool) -> bool:
        """Records and prints how the trials of jobs that have ended came out; returns whether any has ended."""
        any_ended = False
        for slot, (training, held) in list(self._running.items()):
            code = training.process.answer()
            if code is None:
                continue
            any_ended = True
            self._count_time()
            del self._running[slot]
            if training.process.is_ending:
                self._trainers.pop(slot).end()
            for lease in held:
                self._record(self.trials[lease.name], training, lease, code, asked)
        return any_ended

    def _record(self, trial: Trial, training: Training, lease: Lease, code: int, asked: bool) -> None:
        end, text = training.outcome(trial, self.home, code, asked)
        deaths = lease.deaths + (end is End.DIED)
        if end is End.DIED and deaths >= MOST_DEATHS:
            end, text = End.FAILED, training.fail(trial, self.home, f'{text}, {deaths} times')
        elif end is End.DIED:
            text += f'; it is tried again ({training.log})'
        if end is End.FAILED:
            self.state.failed[trial.directory] = code or 2  # 0 of a group that went on without this trial
        elif end is End.STOPPED:
            self.state.stopped.add(trial.directory)
        elif end is End.BUSY:
            self.state.busy[trial.directory] = time.monotonic() + BUSY_SECONDS
        lease.release(done=end is End.DONE, deaths=deaths if end in (End.DIED, End.STOPPED, End.BUSY) else 0)
        self.state.look()
        counts = self.counts()
        ended = counts[jobs.DONE] + counts[jobs.FAILED] + counts[jobs.STOPPED]
        seconds = f'{(time.monotonic() - training.began) / max(len(training.left), 1):,.0f} s'
        print(f'{ended}/{len(self.trials)}  {trial.directory}  {seconds}  {text}', flush=True)

    def _count_time(self) -> None:
        """Adds the seconds since the last call to the trials that run; those of one job share its time."""
        now = time.monotonic()
        passed: dict[str, Training] = {}
        for training, _ in self._running.values():
            passed |= {trial.directory: training for trial in training.left}
        for name, training in passed.items():
            since = max(self._counted, training.began)
            self._spent[name] = self._spent.get(name, 0.0) + (now - since) / len(training.left)
        self._counted = now

    def _write_times(self, patience: float = 0.0) -> None:
        """Writes the seconds to the list; later, if another process decides or the disk has no room."""
        self._count_time()
        with contextlib.suppress(OSError, UserError), leases.deciding(self._held.directory, patience) as decides:
            if decides:
                self._writes_at = time.monotonic() + WRITE_EVERY
                manifest.add_times(self.home, self._spent)
                self._spent = {}


def _print_mismatches(trials: Sequence[Trial]) -> None:
    for name, mismatches in {trial.name: trial.mismatch_percent for trial in trials}.items():
        for quantity, percent in mismatches.items():
            if abs(percent) > LARGEST_MISMATCH:
                print(f'{name}: misses the {quantity} that it should match by {percent:+.1f} %', flush=True)
