"""The README and the pages of docs/ say what the code is: commands, fields, files, links and Python in them work."""

import ast
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

import lives
import recipes
from places import ROOT
from tformer import checks, commands, config, errors

sys.path.insert(0, str(ROOT / 'docs'))
import generated_pages

WRITTEN = sorted(
    [*ROOT.glob('*.md'), *(path for path in (ROOT / 'docs').rglob('*.md') if 'build' not in path.parts)],
    key=lambda path: path.relative_to(ROOT).as_posix(),
)
NAMES = [path.relative_to(ROOT).as_posix() for path in WRITTEN]
TEXTS = dict(zip(NAMES, (path.read_text() for path in WRITTEN), strict=True))
TUTORIAL = ROOT / 'docs' / 'tutorial.ipynb'
FENCE = re.compile(r'^```(\w*)\n(.*?)^```$', re.MULTILINE | re.DOTALL)
MISSING = {'configs/sweeps/mine.py', 'configs/sweeps/rates.py'}  # files that the reader writes
PLACES = re.findall(r'\| `(\S+?\.py):(\w+)` \|', TEXTS['docs/design.md'])
TABLES = [
    (file, name)
    for names, file in re.findall(r'\| (`[A-Z_`, ]+`) \| `(\S+\.py)` \|', TEXTS['docs/how-to/extend.md'])
    for name in re.findall(r'`(\w+)`', names)
]


def blocks(text: str, *languages: str) -> list[str]:
    """Returns the fenced blocks of these languages."""
    return [code for language, code in FENCE.findall(text) if language in languages]


def inline(text: str) -> list[str]:
    """Returns the inline code of a text; a line break in it is a space."""
    return [' '.join(code.split()) for code in re.findall(r'`([^`]+)`', FENCE.sub('', text))]


def command_lines() -> Iterator[tuple[str, str]]:
    """Yields (page, command line) for each command of tformer that a page shows."""
    for name, text in TEXTS.items():
        for code in blocks(text, 'sh', ''):
            for line in code.replace('\\\n', ' ').splitlines():
                found = re.match(r'(?:\$ )?(?:\.venv/bin/)?tformer (.*)', line)
                if found:
                    yield name, found[1]
        for code in inline(text):
            if code.startswith('tformer ') and code.split()[1] in commands.COMMANDS:
                yield name, code.removeprefix('tformer ')


# ------------------------------------------------------------------------------------------------------------ the text


@pytest.mark.parametrize('name', NAMES)
def test_lines_are_short(name: str) -> None:
    assert [line for line in TEXTS[name].splitlines() if len(line) > 120] == []


def test_the_readme_is_short() -> None:
    assert len(TEXTS['README.md'].splitlines()) <= 200


@pytest.mark.parametrize('name', NAMES)
def test_links_resolve(name: str) -> None:
    for target in re.findall(r'\]\(([^)\s]+)\)', FENCE.sub('', TEXTS[name])):
        if target.startswith('http'):
            continue
        path, _, anchor = target.partition('#')
        place = (ROOT / name).parent / path if path else ROOT / name
        relative = os.path.relpath(place, ROOT / 'docs')
        assert place.exists() or relative in generated_pages.PAGES, target
        if anchor and place.suffix == '.md' and place.exists():
            text = place.read_text()
            slugs = [re.sub(r'[^\w\- ]', '', line).strip().lower().replace(' ', '-') for line in headings(text)]
            assert anchor in slugs or f'id="{anchor}"' in text, target


def headings(text: str) -> list[str]:
    return re.findall(r'^#+ (.*)$', FENCE.sub('', text), re.MULTILINE)


@pytest.mark.parametrize('name', NAMES)
def test_files_that_are_named_exist(name: str) -> None:
    for code in inline(TEXTS[name]):
        for path in re.findall(r'(?<![\w/.])((?:tformer|tests|configs|launch|docs)/[\w/.-]*\w)', code):
            assert path in MISSING or (ROOT / path).exists(), path


