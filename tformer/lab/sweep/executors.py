"""Where the workers of a sweep run. A worker is `tformer sweep --join`: it takes jobs from the sweep's directory.

An executor only starts workers somewhere. The sweep may move from one to another, or run on several at once.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tformer.errors import STOPPED, UserError, choose

NOTICE_SECONDS = 300  # before a time limit, to save and stop


class Work(NamedTuple):
    """A sweep to run."""

    here: Callable[[], int]  # runs it in this process, and returns the exit code
    claim: Callable[[], int]  # writes what is to be trained to the directory, and returns how many trials are left
    arguments: Sequence[str]  # of the command line of a worker, after `tformer`
    home: pathlib.Path  # the sweep's directory, which all workers share
    workers: int  # how many to start
    resources: Mapping[str, str]  # what a worker gets, in the words of the executor


def local(work: Work) -> int:
    """Runs the sweep on this host, in this process and its trainers, until all trials have ended."""
    if work.resources or work.workers != 1:
        raise UserError('--workers and --resources are of other executors; here --parallel=K trains K trials at once')
    return work.here()


# ---------------------------------------------------------------------------------------------------------- SLURM


class Worker:
    """What a task of a SLURM array runs: a worker, which saves and stops before the time limit, and is queued again."""

    def __init__(self, command: Sequence[str]):
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        """Returns the exit code of the worker; one that stopped because SLURM ends the job is queued again."""
        # SLURM tells every process of the job of the end; the worker hears of it by `checkpoint`.
        self._process = subprocess.Popen(
            self._command, preexec_fn=lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN) and None
        )
        while _has_not_ended(self._process.pid):
            time.sleep(0.2)
        code = self._process.wait()
        if code == STOPPED and not _is_cancelled():
            os.kill(os.getpid(), signal.SIGUSR2)  # submitit's notice of the end, upon which it queues the job again
            time.sleep(1)
        return code

    def checkpoint(self) -> Any:
        """Stops the worker, and returns what submitit queues."""
        from submitit.helpers import DelayedSubmission

        if self._process is not None and _has_not_ended(self._process.pid):
            self._process.send_signal(signal.SIGTERM)
            while _has_not_ended(self._process.pid):
                time.sleep(0.2)
        return DelayedSubmission(Worker(self._command))


def _has_not_ended(pid: int) -> bool:
    """Returns whether a child runs. Unlike `Popen.poll` it may interrupt itself, as in the handler of a signal."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:  # it has been waited for
        return False


def _is_cancelled() -> bool:
    """Returns whether the SLURM job of this process has been cancelled, or queued again already: it is not running."""
    job = os.environ.get('SLURM_JOB_ID')
    if job is None:
        return False
    shown = subprocess.run(['scontrol', 'show', '--oneliner', 'job', job], capture_output=True, text=True)
    state = re.search(r'\bJobState=(\w+)', shown.stdout)
    return state is not None and state[1] != 'RUNNING'


def slurm(work: Work) -> int:
    """Submits an array of workers through submitit. `resources` are submitit's parameters of sbatch.

    They are queued again where they are preempted, lose their node or reach the time limit. What they print is in
    DIR/slurm.

    Raises:
      UserError: submitit or SLURM is missing, or refuses a parameter.
    """
    try:
        import submitit
    except ImportError as error:
        raise UserError("--executor=slurm needs submitit: pip install 'tformer[slurm]'") from error
    parameters = {'job_name': 'tformer', 'time': '1440', 'signal_delay_s': str(NOTICE_SECONDS), **work.resources}
    valid = submitit.SlurmExecutor._valid_parameters() - {'map_count', 'additional_parameters', 'nodes', 'setup'}
    for name in work.resources:
        choose(dict.fromkeys(sorted(valid)), name, '--resources')
    if not work.claim():
        print('all trials are done')
        return 0
    try:
        executor = submitit.SlurmExecutor(work.home / 'slurm', max_num_timeout=1000)
        executor.update_parameters(
            **{name: _number(value) for name, value in parameters.items()}, additional_parameters={'requeue': True}
        )
        with executor.batch():
            command = [sys.executable, '-m', 'tformer', *work.arguments]
            jobs = [executor.submit(Worker(command)) for _ in range(work.workers)]
    except (RuntimeError, ValueError, OSError, submitit.core.utils.FailedJobError) as error:
        raise UserError(f'--executor=slurm: {error}') from error
    array = str(jobs[0].job_id).partition('_')[0]
    print(
        f'SLURM job {array}: {work.workers} worker{"s" * (work.workers > 1)}, whose output is in {work.home / "slurm"}'
    )
    return 0


