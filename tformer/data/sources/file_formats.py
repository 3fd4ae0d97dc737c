"""Records from the lines of a file: a document, tab-separated columns, JSON objects, or one token per line."""

import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tformer.config.run import Data
from tformer.config.tasks import RECORDS, TASKS
from tformer.data.sources import fields, templates
from tformer.data.sources.records import BadRecord, Record
from tformer.data.sources.text_reader import Text
from tformer.errors import UserError, choose, nearest

Reader = Callable[[Text, Data, str], Iterator[Record]]


def ending(path: Path) -> str:
    """Returns the ending that decides how a file is read, e.g. '.tsv' for lines.tsv.gz.

    Raises:
      UserError: it is not a key of READERS.
    """
    suffix = Path(path.name.removesuffix('.gz')).suffix
    choose(READERS, suffix, f'the ending of {path}')
    return suffix


def _txt(text: Text, config: Data, objective: str) -> Iterator[Record]:
    """The whole file for objectives on running text, else one record per paragraph between blank lines."""
    if TASKS[objective].fields != ('text',):
        raise _unfit(text, objective, 'only text')
    whole = TASKS[objective].running_text
    written = io.StringIO(newline='')
    for _, line in text:
        if whole or line.strip():
            written.write(line)
        else:
            yield from _document(written, '\r\n')
            written = io.StringIO(newline='')
    yield from _document(written, '' if whole else '\r\n')


def _document(written: io.StringIO, left_out: str) -> Iterator[Record]:
    document = written.getvalue()
    document = document.strip(left_out) if left_out else document
    if document.strip():
        yield {'text': document}


def _unfit(text: Text, objective: str, has: str) -> UserError:
    wanted = ' and '.join(TASKS[objective].fields)
    use = '.jsonl' if 'answers' in TASKS[objective].fields else '.tsv or .jsonl'
    use = f'.conll, {use}' if 'tags' in TASKS[objective].fields else use
    return UserError(f'{text.path} has {has} and {objective} needs {wanted}: use a {use} file')


def _tsv(text: Text, config: Data, objective: str) -> Iterator[Record]:
    """One record per line. `config.columns` names the columns; those that the objective does not use are ignored.

    Without `config.columns`, the first line decides whether there are optional columns, or labels before running text.
    Tokens, and tags, are separated by single spaces.
    """
    if 'answers' in TASKS[objective].fields and config.source_template is None:
        raise _unfit(text, objective, 'no lists of answers')
    own, make = TASKS[objective].fields, fields.maker(config, objective)
    lists = ('tokens', 'tags') if 'tags' in own and config.source_template is None else ()
    layouts = [_columns(text, config, objective)] if config.columns or config.source_template else [own]
    if not config.columns:
        layouts += [own + TASKS[objective].optional] if 'pair' in TASKS[objective].optional else []
        layouts += [('label', 'text')] if own == ('text',) else []
    for number, line in text.filled():
        values = line.split('\t')
        fitting = [layout for layout in layouts if len(layout) == len(values)]
        if not fitting:
            expected = ' or '.join(f'{len(layout)} ({", ".join(layout)})' for layout in layouts)
            text.bad(number, f'{len(values)} tab-separated columns, expected {expected}: {line[:40]!r}')
            continue
        layouts = fitting  # the first line decides
        by_name: dict[str, Any] = dict(zip(layouts[0], values, strict=True))
        for name in lists:
            by_name[name] = by_name[name].split(' ') if by_name[name] else []
        yield from _made(text, number, by_name, make, objective)


def _columns(text: Text, config: Data, objective: str) -> tuple[str, ...]:
    """Returns the names of a file's columns; raises a `UserError` if the objective or the templates need others."""
    if not config.columns:
        raise UserError(f'{text.path}: data.source_template needs data.columns, the names of the columns')
    for field in templates.names(config) or TASKS[objective].fields:
        if field not in config.columns:
            needs = 'which the templates name' if config.source_template else f'which {objective} needs'
            raise UserError(f'data.columns={config.columns} lacks {field!r}, {needs}{nearest(field, config.columns)}')
    return config.columns


