"""What the accelerators' compilers make of the strategies, stored, so that a change that nobody meant has a name.

    TFORMER_COMPILERS=build/compilers python tests/helpers/fingerprints.py    # compiles all and stores them anew

A fingerprint is the numbers of a compiled train step, by name: operations of its products, peak bytes, collectives by
axes and their bytes, kernels, and the instructions that it runs by kind. They hold for one version of a compiler.
"""

import importlib.metadata
import json
from collections.abc import Mapping
from typing import Any

import ahead
import compiling
from places import TESTS

STORED = TESTS / 'reference' / 'programs.json'
Fingerprint = Mapping[str, float]


def version() -> str:
    """Returns the version of JAX, which names that of each compiler."""
    return importlib.metadata.version('jax')


def fingerprint(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the fingerprint of a row that `ahead.py` prints."""
    found = {'operations': row['flops'], 'peak bytes': row['peak_bytes']}
    for each in row['collectives']:
        name = f'{each["kind"]} over {"+".join(each["axes"])}'
        found |= {name: each['count'], f'bytes of {name}': each['bytes']}
    return found | row['kernels'] | row['instructions']


def changes(stored: Fingerprint, found: Fingerprint) -> list[str]:
    """Returns a line for each number that differs; one that only one of them has is 0 in the other."""
    names = sorted({*stored, *found})
    pairs = ((name, stored.get(name, 0), found.get(name, 0)) for name in names)
    return [f'{name}: {old:,.0f} -> {new:,.0f}' for name, old, new in pairs if old != new]


def load() -> dict[str, dict[str, Fingerprint]]:
    """Returns the stored fingerprints by device and case; none if they are of another version of JAX."""
    stored = json.loads(STORED.read_text())
    return stored['devices'] if stored['jax'] == version() else {}


def main() -> None:
    devices = {}
    for device in compiling.TARGETS:
        with compiling.asked(device) as program:
            devices[device] = {' '.join(case): fingerprint(program(*case)) for case in ahead.CASES}
    STORED.write_text(json.dumps({'jax': version(), 'devices': devices}, indent=1) + '\n')


if __name__ == '__main__':
    main()
