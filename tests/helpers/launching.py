"""The scripts of launch/ among stubs of the programs that they call."""

import json
import os
import pathlib
import subprocess
import sys
import time

from lives import HANG

STUB = f"""#!{sys.executable} -IS
import json, os, signal, subprocess, sys
name, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
with open(os.environ['CALLS'], 'a') as file:
    file.write(json.dumps([name, *arguments]) + '\\n')
"""


# sbatch runs the script, again as long as scontrol says so; srun runs the command, as its tasks.
STUBS = {
    'sbatch': """
script = [x for x in arguments if not x.startswith('--')][0]
rest = arguments[arguments.index(script) + 1 :]
again = os.environ['CALLS'] + '.again'
open(again, 'w').close()
while os.path.exists(again):
    os.remove(again)
    code = subprocess.call(['bash', script, *rest], env={**os.environ, 'SLURM_JOB_ID': '77'})
sys.exit(code)
""",
    'srun': """
while arguments[0].startswith('--'):
    arguments.pop(0)
tasks = [
    subprocess.Popen(
        arguments,
        env={
            **os.environ, 'SLURM_NTASKS': os.environ.get('TASKS', '1'), 'SLURM_PROCID': str(task),
            'SLURM_LOCALID': str(task), 'SLURM_STEP_NODELIST': '127.0.0.1',
        },
    )
    for task in range(int(os.environ.get('TASKS', '1')))
]
signal.signal(signal.SIGTERM, lambda number, _: [task.send_signal(number) for task in tasks])
sys.exit(max(task.wait() for task in tasks))
""",
    'scontrol': "open(os.environ['CALLS'] + '.again', 'w').close()",
    'tformer': """
codes = os.environ.get('CODES', '0').split()
runs = sum(json.loads(line)[0] == 'tformer' for line in open(os.environ['CALLS']))
sys.exit(int(codes[min(runs, len(codes)) - 1]))
""",
    'gcloud': """
command = [x.removeprefix('--command=') for x in arguments if x.startswith('--command=')]
if 'describe' in arguments:
    sys.exit(int(os.environ['ABSENT']))
if command and 'tformer train' in command[0]:
    sys.exit(subprocess.call(['bash', '-c', command[0].replace('.venv/bin/', ''), 'vm'], cwd=os.environ['VM']))
""",
}


class Stubs:
    """A directory for PATH, with programs that note their calls."""

    def __init__(self, place: pathlib.Path):
        self._calls = place / 'calls'
        self._calls.touch()
        self.place = place / 'bin'
        self.place.mkdir()
        for name, body in STUBS.items():
            (self.place / name).write_text(STUB + body)
            (self.place / name).chmod(0o755)
        path = os.pathsep.join([str(self.place), os.environ['PATH']])
        self.environment = {**os.environ, 'PATH': path, 'CALLS': str(self._calls)}

    def run(self, *command: object, **environment: str) -> subprocess.CompletedProcess:
        """Runs a command among the stubs."""
        words = [str(word) for word in command]
        env = self.environment | environment
        return subprocess.run(words, env=env, cwd=self.place.parent, capture_output=True, text=True, timeout=HANG)

    def calls(self, name: str) -> list[list[str]]:
        """The arguments of every call of a program, in turn."""
        calls = [json.loads(line) for line in self._calls.read_text().splitlines()]
        return [call[1:] for call in calls if call[0] == name]


def outlives(pid: int) -> bool:
    """Whether a process that is to end still runs after a minute; one that is not waited for has ended."""
    for _ in range(1200):
        try:
            state = pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]
        except OSError:
            return False
        if state == 'Z':
            return False
        time.sleep(0.05)
    return True
