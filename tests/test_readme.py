"""The README says what the code is."""

import ast
import pathlib
import re

import pytest

from tformer import choices

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
    assert choices.ablation_table() in README


def test_every_field_is_explained() -> None:
    for line in choices.ablation_table().splitlines()[2:]:
        field, _, _, meaning = (cell.strip() for cell in line.replace('\\|', '').strip('|').split('|'))
        assert meaning, field
