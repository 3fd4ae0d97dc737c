"""Rows of a long work, kept beside the file that they will be, so that a stopped command goes on.

FILE.part holds a line of JSON that says of what it is, and one for each row as it came. Of several processes the first
one keeps its rows there and number N in FILE.part.N; whoever goes on, in whatever number, finds the rows of all.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from tformer.data import locks
from tformer.distributed import processes
from tformer.errors import UserError


class Kept(NamedTuple):
    """The rows that there are, to which a process adds its own."""

    rows: dict[int, Any]
    file: Any
    path: pathlib.Path  # that the rows will be
    head: str
    most: int  # rows that there will be
    seen: dict[int, int]  # other process -> how many bytes of its file were counted

    def add(self, index: int, row: Any) -> None:
        """Keeps row number `index`, which a killed process leaves behind."""
        self.file.write(json.dumps([index, row]).encode() + b'\n')
        self.file.flush()
        self.rows[index] = row

    def added_elsewhere(self) -> int:
        """Returns how many rows other processes have kept since this was last asked."""
        found = 0
        for number in self.seen:
            with contextlib.suppress(FileNotFoundError), _part(self.path, number).open('rb') as file:
                file.seek(self.seen[number])
                new = file.read()
                self.seen[number] += len(new)
                found += new.count(b'\n')
        return found

    def whole(self) -> dict[int, Any] | None:
        """Returns the rows of all processes once these have called this; None in all but the first."""
        if not processes.first():
            self.file.close()
        processes.meet('kept rows')
        if not processes.first():
            return None
        _take_others(self)
        return self.rows


@contextlib.contextmanager
def kept(path: pathlib.Path, of: Mapping[str, Any], count: int) -> Iterator[Kept]:
    """Yields the rows that earlier processes left for `path`, to which others are added; all processes see the same.

    The files are removed where all went well, and one without a row in any case. A torn last line, as a full disk
    leaves it, is dropped.

    Args:
      path: the file that the rows will be.
      of: what they are made of, values of JSON; other rows are not taken.
      count: how many there will be.

    Raises:
      UserError: a file is of something else, or another process writes it.
    """
    number, head = jax.process_index(), json.dumps({name: _short(value) for name, value in of.items()})
    seen = {other: len(head.encode()) + 1 for other in range(jax.process_count()) if other != number}
    rows: dict[int, Any] = {}
    if not processes.first():
        processes.meet('rows of earlier processes are one file')
        with _part(path).open('rb') as file:
            rows = _read(_part(path), file, head, count)
    with _locked(_part(path, number)) as file:
        there = Kept(rows | _read(_part(path, number), file, head, count), file, path, head, count, seen)
        if processes.first():
            _take_others(there)
            file.flush()
            os.fsync(file.fileno())  # so that other hosts see it
            processes.meet('rows of earlier processes are one file')
        processes.meet('rows of earlier processes are read')
        try:
            yield there
        except BaseException:
            with contextlib.suppress(FileNotFoundError):  # the first process may have taken its rows
                if _part(path, number).stat().st_size <= len(head.encode()) + 1:  # no row
                    _part(path, number).unlink()
            raise
        if processes.first():
            _part(path).unlink()


def _part(path: pathlib.Path, number: int = 0) -> pathlib.Path:
    """Returns the file in which a process keeps its rows."""
    return path.with_name(f'{path.name}.part{f".{number}" if number else ""}')


def _locked(part: pathlib.Path) -> Any:
    """Returns an open file that no other process writes."""
    file = part.open('a+b')
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise UserError(f'{part}: another process writes it') from error
    except OSError as error:
        locks.say_none(part, error)
    return file


def _take_others(there: Kept) -> None:
    """Moves the rows of other processes to those of the first."""
    name = re.compile(re.escape(there.path.name) + r'\.part\.\d+')
    for part in sorted(each for each in there.path.parent.iterdir() if name.fullmatch(each.name)):
        with _locked(part) as file:
            for index, row in _read(part, file, there.head, there.most).items():
                there.add(index, row)
        part.unlink()


def _short(value: Any) -> Any:
    """Returns a short value itself, and of a long one its digest."""
    text = json.dumps(value)
    return value if len(text) <= 200 else hashlib.sha256(text.encode()).hexdigest()


def _read(part: pathlib.Path, file: Any, head: str, count: int) -> dict[int, Any]:
    """Returns the rows of a file that begins with `head`. One that is open for writing is begun where it is empty, and
    loses a torn end."""
    file.seek(0)
    first, *lines = file.read().split(b'\n')
    if not lines and file.writable():  # not even the first line is whole
        file.truncate(0)
        file.write(f'{head}\n'.encode())
        return {}
    if first != head.encode():
        raise UserError(f'{part} is of something else{_difference(first, head)}: remove it, or name another --output')
    whole = lines[:-1]  # the last one is empty, or torn
    if file.writable():
        file.truncate(sum(len(line) + 1 for line in (first, *whole)))
    try:
        rows = [(index, row) for index, row in map(json.loads, whole)]
    except (ValueError, TypeError) as error:
        raise UserError(f'{part} is damaged: remove it') from error
    if not all(type(index) is int and 0 <= index < count and isinstance(row, list) for index, row in rows):
        raise UserError(f'{part} is damaged: remove it')
    return dict(rows)


def _difference(there: bytes, here: str) -> str:
    """Returns what two first lines say otherwise, in brackets; nothing where the first one says nothing."""
    try:
        before = json.loads(there)
        other = [
            f'{name}={before[name]} there, {value} here'
            for name, value in json.loads(here).items()
            if before[name] != value
        ]
    except (ValueError, TypeError, KeyError):
        return ''
    return f' ({"; ".join(other)[:300]})'