def test_make_has_the_targets_that_are_named() -> None:
    targets = set(re.findall(r'^([\w-]+):', (ROOT / 'Makefile').read_text(), re.MULTILINE))
    for name, text in TEXTS.items():
        lines = [line for code in blocks(text, 'sh') for line in code.splitlines()]
        for code in (*inline(text), *lines):
            if found := re.match(r'make (\w+)', code):
                assert found[1] in targets, (name, code)


@pytest.mark.parametrize(('file', 'name'), [*PLACES, *TABLES])
def test_the_map_of_the_code_points_at_what_exists(file: str, name: str) -> None:
    defined = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    assert name in defined


def test_the_map_of_the_code_is_there() -> None:
    assert len(PLACES) >= 40 and len(TABLES) >= 14


# -------------------------------------------------------------------------------------------------- commands and fields


@pytest.mark.parametrize(('page', 'line'), sorted(set(command_lines())))
def test_a_command_line_is_what_the_commands_take(page: str, line: str) -> None:
    """Its command, its flags and its fields exist, and its config loads with them if the file is in the repository."""
    name, *words = shlex.split(re.sub(r'\[(--[^\]]*)\]', r'\1', line), comments=True)
    command = commands.COMMANDS[name]
    spec, overrides, positional = None, {}, []
    for word in words:
        flag, equals, value = word.lstrip('-').partition('=')
        if word.startswith('--config.'):
            assert equals, word
            overrides[flag.removeprefix('config.')] = value
        elif word.startswith('--'):
            assert flag in command.flags, word
            spec = value if flag == 'config' else spec
        elif word not in ('|', 'or', '...'):
            positional.append(word)
    assert not positional or command.arguments is not None, positional
    assert set(overrides) <= set(config.field_types())
    if spec and spec.startswith('configs/') and name != 'sweep' and '...' not in spec:
        overrides.pop('extensions', None)  # a file that the reader writes
        config.override(config.load(str(ROOT / spec)), overrides)
    elif spec and spec.startswith('configs/') and spec not in MISSING and '...' not in spec:
        assert (ROOT / spec.partition(':')[0]).exists()


def test_many_command_lines_are_found() -> None:
    assert len(set(command_lines())) >= 30


@pytest.mark.parametrize('name', NAMES)
def test_fields_that_are_named_exist(name: str) -> None:
    fields = set(config.field_types())
    sections = '|'.join(sorted({field.partition('.')[0] for field in fields}))
    if name == 'CHANGELOG.md':
        return
    for code in (*inline(TEXTS[name]), *blocks(TEXTS[name], 'sh', '')):
        for field in re.findall(rf'--config\.(\w+\.\w+)|^((?:{sections})\.(?!py$)\w+)(?:=|$)', code):
            assert ''.join(field) in fields, code


def test_the_reference_has_every_field_with_its_meaning() -> None:
    page = generated_pages.config_page()
    table = checks.ablation_table().splitlines()[2:]
    assert {line.split('`')[1] for line in table} | {'extensions'} == set(config.field_types())
    assert '## extensions\n' in page
    for line in table:
        assert line in page
        field, _, _, meaning = (cell.strip() for cell in line.replace('\\|', '').strip('|').split('|'))
        assert meaning, field


def test_the_reference_has_every_command_with_its_flags() -> None:
    page = generated_pages.commands_page()
    for name, command in commands.COMMANDS.items():
        assert f'## {name}\n' in page and f'| {command.summary} |' in page
        assert all(f'--{flag}' in page for flag in command.flags)


def test_the_reference_has_every_public_name() -> None:
    page = generated_pages.api_page()
    for name in ('build', 'train', 'generate', 'Run', 'Config'):
        assert re.search(rf'^::: tformer\.[\w.]*\b{name}$', page, re.MULTILINE), name


