"""Rows of binary files as plain values: Parquet, Arrow and Feather, the tar shards of WebDataset, and ArrayRecord.

A file is read a few rows at a time, whatever its size, and of a table only the columns that are asked for.
"""

import contextlib
import functools
import itertools
import json
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from tformer.config import json_files
from tformer.data.sources.records import BadRecord
from tformer.data.sources.text_reader import Numbered, needed, opened, unchanged
from tformer.errors import UserError, nearest

_AT_ONCE = 256  # rows that are read together
_BUFFER = 1 << 20  # bytes of a column chunk of Parquet that are read together
_END_OF_STREAM = b'\xff\xff\xff\xff\0\0\0\0'  # of Arrow; without it a stream was cut off between two batches
_BLOCK, _TOGETHER = 512, 1 << 16  # bytes; tar's own unit, and what is read of a tar file together
_MEMBERS = {'txt': 'text', 'cls': 'label'}  # WebDataset's names of members, and ours

Values = dict[str, Any]
Names = Mapping[str, bool]  # the columns that are wanted: whether every row needs them


class Rows(Numbered):
    """The rows of a binary file."""

    between = ' row '


def values(rows: Rows, kind: str, names: Names) -> Iterator[tuple[int, Values]]:
    """Yields the number, from 1, and the values of each row of a file of a `kind` in `ROWS`, as JSON has them.

    A name with slashes is a field inside a column, e.g. translation/en. Rows that cannot be read are `rows.bad`.

    Raises:
      UserError: the file is damaged, lacks a column that every row needs, or changes while it is read.
    """
    yield from ROWS[kind](rows, names)


@contextlib.contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Turns what the libraries raise of a damaged file into a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # pyarrow has some that are of no common kind
        why = getattr(error, 'strerror', None) or ' '.join(str(error).split()) or type(error).__name__
        raise UserError(f'{path} cannot be read: {why}') from None


# ---------------------------------------------------------------------------------------------------------- tables


class _Column(NamedTuple):
    """Where the value of a name is in a row, and the names of its classes, as the hub's `datasets` store them."""

    place: tuple[str, ...]
    required: bool
    classes: list[str] | None

    def value(self, row: Values) -> Any:
        value = functools.reduce(lambda inner, part: None if inner is None else inner[part], self.place, row)
        return _plain(value, self.classes)


def _plain(value: Any, classes: list[str] | None) -> Any:
    """Returns a value as JSON has it: bytes become text, and numbers of classes become names."""
    if isinstance(value, list):
        return [_plain(item, classes) for item in value]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise BadRecord(f'not UTF-8: byte 0x{value[error.start]:02x}') from None
    if classes is None or value is None:
        return value
    if type(value) is not int or not 0 <= value < len(classes):  # often -1
        raise BadRecord(f'class {value!r} is not among the {len(classes)} of the file: is it a split without labels?')
    return classes[value]


def _parquet(rows: Rows, names: Names) -> Iterator[tuple[int, Values]]:
    parquet = needed('pyarrow.parquet', 'Parquet files')
    # With `pre_buffer`, the default, a row group is held whole.
    options = {'buffer_size': _BUFFER, 'pre_buffer': False, 'page_checksum_verification': True}
    with unchanged(rows.file), _one_line(rows.path), parquet.ParquetFile(rows.path, **options) as file:
        columns = _columns(rows.path, file.schema_arrow, names)
        paths = ['.'.join(column.place) for column in columns.values()]
        yield from _of_batches(rows, file.iter_batches(_AT_ONCE, columns=paths, use_threads=False), columns)


