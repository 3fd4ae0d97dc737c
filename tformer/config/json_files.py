"""JSON files that are read back. A mistake in one is one line that names the file, and the line of a file of rows."""

import json
import os
import pathlib
from typing import Any

from tformer.errors import UserError


def parse(text: str) -> dict[str, Any]:
    """Returns the JSON object that a text holds.

    Raises:
      ValueError: it is not JSON, is nested too deeply, is not an object, or gives a key twice.
    """
    try:
        tree = json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError('it is nested too deeply') from None
    if not isinstance(tree, dict):
        raise ValueError('not a JSON object')
    return tree


def read(file: pathlib.Path) -> dict[str, Any]:
    """Returns the object that a JSON file holds. Raises a `UserError` if the file is missing or holds no object."""
    text = _text(file)
    try:
        return parse(text)
    except ValueError as error:
        raise UserError(f'{file}: {error}') from error


def read_if_there(file: pathlib.Path) -> dict[str, Any]:
    """Returns the object that a JSON file holds; {} where nothing has its name, not even a link to nowhere."""
    return read(file) if os.path.lexists(file) else {}


def read_rows(file: pathlib.Path, *, unfinished: bool = False) -> list[dict[str, Any]]:
    """Returns the objects of a file, one a line; if `unfinished`, without a last line that does not end.

    Raises:
      UserError: the file is missing, or one of its lines holds no object.
    """
    *lines, rest = _text(file).split('\n')
    if rest and not unfinished:
        lines.append(rest)
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(parse(line))
        except ValueError as error:
            raise UserError(f'{file}:{number}: {error}') from error
    return rows


def _text(file: pathlib.Path) -> str:
    if not file.is_file():  # reading a pipe or a device might never end
        raise UserError(f'{file} is not a file' if file.exists() else f'no file {file}')
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(f'{file}: not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start:,}') from None
    except OSError as error:
        raise UserError(f'{file}: {error.strerror}') from error


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object of JSON's pairs. Raises a `ValueError` if it gives a key twice."""
    tree = dict(pairs)
    if len(tree) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f'the key {max(names, key=names.count)!r} is given twice')
    return tree
