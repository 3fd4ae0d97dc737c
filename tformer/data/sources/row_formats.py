"""Rows of binary files as plain values: tables, the tar shards of WebDataset, and ArrayRecord.

A file is read a few rows at a time, whatever its size.
"""

import itertools
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from tformer.config import json_files
from tformer.data.sources.records import BadRecord
from tformer.data.sources.rows import AT_ONCE, Names, Rows, Values, one_line, plain
from tformer.data.sources.tables import TABLES
from tformer.data.sources.text_reader import needed, opened
from tformer.errors import UserError

_BLOCK, _TOGETHER = 512, 1 << 16  # bytes; tar's own unit, and what is read of a tar file together
_MEMBERS = {'txt': 'text', 'cls': 'label'}  # WebDataset's names of members, and ours


def values(rows: Rows, kind: str, names: Names) -> Iterator[tuple[int, Values]]:
    """Yields the number, from 1, and the values of each row of a file of a `kind` in `ROWS`, as JSON has them.

    A name with slashes is a field inside a column, e.g. translation/en. Rows that cannot be read are `rows.bad`.

    Raises:
      UserError: the file is damaged, lacks a column that every row needs, or changes while it is read.
    """
    yield from ROWS[kind](rows, names)


def _tar(rows: Rows, names: Names) -> Iterator[tuple[int, Values]]:
    """The samples of a shard: adjacent members whose names are the same up to the first dot of the last part.

    The rest of a member's name is the name of its text; the keys of an object in a .json member are names, too. Members
    without such a rest, such as README and hidden files, are not part of a sample. Nothing is unpacked to the disk.
    """
    with opened(rows.file) as stored, one_line(rows.path):
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
        if blocks.more_after(tar.offset):
            raise UserError(f'{rows.path} has more after its end: is it several tar files in one?')


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

    def more_after(self, place: int) -> bool:
        """Returns whether anything but zeros is behind a place in what was read last; the file is read to its end."""
        more = any(self._last[place - self._stop + len(self._last) :])
        while piece := self._file.read(_TOGETHER):
            more = more or any(piece)
        return more


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
    text = plain(content.read(), None).removeprefix('\ufeff')
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
    with rows.unchanged(), one_line(rows.path):
        reader = module.ArrayRecordReader(str(rows.path))
        if not reader.ok():
            raise UserError(f'{rows.path} cannot be read: it is cut off, or not an ArrayRecord file')
        objects = None
        for start in range(0, reader.num_records(), AT_ONCE):
            stored = reader.read(start, min(start + AT_ONCE, reader.num_records()))
            for number, content in enumerate(stored, start=start + 1):
                try:
                    text = plain(content, None)
                    if objects is None:
                        objects = text.lstrip().startswith('{') and isinstance(json.loads(text), dict)
                    found = _object(text, 'the record') if objects else {'text': text}
                except (ValueError, RecursionError) as error:
                    rows.bad(number, error)
                    continue
                yield number, found


ROWS: dict[str, Callable[[Rows, Names], Iterator[tuple[int, Values]]]] = {
    **TABLES,
    '.tar': _tar,
    '.array_record': _array_record,
    '.arrayrecord': _array_record,
}
