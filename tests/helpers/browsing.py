"""Pages in headless Chromium, whose console must stay clean."""

import pathlib
import shutil
import subprocess

import pytest

from lives import HANG

FLAGS = (
    'headless no-sandbox disable-gpu disable-background-networking disable-component-update disable-sync no-first-run '
    'enable-logging=stderr dump-dom'
).split()

needs_chromium = pytest.mark.skipif(shutil.which('chromium') is None, reason='chromium is not installed')


def opened(address: str, profile: pathlib.Path, width: int = 1280, milliseconds: int = 5000) -> str:
    """Returns the document of a page after so many milliseconds of its time, in a window `width` pixels wide."""
    given = f'user-data-dir={profile} window-size={width},900 virtual-time-budget={milliseconds}'.split()
    command = ['chromium', *[f'--{flag}' for flag in [*FLAGS, *given]], address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=True)
    assert 'CONSOLE' not in done.stderr, done.stderr
    return done.stdout
