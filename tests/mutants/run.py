"""Runs every mutant: a small wrong edit to the library, against the tests that should notice it.

    python tests/mutants/run.py [--only=TEXT ...] [--jobs=2] [--write]

The mutants are the tables in tests/mutants/*.toml. Each one is applied in its own copy of the repository, and its tests
run there in a process of their own, with a compilation cache of their own; first, all tests must pass on the code as it
is, a part of them in each process. The last lines are a table of what caught each mutant. The exit code is 1 where one
survives, unless its row says why (`survives`). `--only` takes mutants with this text in their name or file, `--write`
writes docs/mutants.md.
"""

import argparse
import contextlib
import importlib
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import textwrap
import time
import tomllib
import traceback
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
PARTS = ('tformer', 'tests', 'configs', 'launch', 'docs', 'README.md', 'CHANGELOG.md', 'pyproject.toml', 'mkdocs.yml')
# Imported once, so that each process starts with them; the library itself is imported by each process alone.
HEAVY = (
    'pytest hypothesis jax flax.linen optax.contrib orbax.checkpoint grain sklearn.metrics scipy.stats sentencepiece'
)
# What is imported already cannot be rewritten for longer messages.
OPTIONS = ('-x', '-q', '-p', 'no:cacheprovider', '-W', 'ignore::pytest.PytestAssertRewriteWarning')
SURVIVED, BROKEN, LATE = 'SURVIVED', 'no test ran', 'the time limit'

# name, file, old, new, tests; survives: the reason why it may; seconds: its time limit. Without a file: no edit.
Mutant = dict[str, Any]


def load() -> list[Mutant]:
    """Returns the rows of all tables."""
    tables = sorted(pathlib.Path(__file__).parent.glob('*.toml'))
    return [row for table in tables for row in tomllib.loads(table.read_text())['mutant']]


def apply(mutant: Mutant, root: pathlib.Path) -> None:
    """Makes the edit in a copy of the repository."""
    file = root / mutant['file']
    text = file.read_text()
    assert text.count(mutant['old']) == 1, f'{mutant["name"]}: its text is not once in {mutant["file"]}'
    file.unlink()
    file.write_text(text.replace(mutant['old'], mutant['new']))
    for compiled in (file.parent / '__pycache__').glob(f'{file.stem}.*'):
        compiled.unlink()


def start(mutant: Mutant, place: pathlib.Path) -> int:
    """Starts a mutant's tests in a copy of the repository that has it; returns the process's id."""
    for part in (ROOT / name for name in PARTS):
        (shutil.copytree if part.is_dir() else shutil.copy2)(part, place / part.name)
    if 'file' in mutant:
        apply(mutant, place)
    process = os.fork()
    if process:
        return process
    os.setsid()
    output = os.open(place / 'output.txt', os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(place)
    sys.path[:] = [str(place), *(x for x in sys.path if pathlib.Path(x or '.').resolve() not in (ROOT, ROOT / 'tests'))]
    os.environ |= {'PYTHONPATH': str(place), 'TFORMER_TEST_COMPILATIONS': str(place / 'compilations')}
    code = 99
    try:
        found = importlib.import_module('tformer').__file__ or ''
        if found.startswith(str(place)):  # not the code that is installed
            code = int(importlib.import_module('pytest').main([*OPTIONS, *mutant['tests']]))
    except BaseException:  # this process must not go on as the one that started it
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def verdict(code: int | None, output: str) -> str:
    """Returns what caught a mutant, from the exit code of its tests (None: they took too long) and their output."""
    failed = re.findall(r'^(?:FAILED|ERROR) (\S+)', output, re.M)
    if code == 1 and failed:
        return failed[0]
    return {0: SURVIVED, None: LATE}.get(code, BROKEN)


def run(mutants: list[Mutant], jobs: int) -> Iterator[tuple[str, str, str]]:
    """Yields (name, verdict, output) of each mutant as its tests end."""
    running: dict[int, tuple[Mutant, tempfile.TemporaryDirectory, float]] = {}
    waiting = list(mutants)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                mutant = waiting.pop(0)
                place = tempfile.TemporaryDirectory(prefix='mutant-', ignore_cleanup_errors=True)
                limit = time.monotonic() + mutant.get('seconds', 300)
                running[start(mutant, pathlib.Path(place.name))] = mutant, place, limit
            time.sleep(0.05)
            for process, (mutant, place, limit) in list(running.items()):
                late = time.monotonic() > limit
                ended, status = os.waitpid(process, os.WNOHANG)
                if not ended and not late:
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)
                if not ended:
                    os.waitpid(process, 0)
                del running[process]
                output = (pathlib.Path(place.name) / 'output.txt').read_text(errors='replace')
                place.cleanup()
                yield mutant['name'], verdict(os.waitstatus_to_exitcode(status) if ended else None, output), output
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)


