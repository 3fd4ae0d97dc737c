"""Imports run one way, without a cycle; what must stay out of a run stays out."""

import ast
import graphlib
import os
import subprocess
import sys

import pytest

import lives
from lives import HANG
from places import ROOT

# From the bottom up. A file imports from its own part of the package and from the lines before, nothing else.
ORDER = [
    ('atomic', 'errors'),
    ('config',),
    ('data', 'distributed'),
    ('layers',),
    ('model', 'objectives', 'optim', 'hf'),
    ('decode', 'evaluation'),
    ('checks',),
    ('training',),
    ('lab',),
    ('commands',),
    ('__main__',),
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}

NEVER = [  # (who, whom), by the beginning of a module's name
    ('tformer.config', 'jax'),
    ('tformer.config', 'flax'),
    ('tformer.data', 'jax'),
    ('tformer.data', 'flax'),
    ('tformer.evaluation.scores', 'jax'),
    ('tformer.evaluation.text_scores', 'jax'),
    ('tformer.layers', 'tformer.model'),
    ('tformer.training', 'tformer.decode'),
    ('tformer.evaluation', 'tformer.decode'),
    ('tformer', 'tensorflow'),
    ('tformer', 'torch'),
]


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


MODULES = {module_name(path): path for path in sorted((ROOT / 'tformer').rglob('*.py'))}


def imports(name):
    """Returns every module that a file names in an import, wherever the import stands."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f'{name}: a relative import'
            submodules = {f'{node.module}.{alias.name}' for alias in node.names}
            inside = submodules & set(MODULES)
            found |= inside if len(inside) == len(submodules) else inside | {node.module}
    return found


def part(name):
    """Returns the part of the package that a module belongs to, '' for the package itself."""
    return name.split('.')[1] if '.' in name else ''


def begins(name, with_):
    return name == with_ or name.startswith(with_ + '.')


def test_the_package_has_few_rooms() -> None:
    rooms = {path.name for path in (ROOT / 'tformer').iterdir()} - {'__pycache__'}
    assert len(rooms) <= 18, sorted(rooms)


def test_every_part_of_the_package_has_its_place():
    assert {part(name) for name in MODULES} - {''} == set(RANK)
    top = [
        node for node in ast.parse(MODULES['tformer'].read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert [ast.unparse(node) for node in top] == ['import importlib', 'from typing import TYPE_CHECKING, Any']


@pytest.mark.parametrize('name', [name for name in MODULES if name != 'tformer'])
def test_imports_run_one_way(name):
    ours = {other for other in imports(name) if begins(other, 'tformer')}
    assert ours <= set(MODULES)
    assert not [other for other in ours if part(other) != part(name) and RANK[part(other)] >= RANK[part(name)]]


@pytest.mark.slow
def test_no_module_imports_what_it_never_may():
    for who, whom in NEVER:
        assert any(begins(name, who) for name in MODULES)
        for name in MODULES:
            if begins(name, who):
                assert not [other for other in imports(name) if begins(other, whom)], name


def test_no_cycle():
    graph = {name: imports(name) & set(MODULES) for name in MODULES}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(MODULES)


# ------------------------------------------------------------------------------------------------ at run time
def python(code, *args, **environment):
    """Runs code in an interpreter of its own and returns what it prints last."""
    ran = subprocess.run(
        [sys.executable, '-c', code, *map(str, args)],
        cwd=ROOT,
        env={**lives.environment(), **environment},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()[-1]


LOADED = "print(sorted({name.split('.')[0] for name in sys.modules} & {'jax', 'flax', 'tensorflow', 'torch'}))"


def test_importing_the_package_or_reading_a_config_loads_no_jax():
    assert python(f'import sys, tformer; {LOADED}') == '[]'
    assert python(f'import sys, tformer.config, tformer.__main__; {LOADED}') == '[]'


# What no command may load that has no use for it: each takes from tens of milliseconds to seconds.
SELDOM = """
    tensorflow tensorflow_datasets torch transformers tokenizers huggingface_hub
    scipy sklearn pandas matplotlib IPython
    sacrebleu rapidfuzz jinja2 markdown_it pyarrow starlette uvicorn optuna wandb mlflow
""".split()
BEFORE_USE = [
    *SELDOM,
    'grain',
    'orbax',
    'tensorstore',
    'tensorboardX',
]  # in addition, until data or checkpoints are read
SEEN = "print(sorted({name.split('.')[0] for name in sys.modules} & set(sys.argv[-1].split())))"


@pytest.mark.slow
def test_train_evaluate_and_generate_import_nothing_that_is_slow_before_they_use_it():
    names = ', '.join(f'tformer.commands.{name}' for name in ('train', 'evaluate', 'generate', 'inspect'))
    assert python(f'import sys, {names}; {SEEN}', ' '.join(BEFORE_USE)) == '[]'


def test_what_is_told_without_work_imports_no_numerical_library():
    told = 'from tformer import __main__ as line; line.parse(["tformer", "train", "--workdir=a"])'
    assert python(f'import sys; {told}; {SEEN}', 'jax flax optax numpy ml_collections') == '[]'


TRAIN = f"""
import sys
from tformer import checks, config
from tformer.commands import train as train_command
cfg = config.load('configs/g2p.py:smoke')
checks.check_here(cfg)
train_command.train_and_evaluate(cfg, sys.argv[1])
{SEEN}
"""


@pytest.mark.proof
def test_training_loads_neither_tensorflow_nor_torch_where_both_are_installed_nor_what_else_it_needs_not(tmp_path):
    """Empty packages of their names stand in front of any real ones: whoever tries to import them, gets them."""
    for name in ('tensorflow', 'torch'):
        (tmp_path / 'packages' / name).mkdir(parents=True)
        (tmp_path / 'packages' / name / '__init__.py').write_text('')
    packages = os.pathsep.join(filter(None, [str(tmp_path / 'packages'), os.environ.get('PYTHONPATH')]))
    assert python(f'import sys, torch, tensorflow; {LOADED}', PYTHONPATH=packages) == "['tensorflow', 'torch']"
    unused = [name for name in SELDOM if name not in ('rapidfuzz', 'scipy')]  # the recipe's metrics compare texts
    assert python(TRAIN, tmp_path / 'run', ' '.join(unused), PYTHONPATH=packages) == '[]'
