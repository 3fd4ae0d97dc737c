"""Runs a helper in a process of its own, which sees the compiler of an accelerator."""

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

from lives import HANG
from places import HELPERS, ROOT
from tformer.distributed import devices

TARGETS = ('v5e:2x4', 'h100:8')


def installed(device: str) -> bool:
    """Returns whether the compiler of a device is in the folder where `make compilers` puts it."""
    return all(devices.folder(part).is_dir() for part in _parts(device))


def rows(device: str, helper: str) -> list[dict[str, Any]]:
    """Returns what a helper prints of a device: a row for each case."""
    ran = subprocess.run(**_process(device, helper), capture_output=True, timeout=4 * HANG)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return list(map(json.loads, ran.stdout.splitlines()))


@contextlib.contextmanager
def asked(device: str) -> Iterator[Callable[[str, str], dict[str, Any]]]:
    """Yields a function that returns the row of `ahead.py` for a mesh and a family, compiled when it is first asked
    for, all in one process."""
    with (
        tempfile.TemporaryFile('w+') as errors,
        subprocess.Popen(**_process(device, 'ahead.py'), stdin=-1, stdout=-1, stderr=errors) as ahead,
    ):
        limit = threading.Timer(4 * HANG, ahead.kill)
        limit.daemon = True
        limit.start()

        @functools.cache
        def row(mesh: str, family: str) -> dict[str, Any]:
            with contextlib.suppress(BrokenPipeError):  # it has ended, and says why
                print(mesh, family, file=ahead.stdin, flush=True)
            printed = ahead.stdout.readline()
            if not printed:
                errors.seek(0)
                raise AssertionError(errors.read()[-3000:])
            return json.loads(printed)

        yield row
        limit.cancel()


def _process(device: str, helper: str) -> dict[str, Any]:
    path = os.pathsep.join(map(str, [ROOT, devices.folder(_parts(device)[0])]))  # JAX looks there when it is imported
    environment = {**os.environ, 'PYTHONPATH': path, 'XLA_FLAGS': ''}
    return {'args': [sys.executable, str(HELPERS / helper), device], 'cwd': ROOT, 'env': environment, 'text': True}


def _parts(device: str) -> tuple[str, ...]:
    return ('cuda', 'cudnn') if devices.Target.parse(device).device.platform == 'cuda' else ('tpu',)