def parts(tests: list[str], number: int) -> list[Mutant]:
    """Returns the tests in this many parts to run on the code as it is, those of a file in one part."""
    files = sorted({test.partition('::')[0] for test in tests})
    return [
        {'name': f'part {i + 1}', 'tests': [t for t in tests if files.index(t.partition('::')[0]) % number == i]}
        for i in range(number)
    ]


def page(mutants: list[Mutant], found: dict[str, str]) -> str:
    """Returns docs/mutants.md: what was tried, and the test that caught it."""
    lines = [
        '# Mutants\n',
        f'`make mutants` applies {len(mutants)} small wrong edits to the library, one at a time, and runs the tests',
        'that should notice. The edits are in `tests/mutants/`; `python tests/mutants/run.py --write` makes this page.',
        'Each line says what the edit makes wrong, and which test fails.',
    ]
    for file in dict.fromkeys(mutant['file'] for mutant in mutants):
        lines.append(f'\n## `{file}`\n')
        for mutant in (mutant for mutant in mutants if mutant['file'] == file):
            by = re.sub(r'.*::([^\[]*).*', r'`\1`', found[mutant['name']])
            line = f'- {mutant["name"]}: {mutant.get("survives", by)}'
            lines += textwrap.wrap(line, 120, subsequent_indent='  ', break_long_words=False, break_on_hyphens=False)
    return '\n'.join(lines) + '\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', nargs='*', help='mutants with one of these texts in their name or file')
    parser.add_argument('--jobs', type=int, default=2, help='how many run at a time')
    parser.add_argument('--write', action='store_true', help='write docs/mutants.md')
    parser.add_argument('--trust', action='store_true', help='do not run the tests on the code as it is first')
    flags = parser.parse_args()
    mutants = [m for m in load() if not flags.only or any(text in f'{m["name"]} {m["file"]}' for text in flags.only)]
    os.environ['JAX_PLATFORMS'] = 'cpu'
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the mutants end with it
    for module in HEAVY.split():
        importlib.import_module(module)
    if not flags.trust:
        tests = list(dict.fromkeys(test for m in mutants for test in m['tests']))
        print(f'the code as it is: {len(tests)} tests and files of tests', flush=True)
        for _, by, output in run([part | {'seconds': 3600} for part in parts(tests, flags.jobs)], flags.jobs):
            if by != SURVIVED:
                print(output[-3000:], f'the tests fail on the code as it is: {by}', sep='\n')
                return 1
    found: dict[str, str] = {}
    began, end = time.monotonic(), '\r\033[K' if sys.stdout.isatty() else '\n'
    for name, by, output in run(mutants, flags.jobs):
        found[name] = by
        print(f'{len(found)}/{len(mutants)}  {time.monotonic() - began:.0f} s  {name}: {by}', end=end, flush=True)
        if by == BROKEN:
            print(output[-2000:], flush=True)
    for mutant in mutants:
        print(f'{mutant["file"]:<50}  {mutant["name"]:<60}  {found[mutant["name"]]}')
    survivors = [m['name'] for m in mutants if found[m['name']] in (SURVIVED, BROKEN) and 'survives' not in m]
    print(f'{len(mutants) - len(survivors)} of {len(mutants)} mutants are caught or explained')
    if flags.write and not survivors and not flags.only:
        (ROOT / 'docs' / 'mutants.md').write_text(page(mutants, found))
    return 1 if survivors else 0


if __name__ == '__main__':
    sys.exit(main())
