"""Where workers run: shares of a host's devices, SLURM through submitit, and an indexed Job of Kubernetes."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

import slurm
import toy_data
from launching import Stubs
from lives import HANG, environment
from small_sweeps import TINY, waiting
from tformer import __main__ as command_line
from tformer import config
from tformer.errors import UserError
from tformer.lab.sweep import devices, executors
from tformer.lab.sweep.devices import Devices
from tformer.lab.sweep.executors import Work
from tformer.training import checkpoint

NONE, GPUS, CHIPS = Devices(None, ()), Devices('gpu', ('0', '1', '5', '7')), Devices('tpu', tuple('0123'))


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ('XLA_PYTHON_CLIENT_MEM_FRACTION', 'XLA_CLIENT_MEM_FRACTION', 'CUDA_VISIBLE_DEVICES', 'JAX_PLATFORMS'):
        monkeypatch.delenv(name, raising=False)


# ----------------------------------------------------------------------------------------------------- this host


def seen(parallel: int, of: Devices) -> list[dict[str, str]]:
    return [devices.share(slot, parallel, of).environment for slot in range(parallel)]


def test_gpus_are_dealt_out_whole_or_in_parts_of_their_memory() -> None:
    of = 'CUDA_VISIBLE_DEVICES'
    assert seen(1, GPUS) == [{}] and seen(3, NONE) == 3 * [{}]
    assert seen(4, GPUS) == [{of: name} for name in ('0', '1', '5', '7')]
    assert seen(2, GPUS) == [{of: '0,1'}, {of: '5,7'}]
    assert [share[of] for share in seen(3, GPUS)] == ['0', '1', '5']
    of_two = seen(8, GPUS)
    assert [share[of] for share in of_two] == 2 * ['0', '1', '5', '7']
    assert {share['XLA_PYTHON_CLIENT_MEM_FRACTION'] for share in of_two} == {'0.45'}
    assert {share['XLA_PYTHON_CLIENT_MEM_FRACTION'] for share in seen(5, GPUS)} == {'0.45'}


def test_the_users_fraction_of_memory_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('XLA_CLIENT_MEM_FRACTION', '0.2')
    assert [list(share) for share in seen(8, GPUS)] == 8 * [['CUDA_VISIBLE_DEVICES']]


def test_chips_are_dealt_out_whole() -> None:
    assert [share['TPU_VISIBLE_CHIPS'] for share in seen(4, CHIPS)] == ['0', '1', '2', '3']
    two = seen(2, CHIPS)
    assert [share['TPU_VISIBLE_CHIPS'] for share in two] == ['0,1', '2,3']
    assert {share['TPU_CHIPS_PER_PROCESS_BOUNDS'] for share in two} == {'1,2,1'}
    with pytest.raises(UserError, match='5 processes at once: a TPU chip serves one process, and this host has 4'):
        devices.share(0, 5, CHIPS)


def test_processes_of_one_trial_have_gpus_of_their_own_and_the_cores_of_both() -> None:
    of = 'CUDA_VISIBLE_DEVICES'
    apart = [[each.environment for each in devices.shares(slot, 2, 2, GPUS)] for slot in range(2)]
    assert apart == [[{of: '0'}, {of: '1'}], [{of: '5'}, {of: '7'}]]
    assert [each.environment[of] for each in devices.shares(0, 1, 2, GPUS)] == ['0,1', '5,7']
    cores = devices.share(1, 2, GPUS).cores
    assert [each.cores for each in devices.shares(1, 2, 2, GPUS)] == [cores, cores]
    assert devices.shares(1, 3, 2, NONE) == 2 * [devices.share(1, 3, NONE)]
    assert devices.shares(1, 2, 1, CHIPS) == [devices.share(1, 2, CHIPS)]
    with pytest.raises(UserError, match='--processes=3: 6 processes need a GPU each, and this host shows 4'):
        devices.shares(0, 2, 3, GPUS)
    with pytest.raises(UserError, match='--processes=2: the TPU chips of a host train a trial as one process'):
        devices.shares(0, 1, 2, CHIPS)


def test_how_many_train_at_once() -> None:
    assert [devices.count(*given, GPUS) for given in ((None, None), (3, None), (None, 2))] == [1, 3, 8]
    with pytest.raises(UserError, match='--per_device=2: this host shows no GPU or TPU'):
        devices.count(None, 2, NONE)
    with pytest.raises(UserError, match='give one of them'):
        devices.count(2, 2, GPUS)
    for given, name in (((0, None), 'parallel=0'), ((None, -1), 'per_device=-1')):
        with pytest.raises(UserError, match=f'--{name} must be positive'):
            devices.count(*given, GPUS)


def test_the_devices_that_this_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {'/dev/nvidia[0-9]*': [], '/dev/accel[0-9]*': [], '/dev/vfio/[0-9]*': []}
    monkeypatch.setattr(devices.glob, 'glob', found.get)
    assert devices.visible() == NONE
    found['/dev/accel[0-9]*'] = ['/dev/accel0', '/dev/accel1']
    assert devices.visible() == Devices('tpu', ('0', '1'))
    found['/dev/nvidia[0-9]*'] = ['/dev/nvidia0', '/dev/nvidia1']
    assert devices.visible() == Devices('gpu', ('0', '1'))
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '3,GPU-7')
    assert devices.visible() == Devices('gpu', ('3', 'GPU-7'))
    monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
    assert devices.visible() == NONE


# ---------------------------------------------------------------------------------------------------- Kubernetes

# The fields of a Job that are used, as the reference of the API (batch/v1 and core/v1, Kubernetes 1.33) has them.
JOB = {
    'apiVersion': str, 'kind': str, 'metadata': {'name': str},
    'spec': {
        'completionMode': str, 'completions': int, 'parallelism': int, 'backoffLimitPerIndex': int,
        'podFailurePolicy': {'rules': [{
            'action': str,
            'onPodConditions': [{'type': str, 'status': str}],
            'onExitCodes': {'containerName': str, 'operator': str, 'values': [int]},
        }]},
        'template': {'spec': {
            'restartPolicy': str, 'terminationGracePeriodSeconds': int,
            'containers': [{
                'name': str, 'image': str, 'command': [str], 'resources': {'limits': 'quantities'},
                'volumeMounts': [{'name': str, 'mountPath': str}],
            }],
            'volumes': [{
                'name': str, 'persistentVolumeClaim': {'claimName': str}, 'emptyDir': {'medium': str},
            }],
        }},
    },
}  # fmt: skip


def fits(value: object, schema: object) -> bool:
    if isinstance(schema, dict):
        return isinstance(value, dict) and all(name in schema and fits(value[name], schema[name]) for name in value)
    if isinstance(schema, list):
        return isinstance(value, list) and all(fits(each, schema[0]) for each in value)
    if schema == 'quantities':
        return isinstance(value, dict) and all(isinstance(amount, str) for amount in value.values())
    return type(value) is schema


def work(home: pathlib.Path, workers: int = 1, claim=lambda: 1, **resources: str) -> Work:
    arguments = ['sweep', '--join', '--config=x.py', f'--workdir={home}']
    return Work(lambda: 3, claim, arguments, home, workers, resources)


def test_a_job_of_kubernetes_fits_the_schema_and_begins_pods_again_that_were_taken_away(capsys) -> None:
    home = pathlib.PurePosixPath('/runs/mine')
    assert executors.kubernetes(work(home, 8, image='my/image:1', cpu='8', devices='2')) == 0
    job = json.loads(capsys.readouterr().out)
    assert fits(job, JOB) and not fits({**job, 'status': {}}, JOB)
    assert (job['apiVersion'], job['kind'], job['spec']['completionMode']) == ('batch/v1', 'Job', 'Indexed')
    assert job['spec']['completions'] == job['spec']['parallelism'] == 8
    pod = job['spec']['template']['spec']
    (container,) = pod['containers']
    assert container['command'] == ['tformer', 'sweep', '--join', '--config=x.py', '--workdir=/runs/mine']
    assert container['resources'] == {'limits': {'nvidia.com/gpu': '2', 'cpu': '8'}}
    assert {mount['name'] for mount in container['volumeMounts']} == {volume['name'] for volume in pod['volumes']}
    assert pod['restartPolicy'] == 'Never'  # as a policy of failures demands
    rules = job['spec']['podFailurePolicy']['rules']
    assert [rule['action'] for rule in rules] == ['Ignore', 'Ignore'] and rules[1]['onExitCodes']['values'] == [75]
    for rule in rules:  # of either kind, not both
        assert len(rule) == 2


@pytest.mark.parametrize(
    ('home', 'resources', 'message'),
    [
        ('runs/mine', {}, '--workdir=runs/mine is not in /runs'),
        ('/other/x', {'mount': '/runs'}, '--workdir=/other/x is not in /runs'),
        ('/runs/x', {'devices': 'two'}, 'devices=two is not an integer'),
        ('/runs/x', {'name': 'My_Sweep'}, 'name=My_Sweep is not a name of Kubernetes'),
        ('/runs/x', {'imgae': 'y'}, "--resources='imgae' is unknown; did you mean 'image'"),
    ],
)
def test_a_job_that_kubernetes_would_refuse_is_refused(home: str, resources: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        executors.kubernetes(work(pathlib.PurePosixPath(home), **resources))


def test_what_is_of_another_executor_is_refused(tmp_path: pathlib.Path) -> None:
    assert executors.local(work(tmp_path)) == 3
    for given in ({'workers': 2}, {'gpus': '1'}):
        with pytest.raises(UserError, match='--workers and --resources are of other executors'):
            executors.local(work(tmp_path, **given))
    base = ['tformer', 'sweep', '--config=x.py', '--workdir=/runs/x']
    for flag, message in {
        '--executor=slrum': "--executor='slrum' is unknown; did you mean 'slurm'",
        '--resources=gpus': "--resources: 'gpus' is not KEY=VALUE",
        '--workers=0': '--workers=0 must be positive',
        '--processes=0': '--processes=0 must be positive',
    }.items():
        with pytest.raises(UserError, match=message):
            command_line.main([*base, flag])
    with pytest.raises(UserError, match='--processes and --together'):
        command_line.main([*base, '--processes=2', '--together=2'])


def test_a_worker_elsewhere_has_the_flags_of_the_command(capsys) -> None:
    flags = ['--config=x.py:a b', '--config.train.num_steps=5', '--workdir=/runs/x', '--together=4', '--per_device=2']
    command_line.main(['tformer', 'sweep', *flags, '--executor=kubernetes', '--workers=3', '--resources=devices=0'])
    (container,) = json.loads(capsys.readouterr().out)['spec']['template']['spec']['containers']
    wanted = ['--config=x.py:a b', '--config.train.num_steps=5', '--workdir=/runs/x', '--per_device=2', '--together=4']
    assert container['command'] == ['tformer', 'sweep', '--join', *wanted]
    assert container['resources'] == {'limits': {}}


# --------------------------------------------------------------------------------------------------------- SLURM


def test_without_submitit_or_slurm_a_line_says_so(tmp_path: pathlib.Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, 'submitit', None)
    with pytest.raises(UserError, match=r"needs submitit: pip install 'tformer\[slurm\]'"):
        executors.slurm(work(tmp_path))
    monkeypatch.undo()
    pytest.importorskip('submitit')
    monkeypatch.setenv('PATH', str(tmp_path))
    with pytest.raises(UserError, match=r'--executor=slurm: .*srun'):
        executors.slurm(work(tmp_path))
    with pytest.raises(UserError, match="--resources='partiton' is unknown; did you mean 'partition'"):
        executors.slurm(work(tmp_path, partiton='x'))


def test_an_array_of_workers_is_submitted(tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    pytest.importorskip('submitit')
    stubs = Stubs(tmp_path)
    said = stubs.place / 'sbatch'
    said.write_text(f'#!/bin/sh\ncat "$1" > {tmp_path}/script; echo Submitted batch job 77\n')
    monkeypatch.setenv('PATH', stubs.environment['PATH'])
    assert executors.slurm(work(tmp_path / 'run', 3, partition='gpu', gpus_per_node='1', time='90')) == 0
    lines = (tmp_path / 'script').read_text().splitlines()
    options = {line.removeprefix('#SBATCH --') for line in lines if line.startswith('#SBATCH')}
    wanted = {'array=0-2%3', 'partition=gpu', 'gpus-per-node=1', 'time=90', 'requeue', 'signal=USR2@300'}
    assert wanted <= options and 'open-mode=append' in options
    assert capsys.readouterr().out == f'SLURM job 77: 3 workers, whose output is in {tmp_path}/run/slurm\n'
    (tmp_path / 'script').unlink()
    assert executors.slurm(work(tmp_path / 'run', 3, claim=lambda: 0)) == 0
    assert capsys.readouterr().out == 'all trials are done\n' and not (tmp_path / 'script').exists()


TASK = """
import pickle, signal, sys
from tformer.lab.sweep.executors import Worker
worker = Worker([sys.executable, '-c', sys.argv[1]])

