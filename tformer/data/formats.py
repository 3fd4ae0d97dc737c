"""Records from the lines of a file: one document, tab-separated lines, or JSON lines."""

import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tformer.config.run import Data
from tformer.data.lines import Text
from tformer.data.records import FIELDS, Record
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
    """One document (causal_lm), or the paragraphs between blank lines (other objectives on text)."""
    if FIELDS[objective] != ('text',):
        wanted = ' and '.join(FIELDS[objective])
        raise UserError(f'{text.path} has only text and {objective} needs {wanted}: use a .tsv or .jsonl file')
    whole = objective == 'causal_lm'
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


def _tsv(text: Text, config: Data, objective: str) -> Iterator[Record]:
    """One record a line; `config.columns` names the columns, and others than the objective's are passed over."""
    fields, columns = FIELDS[objective], config.columns
    for field in fields:
        if columns and field not in columns:
            hint = nearest(field, columns)
            raise UserError(f'data.columns={columns} lacks {field!r}, which {objective} needs{hint}')
    layouts = [columns or fields]
    if not columns and fields == ('text',):
        layouts.append(('label', 'text'))
    for number, line in text.filled():
        values = line.split('\t')
        fitting = [layout for layout in layouts if len(layout) == len(values)]
        if not fitting:
            names = ', '.join(layouts[0])
            expected = f'expected {len(layouts[0])} ({names})'
            text.bad(number, f'{len(values)} tab-separated columns, {expected}: {line[:40]!r}')
            continue
        layouts = fitting  # the first line decides
        record = dict(zip(layouts[0], values, strict=True))
        yield {field: record[field] for field in fields}


def _jsonl(text: Text, config: Data, objective: str) -> Iterator[Record]:
    """One object a line; `config.columns` are the keys of the objective's fields."""
    keys = keys_of(config, objective)
    for number, line in text.filled():
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            text.bad(number, f'not JSON: {error}: {line[:40]!r}')
            continue
        if not isinstance(values, dict):
            text.bad(number, f'not a JSON object: {line[:40]!r}')
            continue
        found = [_mistake(values, field, key) for field, key in keys.items()]
        if any(found):
            text.bad(number, next(filter(None, found)))
            continue
        yield {field: str(values[key]) for field, key in keys.items()}


def _mistake(values: Mapping[str, object], field: str, key: str) -> str:
    """What is wrong with a field's value, '' where nothing is."""
    if key not in values:
        return f'no key {key!r}{nearest(key, [name for name in values if name.isprintable()])}'
    value = values[key]
    if field == 'label' and isinstance(value, int):
        return ''
    if not isinstance(value, str):
        return f'{key!r} is not a string: {str(value)[:40]}'
    if '\0' in value:
        return f'{key!r} has a NUL: not text'
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f'{key!r} has half a surrogate pair: {value[error.start]!r}'
    return ''


def keys_of(config: Data, objective: str) -> dict[str, str]:
    """The name in the data of each of the objective's fields: `config.columns` in the order of `FIELDS`."""
    fields = FIELDS[objective]
    if config.columns and len(config.columns) != len(fields):
        raise UserError(f'data.columns={config.columns} must name {len(fields)} fields: {", ".join(fields)}')
    return dict(zip(fields, config.columns or fields, strict=True))


READERS: dict[str, Reader] = {
    '.txt': _txt,
    '.tsv': _tsv,
    '.jsonl': _jsonl,
}
