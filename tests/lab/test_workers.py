"""Workers of a sweep: warm processes, hosts that work on one sweep at once, and kills of any of them."""

import contextlib
import errno
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
import types
from unittest import mock

import pytest

import toy_data
from lives import HANG, environment
from places import TESTS
from small_sweeps import ACTOR, TINY, acting, wait_for
from tformer import config
from tformer.errors import Stopped
from tformer.lab.sweep import grid, jobs, leases, manifest, runner, trial_process, trials
from tformer.lab.sweep.leases import Holder, Leases
from tformer.lab.sweep.runner import Placement
from tformer.training import program_cache
from whole_runs import numbers, scores


def begun(directory: pathlib.Path) -> dict[str, int]:
    return {file.parts[-3]: len(file.read_text()) for file in sorted(directory.glob('*/seed_0/began'))}


@pytest.mark.signals
def test_a_trial_that_ends_its_process_is_tried_again_and_fails_in_the_end(tmp_path: pathlib.Path, capsys) -> None:
    """One is killed each time, one aborts once; those after them have a process again."""
    assert acting(tmp_path, [6.0, 7.0, 1.0]) == 1
    assert begun(tmp_path) == {'baseline': 3, 'learning_rate=7.0': 2, 'learning_rate=1.0': 1}
    error = 'its process ended by SIGKILL, 3 times'
    assert (tmp_path / 'baseline/seed_0/error.txt').read_text() == f'{error}\n'
    said = capsys.readouterr().out
    assert len(re.findall(r'baseline/seed_0 .* its process ended by SIGKILL; it is tried again', said)) == 2
    assert re.search(rf'baseline/seed_0 .* failed: {error} \(.*log\.txt\)', said)
    assert 'learning_rate=7.0/seed_0' in said and 'its process ended by SIGABRT; it is tried again' in said
    assert acting(tmp_path, [6.0, 7.0, 1.0]) == 1 and begun(tmp_path)['baseline'] == 6  # a new command tries again


def test_one_process_trains_them_all_and_another_follows_an_error(tmp_path: pathlib.Path, monkeypatch) -> None:
    actor = ACTOR.replace("file.write('x')", 'file.write(str(os.getpid()))')
    made = trials.trials(TINY, grid({'optimizer.learning_rate': [1.0, 4.0, 3.0, 8.0]}))
    monkeypatch.setattr(trial_process, 'TRAIN', [sys.executable, '-c', actor])
    assert runner.sweep(TINY, made, tmp_path) == 1
    first, second, third, fourth = ((tmp_path / trial.directory / 'began').read_text() for trial in made)
    assert first == second == third != fourth


def test_pruned_arms_and_those_of_another_host_are_left_alone(tmp_path: pathlib.Path, capsys) -> None:
    made = trials.trials(TINY, grid({'optimizer.learning_rate': [1.0, 4.0, 8.0, 2.0]}))
    manifest.claim(TINY, made, tmp_path)
    (tmp_path / jobs.PRUNED).write_text('{"arm": "learning_rate=4.0"}\n{"arm": "learning_')
    (tmp_path / made[3].directory / 'error.txt').write_text('tformer: of another host, now\n')
    other = Leases(tmp_path / 'leases', Holder('there', 1, 1))
    other.look()
    other.take(made[2].directory)
    assert acting(tmp_path, [1.0, 4.0, 8.0, 2.0], joins=True) == 0
    assert begun(tmp_path) == {'baseline': 1}
    assert (tmp_path / made[3].directory / 'error.txt').exists()
    other.look()
    assert [other.is_held(trial.directory) for trial in made] == [False, False, True, False]
    assert 'others train' not in capsys.readouterr().out


def test_a_worker_of_a_scheduler_leaves_failures_and_the_next_command_tries_them_again(tmp_path) -> None:
    assert acting(tmp_path, [2.0, 1.0]) == 2
    assert acting(tmp_path, [2.0, 1.0], joins=True) == 0 and begun(tmp_path)['baseline'] == 1
    assert acting(tmp_path, [2.0, 1.0]) == 2 and begun(tmp_path)['baseline'] == 2