def notice(*_):
    again = pickle.loads(pickle.dumps(worker.checkpoint()))
    print('queued', again.function._command == worker._command, flush=True)
    sys.exit(9)

signal.signal(signal.SIGUSR2, notice)
print('ended', worker())
"""
WAITS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print('begun', signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN, flush=True)
time.sleep(600)
"""


@pytest.mark.signals
@pytest.mark.proof
@pytest.mark.parametrize('notice', [signal.SIGUSR2, None])
def test_a_task_lets_its_worker_save_before_it_is_queued_again(notice: signal.Signals | None) -> None:
    """Told by submitit's signal, or where SLURM's SIGTERM has stopped the worker already."""
    pytest.importorskip('submitit')
    pipes = {'stdout': subprocess.PIPE, 'text': True, 'env': environment()}
    with subprocess.Popen([sys.executable, '-c', TASK, WAITS], **pipes) as task:
        assert task.stdout.readline() == 'begun True\n'
        if notice is None:
            children = pathlib.Path(f'/proc/{task.pid}/task/{task.pid}/children').read_text().split()
            os.kill(int(children[0]), signal.SIGTERM)
        else:
            task.send_signal(notice)
        assert task.stdout.read() == 'queued True\n' and task.wait(HANG) == 9


@pytest.mark.signals
@pytest.mark.proof
def test_a_task_that_the_user_cancels_is_not_queued_again(tmp_path: pathlib.Path) -> None:
    pytest.importorskip('submitit')
    (tmp_path / 'scontrol').write_text('#!/bin/sh\necho JobId=$5 JobState=CANCELLED Reason=None\n')
    (tmp_path / 'scontrol').chmod(0o755)
    env = {**environment(), 'PATH': f'{tmp_path}:{os.environ["PATH"]}', 'SLURM_JOB_ID': '77'}
    ends = "import sys; print('begun', flush=True); sys.exit(75)"
    ran = subprocess.run([sys.executable, '-c', TASK, ends], capture_output=True, text=True, env=env)
    assert ran.stdout == 'begun\nended 75\n'


