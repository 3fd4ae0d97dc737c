"""Which share of the suite's time each test file may take; the stored shares put long files first, too.

A share is measured in one run, so it says the same on a fast and on a slow machine. Quick tests, slow ones and proofs
are counted apart. `python -m pytest -n 2 --store-shares` writes the table anew.
"""

import json
import pathlib
from collections.abc import Mapping

STORED = pathlib.Path(__file__).with_suffix('.json')
Seconds = Mapping[str, Mapping[str, float]]  # by kind and file


def load() -> dict[str, dict[str, float]]:
    return json.loads(STORED.read_text())


def shares(seconds: Seconds) -> dict[str, dict[str, float]]:
    """Returns the percentage that each file takes of the time of its kind."""
    return {
        kind: {file: 100 * spent / sum(files.values()) for file, spent in files.items()}
        for kind, files in seconds.items()
        if files
    }


def store(seconds: Seconds) -> None:
    rounded = {
        kind: {file: round(share, 1) for file, share in sorted(files.items(), key=lambda item: -item[1])}
        for kind, files in shares(seconds).items()
    }
    STORED.write_text(json.dumps(rounded, indent=2) + '\n')


def outgrown(seconds: Seconds, allowed: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Returns a line for each file whose share is half as large again as allowed, and two percent more."""
    lines = []
    for kind, files in shares(seconds).items():
        for file, share in files.items():
            stated = allowed.get(kind, {}).get(file, 0)
            if share > 1.5 * stated + 2:
                lines.append(f'{file} takes {share:.1f} % of the time of the {kind} tests; its share is {stated:.1f} %')
    return lines