def test_a_worker_of_a_scheduler_waits_for_what_may_come_and_for_nothing_else(tmp_path, monkeypatch) -> None:
    made = trials.trials(TINY, grid({'optimizer.learning_rate': [1.0]}))
    monkeypatch.setattr(trial_process, 'TRAIN', [sys.executable, '-c', ACTOR])
    monkeypatch.setattr(runner, 'ASK_EVERY', 0.01)
    choices = [jobs.Wait('others train', may_come=True), jobs.Job(tuple(made)), jobs.Wait('others train'), None]
    worker = Placement(joins=True)
    assert runner.sweep(TINY, made, tmp_path, worker, next_job=lambda state: choices.pop(0)) == 0
    assert begun(tmp_path) == {'baseline': 1} and choices == [None]


@pytest.mark.parametrize('patience', [300.0, 0.0])
def test_a_file_system_that_fails_is_asked_again_for_some_time(tmp_path, monkeypatch, capsys, patience) -> None:
    made = trials.trials(TINY, grid({'optimizer.learning_rate': [1.0]}))
    monkeypatch.setattr(trial_process, 'TRAIN', [sys.executable, '-c', ACTOR])
    monkeypatch.setattr(runner, 'ASK_EVERY', 0.01)
    monkeypatch.setattr(runner, 'PATIENCE', patience)
    failed = [OSError(errno.ESTALE, os.strerror(errno.ESTALE))] * 3
    choices = [*failed, jobs.Job(tuple(made)), None]
    answer = mock.Mock(side_effect=choices)
    if patience:
        assert runner.sweep(TINY, made, tmp_path, next_job=answer) == 0 and begun(tmp_path) == {'baseline': 1}
        assert capsys.readouterr().err.count(f'{tmp_path}: Stale file handle; asking again for 300 s') == 1
    else:
        with pytest.raises(OSError, match='Stale file handle'):
            runner.sweep(TINY, made, tmp_path, next_job=answer)


def test_a_scheduler_is_not_asked_to_begin_a_worker_again_for_trials_that_are_to_stay_stopped(tmp_path) -> None:
    made = trials.trials(TINY, grid({'optimizer.learning_rate': [1.0, 4.0]}))
    manifest.claim(TINY, made, tmp_path)
    (tmp_path / made[0].directory / 'stopped').touch()
    assert acting(tmp_path, [1.0, 4.0], joins=True) == 0 and begun(tmp_path) == {'learning_rate=4.0': 1}
    with pytest.raises(Stopped, match='trials were asked to stop'):
        acting(tmp_path, [1.0, 4.0])


def test_faults_of_the_directory_stop_no_training_and_leave_no_lease(tmp_path: pathlib.Path, monkeypatch) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch:
        patch.setattr(manifest, 'add_times', mock.Mock(side_effect=full))
        assert acting(tmp_path, [1.0]) == 0
    (tmp_path / 'sweep.json').write_text('{"trials": [')
    with monkeypatch.context() as patch:
        patch.setattr(trial_process.Training, 'begin', mock.Mock(side_effect=full))
        with pytest.raises(OSError, match='No space left'):
            acting(tmp_path, [1.0, 4.0])
    held = Leases(tmp_path / 'leases')
    held.look()
    assert not any(held.is_held(name) for name in held.names())
    assert acting(tmp_path, [1.0, 4.0]) == 0 and begun(tmp_path) == {'baseline': 1, 'learning_rate=4.0': 1}