@pytest.mark.proof
def test_a_task_ends_with_its_worker() -> None:
    pytest.importorskip('submitit')
    ran = subprocess.run([sys.executable, '-c', TASK, 'import sys; sys.exit(2)'], capture_output=True, text=True,
                         env=environment())  # fmt: skip
    assert ran.stdout == 'ended 2\n'


@pytest.mark.proof
@pytest.mark.signals
@pytest.mark.skipif(slurm.missing() is not None, reason=str(slurm.missing()))
def test_workers_of_a_real_slurm_stop_before_their_limit_go_on_and_a_host_ends_the_sweep(tmp_path) -> None:
    """Two nodes of one task each; the limit of one moves close while both train. Two seeds are added later."""
    pytest.importorskip('submitit')
    fields = {'data.path': (str(toy_data.running(tmp_path / 'data')),), 'data.byte_fallback': False}
    (tmp_path / 'base.json').write_text(json.dumps(config.to_dict(config.override(TINY, fields))))
    text = 'from tformer.lab.sweep import Sweep, seeds\n\ndef get_sweep(count: str = "3"):\n'
    (tmp_path / 'sweep.py').write_text(f"{text}    return Sweep('base.json', seeds(int(count)))\n")
    home, go = tmp_path / 'run', tmp_path / 'go'
    env = {**waiting(tmp_path, go, 2), 'PATH': f'{pathlib.Path(sys.executable).parent}:{os.environ["PATH"]}'}
    sweep = [sys.executable, '-m', 'tformer', 'sweep', f'--workdir={home}']
    with slurm.running() as real:
        given = ['--executor=slurm', '--workers=2', '--resources=time=60,cpus_per_task=1']
        said = real.run(*sweep, f'--config={tmp_path}/sweep.py', *given, **env)
        job = re.match(r'SLURM job (\d+): 2 workers', said)[1]
        tasks = [f'{job}_0', f'{job}_1']
        first = [home / f'baseline/seed_{seed}' for seed in (0, 1)]
        real.until(lambda: all(checkpoint.steps(place) for place in first) or 'FAILED' in states(real, tasks))
        real.run('scontrol', 'update', f'JobId={tasks[0]}', 'TimeLimit=5')
        real.until(lambda: any('received SIGINT' in (place / 'log.txt').read_text() for place in first))
        go.touch()
        real.until(lambda: real.job(tasks[0])['Restarts'] == '1')
        real.run('scontrol', 'update', f'JobId={tasks[0]}', 'TimeLimit=60')
        real.until(lambda: not {'PENDING', 'RUNNING', 'COMPLETING', 'CONFIGURING'} & states(real, tasks))
        assert states(real, tasks) == {'COMPLETED'}, [file.read_text() for file in (home / 'slurm').glob('*.err')]
    logs = [(home / f'baseline/seed_{seed}/log.txt').read_text() for seed in range(3)]
    assert sum('resumed at step' in log for log in logs) == 1
    assert len(list(home.glob('baseline/seed_*/result.json'))) == 3 and not (home / 'report.md').exists()
    ended = subprocess.run([*sweep, f'--config={tmp_path}/sweep.py:4'], env=env, capture_output=True, text=True)
    assert ended.returncode == 0 and '4 trials, 3 of them done' in ended.stdout, ended.stderr
    assert (home / 'report.md').exists()


def states(real: slurm.Slurm, tasks: list[str]) -> set[str]:
    return {real.job(task)['JobState'] for task in tasks}
