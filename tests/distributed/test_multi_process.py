"""Several real processes that train as one: as one process does, whoever of them fails, and with other counts later."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest

import slurm
import toy_data
from launching import Stubs, outlives
from lives import HANG, environment, reserve_port
from places import LAUNCH, ROOT
from tformer.config import Config, Data, Train
from tformer.distributed import meshes, processes
from tformer.errors import UserError
from tformer.training import checkpoint, setup
from whole_runs import numbers

STEPS = 18
SCHEDULERS = ('KUBERNETES_', 'SLURM_', 'OMPI_', 'PMI', 'TPU_', 'CLOUD_TPU')  # of the machine that tests
ENVIRONMENT = {name: value for name, value in environment(cached=False).items() if not name.startswith(SCHEDULERS)}


def flags(place: pathlib.Path, workdir: str, **changed: object) -> list[str]:
    """The flags of a training on running text, with a dropout and packed rows, that saves and reports every step."""
    toy_data.running(place / 'data')
    fields = {
        'data.source': 'files', 'data.path': place / 'data', 'data.tokenizer': 'symbol', 'data.length': 32,
        'model.dropout_rate': 0.1, 'train.num_steps': STEPS, 'train.batch_size': 16, 'train.log_every': 1,
        'train.eval_every': STEPS // 2, 'train.checkpoint_every': 1, 'evaluate.samples': 0,
    } | {name.replace('__', '.'): value for name, value in changed.items()}  # fmt: skip
    if 'train.init_from' in fields:
        del fields['data.tokenizer']  # the other run's
    fields_given = [f'--config.{name}={value}' for name, value in fields.items()]
    return [f'--config={ROOT}/configs/lm_stdlib.py:smoke', *fields_given, f'--workdir={place / workdir}']


class Launched:
    """launch/local with real processes."""

    def __init__(self, place: pathlib.Path, processes: int, *arguments: str, devices: int = 1):
        self._files = [place / f'{name}_{time.monotonic_ns()}' for name in ('out', 'err')]
        options = (f'--processes={processes}', f'--devices={devices}')
        with self._files[0].open('w') as out, self._files[1].open('w') as err:
            self.process = subprocess.Popen(
                [sys.executable, LAUNCH / 'local', *options, *arguments], env=ENVIRONMENT, stdout=out, stderr=err
            )
        listed = pathlib.Path(f'/proc/{self.process.pid}/task/{self.process.pid}/children')
        self.pids: list[int] = []
        while len(self.pids) < processes and self.process.poll() is None:
            self.pids = [int(pid) for pid in listed.read_text().split()]
            time.sleep(0.01)

    @property
    def out(self) -> str:
        return self._files[0].read_text()

    @property
    def err(self) -> str:
        return self._files[1].read_text()

    def until(self, sign: Callable[[], object]) -> None:
        """Waits until sign() holds; fails where all end before."""
        end = time.monotonic() + HANG
        while not sign():
            if time.monotonic() > end:
                self.process.kill()  # and those that it started
            assert self.process.poll() is None, self.out + self.err
            time.sleep(0.01)

    def end(self) -> int:
        """Returns the exit code; sees that nobody is left."""
        try:
            code = self.process.wait(HANG)
        finally:
            self.process.kill()
        assert not any(map(outlives, self.pids)), self.err
        return code


def assert_near(one: pathlib.Path, other: pathlib.Path) -> None:
    """The same numbers after the same steps: of the same rows."""
    first, second = numbers(one), numbers(other)
    assert [row.keys() for row in first] == [row.keys() for row in second] and len(first) >= STEPS
    for mine, others in zip(first, second, strict=True):
        for name in mine:
            np.testing.assert_allclose(mine[name], others[name], rtol=1e-5, atol=1e-7, err_msg=name)


def results(workdir: pathlib.Path) -> dict[str, dict[str, float]]:
    return json.loads((workdir / 'result.json').read_text())


@pytest.fixture(scope='module')
def alone(tmp_path_factory) -> pathlib.Path:
    """A run that one process made."""
    place = tmp_path_factory.mktemp('alone')
    launched = Launched(place, 1, *flags(place, 'run'))
    assert launched.end() == 0, launched.err
    said = [line for line in launched.err.splitlines() if 'compilation cache' not in line]  # cut by a test that kills
    assert said == [] and '1 device(s)' in launched.out
    return place / 'run'


DIES = """import os, pathlib, signal, time
        from tformer.training import recorder
        add, counted = recorder.MetricAccumulator.add, []
        def last(self, numbers, index=None):
            add(self, numbers, index)
            counted.append(numbers)
            if len(counted) == 5:
                while not pathlib.Path("{run}/checkpoints/3").is_dir():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
        recorder.MetricAccumulator.add = last"""


# After a step all processes wait for the notice of a signal, unless the job was queued again; jax counts how often each
# has asked, not the steps.
HOLDS = """import os, time
        from tformer.training import stopping
        reason = stopping.StopMonitor.reason
        def waiting(self, step):
            asked = step
            held = step == {step} and not os.environ.get("SLURM_RESTART_COUNT")
            while (found := reason(self, asked)) is None and held:
                asked += 1
                time.sleep(0.01)
            return found
        stopping.StopMonitor.reason = waiting"""


@pytest.mark.stack
@pytest.mark.signals
@pytest.mark.proof
def test_a_killed_process_ends_all_and_one_process_goes_on(tmp_path: pathlib.Path, alone: pathlib.Path) -> None:
    """It is killed while the other is in a step, with its last save behind it. Of one device each: the devices of one
    process wait for each other, and it does not hear of the end before the heartbeats fail."""
    run = tmp_path / 'run'
    given = flags(tmp_path, 'run', train__checkpoint_every=3)
    launched = Launched(tmp_path, 2, *given, hooked(tmp_path, 1, DIES.format(run=run)))
    assert launched.end() == 128 + signal.SIGKILL
    assert 'another process of the run has ended; the same command resumes' in launched.err
    assert launched.err.splitlines()[-1] == 'launch/local: process 1 of 2 was the first to fail: SIGKILL'
    assert '2 device(s)' in launched.out and 'Gloo' not in launched.out and 'Traceback' not in launched.err

    assert max(checkpoint.steps(run)) == 3
    again = Launched(tmp_path, 1, *given, devices=4)
    assert again.end() == 0, again.err
    assert 'resumed at step 3' in again.out
    assert_near(run, alone)


@pytest.mark.proof
@pytest.mark.signals
def test_sigterm_saves_and_slurm_tasks_go_on(tmp_path: pathlib.Path, alone: pathlib.Path) -> None:
    """What launch/local was asked to stop, launch/slurm.sbatch finishes: its tasks find each other by themselves."""
    run, kept = tmp_path / 'run', 6
    launched = Launched(tmp_path, 2, *flags(tmp_path, 'run'), hooked(tmp_path, -1, HOLDS.format(step=kept)))
    launched.until(lambda: kept - 1 in checkpoint.steps(run))
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end() == 75, launched.err
    assert f'SIGTERM: stopped after step {kept} of {STEPS}, which is saved' in launched.err
    assert 'fail' not in launched.err

    stubs = Stubs(tmp_path)
    (stubs.place / 'tformer').write_text(f'#!/bin/sh\nexec {sys.executable} -m tformer "$@"\n')
    task = {**ENVIRONMENT, 'TASKS': '2', 'PATH': stubs.environment['PATH'], 'CALLS': stubs.environment['CALLS']}
    ran = subprocess.run(
        ['sbatch', LAUNCH / 'slurm.sbatch', *flags(tmp_path, 'run')],
        env=task, capture_output=True, text=True, timeout=HANG,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert f'2 device(s), attention by reference, resumed at step {kept}' in ran.stdout
    assert ran.stdout.count(f'step {STEPS} valid') == 1  # the first one's
    assert_near(run, alone)

    assert results(run)['test'] == pytest.approx(results(alone)['test'], rel=1e-5)

    (run / 'result.json').unlink()
    launched = Launched(tmp_path, 2, 'evaluate', f'--workdir={run}', devices=2)
    assert launched.end() == 0, launched.err
    scored = results(run)['test']
    assert scored == pytest.approx({name: results(alone)['test'][name] for name in scored}, rel=1e-5)
    assert len(scored) >= 4 and launched.out.count(', test: ') == 1


@pytest.mark.proof
@pytest.mark.signals
@pytest.mark.skipif(slurm.missing() is not None, reason=str(slurm.missing()))
def test_slurm_signals_a_job_before_its_limit_queues_it_again_and_it_ends_as_if_alone(tmp_path, alone) -> None:
    """On a real SLURM of two nodes, without its GPUs; the limit is moved close when the job has made some steps."""
    run, kept = tmp_path / 'run', 6
    lines = (LAUNCH / 'slurm.sbatch').read_text().splitlines(keepends=True)
    (tmp_path / 'job.sbatch').write_text(''.join(line for line in lines if '--gpus-per-node' not in line))
    (tmp_path / 'bin').mkdir()
    (tmp_path / 'bin' / 'tformer').write_text(f'#!/bin/sh\nexec {sys.executable} -m tformer "$@"\n')
    (tmp_path / 'bin' / 'tformer').chmod(0o755)
    given = [*flags(tmp_path, 'run'), hooked(tmp_path, -1, HOLDS.format(step=kept))]
    options = ['--nodes=2', '--ntasks-per-node=1', '--cpus-per-task=1', '--time=60', f'--output={tmp_path}/out']
    with slurm.running() as real:
        environment = {**ENVIRONMENT, 'PATH': f'{tmp_path}/bin:{os.environ["PATH"]}'}
        submitted = real.run('sbatch', '--parsable', *options, tmp_path / 'job.sbatch', *given, **environment)
        job = submitted.strip()
        begun = 'PENDING', 'CONFIGURING', 'RUNNING'
        real.until(lambda: kept - 1 in checkpoint.steps(run) or real.job(job)['JobState'] not in begun)
        real.run('scontrol', 'update', f'JobId={job}', 'TimeLimit=5')  # the signal is due five minutes before
        real.until(lambda: real.job(job)['Restarts'] == '1')
        assert max(checkpoint.steps(run)) == kept
        real.run('scontrol', 'update', f'JobId={job}', 'TimeLimit=60')
        real.until(lambda: real.job(job)['JobState'] in ('COMPLETED', 'FAILED', 'TIMEOUT'))
        found = real.job(job)
    said = (tmp_path / 'out').read_text()
    assert (found['JobState'], found['ExitCode']) == ('COMPLETED', '0:0'), said
    assert f'SIGTERM: stopped after step {kept} of {STEPS}, which is saved' in said
    assert f'2 device(s), attention by reference, resumed at step {kept}' in said
    assert_near(run, alone)


@pytest.mark.proof
@pytest.mark.signals
def test_four_processes_and_then_two(tmp_path: pathlib.Path, alone: pathlib.Path) -> None:
    run = tmp_path / 'run'
    launched = Launched(tmp_path, 4, *flags(tmp_path, 'run'), hooked(tmp_path, 0, DIES.format(run=run)))
    assert launched.end() == 128 + signal.SIGKILL
    assert launched.err.splitlines()[-1] == 'launch/local: process 0 of 4 was the first to fail: SIGKILL'
    launched = Launched(tmp_path, 2, *flags(tmp_path, 'run'))
    assert launched.end() == 0, launched.err
    assert 'resumed at step' in launched.out
    assert_near(run, alone)


def test_all_but_the_first_process_find_what_it_wrote(tmp_path: pathlib.Path, monkeypatch) -> None:
    toy_data.running(tmp_path / 'data')
    data = Data(source='files', path=(str(tmp_path / 'data'),), tokenizer='symbol', length=32)
    config = Config(data=data, train=Train(objective='causal_lm', batch_size=8, num_steps=1))
    mesh = meshes.make_mesh(config.mesh)
    first = setup.load_data(config, tmp_path, mesh).tokenizers

    def written() -> dict[str, int]:
        return {file.name: file.stat().st_ino for file in tmp_path.iterdir() if file.is_file()}

    before = written()
    monkeypatch.setattr(processes, 'first', lambda: False)
    other = setup.load_data(config, tmp_path, mesh).tokenizers
    assert other.fingerprint == first.fingerprint and other.labels == first.labels
    assert 'tokenizer.target.symbol' in before and written() == before


@pytest.mark.proof
def test_all_begin_from_the_parameters_of_another_run(tmp_path: pathlib.Path, alone: pathlib.Path) -> None:
    changed = {'train__init_from': alone, 'mesh__fsdp': 2, 'mesh__data': 2}
    runs = []
    for processes_, devices in ((1, 4), (2, 2)):
        launched = Launched(tmp_path, processes_, *flags(tmp_path, f'tuned_{processes_}', **changed), devices=devices)
        assert launched.end() == 0, launched.err
        assert launched.out.count('  fresh: none') == 1
        runs.append(tmp_path / f'tuned_{processes_}')
    assert_near(*runs)
    assert numbers(runs[0])[0]['train/loss'] < numbers(alone)[0]['train/loss'] - 0.1


HOOKED = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("lm", "{root}/configs/lm_stdlib.py")
lm = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lm)
def get_config(size=""):
    config = lm.get_config(size)
    if "--process_id={number}" in sys.argv or {number} < 0:
        {hook}
    return config
"""


