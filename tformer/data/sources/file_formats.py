"""Records from the lines of a file: one document, tab-separated lines, JSON lines, or a token a line."""

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
    """What decides how a file is read, e.g. '.tsv' for lines.tsv.gz.

    Raises:
      UserError: none of READERS.
    """
    found = Path(path.name.removesuffix('.gz')).suffix
    choose(READERS, found, f'the ending of {path}')
    return found


def _txt(text: Text, config: Data, objective: str) -> Iterator[Record]:
    """One document (objectives on running text), or the paragraphs between blank lines (others)."""
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
    """One record a line; `config.columns` names the columns, and others than the objective's are passed over.

    Without them the first line decides whether there are optional ones, or labels before running text. Tokens and
    tags have single spaces between.
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
        found: dict[str, Any] = dict(zip(layouts[0], values, strict=True))
        for name in lists:
            found[name] = found[name].split(' ') if found[name] else []
        yield from _made(text, number, found, make, objective)


def _columns(text: Text, config: Data, objective: str) -> tuple[str, ...]:
    """The names of the columns of a file, among them all that the objective, or its templates, need."""
    if not config.columns:
        raise UserError(f'{text.path}: data.source_template needs data.columns, the names of the columns')
    for field in templates.names(config) or TASKS[objective].fields:
        if field not in config.columns:
            needs = 'which the templates name' if config.source_template else f'which {objective} needs'
            raise UserError(f'data.columns={config.columns} lacks {field!r}, {needs}{nearest(field, config.columns)}')
    return config.columns


def _jsonl(text: Text, config: Data, objective: str) -> Iterator[Record]:
    """One object a line; `config.columns` are the keys of the objective's fields, and then of optional ones.

    The first record decides which optional fields there are.
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
        there = {key: key in values for key in optional.values()}
        if first not in (None, there):
            key = next(key for key in there if there[key] != first[key])
            text.bad(number, f'{"a" if there[key] else "no"} key {key!r}, unlike the lines before')
            continue
        for record in _made(text, number, values, make, objective):
            first = there
            yield record


def _conll(text: Text, config: Data, objective: str) -> Iterator[Record]:
    """One token a line, blank lines between sentences, -DOCSTART- lines passed over (Tjong Kim Sang 2002).

    Spaces or tabs part the columns, which `config.columns` names; else the first is the token, the last its tag. A bad
    line makes its sentence a bad record.
    """
    if TASKS[objective].fields != ('tokens', 'tags') and config.source_template is None:
        raise _unfit(text, objective, 'tokens and tags')
    names = _columns(text, config, objective) if config.columns else ()
    make = fields.maker(config, objective)
    rows: list[list[str]] = []
    start, skipped, why = 0, 0, ''
    for number, line in _and_end(text):
        row = re.split(r'[ \t]+', line.strip(' \t\r\n'))
        if row[0] not in ('', '-DOCSTART-'):
            if not names and len(row) > 1:  # the first line decides
                names = ('tokens', *(f'column {i}' for i in range(2, len(row))), 'tags')
            if not rows and not why:
                start = number
            if len(row) != len(names) and not why:
                expected = f'expected {len(names) or 2} ({", ".join(names or RECORDS["tags"].fields)})'
                why, start = f'{len(row)} columns between spaces, {expected}: {line.strip()[:40]!r}', number
            if TASKS[objective].records == 'tags' and not why:
                try:
                    fields.check_tag(row[names.index('tags')], config.labels)
                except BadRecord as error:
                    why, start = str(error), number
            rows.append(row)
            continue
        whole = text.skipped == skipped  # no line was passed over as no text, which is one bad record already
        if whole and why:
            text.bad(start, why)
        elif whole and rows:
            columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
            yield from _made(text, start, columns, make, objective)
        rows, skipped, why = [], text.skipped, ''


def _and_end(text: Text) -> Iterator[tuple[int, str]]:
    yield from text
    yield 0, ''


def _made(text: Text, number: int, values: Mapping[str, Any], make: fields.Make, objective: str) -> list[Record]:
    """The record of a line's values, or none where it is bad."""
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