def _number(value: str) -> Any:
    return int(value) if re.fullmatch(r'\d+', value) else value


# ----------------------------------------------------------------------------------------------------- Kubernetes

POD = {
    'image': 'REGISTRY/tformer:latest',
    'claim': 'runs',  # the volume that all pods share
    'mount': '/runs',
    'name': 'tformer-sweep',
    'device': 'nvidia.com/gpu',
    'devices': '1',
    'cpu': '',
    'memory': '',
}  # fmt: skip


def kubernetes(work: Work) -> int:
    """Prints an indexed Job of workers, for `kubectl apply -f -`. `resources` are the keys of `POD`.

    A pod that is evicted or whose node is lost begins again, and so does one that saved and stopped.
    """
    for name in work.resources:
        choose(POD, name, '--resources')
    print(json.dumps(manifest(work), indent=2))
    return 0


def manifest(work: Work) -> dict[str, Any]:
    """Returns the Job (batch/v1) of the workers of a sweep.

    Raises:
      UserError: a number is none, or the sweep's directory is not in the volume.
    """
    pod = {**POD, **work.resources}
    if not pod['devices'].isdecimal():
        raise UserError(f'--resources: devices={pod["devices"]} is not an integer of at least 0')
    if not re.fullmatch(r'[a-z0-9]([-a-z0-9]{0,51}[a-z0-9])?', pod['name']):
        raise UserError(f'--resources: name={pod["name"]} is not a name of Kubernetes: small letters, digits and -')
    if not pathlib.PurePosixPath(work.home).is_relative_to(pod['mount']):
        raise UserError(f'--workdir={work.home} is not in {pod["mount"]}, where pods have their volume (mount=PATH)')
    limits = {pod['device']: pod['devices']} if pod['devices'] != '0' else {}
    limits |= {name: pod[name] for name in ('cpu', 'memory') if pod[name]}
    container = {
        'name': 'tformer',
        'image': pod['image'],
        'command': ['tformer', *work.arguments],
        'resources': {'limits': limits},
        'volumeMounts': [
            {'name': 'runs', 'mountPath': pod['mount']},
            {'name': 'shared-memory', 'mountPath': '/dev/shm'},
        ],
    }
    volumes = [
        {'name': 'runs', 'persistentVolumeClaim': {'claimName': pod['claim']}},
        {'name': 'shared-memory', 'emptyDir': {'medium': 'Memory'}},
    ]
    ignored = [
        {'action': 'Ignore', 'onPodConditions': [{'type': 'DisruptionTarget', 'status': 'True'}]},
        {'action': 'Ignore', 'onExitCodes': {'containerName': 'tformer', 'operator': 'In', 'values': [STOPPED]}},
    ]
    return {
        'apiVersion': 'batch/v1',
        'kind': 'Job',
        'metadata': {'name': pod['name']},
        'spec': {
            'completionMode': 'Indexed',
            'completions': work.workers,
            'parallelism': work.workers,
            'backoffLimitPerIndex': 3,
            'podFailurePolicy': {'rules': ignored},
            'template': {
                'spec': {
                    'restartPolicy': 'Never',
                    'terminationGracePeriodSeconds': NOTICE_SECONDS,
                    'containers': [container],
                    'volumes': volumes,
                }
            },
        },
    }


EXECUTORS: dict[str, Callable[[Work], int]] = {'local': local, 'slurm': slurm, 'kubernetes': kubernetes}