def hooked(place: pathlib.Path, number: int, hook: str) -> str:
    """The flag of a config file that runs `hook` in a process, -1: in all."""
    (place / 'hooked.py').write_text(HOOKED.format(root=ROOT, number=number, hook=hook))
    return f'--config={place}/hooked.py:smoke'


@pytest.mark.proof
def test_a_process_with_other_data_or_another_config_ends_all(tmp_path: pathlib.Path) -> None:
    given = flags(tmp_path, 'run')
    toy_data.running(tmp_path / 'other')
    lines = (tmp_path / 'other' / 'train.txt').read_text().splitlines(keepends=True)
    (tmp_path / 'other' / 'train.txt').write_text(''.join(lines[1:]))
    given = [flag for flag in given if not flag.startswith(('--config.data.path=', '--config.train.log_every'))]
    hook = f'config.data.path = ("{tmp_path}/other",); config.train.log_every = 3'
    other = f'else: config.data.path = ("{tmp_path}/data",); config.train.log_every = 1'
    launched = Launched(tmp_path, 2, *given, hooked(tmp_path, 1, f'{hook}\n    {other}'))
    assert launched.end() == 2, launched.err
    (told,) = {line.removeprefix('[1] ') for line in launched.err.splitlines() if 'process 1 differs from' in line}
    assert told.startswith('tformer: process 1 differs from process 0 in: ') and 'fingerprint of the data' in told
    assert not checkpoint.steps(tmp_path / 'run')


