"""Records of a file: a document, tab-separated columns, one token per line, JSON objects, or rows of a binary file."""

import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tformer.config import json_files
from tformer.config.run import Data
from tformer.config.tasks import RECORDS, TASKS
from tformer.data.sources import fields, row_formats, templates, token_files
from tformer.data.sources.records import BadRecord, Record
from tformer.data.sources.rows import Rows
from tformer.data.sources.text_reader import PACKS, File, Numbered, Text
from tformer.errors import UserError, choose, nearest

Reader = Callable[[Any, Data, str], Iterator[Record]]  # of what `opened` returns
Columns = tuple[str, ...]  # their names


def ending(path: Path) -> str:
    """Returns the key of READERS that decides how a file is read, e.g. '.tsv' for lines.tsv.gz."""
    name = re.sub(r'-\d+-of-\d+$', '', path.name)  # of ArrayRecord
    suffix = Path(Path(name).stem if Path(name).suffix in PACKS else name).suffix
    choose(dict.fromkeys(ENDINGS), suffix, f'the ending of {path}')
    return suffix


def opened(file: File, bad_lines: str) -> Text | Rows:
    """Returns the lines or the rows of a file."""
    return (Rows if ending(file.path) in row_formats.ROWS else Text)(file, bad_lines)


def _txt(text: Text, config: Data, objective: str) -> Iterator[Record]:
    """The whole file for objectives on running text, else one record per paragraph between blank lines."""
    if TASKS[objective].fields != ('text',):
        raise _unfit(text, objective, 'only text')
    if config.columns:
        raise UserError(f'{text.path}: data.columns={config.columns} has no effect on a .txt file')
    whole = TASKS[objective].running_text
    for _, lines in itertools.groupby(text, lambda numbered: whole or bool(numbered[1].strip())):
        written = io.StringIO(newline='')  # a list of the lines would take several times the memory of a large file
        written.writelines(line for _, line in lines)
        document = written.getvalue() if whole else written.getvalue().strip('\r\n')
        del written
        if document and not document.isspace():
            yield {'text': document}


def _unfit(text: Text, objective: str, has: str) -> UserError:
    wanted = TASKS[objective].fields
    use = (
        '.jsonl'
        if {'answers', 'choices'} & {*wanted}
        else '.conll, .tsv or .jsonl'
        if 'tags' in wanted
        else '.tsv or .jsonl'
    )
    return UserError(f'{text.path} has {has} and {objective} needs {" and ".join(wanted)}: use a {use} file')


def _tsv(text: Text, config: Data, objective: str) -> Iterator[Record]:
    """One record per line. `config.columns` names the columns; those that the objective does not use are ignored.

    Without `config.columns`, the first line decides whether there are optional columns, or labels before running text.
    Tokens, and tags, are separated by single spaces.
    """
    own, optional, filled_in = TASKS[objective].fields, TASKS[objective].optional, config.source_template is not None
    for field in ('answers', 'choices'):
        if field in own and not filled_in:
            raise _unfit(text, objective, f'no lists of {field}')
    make = fields.maker(config, objective)
    lists = ('tokens', 'tags') if 'tags' in own and not filled_in else ()
    layouts = [_columns(text, config, objective)] if config.columns or filled_in else [own]
    if not config.columns:
        layouts += [own + optional] if optional and 'references' not in optional else []
        layouts += [('label', 'text')] if own == ('text',) else []
    for number, line in text.filled():
        values = line.split('\t')
        if number == 1 and (header := _header(values, layouts)):
            text.bad(number, f'it has the names of the columns, not their values: {header}: {line[:40]!r}')
            continue
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


def _header(values: Sequence[str], layouts: Iterable[Columns]) -> str | None:
    """Returns what to do about a line that names the columns of a layout, in any order; None: it does not."""
    names = tuple(value.strip().lower() for value in values)
    for layout in layouts:
        if sorted(names) == sorted(map(str.lower, layout)):
            order = '' if names == tuple(map(str.lower, layout)) else f', and set data.columns={",".join(names)}'
            return f'delete this line{order}'
    return None


def _columns(text: Text, config: Data, objective: str) -> Columns:
    """Returns the names of a file's columns; raises a `UserError` if the objective or the templates need others."""
    if not config.columns:
        raise UserError(f'{text.path}: data.source_template needs data.columns, the names of the columns')
    if twice := [name for name in config.columns if config.columns.count(name) > 1]:
        raise UserError(f'data.columns={config.columns} names {twice[0]!r} twice')
    for field in templates.names(config) or TASKS[objective].fields:
        if field not in config.columns:
            needs = 'which the templates name' if config.source_template else f'which {objective} needs'
            raise UserError(f'data.columns={config.columns} lacks {field!r}, {needs}{nearest(field, config.columns)}')
    return config.columns


