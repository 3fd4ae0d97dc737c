"""A Python with Apache Beam beside the packages of this one, which must not have those that Beam asks for."""

import pathlib
import subprocess
import sys
import sysconfig

import pytest

from lives import HANG
from places import ROOT

PLACE = ROOT / 'build' / 'beam'


def interpreter() -> str:
    """Returns a Python that imports Beam, from an environment that is made once; skips the test where there is none."""
    python = PLACE / 'bin' / 'python'
    if not (PLACE / 'ready').exists():
        subprocess.run([sys.executable, '-m', 'venv', '--clear', str(PLACE)], check=True, timeout=HANG)
        install = [str(python), '-m', 'pip', 'install', '--quiet', 'apache-beam>=2.60']
        try:
            subprocess.run(install, check=True, capture_output=True, timeout=HANG)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f'apache-beam cannot be installed: {error}')
        own = subprocess.run([str(python), '-c', 'import site; print(site.getsitepackages()[0])'],
                             check=True, capture_output=True, text=True)  # fmt: skip
        pathlib.Path(own.stdout.strip(), 'of_tformer.pth').write_text(sysconfig.get_paths()['purelib'] + '\n')
        (PLACE / 'ready').touch()
    return str(python)
