"""The files under configs/, and the arguments that each takes."""

import ast
import re

import pytest

from places import ROOT
from tformer import checks, config
from tformer.errors import UserError

FOLDER = ROOT / 'configs'
EVERY = sorted(str(path.relative_to(FOLDER).with_suffix('')) for path in FOLDER.rglob('*.py'))
SWEEPS = [file for file in EVERY if file.startswith('sweeps/')]
FILES = [file for file in EVERY if file not in SWEEPS]


def load(recipe: str, **fields: object) -> config.Config:
    """Returns the config of e.g. 'glue:sst2,smoke', with fields changed: data__path='...', as a command loads it."""
    changed = {name.replace('__', '.'): value for name, value in fields.items()}
    return checks.settle(config.override(stated(recipe), changed), changed, say=lambda line: None)


def stated(recipe: str) -> config.Config:
    """Returns the config of a recipe with the fields that have no effect in it."""
    file, _, arguments = recipe.partition(':')
    return config.load(f'{FOLDER}/{file}.py:{arguments}')


def arguments(file: str) -> tuple[str, ...]:
    """Returns every argument of a recipe, as its own error message lists them."""
    with pytest.raises(UserError) as error:
        load(f'{file}:?')
    listed = re.search(r'\(valid: (.*)\)', str(error.value))
    assert listed
    return ast.literal_eval(f'({listed[1]},)')


def header(file: str) -> str:
    """Returns a recipe's docstring."""
    return ast.get_docstring(ast.parse((FOLDER / f'{file}.py').read_text())) or ''
