"""Recipes at their smoke size on small data, and the numbers that a workdir records."""

import json
import pathlib

import toy_data
from lives import environment
from places import ROOT
from tformer import checks, config

DATA = {'classify': toy_data.labelled, 'translate': toy_data.parallel}

ENVIRONMENT = environment()


def overrides(recipe: str, place: pathlib.Path) -> dict[str, str]:
    name = recipe.split('.')[0]
    made = {'data.path': str(DATA[name](place / 'data'))} if name in DATA else {}
    return {'mesh.data': '1', 'decode.max_len': '8', **made}


def load(recipe: str, place: pathlib.Path, **more: str) -> config.Config:
    changed = {**overrides(recipe, place), **{name.replace('__', '.'): value for name, value in more.items()}}
    return checks.settled(config.load(f'{ROOT}/configs/{recipe}', changed))


def scores(workdir: pathlib.Path) -> dict[str, dict[str, float]]:
    """Returns what result.json holds besides measured times."""
    found = json.loads((workdir / 'result.json').read_text())
    assert found.pop('wall_time')['total'] > 0
    return found


def numbers(workdir: pathlib.Path) -> list[dict[str, float]]:
    """Returns the rows of metrics.jsonl without what a clock measures."""
    rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
    return [{k: v for k, v in row.items() if 'per_second' not in k and k != 'train/mfu'} for row in rows]
