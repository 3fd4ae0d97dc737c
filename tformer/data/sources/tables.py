"""Rows of Parquet, Arrow and Feather: of the columns that are asked for, a few rows at a time, from a part or all."""

import contextlib
import functools
import itertools
import json
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tformer.data.sources.records import BadRecord
from tformer.data.sources.rows import AT_ONCE, Names, Rows, Values, one_line, plain
from tformer.data.sources.text_reader import File, changed, needed, state
from tformer.errors import UserError, nearest

_BUFFER = 1 << 20  # bytes of a column chunk of Parquet that are read together
_JOINT = b'ARROW1ARROW1\0\0'  # the end of a file of Arrow and the beginning of another
_END_OF_STREAM = b'\xff\xff\xff\xff\0\0\0\0'  # of Arrow; without it a stream was cut off between two batches


class RowGroups(Rows):
    """The rows of some groups of a table: row groups of Parquet, batches of Arrow.

    The file is not hashed again: it must have the size and the time that it had `before`.
    """

    partial = True

    def __init__(self, file: File, bad_lines: str, start: int, stop: int, before: tuple[int, int]) -> None:
        super().__init__(file, bad_lines)
        self.groups, self._before = range(start, stop), before

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        try:
            yield
        finally:
            if state(self.path) != self._before:
                raise changed(self.path)


def group_sizes(path: Path, kind: str) -> list[int]:
    """Returns the bytes of each group of rows of a file; []: it has none, and is read whole.

    Raises:
      UserError: the file is damaged.
    """
    if kind == '.parquet':
        parquet = needed('pyarrow.parquet', 'Parquet files')
        with one_line(path), parquet.ParquetFile(path) as file:
            return [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]
    if kind in ('.arrow', '.feather'):
        with one_line(path), _batches(path, {}, mapped=True) as (batches, _):
            _refuse_joined(path)
            return [batch.nbytes for batch in batches]
    return []


class _Column(NamedTuple):
    """Where the value of a name is in a row, and the names of its classes, as the hub's `datasets` store them."""

    place: tuple[str, ...]
    required: bool
    classes: list[str] | None

    def value(self, row: Values) -> Any:
        value = functools.reduce(lambda inner, part: None if inner is None else inner[part], self.place, row)
        return plain(value, self.classes)


def _parquet(rows: Rows, names: Names) -> Iterator[tuple[int, Values]]:
    parquet = needed('pyarrow.parquet', 'Parquet files')
    # With `pre_buffer`, the default, a row group is held whole.
    options = {'buffer_size': _BUFFER, 'pre_buffer': False, 'page_checksum_verification': True}
    with rows.unchanged(), one_line(rows.path), parquet.ParquetFile(rows.path, **options) as file:
        columns = _columns(rows.path, file.schema_arrow, names)
        paths = ['.'.join(column.place) for column in columns.values()]
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        groups = range(len(sizes)) if rows.groups is None else rows.groups
        batches = file.iter_batches(AT_ONCE, row_groups=[*groups], columns=paths, use_threads=False)
        yield from _of_batches(rows, batches, columns, sum(sizes[: groups.start]))


def _arrow(rows: Rows, names: Names) -> Iterator[tuple[int, Values]]:
    mapped, before = rows.groups is not None, 0
    with rows.unchanged(), one_line(rows.path), _batches(rows.path, names, mapped) as (batches, columns):
        if rows.groups is None:
            _refuse_joined(rows.path)
        elif rows.groups:
            before = sum(batch.num_rows for batch in itertools.islice(batches, rows.groups.start))
            batches = itertools.islice(batches, len(rows.groups))
        yield from _of_batches(rows, map(_checked, batches), columns, before)


@contextlib.contextmanager
def _batches(path: Path, names: Names, mapped: bool) -> Iterator[tuple[Iterator[Any], dict[str, _Column]]]:
    """Yields the batches of Arrow's files (Feather is one) and its streams, which the hub's `datasets` write.

    Each has the columns of `names` alone. Batches of a file that is `mapped` are passed over without being read.
    """
    arrow = needed('pyarrow', 'Arrow files')
    with (arrow.memory_map if mapped else arrow.OSFile)(str(path)) as file:
        size, magic = file.size(), file.read(6)
        if magic.startswith(b'FEA1'):
            raise UserError(f'{path} is Feather of version 1: write it as version 2')
        if streamed := magic != b'ARROW1':
            file.seek(max(size - len(_END_OF_STREAM), 0))
            if file.read() != _END_OF_STREAM:
                raise UserError(f'{path} cannot be read: it is cut off, or not an Arrow file')
        file.seek(0)
        open_it = arrow.ipc.open_stream if streamed else arrow.ipc.open_file
        columns = _columns(path, open_it(file).schema, names)
        file.seek(0)
        fields = open_it(file).schema
        wanted = sorted({fields.get_field_index(column.place[0]) for column in columns.values()})
        file.seek(0)
        options = arrow.ipc.IpcReadOptions(included_fields=wanted) if names else None
        table = open_it(file, options=options)
        batches = _stream(path, table, file) if streamed else map(table.get_batch, range(table.num_record_batches))
        yield batches, columns


def _stream(path: Path, batches: Iterable[Any], file: Any) -> Iterator[Any]:
    """Yields the batches of a stream, which must be the whole file."""
    yield from batches
    if file.tell() != file.size():
        raise UserError(f'{path} has more after its end: is it several Arrow streams in one?')


def _refuse_joined(path: Path) -> None:
    """Raises a `UserError` if there are several files of Arrow in one: the last of them says where batches are."""
    with path.open('rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content.find(_JOINT) >= 0:
            raise UserError(f'{path} has more after its end: is it several Arrow files in one?')


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


def _of_batches(
    rows: Rows, batches: Iterable[Any], columns: Mapping[str, _Column], number: int
) -> Iterator[tuple[int, Values]]:
    """Yields the rows of batches, of which `number` rows come before."""
    for batch in batches:
        for start in range(0, batch.num_rows, AT_ONCE):
            for row in _python(batch.slice(start, AT_ONCE)):
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


TABLES: dict[str, Callable[[Rows, Names], Iterator[tuple[int, Values]]]] = {
    '.parquet': _parquet,
    '.arrow': _arrow,
    '.feather': _arrow,
}