@pytest.mark.parametrize(
    ('changed', 'told'),
    [
        ([(2, 1), (2, 3), (3, 0), (3, 1)], 'process 2 differs from process 0 in: data, devices'),
        ([(1, fact) for fact in range(5)], 'process 1 differs from process 0 in: steps, data, config and 2 more'),
    ],
)
def test_the_facts_that_are_told_are_those_of_the_first_process_that_differs(changed, told, monkeypatch) -> None:
    facts = dict.fromkeys(('steps', 'data', 'config', 'devices', 'seed'), 0)

    def of_all(own: np.ndarray) -> np.ndarray:
        found = np.stack([own] * 4)
        for process, fact in changed:
            found[process, fact] += 1
        return found

    monkeypatch.setattr(processes.jax, 'process_count', lambda: 4)
    monkeypatch.setattr(processes.multihost_utils, 'process_allgather', of_all)
    with pytest.raises(UserError) as error:
        processes.agree(facts)
    assert str(error.value) == told


SCORING = """import time
    from tformer.commands import train as train_command
    from tformer.distributed import processes
    from tformer.training import stopping
    later, train, meet = 1 - processes.first(), train_command.loop.train, processes.meet
    train_command.loop.train = lambda *given: (train(*given), time.sleep({late} * later))[0]
    processes.meet = lambda name: (print(name), meet(name))
    train_command.finish = lambda *_: (print("scores"), time.sleep(3600))
    stopping.print = lambda *words, **how: (time.sleep(later), print(*words, **how))"""


