"""The tables of mutants: each row still says what it edits, and which tests should notice."""

import ast
import tomllib

from places import ROOT

TABLES = sorted((ROOT / 'tests' / 'mutants').glob('*.toml'))
ROWS = [row for table in TABLES for row in tomllib.loads(table.read_text(encoding='utf-8'))['mutant']]
FIELDS = {'name', 'file', 'old', 'new', 'tests'}


def test_there_are_many_mutants_and_each_has_a_name_of_its_own() -> None:
    assert len(ROWS) >= 75
    names = [row['name'] for row in ROWS]
    assert len(set(names)) == len(names)
    for row in ROWS:
        assert row.keys() - {'survives', 'seconds'} == FIELDS, row['name']


def test_each_edit_applies_once_and_gives_another_program() -> None:
    for file in {row['file'] for row in ROWS}:
        text = (ROOT / file).read_text(encoding='utf-8')
        parts = ast.parse(text).body if file.endswith('.py') else []
        for row in (row for row in ROWS if row['file'] == file):
            assert text.count(row['old']) == 1, (row['name'], file)
            assert row['new'] != row['old'], row['name']
            if not parts:
                continue  # a template, or a page's script
            begins = text[: text.index(row['old'])].count('\n') + 1
            ends = begins + row['old'].rstrip('\n').count('\n')
            around = [part for part in parts if first_line(part) <= ends and (part.end_lineno or 0) >= begins]
            first, last = first_line(around[0]) - 1, around[-1].end_lineno
            own = '\n'.join(text.split('\n')[first:last]) + '\n'
            ast.parse(own.replace(row['old'], row['new']))


def first_line(part: ast.stmt) -> int:
    """Returns the line on which a definition begins, with its decorators."""
    return min([part.lineno, *(each.lineno for each in getattr(part, 'decorator_list', ()))])


def test_the_tests_that_should_notice_are_there() -> None:
    for row in ROWS:
        assert row['tests'], row['name']
        for test in row['tests']:
            file, _, name = test.partition('::')
            assert (ROOT / file).is_file(), (row['name'], file)
            assert f'def {name.partition("[")[0]}(' in (ROOT / file).read_text(encoding='utf-8') or not name, test