def _jsonl(text: Text, config: Data, objective: str) -> Iterator[Record]:
    """One object per line. `config.columns` are the keys of the objective's fields and then of its optional ones.

    The first record decides which optional fields all records have.
    """
    keys = {} if config.source_template else fields.keys_of(config, objective)
    optional = {field: keys[field] for field in TASKS[objective].optional if field in keys}
    make = fields.maker(config, objective, keys)
    first: dict[str, bool] | None = None
    for number, line in text.filled():
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            text.bad(number, f'not JSON: {error}: {line[:40]!r}')
            continue
        if not isinstance(values, dict):
            text.bad(number, f'not a JSON object: {line[:40]!r}')
            continue
        present = {key: key in values for key in optional.values()}
        if first not in (None, present):
            key = next(key for key in present if present[key] != first[key])
            text.bad(number, f'{"a" if present[key] else "no"} key {key!r}, unlike the lines before')
            continue
        for record in _made(text, number, values, make, objective):
            first = present
            yield record


def _conll(text: Text, config: Data, objective: str) -> Iterator[Record]:
    """One token per line, with blank lines between sentences (Tjong Kim Sang 2002); -DOCSTART- lines are ignored.

    Columns are separated by spaces or tabs. `config.columns` names them; else the first column is the token and the
    last one its tag. A sentence with a bad line is one bad record.
    """
    if TASKS[objective].fields != ('tokens', 'tags') and config.source_template is None:
        raise _unfit(text, objective, 'tokens and tags')
    names = _columns(text, config, objective) if config.columns else ()
    make = fields.maker(config, objective)
    for lines, whole in _sentences(text):
        rows = [(number, line, re.split(r'[ \t]+', line)) for number, line in lines]
        if not names:  # the first line with a token and a tag decides
            names = next((_conll_names(len(row)) for _, _, row in rows if len(row) > 1), ())
        if not rows or not whole:
            continue
        number, problem = _first_problem(rows, names, config, check_tags=TASKS[objective].records == 'tags')
        if problem:
            text.bad(number, problem)
            continue
        columns = zip(*(row for _, _, row in rows), strict=True)
        yield from _made(text, rows[0][0], dict(zip(names, map(list, columns), strict=True)), make, objective)


def _sentences(text: Text) -> Iterator[tuple[list[tuple[int, str]], bool]]:
    """Yields the (number, text) of each sentence's lines, and whether all its lines are text: the reader has already
    reported a line that is not."""
    lines: list[tuple[int, str]] = []
    skipped = text.skipped
    for number, line in text:
        line = line.strip(' \t\r\n')
        if re.split(r'[ \t]', line, maxsplit=1)[0] not in ('', '-DOCSTART-'):
            lines.append((number, line))
            continue
        yield lines, text.skipped == skipped
        lines, skipped = [], text.skipped
    yield lines, text.skipped == skipped


def _conll_names(count: int) -> tuple[str, ...]:
    return 'tokens', *(f'column {place}' for place in range(2, count)), 'tags'


def _first_problem(
    rows: list[tuple[int, str, list[str]]], names: tuple[str, ...], config: Data, check_tags: bool
) -> tuple[int, str]:
    """Returns the number of the first bad line of a sentence and the reason, '' where no line is bad."""
    expected = names or RECORDS['tags'].fields
    for number, line, row in rows:
        if len(row) != len(names):
            columns = f'expected {len(expected)} ({", ".join(expected)})'
            return number, f'{len(row)} columns between spaces, {columns}: {line[:40]!r}'
        if check_tags:
            try:
                fields.check_tag(row[names.index('tags')], config.labels)
            except BadRecord as error:
                return number, str(error)
    return 0, ''


def _made(text: Text, number: int, values: Mapping[str, Any], make: fields.Make, objective: str) -> list[Record]:
    """Returns the record of a line's values, or an empty list if the line is bad."""
    try:
        record = make(values)
    except BadRecord as error:
        text.bad(number, error)
        return []
    return [{**record, 'where': text.where(number)}] if TASKS[objective].labelled else [record]


READERS: dict[str, Reader] = {
    '.txt': _txt,
    '.tsv': _tsv,
    '.jsonl': _jsonl,
    '.conll': _conll,
}