@pytest.mark.proof
@pytest.mark.signals
@pytest.mark.parametrize(
    ('processes', 'late', 'sign'), [(1, 0, 'scores'), (2, 0, 'scores'), (2, 5, 'handling signals')]
)
def test_a_signal_while_the_end_is_scored_has_the_job_queued_again(tmp_path, processes, late, sign) -> None:
    """The second process ends a second later than the first, and may still be on its way from the training."""
    hook = hooked(tmp_path, -1, SCORING.format(late=late))
    launched = Launched(tmp_path, processes, *flags(tmp_path, 'run'), hook)
    launched.until(lambda: sign in launched.out)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end() == 75, launched.err
    assert 'received SIGTERM: exiting; there is nothing to save' in launched.err
    assert max(checkpoint.steps(tmp_path / 'run')) == STEPS


ENDING = """import pathlib, time
    from tformer.training import recorder
    end, sent = recorder.RunRecorder.end, pathlib.Path({sent!r})
    def late(*given):
        print("ending")
        while not sent.exists():
            time.sleep(0.01)
        time.sleep(5)
        end(*given)
    recorder.RunRecorder.end = late"""


@pytest.mark.proof
@pytest.mark.signals
@pytest.mark.parametrize('processes', [1, 2])
def test_a_signal_after_the_last_step_leaves_the_scoring_to_the_next_job(tmp_path, processes) -> None:
    sent = tmp_path / 'sent'  # a while before the last save goes on
    hook = hooked(tmp_path, -1, ENDING.format(sent=str(sent)))
    launched = Launched(tmp_path, processes, *flags(tmp_path, 'run'), hook)
    launched.until(lambda: 'ending' in launched.out)
    launched.process.send_signal(signal.SIGTERM)
    sent.touch()
    assert launched.end() == 75, launched.err
    assert f'SIGTERM: trained to step {STEPS}, which is saved, and not scored yet' in launched.err
    assert max(checkpoint.steps(tmp_path / 'run')) == STEPS and not (tmp_path / 'run/result.json').exists()
    assert Launched(tmp_path, processes, *flags(tmp_path, 'run')).end() == 0
    assert (tmp_path / 'run/result.json').exists()


