"""The scripts of launch/, run as they are: by stubs of what they call, which note how they were called."""

import os
import pathlib
import queue
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest

from launching import Stubs, outlives
from lives import HANG
from places import LAUNCH

SCRIPTS = ('slurm.sbatch', 'tpu_vm.sh')

# Options of sbatch, of the many that it has.
SBATCH = {
    'account', 'array', 'constraint', 'cpus-per-gpu', 'cpus-per-task', 'error', 'exclusive', 'export', 'gpus',
    'gpus-per-node', 'gpus-per-task', 'gres', 'job-name', 'mem', 'mem-per-gpu', 'nodes', 'ntasks', 'ntasks-per-node',
    'open-mode', 'output', 'partition', 'qos', 'requeue', 'signal', 'time',
}  # fmt: skip


@pytest.fixture
def stubs(tmp_path: pathlib.Path) -> Stubs:
    return Stubs(tmp_path)


@pytest.mark.parametrize('name', SCRIPTS)
def test_scripts_are_bash(name: str) -> None:
    checked = subprocess.run(['bash', '-n', LAUNCH / name], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    if shutil.which('shellcheck'):
        checked = subprocess.run(['shellcheck', LAUNCH / name], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize('name', ['local', 'jobset.yaml', *SCRIPTS])
def test_files_begin_with_their_command_and_know_no_field(name: str) -> None:
    lines = (LAUNCH / name).read_text().splitlines()
    assert any(f'launch/{name}' in line for line in lines[:8])
    code = [line for line in lines if not line.startswith(('#', '    '))]
    assert not re.search(r'--config\.\w+\.\w+', '\n'.join(code))
    assert max(map(len, lines)) <= 120


# ------------------------------------------------------------------------------------------------------ SLURM


def directives(name: str) -> dict[str, str]:
    """#SBATCH options -> values; Slurm reads those before the first command."""
    found, begun = {}, False
    for line in (LAUNCH / name).read_text().splitlines():
        if line.startswith('#SBATCH'):
            assert not begun, f'after the first command: {line}'
            option = re.fullmatch(r'#SBATCH --([a-z-]+)(?:=(\S+))?', line)
            assert option, line
            found[option[1]] = option[2] or ''
        begun = begun or (bool(line.strip()) and not line.startswith('#'))
    return found


def test_directives_ask_for_a_signal_in_time_and_another_life() -> None:
    found = directives('slurm.sbatch')
    assert set(found) <= SBATCH
    notice = re.fullmatch(r'TERM@(\d+)', found['signal'])  # no B: the steps get it, not the shell
    assert notice and 120 <= int(notice[1]) < 2**16
    assert found['requeue'] == '' and found['open-mode'] == 'append'


def test_slurm_trains_on_all_tasks_and_is_queued_again_where_it_saved_and_stopped(stubs: Stubs) -> None:
    flags = ['--config=x.py:a b', '--workdir=runs/x', "--config.data.mixture=('path=a weight=1',)"]
    ran = stubs.run('sbatch', '--nodes=2', LAUNCH / 'slurm.sbatch', *flags, CODES='75 75 0')
    assert ran.returncode == 0, ran.stderr
    assert stubs.calls('tformer') == 3 * [['train', '--coordinator=auto', *flags]]
    assert stubs.calls('scontrol') == 2 * [['requeue', '77']]
    assert all('--kill-on-bad-exit=1' in call for call in stubs.calls('srun'))


@pytest.mark.parametrize('code', [0, 1, 2, 137])
def test_slurm_queues_nothing_else_again(stubs: Stubs, code: int) -> None:
    ran = stubs.run('sbatch', LAUNCH / 'slurm.sbatch', '--config=x', CODES=str(code))
    assert ran.returncode == code and stubs.calls('scontrol') == [] and len(stubs.calls('tformer')) == 1


# ------------------------------------------------------------------------------------------------- Kubernetes


@pytest.fixture(scope='module')
def jobset() -> dict:
    yaml = pytest.importorskip('yaml')
    return yaml.safe_load((LAUNCH / 'jobset.yaml').read_text())


def test_jobset_is_one_indexed_job_whose_failure_restarts_all(jobset: dict) -> None:
    assert (jobset['apiVersion'], jobset['kind']) == ('jobset.x-k8s.io/v1alpha2', 'JobSet')
    spec = jobset['spec']
    assert set(spec) <= {'network', 'failurePolicy', 'successPolicy', 'replicatedJobs', 'coordinator', 'suspend'}
    assert spec['network']['enableDNSHostnames'] is True
    assert spec['failurePolicy']['maxRestarts'] > 0
    (rule,) = spec['failurePolicy']['rules']  # nothing but what the job's own policy fails is not restarted
    assert (rule['action'], rule['onJobFailureReasons']) == ('FailJobSet', ['PodFailurePolicy'])
    (replicated,) = spec['replicatedJobs']
    assert set(replicated) == {'name', 'replicas', 'template'} and replicated['replicas'] == 1
    job = replicated['template']['spec']
    assert job['completionMode'] == 'Indexed' and job['parallelism'] == job['completions'] > 1
    assert job['backoffLimit'] == 0  # one pod's end is the job's
    (fails,) = job['podFailurePolicy']['rules']
    assert fails == {
        'action': 'FailJob',
        'onExitCodes': {'containerName': 'tformer', 'operator': 'In', 'values': [2]},
    }
    pod = job['template']['spec']
    assert pod['restartPolicy'] == 'Never' and pod['terminationGracePeriodSeconds'] >= 120
    (container,) = pod['containers']
    assert container['name'] == 'tformer'
    mounts = {mount['name']: mount['mountPath'] for mount in container['volumeMounts']}
    assert set(mounts) == {volume['name'] for volume in pod['volumes']}
    (workdir,) = (x.partition('=')[2] for x in container['args'] if x.startswith('--workdir='))
    (claimed,) = (volume['name'] for volume in pod['volumes'] if 'persistentVolumeClaim' in volume)
    assert workdir.startswith(mounts[claimed] + '/')


def test_jobset_pods_join_at_the_name_of_the_first(jobset: dict, stubs: Stubs) -> None:
    (replicated,) = jobset['spec']['replicatedJobs']
    job = replicated['template']['spec']
    (container,) = job['template']['spec']['containers']
    name = jobset['metadata']['name']
    labels = {
        "metadata.labels['jobset.sigs.k8s.io/jobset-name']": name,
        "metadata.labels['jobset.sigs.k8s.io/replicatedjob-name']": replicated['name'],
    }
    environment = {
        one['name']: one['value'] if 'value' in one else labels[one['valueFrom']['fieldRef']['fieldPath']]
        for one in container['env']
    }
    assert all(isinstance(value, str) for value in environment.values())
    assert int(environment['NUM_PROCESSES']) == job['completions']
    used = set(re.findall(r'\$\{(\w+)\}', ' '.join(container['command'])))
    assert used == {*environment, 'JOB_COMPLETION_INDEX'}
    port = container['ports'][0]['containerPort']
    for index in range(job['completions']):
        ran = stubs.run(*container['command'], *container['args'], **environment, JOB_COMPLETION_INDEX=str(index))
        assert ran.returncode == 0, ran.stderr
        assert stubs.calls('tformer')[-1] == [
            'train', f'--coordinator={name}-{replicated["name"]}-0-0.{name}:{port}',
            f'--num_processes={job["completions"]}', f'--process_id={index}', *container['args'],
        ]  # fmt: skip


# -------------------------------------------------------------------------------------------------- Cloud TPU


def slice_of(stubs: Stubs, *flags: str, **environment: str) -> subprocess.CompletedProcess:
    (stubs.place.parent / 'tformer').mkdir(exist_ok=True)
    named = {'NAME': 'n', 'ZONE': 'z', 'TYPE': 'v6e-16', 'VERSION': 'v2', 'ABSENT': '1', 'VM': str(stubs.place.parent)}
    return stubs.run(LAUNCH / 'tpu_vm.sh', *flags, **{**named, **environment})


def test_a_slice_is_made_filled_and_used_on_all_workers(stubs: Stubs) -> None:
    flags = ['--config=configs/x.py', '--workdir=/mnt/a b', "--config.x.y=('p q', 3)"]
    ran = slice_of(stubs, *flags, CODES='75')
    assert ran.returncode == 75, ran.stderr
    calls = [call[3:] for call in stubs.calls('gcloud')]
    assert all(call[:3] == ['compute', 'tpus', 'tpu-vm'] and call[-1] == '--zone=z' for call in stubs.calls('gcloud'))
    assert [call[0] for call in calls] == ['describe', 'create', 'scp', 'ssh', 'ssh']
    assert calls[1] == ['create', 'n', '--accelerator-type=v6e-16', '--version=v2', '--zone=z']
    assert all('--worker=all' in call for call in calls[2:])
    assert stubs.calls('tformer') == [['train', '--coordinator=auto', *flags]]
    shlex.split(calls[3][-2])  # is a shell's


def test_a_slice_that_is_there_is_used_and_deleted_on_request(stubs: Stubs) -> None:
    ran = slice_of(stubs, '--config=x', ABSENT='0', DELETE='1', SPOT='1', CODES='2')
    assert ran.returncode == 2, ran.stderr
    calls = [call[3:] for call in stubs.calls('gcloud')]
    assert [call[0] for call in calls] == ['describe', 'scp', 'ssh', 'ssh', 'delete']
    assert calls[-1] == ['delete', 'n', '--quiet', '--zone=z']
    slice_of(stubs, '--config=x', SPOT='1')
    assert ['create', 'n', '--accelerator-type=v6e-16', '--version=v2', '--spot', '--zone=z'] in [
        call[3:] for call in stubs.calls('gcloud')
    ]


def test_a_slice_needs_its_names(stubs: Stubs) -> None:
    ran = slice_of(stubs, '--config=x', ZONE='')
    assert ran.returncode and 'ZONE' in ran.stderr and stubs.calls('gcloud') == []


# ------------------------------------------------------------------------------------------------ this machine

FAKE = """
import os, signal, sys, time
flags = dict(word.lstrip('-').split('=', 1) for word in sys.argv[1:] if '=' in word)
me, count = int(flags['process_id']), int(flags['num_processes'])
def say(text): print(text, file=sys.stderr, flush=True)
def meet():  # all are there
    place = os.environ['PIDS']
    open(f'{place}/new{me}', 'w').write(str(os.getpid()))
    os.rename(f'{place}/new{me}', f'{place}/{me}')
    while not all(os.path.exists(f'{place}/{other}') for other in range(count)): time.sleep(0.01)
"""
SHORT = (
    'import importlib.machinery as m, importlib.util as u, os, sys\n'
    'loader = m.SourceFileLoader("local", sys.argv[1])\n'
    'local = u.module_from_spec(u.spec_from_loader("local", loader)); loader.exec_module(local)\n'
    'assert sum(seconds for seconds, _ in local.MEASURES) <= 25\n'  # and 30 of heartbeats before: within 60
    'haste = float(os.environ["HASTE"]); sys.argv = sys.argv[1:]\n'
    'local.MEASURES = tuple((seconds / haste, which) for seconds, which in local.MEASURES)\n'
    'sys.exit(local.main())'
)


class Local:
    """launch/local, with less patience, as it runs a program of ours under the name of tformer."""

    def __init__(self, place: pathlib.Path, program: str, *arguments: str, processes: int = 3, **environment: str):
        (place / 'fake' / 'tformer').mkdir(parents=True)
        (place / 'fake' / 'tformer' / '__init__.py').touch()
        (place / 'fake' / 'tformer' / '__main__.py').write_text(FAKE + program)
        self._pids = place / 'pids'
        self._pids.mkdir()
        env = {**os.environ, 'PYTHONPATH': str(place / 'fake'), 'PIDS': str(self._pids), 'HASTE': '5', **environment}
        command = [sys.executable, '-c', SHORT, LAUNCH / 'local', f'--processes={processes}', *arguments]
        self.processes = processes
        self._ran = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=place
        )

    def pids(self) -> list[int]:
        """Waits until all have met; returns their ids."""
        files = [self._pids / str(number) for number in range(self.processes)]
        self._wait_for(files)
        return [int(file.read_text()) for file in files]

    def asked_long_ago(self) -> None:
        """Waits until every process has noted that it was asked to end, and still runs after more than all patience."""
        self._wait_for([self._pids / f'asked{number}_long_ago' for number in range(self.processes)])

    def _wait_for(self, files: list[pathlib.Path]) -> None:
        end = time.monotonic() + HANG
        while not all(file.exists() for file in files):
            assert time.monotonic() < end, [file for file in files if not file.exists()]
            time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        self._ran.send_signal(number)

    def end(self) -> tuple[int, str, str]:
        """Returns (exit code, standard output, standard error), and sees that none is left."""
        try:
            out, err = self._ran.communicate(timeout=HANG)
        finally:
            self._ran.kill()
            left = [pid for pid in self.pids() if outlives(pid)]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        assert left == []
        return self._ran.returncode, out, err


def test_local_passes_the_line_on_and_shows_the_first(tmp_path: pathlib.Path) -> None:
    program = (
        'meet(); print(*sys.argv[1:], sep="|")\n'
        'print(os.environ["XLA_FLAGS"], os.environ["JAX_PLATFORMS"], flush=True)\n'
        'say(f"hello {me}")'
    )
    local = Local(tmp_path, program, '--devices=4', '--config=x y', "--config.a.b=('c',)", XLA_FLAGS='--before')
    code, out, err = local.end()
    assert code == 0
    first, second = out.splitlines()  # of one process
    words = first.split('|')
    assert words[:3] == ['train', '--config=x y', "--config.a.b=('c',)"]
    assert re.fullmatch(r'--coordinator=127\.0\.0\.1:\d+', words[3])
    assert words[4:] == ['--num_processes=3', '--process_id=0']
    assert second == '--before --xla_force_host_platform_device_count=4 cpu'
    assert sorted(err.splitlines()) == ['[1] hello 1', '[2] hello 2', 'hello 0']


def test_local_takes_a_command_and_wants_processes(tmp_path: pathlib.Path) -> None:
    code, out, _ = Local(tmp_path, 'meet(); print(*sys.argv[1:3])', 'evaluate', '--workdir=x', processes=1).end()
    assert (code, out) == (0, 'evaluate --workdir=x\n')
    ran = subprocess.run([sys.executable, LAUNCH / 'local', '--processes=0'], capture_output=True, text=True)
    assert ran.returncode == 2 and 'must be positive' in ran.stderr and 'Traceback' not in ran.stderr


@pytest.mark.signals
def test_local_ends_the_rest_and_tells_the_first_failure_last(tmp_path: pathlib.Path) -> None:
    program = (
        'signal.signal(signal.SIGTERM, lambda *_: (say(f"asked {me}"), sys.exit(9) if me else None))\n'
        'meet()\n'
        'if me == 2: say("tformer: it broke"); sys.exit(3)\n'
        'while True: time.sleep(0.1)'
    )
    code, _, err = Local(tmp_path, program).end()
    assert code == 3
    lines = err.splitlines()
    assert lines[0] == '[2] tformer: it broke' and {'asked 0', '[1] asked 1'} <= set(lines)
    assert lines[-2:] == [
        '[2] tformer: it broke',
        'launch/local: process 2 of 3 was the first to fail: exit code 3',
    ]


@pytest.mark.parametrize(
    ('ends', 'failure'),
    [
        ([(0, 0), (1, 0), (2, 0)], None),
        ([(0, 75), (2, 0), (1, 0)], (0, 75)),
        ([(0, 75), (2, 3), (1, 4)], (2, 3)),  # saving and stopping is no failure beside one
        ([(1, 3), (0, 75), (2, 4)], (1, 3)),
    ],
)
def test_local_tells_the_first_failure_of_those_that_end_by_themselves(ends: list, failure: tuple | None) -> None:
    events = queue.SimpleQueue()
    for end in ends:
        events.put(end)
    assert runpy.run_path(str(LAUNCH / 'local'))['attend']([None] * len(ends), events) == failure


@pytest.mark.signals
def test_local_lets_the_rest_say_why_and_names_a_signal(tmp_path: pathlib.Path) -> None:
    program = (
        'meet()\n'
        'if me == 1: os.kill(os.getpid(), signal.SIGKILL)\n'
        'time.sleep(0.3); say("E1121 noise"); say("F1121 jax: another task died")\n'
        'say("tformer: another has ended"); sys.exit(1)'
    )
    code, _, err = Local(tmp_path, program, HASTE='0.01').end()  # as long as they need
    assert code == 128 + signal.SIGKILL
    said, told = err.splitlines()
    assert said.endswith('tformer: another has ended')  # once
    assert told == 'launch/local: process 1 of 3 was the first to fail: SIGKILL'


def test_local_tells_what_jax_says_of_others_where_nothing_failed_before(tmp_path: pathlib.Path) -> None:
    code, _, err = Local(tmp_path, 'meet()\nif me: say("F1121 jax: another task died"); os.abort()', processes=2).end()
    assert code == 128 + signal.SIGABRT
    told = 'launch/local: process 1 of 2 was the first to fail: SIGABRT'
    assert err.splitlines() == ['[1] F1121 jax: another task died', told]


@pytest.mark.signals
def test_local_ends_a_process_that_stands_still_and_answers_nothing(tmp_path: pathlib.Path) -> None:
    program = 'meet()\nif me: os.kill(os.getpid(), signal.SIGSTOP)\nsay("tformer: no heartbeat"); sys.exit(1)'
    code, _, err = Local(tmp_path, program, processes=2).end()
    assert code == 1 and err.splitlines()[-1] == 'launch/local: process 0 of 2 was the first to fail: exit code 1'


def test_local_holds_its_port_until_process_0_has_it(tmp_path: pathlib.Path) -> None:
    """Nobody else gets it in between; the server that process 0 starts does."""
    program = (
        'import socket\n'
        'port = int(flags["coordinator"].rpartition(":")[2])\n'
        'other = socket.socket()\n'
        'try: other.bind(("127.0.0.1", port)); print("another has it")\n'
        'except OSError as error: print(error.strerror)\n'
        'socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)\n'
        'meet(); print("has it", flush=True)'
    )
    code, out, err = Local(tmp_path, program, processes=1).end()
    assert (code, out) == (0, 'Address already in use\nhas it\n'), err


def test_local_shows_what_all_say_once(tmp_path: pathlib.Path) -> None:
    code, _, err = Local(tmp_path, 'meet(); say("tformer: model.norm=1 is unknown"); sys.exit(2)').end()
    said, told = err.splitlines()
    assert code == 2 and said.endswith('tformer: model.norm=1 is unknown') and told.endswith('exit code 2')


WAITS = (
    'asked = os.environ["PIDS"] + f"/asked{me}"\n'
    'hear = lambda *_: (say(f"asked {me}"), open(asked, "w").close(), sys.exit(75) if STOPS else None)\n'
    'signal.signal(signal.SIGTERM, hear)\n'
    'meet()\n'
    'count = 0\n'
    'while True:\n'
    '    time.sleep(0.1); count += os.path.exists(asked)\n'
    '    if count == 15: open(asked + "_long_ago", "w").close()'
)


@pytest.mark.signals
def test_local_forwards_a_signal_and_passes_75_on(tmp_path: pathlib.Path) -> None:
    local = Local(tmp_path, f'STOPS = True\n{WAITS}')
    local.pids()
    local.signal(signal.SIGTERM)
    code, _, err = local.end()
    assert code == 75 and sorted(re.findall('asked .', err)) == ['asked 0', 'asked 1', 'asked 2']
    assert 'fail' not in err


@pytest.mark.signals
def test_local_ends_all_at_the_second_signal(tmp_path: pathlib.Path) -> None:
    local = Local(tmp_path, f'STOPS = False\n{WAITS}', HASTE='20')
    local.pids()
    local.signal(signal.SIGTERM)
    local.asked_long_ago()  # a signal alone ends none
    local.signal(signal.SIGINT)
    code, _, err = local.end()
    assert code == 128 + signal.SIGINT and len(re.findall('asked', err)) == 3


@pytest.mark.signals
@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='is done by Linux')
def test_local_leaves_none_where_it_is_killed(tmp_path: pathlib.Path) -> None:
    local = Local(tmp_path, 'meet(); time.sleep(3600)')
    local.pids()
    local.signal(signal.SIGKILL)
    assert local.end()[0] == -signal.SIGKILL
