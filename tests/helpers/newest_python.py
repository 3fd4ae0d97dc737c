"""Prints the newest Python of this machine that the project supports; nothing where none is newer than this one."""

import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

NEWEST = 13  # of 3.x: the newest that every dependency has wheels for
CODE = 'import ensurepip, sys; sys.exit(sys.version_info[:2] != (3, {}))'


def candidates(minor: int) -> Iterator[str]:
    yield from filter(None, [shutil.which(f'python3.{minor}')])
    yield from map(str, pathlib.Path.home().glob(f'.pyenv/versions/3.{minor}.*/bin/python3'))


def find() -> str:
    """Returns the path of the newest one that runs, or ''."""
    for minor in range(NEWEST, sys.version_info.minor, -1):
        for path in candidates(minor):
            if subprocess.run([path, '-c', CODE.format(minor)], capture_output=True).returncode == 0:
                return path
    return ''


if __name__ == '__main__':
    print(find())