@pytest.mark.proof
def test_a_mistake_is_told_once_and_an_exception_ends_all(tmp_path: pathlib.Path) -> None:
    launched = Launched(tmp_path, 2, *flags(tmp_path, 'run', model__norm='rmsnrom'))
    assert launched.end() == 2
    assert launched.err.count("tformer: model.norm='rmsnrom' is unknown; did you mean 'rmsnorm'?") == 1
    assert launched.err.splitlines()[-1].endswith('exit code 2') and 'Traceback' not in launched.err

    hook = 'from tformer.training import recorder; recorder.MetricAccumulator.summary = lambda *_: 1 / 0'
    faulty = [*flags(tmp_path, 'run'), hooked(tmp_path, 1, hook)]
    (tmp_path / 'run').mkdir(exist_ok=True)
    (tmp_path / 'run/trial.json').write_text('{}')  # a trial keeps the cause, not what the first process saw of it
    launched = Launched(tmp_path, 2, *faulty)
    assert launched.end() == 1, launched.err
    *lines, last = launched.err.splitlines()  # the other process may still say that this one has ended
    assert '[1] ZeroDivisionError: division by zero' in lines
    assert last == 'launch/local: process 1 of 2 was the first to fail: exit code 1'
    assert (tmp_path / 'run/error.txt').read_text() == 'ZeroDivisionError: division by zero\n'


MISTAKES = {
    'no port': (('host', 2, 0), 'host is no HOST:PORT; valid: auto'),
    'a port that is none': (('host:65536', 2, 0), 'host:65536 is no HOST:PORT; valid: auto'),
    'a misspelt auto': (('atuo', None, None), "atuo is no HOST:PORT; did you mean 'auto'?"),
    'no number': (('host:1', 2, None), 'host:1 needs --num_processes and --process_id'),
    'auto and a count': (('auto', 2, None), 'auto finds --num_processes and --process_id by itself: leave them out'),
}


@pytest.mark.parametrize('mistake', MISTAKES)
def test_what_does_not_fit_together_is_told(mistake: str) -> None:
    given, said = MISTAKES[mistake]
    with pytest.raises(UserError) as error:
        processes.join(*given, preemptible=True)
    assert str(error.value) == f'--coordinator={said}'
    with pytest.raises(UserError, match=re.escape('--process_id=2 is not from 0 to 1 (--num_processes)')):
        processes.join('host:1', 2, 2, preemptible=True)


ABSENT = {
    'nobody there': (
        '--coordinator=127.0.0.1:1 --num_processes=2 --process_id=1',
        'process 0 was not reached in 2 s: ',
    ),
    'nobody comes': (
        '--coordinator=FREE --num_processes=2 --process_id=0',
        'the 2 processes of the run did not all jo',
    ),
    'taken': ('--coordinator=TAKEN --num_processes=2 --process_id=0', 'of this host: Address already in use'),
    'nothing to be found': ('--coordinator=auto', 'no SLURM step, Open MPI, Cloud TPU or Kubernetes job has started'),
    'for one': (
        'prepare --coordinator=auto',
        '--coordinator: benchmark, evaluate, generate, train can run as several processes, prepare cannot',
    ),
    'no coordinator': ('--num_processes=2', '--num_processes and --process_id go with --coordinator'),
}
HASTY = """from tformer import __main__
from tformer.distributed import processes
processes.MEETING_SECONDS = 2
__main__.run()"""


@pytest.mark.slow
@pytest.mark.parametrize('case', ABSENT)
@pytest.mark.proof_cases('nobody comes', 'taken', 'for one')
def test_who_cannot_join_says_so_in_one_line(case: str) -> None:
    given, said = ABSENT[case]
    with socket.create_server(('', 0)) as taken, reserve_port() as free:
        given = given.replace('TAKEN', f'127.0.0.1:{taken.getsockname()[1]}').replace(
            'FREE', f'127.0.0.1:{free.getsockname()[1]}'
        )
        command = given.split() if case == 'for one' else ['train', *given.split()]
        command = [sys.executable, '-c', HASTY, *command, '--config=x', '--workdir=y']
        ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=HANG)
    assert ran.returncode == 2, ran.stderr
    (line,) = ran.stderr.splitlines()
    assert line.startswith('tformer: ') and said in line
