"""Runs the tests that send signals or kill, again and again, beside processes that keep every core busy.

    python tests/helpers/steady.py [TIMES [PYTEST_ARGUMENT ...]]

Proofs run a tenth as often as the others, which run TIMES times. It is a plugin of pytest, too, which gives each test
its repetitions: what several tests share is made once.
"""

import os
import pathlib
import subprocess
import sys

import pytest

TIMES = 'TFORMER_STEADY_TIMES'
BUSY = 'import os; parent = os.getppid()\nwhile os.getppid() == parent: pass'  # ends with whoever started it


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker('signals'):
        metafunc.fixturenames.append('repetition')
        metafunc.parametrize('repetition', range(1, int(os.environ[TIMES]) + 1))


def main(times: str = '30', *arguments: str) -> int:
    here = pathlib.Path(__file__).parent
    paths = os.pathsep.join(filter(None, [str(here), os.environ.get('PYTHONPATH')]))
    busy = [subprocess.Popen([sys.executable, '-c', BUSY]) for _ in range(os.cpu_count() or 1)]
    try:
        for kind, count in (('not proof', int(times)), ('proof', -(-int(times) // 10))):
            command = [sys.executable, '-m', 'pytest', '-p', 'steady', '-n', '2', '-m', f'signals and {kind}']
            environment = {**os.environ, 'PYTHONPATH': paths, TIMES: str(count)}
            code = subprocess.call([*command, *arguments], env=environment, cwd=here.parents[1])
            if code not in (0, 5):  # 5: the arguments choose none of this kind
                return code
        return 0
    finally:
        for each in busy:
            each.kill()


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
