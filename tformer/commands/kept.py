"""Rows of a long work, kept beside the file that they will be, so that a stopped command goes on."""

import contextlib
import fcntl
import hashlib
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tformer.errors import UserError


class Kept(NamedTuple):
    """What there is of FILE in FILE.part: a line of JSON that says of what, and one for each row as it came."""

    rows: dict[int, Any]
    file: Any

    def add(self, index: int, row: Any) -> None:
        """Keeps row number `index`, which a killed process leaves behind."""
        self.file.write(json.dumps([index, row]).encode() + b'\n')
        self.file.flush()
        self.rows[index] = row


@contextlib.contextmanager
def kept(path: pathlib.Path, of: Mapping[str, Any], count: int) -> Iterator[Kept]:
    """Yields the rows that an earlier process left for `path`, to which others are added.

    FILE.part is removed where all went well. A torn last line, as a full disk leaves it, is dropped.

    Args:
      path: the file that the rows will be.
      of: what they are made of, values of JSON; other rows are not taken.
      count: how many there will be.

    Raises:
      UserError: FILE.part is of something else, or another process writes it.
    """
    part = path.with_name(f'{path.name}.part')
    with part.open('a+b') as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f'{part}: another process writes it') from error
        head = json.dumps({name: _short(value) for name, value in of.items()})
        rows = _read(part, file, head, count)
        yield Kept(rows, file)
        part.unlink()


def _short(value: Any) -> Any:
    """Returns a short value itself, and of a long one its digest."""
    text = json.dumps(value)
    return value if len(text) <= 200 else hashlib.sha256(text.encode()).hexdigest()


def _read(part: pathlib.Path, file: Any, head: str, count: int) -> dict[int, Any]:
    """Returns the rows of a file that begins with `head`, and begins it where it is empty."""
    file.seek(0)
    first, *lines = file.read().split(b'\n')
    if not lines:  # not even the first line is whole
        file.truncate(0)
        file.write(f'{head}\n'.encode())
        return {}
    if first != head.encode():
        raise UserError(f'{part} is of something else{_difference(first, head)}: remove it, or name another --output')
    whole = lines[:-1]  # the last one is empty, or torn
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