def test_the_error_that_the_reference_shows_is_the_commands() -> None:
    with pytest.raises(errors.UserError, match=re.escape("'rmsnrom' is unknown; did you mean 'rmsnorm'?")):
        checks.check(config.override(config.load(str(ROOT / 'configs/g2p.py')), {'model.norm': 'rmsnrom'}))


def test_every_recipe_is_listed() -> None:
    section = TEXTS['docs/reference/recipes.md'].partition('## Recipes')[2].partition('\n## ')[0]
    assert {file for file in recipes.FILES if '/' not in file} == set(re.findall(r'`(\w+)\.py`', section))
    for name, argument in re.findall(r'`(\w+)\.py(:\w+)', section):
        checks.check(recipes.load(f'{name}{argument}'))


# -------------------------------------------------------------------------------------------------------------- Python


def python_blocks() -> list[tuple[str, str]]:
    return [(name, code) for name, text in TEXTS.items() for code in blocks(text, 'python')]


def test_every_python_block_is_run_by_a_test() -> None:
    """The sweep and the ten lines here, the parts to add in test_recipes.py."""
    extend = blocks(TEXTS['docs/how-to/extend.md'], 'python')
    for name, code in python_blocks():
        ran = ('def get_sweep', 'tformer.load_config', 'def star_relu')
        assert code in extend or any(part in code for part in ran), (name, code)


def test_the_same_sweep_is_shown_everywhere() -> None:
    (code,) = {code for _, code in python_blocks() if 'def get_sweep' in code and 'search(' not in code}
    assert len([line for line in code.splitlines() if line.strip()]) < 10 and code.count(':demo') == 1


