"""Checksums of the files of a directory, which reveal damage on disk before the files are used."""

import concurrent.futures
import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping

from tformer import atomic
from tformer.config import hashing
from tformer.errors import UserError

Entry = tuple[int, str]  # the size and the CRC-32 of a file

FILE = 'digests.json'
RECORDS = ('run/metadata', 'merit.json')  # files of a checkpoint that are read without its arrays


def write(directory: pathlib.Path) -> None:
    """Writes the size and the CRC-32 of every file in the subdirectories of `directory` to digests.json in it."""
    files = sorted(path for path in directory.glob('*/**/*') if path.is_file())
    with concurrent.futures.ThreadPoolExecutor() as threads:
        entries = zip(files, threads.map(_entry, files), strict=True)
        _save(directory, {str(path.relative_to(directory)): entry for path, entry in entries})


@contextlib.contextmanager
def recording(directory: pathlib.Path, *names: str, anew: bool = False) -> Iterator[None]:
    """Lists the files of these names after its block, which writes them.

    Meanwhile they are not listed, so that a kill leaves no false alarm. If digests.json cannot be read, it stays as it
    is, or with `anew` is written anew.
    """
    try:
        listed: dict[str, Entry] | None = _listed(directory)
    except ValueError:
        listed = {} if anew else None
    if listed is not None and not listed.keys().isdisjoint(names):
        listed = {name: entry for name, entry in listed.items() if name not in names}
        _save(directory, listed)
    yield
    if listed is not None:
        written = [name for name in names if (directory / name).is_file()]
        _save(directory, listed | {name: _entry(directory / name) for name in written})


def matches(directory: pathlib.Path, name: str) -> bool | None:
    """Returns whether a file is as digests.json lists it; None where it is not listed."""
    try:
        entry = _listed(directory).get(name)
        return None if entry is None else entry == _entry(directory / name)
    except OSError:
        return False
    except ValueError:
        return None


def expect(directory: pathlib.Path, name: str) -> None:
    """Raises a `UserError` if a file that digests.json lists has changed or is missing."""
    if matches(directory, name) is False:
        line = 'has changed since it was written: delete it, and `tformer evaluate` makes it again'
        raise UserError(f'{directory / name} {line}')


def digest(directory: pathlib.Path, prefix: str) -> str:
    """Returns a digest of the listed files whose names begin with `prefix`. Raises a `UserError` without a list."""
    try:
        listed = _listed(directory)
    except ValueError as error:
        raise UserError(str(error)) from error
    return hashing.digest_json(sorted([name, *entry] for name, entry in listed.items() if name.startswith(prefix)), 8)


def find_corruption(directory: pathlib.Path, *, contents: bool = True, arrays: bool = True) -> str | None:
    """Returns a description of the first file that has changed since `write`; None where no file has.

    The contents of `RECORDS` are always checked. Without `contents` only the presence and size of other files are, and
    without `arrays` nothing.
    """
    try:
        listed = _listed(directory)
    except ValueError as error:
        return str(error)
    files = {name: directory / name for name in listed if arrays or name in RECORDS}
    for name, path in files.items():
        if not path.is_file():
            return f'{path} is missing'
        if path.stat().st_size != listed[name][0]:
            return f'{path} has {path.stat().st_size:,} bytes, not {listed[name][0]:,}'
    read = [name for name in files if contents or name in RECORDS]
    with concurrent.futures.ThreadPoolExecutor() as threads:
        for name, entry in zip(read, threads.map(_entry, [files[name] for name in read]), strict=True):
            if entry != listed[name]:
                return f'{files[name]} has changed since it was written'
    return None


def _entry(file: pathlib.Path) -> Entry:
    return file.stat().st_size, hashing.crc32_file(file)


def _save(directory: pathlib.Path, entries: Mapping[str, Entry]) -> None:
    atomic.write(directory / FILE, json.dumps(entries, indent=2) + '\n')


def _listed(directory: pathlib.Path) -> dict[str, Entry]:
    """Returns (size, digest) by the name of each listed file. Raises a `ValueError` if digests.json cannot be read."""
    file = directory / FILE
    try:
        return {name: (int(size), str(digest)) for name, (size, digest) in json.loads(file.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        fault = 'is missing' if isinstance(error, FileNotFoundError) else 'cannot be read'
        raise ValueError(f'{file} {fault}') from error
