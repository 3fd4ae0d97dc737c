"""Checksums of the files of a directory, which reveal damage on disk before the files are used."""

import concurrent.futures
import json
import pathlib

from tformer.config import hashing

FILE = 'digests.json'


def write(directory: pathlib.Path) -> None:
    """Writes the size and the CRC-32 of every file in the subdirectories of `directory` to digests.json in it."""
    files = sorted(path for path in directory.glob('*/**/*') if path.is_file())
    with concurrent.futures.ThreadPoolExecutor() as threads:
        found = {
            str(path.relative_to(directory)): [path.stat().st_size, digest]
            for path, digest in zip(files, threads.map(hashing.crc32_file, files), strict=True)
        }
    (directory / FILE).write_text(json.dumps(found, indent=2) + '\n')


def find_corruption(directory: pathlib.Path, *, contents: bool = True) -> str | None:
    """Returns a description of the first file that has changed since `write`; None where no file has.

    Without `contents` the files are not read: only their presence and size are checked.
    """
    listing = directory / FILE
    try:
        wanted = json.loads(listing.read_text())
        files = {directory / name: (int(size), str(digest)) for name, (size, digest) in wanted.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f'{listing} {"is missing" if isinstance(error, FileNotFoundError) else "cannot be read"}'
    for path, (size, _) in files.items():
        if not path.is_file():
            return f'{path} is missing'
        if path.stat().st_size != size:
            return f'{path} has {path.stat().st_size:,} bytes, not {size:,}'
    if contents:
        with concurrent.futures.ThreadPoolExecutor() as threads:
            for (path, (_, wanted)), digest in zip(files.items(), threads.map(hashing.crc32_file, files), strict=True):
                if digest != wanted:
                    return f'{path} has changed since it was written'
    return None