def run(arguments: list[str], folder: pathlib.Path) -> str:
    """Runs Python in a folder, as a user does; returns what it printed."""
    env = lives.environment() | {'MPLBACKEND': 'agg'}
    ran = subprocess.run([sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.proof
def test_the_lines_of_python_run(tmp_path: pathlib.Path) -> None:
    shutil.copytree(ROOT / 'configs', tmp_path / 'configs')
    run(['-m', 'tformer', 'train', '--config=configs/g2p.py:smoke', '--workdir=runs/demo'], tmp_path)
    codes = {code for _, code in python_blocks() if 'tformer.load_config' in code}
    assert codes
    for code in codes:
        run(['-c', code], tmp_path)


def test_the_sizes_of_caches_are_what_the_lines_beside_them_print(capsys: pytest.CaptureFixture[str]) -> None:
    page = TEXTS['docs/how-to/memory.md']
    (code,) = blocks(page, 'python')
    exec(code.replace("'configs/", f"'{ROOT}/configs/"), {})
    rows = re.findall(r'\| ([\d,]+) \| ([\d.]+) GiB \|', page)
    printed = [int(line) for line in capsys.readouterr().out.split()]
    assert [(f'{number:,}', f'{number * 2 * 8 * 4096 / 2**30:g}') for number in printed] == rows and len(rows) == 4


@pytest.mark.slow
def test_files_from_outside_the_package_add_their_rows(tmp_path: pathlib.Path) -> None:
    """As the page shows them: one run trains on an activation, a source, an optimizer and a schedule, one on a loss."""
    files = dict(
        re.findall(r'`(my_\w+\.py)`(?:\.|:)\n\n```python\n(.*?)```', TEXTS['docs/how-to/extend.md'], re.DOTALL)
    )
    assert sorted(files) == ['my_activation.py', 'my_objective.py', 'my_source.py', 'my_training.py']
    for name, code in files.items():
        (tmp_path / name).write_text(code)

    def train(recipe: str, workdir: str, fields: dict[str, str]) -> None:
        flags = [f'--config.{field}={value}' for field, value in fields.items()]
        run(['-m', 'tformer', 'train', f'--config={ROOT}/configs/{recipe}', f'--workdir={workdir}', *flags], tmp_path)

    parts = {'model.activation': 'star_relu', 'data.source': 'squares', 'optimizer.name': 'signum'}
    chosen = {'extensions': 'my_activation.py,my_source.py,my_training.py', 'optimizer.schedule': 'triangle'}
    train('g2p.py:smoke', 'squares', {**parts, **chosen, 'train.num_steps': '2'})
    (tmp_path / 'train.tsv').write_text(''.join(f'{("even", "odd")[n % 2]}\tthe number {n}\n' for n in range(400)))
    labels = {'extensions': 'my_objective.py', 'data.path': 'train.tsv', 'train.objective': 'focal_classification'}
    train('classify.py:small', 'focal', {**labels, 'train.num_steps': '2', 'train.num_epochs': 'None'})
    scores = json.loads((tmp_path / 'focal' / 'result.json').read_text())['test']
    assert 0 < scores['loss'] < scores['nll']


@pytest.mark.proof
def test_the_tutorial_runs(tmp_path: pathlib.Path) -> None:
    cells = json.loads(TUTORIAL.read_text())['cells']
    code = '\n\n'.join(''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code')
    for field in re.findall(r"'((?:model|data|optimizer|train|mesh|decode|evaluate)\.\w+)'", code):
        assert field in config.field_types()
    shutil.copytree(ROOT / 'configs', tmp_path / 'configs')
    run(['-c', code], tmp_path)


@pytest.mark.proof
def test_the_first_sweep_that_is_shown_runs_to_its_report(tmp_path: pathlib.Path) -> None:
    """As it stands there, at the recipe's smallest size."""
    code = next(code for _, code in python_blocks() if 'def get_sweep' in code and 'search(' not in code)
    (tmp_path / 'sweeps').mkdir()
    (tmp_path / 'sweeps' / 'mine.py').write_text(code.replace(':demo', ':smoke'))
    shutil.copy(ROOT / 'configs' / 'g2p.py', tmp_path)
    run(['-m', 'tformer', 'sweep', '--config=sweeps/mine.py', '--workdir=runs/mine', '--parallel=2'], tmp_path)
    report = (tmp_path / 'runs' / 'mine' / 'report.md').read_text()
    assert '1 arm against `baseline`, by test loss (lower is better). 6 trials: 6 done.' in report
    assert '- `norm=rmsnorm`: test loss ' in report and ' by Dunnett): ' in report


@pytest.mark.proof
def test_the_first_search_that_is_shown_runs_to_its_report(tmp_path: pathlib.Path) -> None:
    """As it stands there, at the recipe's smallest size and nine steps."""
    pytest.importorskip('optuna')
    (code,) = blocks(TEXTS['docs/how-to/search.md'], 'python')
    (tmp_path / 'sweeps').mkdir()
    (tmp_path / 'sweeps' / 'rates.py').write_text(code.replace(':demo', ':smoke'))
    shutil.copy(ROOT / 'configs' / 'g2p.py', tmp_path)
    longer = ['--config.train.num_steps=9', '--config.train.eval_every=1']
    run(['-m', 'tformer', 'sweep', '--config=sweeps/rates.py', '--workdir=runs/rates', *longer], tmp_path)
    report = (tmp_path / 'runs' / 'rates' / 'report.md').read_text()
    assert '1 arm against `baseline`, by test loss (lower is better). 10 trials: 10 done.' in report
    assert '`asha` paused them at rungs: 27 reached step 1, ' in report and '| `optimizer.learning_rate` | ' in report
    assert ' with 5 fresh seeds. The searched runs decide nothing' in report


@pytest.mark.proof
def test_the_site_builds_without_a_broken_link(tmp_path: pathlib.Path) -> None:
    pytest.importorskip('mkdocs')
    pytest.importorskip('mkdocs_jupyter')
    pytest.importorskip('mkdocstrings')
    env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'NO_MKDOCS_2_WARNING': 'true'}
    command = [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--quiet', f'--site-dir={tmp_path / "site"}']
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / 'site' / 'reference' / 'config' / 'index.html').exists()
