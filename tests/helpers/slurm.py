"""A real SLURM with two nodes on this machine: a controller, a daemon for each node and a munge of its own.

Debian's packages `slurm-wlm` and `munge` and the rights of root are needed. Nothing outside of its directory changes.
"""

import contextlib
import os
import pathlib
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator

from lives import HANG, reserve_port

PROGRAMS = ('munged', 'slurmctld', 'slurmd', 'sbatch', 'scontrol')
NODES = (socket.gethostname(), 'z')  # the first one's name is that of the coordinator, which has to be found
SETTINGS = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={place}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool.%n
SlurmctldPidFile={place}/controller.pid
SlurmdPidFile={place}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
JobRequeue=1
FirstJobId={job}
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=100
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=100
PartitionName=all Nodes={nodes[0]},{nodes[1]} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Returns why no SLURM can be started here; None: one can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f'{", ".join(absent)} not found (Debian: slurm-wlm, munge)'
    return None if os.geteuid() == 0 else 'a SLURM needs the rights of root'


class Slurm:
    """Runs the commands of a SLURM whose settings stand in a directory."""

    def __init__(self, place: pathlib.Path):
        self.environment = {**os.environ, 'SLURM_CONF': str(place / 'slurm.conf')}

    def run(self, *command: object, **environment: str) -> str:
        """Returns what a command prints."""
        words, env = [str(word) for word in command], {**self.environment, **environment}
        ran = subprocess.run(words, env=env, capture_output=True, text=True, timeout=HANG)
        assert ran.returncode == 0, (words, ran.stdout, ran.stderr)
        return ran.stdout

    def job(self, number: str) -> dict[str, str]:
        """Returns the facts of a job."""
        words = self.run('scontrol', 'show', '--oneliner', 'job', number).split()
        return dict(word.split('=', 1) for word in words if '=' in word)

    def until(self, sign: Callable[[], object]) -> None:
        end = time.monotonic() + HANG
        while not sign():
            assert time.monotonic() < end
            time.sleep(0.2)


@contextlib.contextmanager
def running() -> Iterator[Slurm]:
    """Starts a SLURM in a directory of its own, whose path is short enough for a socket, and ends it."""
    with tempfile.TemporaryDirectory(prefix='slurm-', ignore_cleanup_errors=True) as place:
        yield from _started(pathlib.Path(place))


def _started(place: pathlib.Path) -> Iterator[Slurm]:
    place.chmod(0o755)
    (place / 'state').mkdir()
    (place / 'munge.key').write_bytes(secrets.token_bytes(128))
    (place / 'munge.key').chmod(0o400)
    held = [reserve_port() for _ in range(3)]
    ports = [each.getsockname()[1] for each in held]
    facts = {'place': place, 'host': socket.gethostname(), 'ports': ports, 'nodes': NODES}
    # jax makes the port of the coordinator from the job's number
    (place / 'slurm.conf').write_text(SETTINGS.format(**facts, job=1000 + secrets.randbelow(60_000)))
    slurm = Slurm(place)
    options = [f'--{name}={place}/munge.{end}' for name, end in
               (('socket', 'socket'), ('key-file', 'key'), ('pid-file', 'pid'), ('log-file', 'log'),
                ('seed-file', 'seed'))]  # fmt: skip
    daemons = [
        ['munged', '--foreground', '--force', *options],
        ['slurmctld', '-D', '-c'],
        *(['slurmd', '-D', '-N', name] for name in NODES),
    ]
    begun = []
    try:
        for command in daemons:
            with open(place / f'{len(begun)}.log', 'wb') as log:
                begun.append(subprocess.Popen(command, env=slurm.environment, stdout=log, stderr=log))
            if command[0] == 'munged':
                slurm.until((place / 'munge.socket').exists)
        slurm.until(lambda: slurm.run('sinfo', '--noheader', '--format=%T').split() == ['idle'])
        yield slurm
    finally:
        for each in reversed(begun):
            each.terminate()
        for each in begun:
            each.wait(HANG)
        for each in held:
            each.close()
