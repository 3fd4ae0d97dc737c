"""User files that add rows to the tables of tformer (`config.extensions`), and the rule that decides which are run.

An extension is a Python file that adds rows when it is imported, e.g. `POSITIONS['mine'] = Position(...)`. It is
imported once per process, before the config is checked. The config holds it as `PATH@DIGEST`, the BLAKE2b digest of
the file, so that every process of a run uses the same file.

A config that the user gives (a recipe, the command line, Python) may run the files that it names. A config that is
found in a workdir may not: the user names the files again with --extensions, or puts them in the directory that the
environment variable TFORMER_EXTENSIONS names.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterable

from tformer.config import hashing, python_files
from tformer.config.run import Config
from tformer.errors import UserError, nearest

DIRECTORY = 'TFORMER_EXTENSIONS'  # the environment variable that names a trusted directory

_IMPORTED: dict[str, str] = {}  # digest -> path, of the extensions that this process has imported
_GIVEN: dict[str, None] = {}  # entries of those that the command line gave, in order


def import_files(paths: Iterable[str]) -> list[str]:
    """Imports extensions, unless this process has; returns their entries in config.extensions.

    Raises:
      UserError: a file is missing or does not run.
    """
    return [_imported(pathlib.Path(path), path, None) for path in paths]


def give(paths: Iterable[str]) -> None:
    """Imports the files that the user names on the command line; configs that the user gives then include them."""
    _GIVEN.update(dict.fromkeys(import_files(paths)))


def load(config: Config, *, trusted: bool, place: str, beside: pathlib.Path | None = None) -> Config:
    """Imports the extensions of a config; returns the config with a digest beside each path.

    The files that a `trusted` config names may be run, because the user gave it. Errors name the `place` that the
    config comes from. Relative paths are also looked up in the directory `beside`.

    Raises:
      UserError: a file is missing, has changed, does not run, or may not be run.
    """
    entries = [_load(entry, trusted, place, beside) for entry in config.extensions]
    entries += [entry for entry in _GIVEN if trusted and digest_of(entry) not in map(digest_of, entries)]
    return config if tuple(entries) == config.extensions else dataclasses.replace(config, extensions=tuple(entries))


def path_of(entry: str) -> str:
    """Returns the path in an entry of config.extensions."""
    return re.sub('@[0-9a-f]{32}$', '', entry)


def digest_of(entry: str) -> str | None:
    """Returns the digest in an entry of config.extensions; None if it has none yet."""
    return entry[len(path_of(entry)) + 1 :] or None


def files(config: Config) -> list[str]:
    """Returns the files from which the extensions of a config were imported."""
    return [_IMPORTED.get(digest_of(entry) or '', path_of(entry)) for entry in config.extensions]


class Pickled:
    """Imports the extensions of a config in the process that unpickles it, before what is pickled after it."""

    def __init__(self, config: Config) -> None:
        self._files = files(config)

    def __reduce__(self) -> tuple[object, ...]:
        return import_files, (self._files,)


def _load(entry: str, trusted: bool, place: str, beside: pathlib.Path | None) -> str:
    path, digest = path_of(entry), digest_of(entry)
    if digest in _IMPORTED:
        return entry
    if trusted:
        file = pathlib.Path(path)
        if not file.is_file() and beside is not None and (beside / path).is_file():
            file, path = beside / path, str((beside / path).resolve())
        return _imported(file, path, digest)
    known = {pathlib.Path(other).name: other for other in _IMPORTED.values()}
    name = pathlib.Path(path).name
    if name in known:
        raise _changed(known[name], place)
    file = pathlib.Path(os.environ.get(DIRECTORY, ''), name)
    if DIRECTORY in os.environ and file.is_file():
        if digest != hashing.digest_bytes(file.read_bytes()):
            raise _changed(str(file), place)
        _imported(file, str(file), digest)
        return entry
    raise UserError(
        f'{place} needs the extension {path}: name it with --extensions={path}, or put it in the directory that '
        f'{DIRECTORY} names'
    )


def _imported(file: pathlib.Path, path: str, digest: str | None) -> str:
    """Imports a file, unless this process has; returns its entry."""
    if not file.is_file():
        raise UserError(f'extensions: no file {file}{nearest(file, file.parent.glob("*.py"))}')
    found = hashing.digest_bytes(file.read_bytes())
    if digest is not None and digest != found:
        raise _changed(str(file), 'the config')
    if found not in _IMPORTED:
        _IMPORTED[found] = str(file.resolve())
        try:
            python_files.import_as(file, f'tformer_extension_{file.stem}_{found[:8]}')
        except BaseException:
            del _IMPORTED[found]
            raise
    return f'{path}@{found}'


def _changed(file: str, place: str) -> UserError:
    return UserError(f'extensions: {file} has changed: it is not the file that {place} was made with')
