"""The README says what the code is."""

import ast
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tformer import checks

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / 'README.md').read_text()
PLACES = re.findall(r'\| `(\S+?\.py):(\w+)` \|', README)


@pytest.mark.parametrize(('file', 'name'), PLACES)
def test_the_map_points_at_what_exists(file: str, name: str) -> None:
    defined = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    assert name in defined


def test_the_map_is_there() -> None:
    assert len(PLACES) >= 15


def test_the_ablation_table_is_the_codes() -> None:
    assert checks.ablation_table() in README


def test_every_field_is_explained() -> None:
    for line in checks.ablation_table().splitlines()[2:]:
        field, _, _, meaning = (cell.strip() for cell in line.replace('\\|', '').strip('|').split('|'))
        assert meaning, field


@pytest.mark.slow
def test_the_first_sweep_that_it_shows_runs_to_its_report(tmp_path: pathlib.Path) -> None:
    """As it stands there, at the recipe's smallest size."""
    (text,) = (block for block in re.findall(r'```python\n(.*?)```', README, re.S) if 'def get_sweep' in block)
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) < 10 and text.count(':demo') == 1
    (tmp_path / 'sweeps').mkdir()
    (tmp_path / 'sweeps' / 'mine.py').write_text(text.replace(':demo', ':smoke'))
    shutil.copy(ROOT / 'configs' / 'g2p.py', tmp_path)
    command = [
        sys.executable,
        '-m',
        'tformer',
        'sweep',
        '--config=sweeps/mine.py',
        '--workdir=runs/mine',
        '--parallel=2',
    ]
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''}
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = (tmp_path / 'runs' / 'mine' / 'report.md').read_text()
    assert '1 arm against `baseline`, by test loss (lower is better). 6 trials: 6 done.' in report
    assert '- `norm=rmsnorm`: test loss ' in report and ' by Holm): ' in report
