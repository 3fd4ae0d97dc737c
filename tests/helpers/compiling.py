"""Runs a helper in a process of its own, which sees the compiler of an accelerator."""

import json
import os
import subprocess
import sys
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
    path = os.pathsep.join(map(str, [ROOT, devices.folder(_parts(device)[0])]))  # JAX looks there when it is imported
    ran = subprocess.run(
        [sys.executable, str(HELPERS / helper), device],
        cwd=ROOT,
        env={**os.environ, 'PYTHONPATH': path, 'XLA_FLAGS': ''},
        capture_output=True,
        text=True,
        timeout=4 * HANG,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return list(map(json.loads, ran.stdout.splitlines()))


def _parts(device: str) -> tuple[str, ...]:
    return ('cuda', 'cudnn') if devices.Target.parse(device).device.platform == 'cuda' else ('tpu',)