def test_a_process_that_is_halted_while_it_decides_is_told_of(tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    decides = leases.deciding
    halted = decides(tmp_path / 'leases')
    halted.__enter__()
    waits = [0, 0, 0]

    def deciding(directory: pathlib.Path, patience: float = 0.0) -> contextlib.AbstractContextManager[bool]:
        if not waits:
            halted.__exit__(None, None, None)  # it goes on
        return decides(directory, waits.pop() if waits else HANG)

    monkeypatch.setattr(leases, 'deciding', deciding)
    monkeypatch.setattr(manifest, 'TELL_AFTER', 2)
    made = trials.trials(TINY, grid({'optimizer.learning_rate': [1.0]}))
    held = manifest.enter(TINY, made, Leases(tmp_path / 'leases'))
    assert held is not None and capsys.readouterr().out.count('leases/lock, which another process holds; `fuser`') == 1
    with pytest.raises(Stopped, match='SIGTERM: nothing has begun'):
        manifest.enter(TINY, made, Leases(tmp_path / 'leases'), requests=[signal.SIGTERM])


def test_processes_that_train_as_one_are_told_where_to_pause(tmp_path: pathlib.Path, monkeypatch) -> None:
    (trial,) = trials.trials(TINY, [{}])
    started: list[list[str]] = []
    monkeypatch.setattr(trial_process, '_start', lambda command, share, **_: started.append([*command, share]))
    two = trial_process.TrialProcesses(['one', 'other'])
    (tmp_path / 'log').touch()
    two.give(jobs.Job((trial,), until=3), tmp_path, tmp_path / 'log', None)
    two.give(jobs.Job((trial,)), tmp_path, tmp_path / 'log', None)
    assert ['--until=3' in each for each in started] == [True, True, False, False]
    assert [(each[-2], each[-1]) for each in started[:2]] == [('--process_id=0', 'one'), ('--process_id=1', 'other')]


HOST = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import small_sweeps, tformer.errors
try:
    code = small_sweeps.acting(pathlib.Path(sys.argv[2]), [float(x) for x in sys.argv[3].split(',')], 2)
except tformer.errors.Stopped:
    code = 75
sys.exit(code)
"""


def a_host(directory: pathlib.Path, rates: list[float]) -> 'subprocess.Popen[bytes]':
    """Another host that works on a sweep, or as much of one as a process can be: its leases name another host."""
    as_another = 'import os; read = os.readlink\nos.readlink = lambda path: str(os.getpid()) + read(path)\n'
    quick = 'from tformer.lab.sweep import leases, runner\nleases.PATIENCE, leases.RENEW_SECONDS = 2.0, 0.2\n'
    command = [sys.executable, '-c', as_another + quick + HOST, str(TESTS / 'helpers'), str(directory)]
    return subprocess.Popen([*command, ','.join(map(str, rates))], env=environment(), stdout=subprocess.DEVNULL)


@pytest.mark.signals
@pytest.mark.proof
def test_what_a_dead_host_had_is_taken_over_and_nothing_is_done_twice(tmp_path: pathlib.Path) -> None:
    """Two hosts at once; one is killed while it holds a trial, and its lease is cut in the middle."""
    rates = [5.0, 1.0, 4.0, 8.0, 9.0]
    first = a_host(tmp_path, rates)
    waiting = tmp_path / 'baseline/seed_0'
    wait_for(lambda: (waiting / 'began').exists())
    second = a_host(tmp_path, rates)
    wait_for(lambda: len(list(tmp_path.glob('*/seed_0/result.json'))) == 4)
    assert second.poll() is None and begun(tmp_path)['baseline'] == 1
    first.kill()
    first.wait()
    (lease,) = (tmp_path / 'leases').glob('baseline@*')
    os.truncate(lease, 40)
    (waiting / 'let go').touch()
    assert second.wait(HANG) == 0
    assert begun(tmp_path) == {'baseline': 2} | {f'learning_rate={rate}': 1 for rate in rates[1:]}


@pytest.mark.signals
@pytest.mark.proof
def test_a_halted_host_that_goes_on_gives_up_what_another_has_taken_over(tmp_path: pathlib.Path) -> None:
    rates, waiting = [5.0, 1.0], tmp_path / 'baseline/seed_0'
    first = a_host(tmp_path, rates)
    wait_for(lambda: (tmp_path / 'learning_rate=1.0/seed_0/result.json').exists() and (waiting / 'began').exists())
    with leases.deciding(tmp_path / 'leases', HANG):  # it is not halted while it has the lock
        first.send_signal(signal.SIGSTOP)
        wait_for(lambda: state_of(first.pid) == 'T')
    second = a_host(tmp_path, rates)
    wait_for(lambda: begun(tmp_path)['baseline'] == 2)
    trainers = processes_of(first.pid)
    first.send_signal(signal.SIGCONT)
    wait_for(lambda: not set(trainers) <= set(processes_of(first.pid)))  # that of the lost trial is ended
    (waiting / 'let go').touch()
    assert first.wait(HANG) == second.wait(HANG) == 0
    assert begun(tmp_path) == {'baseline': 2, 'learning_rate=1.0': 1} and not (waiting / 'twice').exists()


@pytest.mark.signals
@pytest.mark.proof
def test_hundreds_of_trials_of_hosts_that_are_killed_at_random_are_each_done_once(tmp_path: pathlib.Path) -> None:
    """300 trials by two hosts of two processes each. Hosts and processes are killed, and files are cut."""
    rates, draw = [round(10.0 + number / 100, 2) for number in range(300)], random.Random(0)
    hosts, end = [a_host(tmp_path, rates), a_host(tmp_path, rates)], time.monotonic() + HANG
    num_done, kills = 0, [draw.randrange(5, 290) for _ in range(24)]  # by how many trials are done
    while num_done < 300:
        assert time.monotonic() < end
        num_done = len(list(tmp_path.glob('*/seed_0/result.json')))
        due = [at for at in kills if at <= num_done]
        kills = [at for at in kills if at > num_done]
        for number in due:
            which = draw.randrange(2)
            if number % 4 and (children := processes_of(hosts[which].pid)):
                os.kill(draw.choice(children), signal.SIGKILL)
                continue
            hosts[which].kill()
            hosts[which].wait()
            for lease in list((tmp_path / 'leases').glob('*seed*'))[:1]:
                os.truncate(lease, draw.randrange(200))
            with (tmp_path / jobs.PRUNED).open('a') as file:
                file.write('{"arm": "learning_rate=')
            hosts[which] = a_host(tmp_path, rates)
        time.sleep(0.02)
    for each in hosts:
        each.kill()
        each.wait()
    assert acting(tmp_path, rates) == 0  # nothing is left to do
    listed = json.loads((tmp_path / 'sweep.json').read_text())['trials']
    found = {
        trial['directory']: json.loads((tmp_path / trial['directory'] / 'result.json').read_text()) for trial in listed
    }
    assert [scores['test']['loss'] for scores in found.values()] == rates
    assert not list(tmp_path.glob('*/seed_0/twice')) and not list(tmp_path.glob('*/seed_0/error.txt'))


def processes_of(parent: int) -> list[int]:
    """The children of a process."""
    try:
        return [int(pid) for pid in pathlib.Path(f'/proc/{parent}/task/{parent}/children').read_text().split()]
    except OSError:
        return []


def state_of(pid: int) -> str:
    """The state of a process, as T for one that is halted."""
    return pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]


# ------------------------------------------------------------------------------------------------- real trainings


@pytest.fixture
def made(tmp_path: pathlib.Path) -> list[trials.Trial]:
    """Three trials of one shape, one of another, and one that fails."""
    path = (str(toy_data.running(tmp_path / 'data')),)
    fields = {'data.path': path, 'data.byte_fallback': False, 'train.num_steps': 6, 'train.eval_every': 3}
    base = config.override(TINY, {**fields, 'train.max_skipped': 1, 'optimizer.learning_rate': 1e-3})
    arms = [{}, {'train.seed': 1}, {'optimizer.learning_rate': 1e38}, {'model.mlp_dim': 32}]
    return trials.trials(base, [*arms, {'model.dropout_rate': 0.1}, {'optimizer.learning_rate': 3e-3, 'train.seed': 2}])


@pytest.mark.proof
def test_a_trial_in_a_warm_process_is_what_it_is_in_one_of_its_own(tmp_path, made, monkeypatch) -> None:
    """To the bit, as users compile; each has its own log, and what fails says so there."""
    for name, value in environment(optimised=True).items():
        monkeypatch.setenv(name, value)
    warm, alone = tmp_path / 'warm', tmp_path / 'alone'
    assert runner.sweep(made[0].config, made, warm, Placement()) == 2
    manifest.claim(made[0].config, made, alone)
    for trial in made:
        place = alone / trial.directory
        command = [sys.executable, '-m', 'tformer', 'train', f'--config={place}/trial.json', f'--workdir={place}']
        ran = subprocess.run(command, capture_output=True, text=True)
        mine, failed = warm / trial.directory, 'e+38' in trial.name
        assert ran.returncode == 2 * failed == 2 * (mine / 'error.txt').exists()
        assert numbers(mine) == numbers(place)
        assert failed or (scores(mine) == scores(place) and len(numbers(mine)) > 6)
        assert (mine / 'config.json').read_bytes() == (place / 'config.json').read_bytes()
        log = (mine / 'log.txt').read_text()
        assert ('were skipped: their loss or gradient' in log) == failed
        assert len(re.findall(r'^\S+ parameters, ', log, re.MULTILINE)) == 1
    assert numbers(warm / made[0].directory) != numbers(warm / made[1].directory)


@pytest.mark.proof
def test_several_processes_train_a_trial(tmp_path: pathlib.Path, made, monkeypatch) -> None:
    """One after another; where one fails for a mistake, the sweep has its line."""
    for name, value in environment(cached=False).items():
        monkeypatch.setenv(name, value)
    base = config.override(made[0].config, {'mesh.data': -1})
    two = trials.trials(base, [{}, {'data.path': (str(tmp_path / 'nothing'),)}])
    assert runner.sweep(base, two, tmp_path / 'run', Placement(processes=2)) == 2
    first, second = (tmp_path / 'run' / trial.directory for trial in two)
    assert '2 device(s)' in (first / 'log.txt').read_text() and (first / 'result.json').exists()
    assert (second / 'error.txt').read_text().startswith('tformer: ') and 'nothing' in (
        second / 'error.txt'
    ).read_text()


@pytest.mark.slow
def test_programs_are_kept_where_only_numbers_differ(tmp_path: pathlib.Path, made) -> None:
    from tformer.training import dummy_batch

    mesh = runner_mesh()
    batch = dummy_batch.random_batch(dummy_batch.assumed(made[0].config))
    stated = {trial.directory: dummy_batch.assumed(trial.config) for trial in made}
    one, same = stated[made[0].directory], stated[made[1].directory]
    assert program_cache.program(one, batch, mesh).step is not program_cache.program(one, batch, mesh).step
    program_cache.keep()
    try:
        first, second = (program_cache.program(each, batch, mesh) for each in (one, same))
        assert first.jitted_step is second.jitted_step and first.jitted_init is second.jitted_init
        assert (first.config, second.config) == (one, same) and (first.hyper.seed, second.hyper.seed) == (0, 1)
        assert program_cache.score_of(first, one) is program_cache.score_of(second, same)
        words = [types.SimpleNamespace(fingerprint=name) for name in 'aab']
        assert [program_cache.tokenizers(each) for each in words] == [words[0], words[0], words[2]]
        assert program_cache.tokenizers(words[1]) is words[0]
        for field, value in {'model.mlp_dim': 32, 'train.num_steps': 7, 'optimizer.beta1': 0.5}.items():
            other = program_cache.program(config.override(one, {field: value}), batch, mesh)
            assert other.jitted_step is not first.jitted_step
        wide = {name: x[:, :1] if x.ndim > 1 else x for name, x in batch.items()}
        assert program_cache.program(one, wide, mesh).step is not first.step
        assert program_cache.program(one, batch, mesh).step is not first.step  # the oldest have gone
    finally:
        program_cache.forget()


def runner_mesh() -> object:
    from tformer.config import Mesh
    from tformer.distributed import meshes

    return meshes.make_mesh(Mesh(data=1))


SERVE = r"""
import json, os, sys
from tformer.commands import trainer
from tformer.errors import Stopped, UserError

sizes = iter(map(int, sys.argv[1].split(',')))
trainer.resident, trainer.MOST_GROWTH, trainer.MOST_JOBS = lambda: next(sizes), 20, 4

def train(job):
    print('out of', job['do'])
    os.write(2, b'error of a library\n')
    ends = {'mistake': UserError('mine'), 'stop': Stopped('asked'), 'disk': OSError(28, 'full'), 'bug': KeyError('its')}
    if job['do'] != 'well':
        raise ends[job['do']]

trainer.serve(train)
"""


@pytest.mark.proof
@pytest.mark.parametrize(
    ('sizes', 'asked', 'answers'),
    [
        ('10,11,12,10', 'well mistake well well well', [(0, False), (2, False), (0, False), (0, True)]),
        ('10,20,31', 'well well well well', [(0, False), (0, False), (0, True)]),
        ('10,10', 'well stop well', [(0, False), (75, True)]),
        ('10', 'disk well', [(2, True)]),
        ('10', 'bug well', [(1, True)]),
    ],
)
def test_a_process_ends_after_doubtful_jobs_and_once_it_has_grown(tmp_path, sizes, asked, answers) -> None:
    names = asked.split()
    log = {'log': str(tmp_path / 'log.txt'), 'extensions': []}
    given = ''.join(json.dumps({**log, 'do': name}) + '\n' for name in names)
    pipes = {'input': given, 'capture_output': True, 'text': True, 'env': environment()}
    ran = subprocess.run([sys.executable, '-c', SERVE, sizes], **pipes)
    assert [tuple(json.loads(line).values()) for line in ran.stdout.splitlines()] == answers
    assert ran.returncode == answers[-1][0] and 'out of' not in ran.stderr
    said = (tmp_path / 'log.txt').read_text()
    assert said.count('out of') == said.count('error of a library') == len(answers)
    ends = {
        'mistake': 'tformer: mine\n',
        'stop': 'tformer: asked\n',
        'disk': 'tformer: full\n',
        'bug': "KeyError: 'its'\n",
    }
    assert all((text in said) == (name in names) for name, text in ends.items())