def _arrow(rows: Rows, names: Names) -> Iterator[tuple[int, Values]]:
    """Arrow's files (Feather is one) and its streams, which the hub's `datasets` write."""
    arrow = needed('pyarrow', 'Arrow files')
    with unchanged(rows.file), _one_line(rows.path), arrow.OSFile(str(rows.path)) as file:
        size, magic = file.size(), file.read(6)
        if magic.startswith(b'FEA1'):
            raise UserError(f'{rows.path} is Feather of version 1: write it as version 2')
        if streamed := magic != b'ARROW1':
            file.seek(max(size - len(_END_OF_STREAM), 0))
            if file.read() != _END_OF_STREAM:
                raise UserError(f'{rows.path} cannot be read: it is cut off, or not an Arrow file')
        file.seek(0)
        open_it = arrow.ipc.open_stream if streamed else arrow.ipc.open_file
        columns = _columns(rows.path, open_it(file).schema, names)
        file.seek(0)
        fields = open_it(file).schema
        wanted = sorted({fields.get_field_index(column.place[0]) for column in columns.values()})
        file.seek(0)
        table = open_it(file, options=arrow.ipc.IpcReadOptions(included_fields=wanted))
        batches = table if streamed else map(table.get_batch, range(table.num_record_batches))
        yield from _of_batches(rows, map(_checked, batches), columns)


def _checked(batch: Any) -> Any:
    """Returns a batch of Arrow; raises a `ValueError` where damage has it point outside of its own bytes."""
    for column in batch.columns:
        try:
            column.validate(full=True)
        except ValueError as error:
            if 'UTF8' not in str(error):  # which is a row's fault
                raise
    return batch


def _columns(path: Path, schema: Any, names: Names) -> dict[str, _Column]:
    """Returns the columns of the names that a file has; raises a `UserError` if it lacks one that rows need."""
    found = {}
    is_struct = needed('pyarrow', 'Tables').types.is_struct
    for name, required in names.items():
        place = (name,) if name in schema.names else tuple(name.split('/'))
        options, fields = list(schema.names), schema
        for part in place:
            if part not in options:
                break
            if options.count(part) > 1:
                raise UserError(f'{path} has {options.count(part)} columns {part!r} (data.columns)')
            fields = fields.field(part).type
            options = [fields.field(i).name for i in range(fields.num_fields)] if is_struct(fields) else []
        else:
            found[name] = _Column(place, required, _classes(schema, place))
            continue
        if required:
            raise UserError(f'{path} has no column {name!r} (data.columns){nearest(part, options)}')
    return found


def _classes(schema: Any, place: tuple[str, ...]) -> list[str] | None:
    """Returns the names of the classes that a column holds by number, where the hub's `datasets` have stored them."""
    try:
        feature: Any = json.loads((schema.metadata or {})[b'huggingface'])['info']['features']
        for part in place:
            feature = feature[part]
        while isinstance(feature, dict) and 'feature' in feature:  # of a list
            feature = feature['feature']
        return [str(name) for name in feature['names']] if feature['_type'] == 'ClassLabel' else None
    except (ValueError, LookupError, TypeError):
        return None


def _of_batches(rows: Rows, batches: Iterable[Any], columns: Mapping[str, _Column]) -> Iterator[tuple[int, Values]]:
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, _AT_ONCE):
            for row in _python(batch.slice(start, _AT_ONCE)):
                number += 1
                try:
                    if isinstance(row, UnicodeDecodeError):
                        raise BadRecord(f'not UTF-8: byte 0x{row.object[row.start]:02x}')
                    found = {name: column.value(row) for name, column in columns.items()}
                except BadRecord as error:
                    rows.bad(number, error)
                    continue
                yield (
                    number,
                    {name: value for name, value in found.items() if value is not None or columns[name].required},
                )


