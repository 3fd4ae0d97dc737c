"""Checksums of the files of a directory, which reveal damage on disk before the files are used."""

import concurrent.futures
import contextlib
import json
import pathlib
from collections.abc import Iterable

from tformer import atomic
from tformer.config import hashing

FILE = 'digests.json'
RECORDS = ('run/metadata', 'merit.json')  # files of a checkpoint that are read without its arrays


def write(directory: pathlib.Path, files: Iterable[pathlib.Path] | None = None) -> None:
    """Writes the size and the CRC-32 of files of a directory to digests.json in it.

    files=None: every file in its subdirectories.
    """
    files = sorted(path for path in files or directory.glob('*/**/*') if path.is_file())
    with concurrent.futures.ThreadPoolExecutor() as threads:
        found = {
            str(path.relative_to(directory)): [path.stat().st_size, digest]
            for path, digest in zip(files, threads.map(hashing.crc32_file, files), strict=True)
        }
    atomic.write(directory / FILE, json.dumps(found, indent=2) + '\n')


def add(directory: pathlib.Path, name: str) -> None:
    """Adds a file that was written after the others. An unreadable digests.json stays as it is."""
    with contextlib.suppress(ValueError):
        wanted = _listed(directory)
        wanted[name] = ((directory / name).stat().st_size, hashing.crc32_file(directory / name))
        atomic.write(directory / FILE, json.dumps(wanted, indent=2) + '\n')


def has_changed(directory: pathlib.Path, name: str) -> bool:
    """Returns whether a file is not as digests.json lists it, or is not listed."""
    try:
        size, digest = _listed(directory)[name]
        return (directory / name).stat().st_size != size or hashing.crc32_file(directory / name) != digest
    except (OSError, ValueError, LookupError):
        return True


def find_corruption(directory: pathlib.Path, *, contents: bool = True, arrays: bool = True) -> str | None:
    """Returns a description of the first file that has changed since `write`; None where no file has.

    The contents of `RECORDS` are always checked. Without `contents` only the presence and size of other files are, and
    without `arrays` nothing.
    """
    try:
        listed = _listed(directory)
    except ValueError as error:
        return str(error)
    files = {directory / name: entry for name, entry in listed.items() if arrays or name in RECORDS}
    for path, (size, _) in files.items():
        if not path.is_file():
            return f'{path} is missing'
        if path.stat().st_size != size:
            return f'{path} has {path.stat().st_size:,} bytes, not {size:,}'
    read = [directory / name for name in listed if directory / name in files and (contents or name in RECORDS)]
    with concurrent.futures.ThreadPoolExecutor() as threads:
        for path, digest in zip(read, threads.map(hashing.crc32_file, read), strict=True):
            if digest != files[path][1]:
                return f'{path} has changed since it was written'
    return None


def _listed(directory: pathlib.Path) -> dict[str, tuple[int, str]]:
    """Returns (size, digest) by the name of each listed file. Raises a `ValueError` if digests.json cannot be read."""
    file = directory / FILE
    try:
        return {name: (int(size), str(digest)) for name, (size, digest) in json.loads(file.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        fault = 'is missing' if isinstance(error, FileNotFoundError) else 'cannot be read'
        raise ValueError(f'{file} {fault}') from error
