"""The table of generation on a CPU: its arithmetic, and its processes at tiny shapes."""

import re
import subprocess
import sys

import pytest

import generation_on_cpu
from places import ROOT
from talking_sides import Talking, put


def test_rates_are_tokens_by_seconds_and_the_ratio_is_that_of_the_same_work(monkeypatch) -> None:
    """32 texts of 48 tokens in 0.5 s and in 1.5 s."""
    sides = Talking({'version': 'jax 1'}, 0.5), Talking({'version': 'other 2'}, 1.5)
    put(monkeypatch, *sides)
    (row,) = generation_on_cpu.rows('mt_small', 3, tiny=False)
    assert row.markdown() == (
        '| mt_small, 4 beams | 3,072 tokens/s |  | 1,024 tokens/s, other 2 | 3.00 (3.00 to 3.00) |'
    )
    assert all(side.asked == [('calls', 1)] * 3 for side in sides)


@pytest.mark.proof
def test_it_runs_with_the_libraries_that_are_installed() -> None:
    script = ROOT / 'tests' / 'accelerator' / 'generation_on_cpu.py'
    ran = subprocess.run([sys.executable, str(script), '--tiny', '--pairs=1'], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    absent = set(re.findall(r'cpu_side (\w+) \w+ tiny is left out', ran.stderr))
    beside = set(re.findall(r'tokens/s, (\w+) ', ran.stdout))
    assert absent | beside == {'transformers', 'ctranslate2'} and 'tformer' not in absent