def _python(batch: Any) -> Iterator[Values | UnicodeDecodeError]:
    """Yields the rows of a batch; a row whose text is not UTF-8 as the error."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            yield error
            return
        for row in range(batch.num_rows):
            yield from _python(batch.slice(row, 1))


# --------------------------------------------------------------------------------------------------- tar, ArrayRecord


def _tar(rows: Rows, names: Names) -> Iterator[tuple[int, Values]]:
    """The samples of a shard: adjacent members whose names are the same up to the first dot of the last part.

    The rest of a member's name is the name of its text; the keys of an object in a .json member are names, too. Members
    without such a rest, such as README and hidden files, are not part of a sample. Nothing is unpacked to the disk.
    """
    with opened(rows.file) as stored, _one_line(rows.path):
        blocks = _Blocks(stored)
        with tarfile.open(fileobj=blocks, mode='r|', bufsize=_TOGETHER) as tar:  # type: ignore[call-overload]
            samples = itertools.groupby(_members(rows.path, tar), key=lambda member: member[0])
            for number, (_, members) in enumerate(samples, start=1):
                found: Values = {}
                try:
                    for _, name, member in members:
                        _add(found, name, member, tar, names)
                except BadRecord as error:
                    rows.bad(number, error)
                    continue
                yield number, found
        if not blocks.end_at(tar.offset):
            raise UserError(f'{rows.path} cannot be read: the tar file is cut off')
        while stored.read(_BUFFER):
            pass


class _Blocks:
    """A file that remembers what was read last."""

    def __init__(self, file: Any) -> None:
        self._file, self._last, self._stop = file, b'', 0

    def read(self, size: int) -> bytes:
        self._last = self._file.read(size)
        self._stop += len(self._last)
        return self._last

    def end_at(self, place: int) -> bool:
        """Returns whether the block of zeros that ends a tar file is at a place in what was read last."""
        start = place - self._stop + len(self._last)
        return start >= 0 and self._last[start : start + _BLOCK] == bytes(_BLOCK)


def _members(path: Path, tar: tarfile.TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Yields the key and name of each file in a shard."""
    for member in tar:
        tar.members.clear()  # type: ignore[attr-defined]  # which it would keep
        place = PurePosixPath(member.name)
        if place.is_absolute() or '..' in place.parts:
            raise UserError(f'{path} cannot be read: its member {member.name!r} leads outside')
        if member.isdir():
            continue
        if not member.isreg():
            raise UserError(f'{path} cannot be read: its member {member.name!r} is not a file')
        key, _, name = place.name.partition('.')
        if key and name:
            yield f'{place.parent}/{key}', name.lower(), member


def _add(found: Values, name: str, member: tarfile.TarInfo, tar: tarfile.TarFile, names: Names) -> None:
    """Adds the values of a member of a sample, unless nobody asks for them."""
    name = name if name in names else _MEMBERS.get(name, name)
    if name not in names and name != 'json':
        return
    content = tar.extractfile(member)
    assert content is not None
    text = _plain(content.read(), None)
    more = {name: text}
    if name == 'json' and name not in names:
        more = _object(text, member.name)
    if twice := found.keys() & more.keys():
        raise BadRecord(f'{member.name} has {min(twice)!r} a second time')
    found |= more


def _object(text: str, what: str) -> Values:
    try:
        read = json.loads(text, object_pairs_hook=json_files.unique)
    except (ValueError, RecursionError) as error:
        raise BadRecord(f'{what} is not JSON: {error}: {text[:40]!r}') from None
    if not isinstance(read, dict):
        raise BadRecord(f'{what} is not a JSON object: {text[:40]!r}')
    return read


def _array_record(rows: Rows, names: Names) -> Iterator[tuple[int, Values]]:
    """Each record is a JSON object, or text; the first one decides."""
    module = needed('array_record.python.array_record_module', 'ArrayRecord files', 'array_record')
    with unchanged(rows.file), _one_line(rows.path):
        reader = module.ArrayRecordReader(str(rows.path))
        if not reader.ok():
            raise UserError(f'{rows.path} cannot be read: it is cut off, or not an ArrayRecord file')
        objects = None
        for start in range(0, reader.num_records(), _AT_ONCE):
            stored = reader.read(start, min(start + _AT_ONCE, reader.num_records()))
            for number, content in enumerate(stored, start=start + 1):
                try:
                    text = _plain(content, None)
                    if objects is None:
                        objects = text.lstrip().startswith('{') and isinstance(json.loads(text), dict)
                    found = _object(text, 'the record') if objects else {'text': text}
                except (BadRecord, json.JSONDecodeError) as error:
                    rows.bad(number, error)
                    continue
                yield number, found


ROWS: dict[str, Callable[[Rows, Names], Iterator[tuple[int, Values]]]] = {
    '.parquet': _parquet,
    '.arrow': _arrow,
    '.feather': _arrow,
    '.tar': _tar,
    '.array_record': _array_record,
    '.arrayrecord': _array_record,
}