def _jsonl(text: Text, config: Data, objective: str) -> Iterator[Record]:
    """One object per line. `config.columns` are the keys of the objective's fields and then of its optional ones."""

    def objects() -> Iterator[tuple[int, Mapping[str, Any]]]:
        for number, line in text.filled():
            try:
                values = json.loads(line, object_pairs_hook=json_files.unique)
            except (ValueError, RecursionError) as error:
                text.bad(number, f'not JSON: {error}: {line[:40]!r}')
                continue
            if isinstance(values, dict):
                yield number, values
            else:
                text.bad(number, f'not a JSON object: {line[:40]!r}')

    yield from _objects(text, objects(), config, objective)


def _rows(rows: Rows, config: Data, objective: str) -> Iterator[Record]:
    """One record per row. `config.columns` are the names of the columns, as of JSON objects."""
    if config.source_template is not None:
        names = dict.fromkeys(templates.names(config), True)
    else:
        keys, required = fields.keys_of(config, objective), TASKS[objective].fields
        names = {key: field in required for field, key in keys.items()}
    yield from _objects(rows, row_formats.values(rows, ending(rows.path), names), config, objective)


def _objects(
    source: Numbered, objects: Iterable[tuple[int, Mapping[str, Any]]], config: Data, objective: str
) -> Iterator[Record]:
    """Yields the records of numbered objects. The first record decides which optional fields all records have."""
    keys = {} if config.source_template else fields.keys_of(config, objective)
    optional = [keys[field] for field in TASKS[objective].optional if field in keys]
    make = fields.maker(config, objective, keys)
    first: dict[str, bool] | None = None
    for number, values in objects:
        present = {key: key in values for key in optional}
        if first not in (None, present):
            key = next(key for key in optional if present[key] != first[key])
            source.bad(number, f'{"a" if present[key] else "no"} key {key!r}, unlike the lines before')
            continue
        for record in _made(source, number, values, make, objective):
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
    types = config.labels if TASKS[objective].records == 'tags' else None
    make = fields.maker(config, objective)
    for lines in _sentences(text):
        rows = [(number, line, re.split(r'[ \t]+', line)) for number, line in lines]
        if not names:  # the first line with a token and a tag decides
            count = next((len(row) for _, _, row in rows if len(row) > 1), 0)
            between = [f'column {place}' for place in range(2, count)]
            names = ('tokens', *between, 'tags') if count else ()
        tags = [row[names.index('tags')] for _, _, row in rows if types is not None and len(row) == len(names)]
        entities = any(map(fields.is_bio, tags))
        for number, line, row in rows:
            try:
                _check_row(row, line, names, types if entities else None)
            except BadRecord as error:
                text.bad(number, error)
                break
        else:
            columns = zip(*(row for _, _, row in rows), strict=True)
            yield from _made(text, rows[0][0], dict(zip(names, map(list, columns), strict=True)), make, objective)


def _sentences(text: Text) -> Iterator[list[tuple[int, str]]]:
    """Yields the (number, text) of the lines of each sentence, unless the reader has skipped one of them as bad."""
    lines: list[tuple[int, str]] = []
    skipped = text.skipped
    for number, line in itertools.chain(text, [(0, '')]):  # a blank line ends the last sentence, too
        line = line.strip(' \t\r\n')
        if re.split(r'[ \t]', line, maxsplit=1)[0] not in ('', '-DOCSTART-'):
            lines.append((number, line))
            continue
        if lines and text.skipped == skipped:
            yield lines
        lines, skipped = [], text.skipped


def _check_row(row: list[str], line: str, names: Columns, types: Columns | None) -> None:
    """Raises `BadRecord` if a line has other columns than `names`, or (unless None) a tag that is not of `types`."""
    if len(row) != len(names):
        expected = names or RECORDS['tags'].fields
        columns = f'expected {len(expected)} ({", ".join(expected)})'
        raise BadRecord(f'{len(row)} columns between spaces, {columns}: {line[:40]!r}')
    if types is not None:
        fields.check_tag(row[names.index('tags')], types)


def _made(text: Numbered, number: int, values: Mapping[str, Any], make: fields.Make, objective: str) -> list[Record]:
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
    **dict.fromkeys(row_formats.ROWS, _rows),
}
ENDINGS = (*READERS, token_files.ENDING)
