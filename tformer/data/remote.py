"""Files at a distance as local ones: http(s)://, s3://, gs://, and by fsspec hf:// and whatever else it knows.

Each file is an entry of the cache, whose key holds what its server says of its version: it is fetched once, and again
when the server has another one. Where it says nothing, the file is kept for this process alone. It is written in pieces
as they come. A read that breaks off goes on where it stopped, a file that changes meanwhile is an error, and every byte
that is kept passes its checksums before it is used again.
"""

import contextlib
import functools
import hashlib
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tformer.data import cache, places
from tformer.errors import UserError

TRIES, PAUSE = 5, 1.0  # reads without progress, and the seconds before the second of them; they double
_URL = re.compile(r'([a-z][a-z0-9+.-]*)://', re.IGNORECASE)
_CONTENT = 'content'  # the name of a file in its entry of the cache


@functools.cache
def fetched(path: str, directory: Path) -> str:
    """Returns a path, and of one at a distance that of a local copy, whose files are kept in a cache's directory.

    A path on a store is a file, a directory or a pattern of names in one; by http it is a file.

    Raises:
      UserError: the path does not exist, its server fails again and again, or the cache cannot be written.
    """
    if not (url := _URL.match(path)):
        return path
    scheme = url[1].lower()
    path = f'{scheme}://{path[url.end() :]}'
    place = _again(path, lambda: places.PLACES.get(scheme, places.ByFsspec)(path))
    names = [name for name in _again(path, place.names) if name and not name.endswith('/')]  # which stand for folders
    if not names:
        raise UserError(f'{path} does not exist')
    local = _held(None)  # links to the files, with their own names
    _URLS[f'{local}/'] = f'{place.url}/'
    for name in names:
        if '..' in name.split('/') or name.startswith('/'):
            raise UserError(f'{path} has a file {name!r}, which leads outside')
        kept = _kept(place, name, directory).absolute()
        try:
            (local / name).parent.mkdir(parents=True, exist_ok=True)
            (local / name).symlink_to(kept)
        except (FileExistsError, NotADirectoryError):
            raise UserError(f'{path} has {name!r}, of which a part is both a file and a directory') from None
    rest = names[0] if scheme in ('http', 'https') else path[len(place.url) :].strip('/')
    return str(local / rest)


_HELD: list[tempfile.TemporaryDirectory[str]] = []  # until the process ends
_URLS: dict[str, str] = {}  # by the directories of local copies


def _held(directory: Path | None) -> Path:
    """Returns a new directory, in another one or among the system's, that is deleted when the process ends."""
    try:
        if directory:
            directory.mkdir(parents=True, exist_ok=True)
        _HELD.append(tempfile.TemporaryDirectory(prefix='tformer-', dir=directory))
    except OSError as error:
        raise UserError(f'no files can be kept in {directory} (data.cache_dir): {error.strerror}') from error
    return Path(_HELD[-1].name)


@contextlib.contextmanager
def by_url() -> Iterator[None]:
    """Has the errors of a block name the URLs of files, not their local copies."""
    try:
        yield
    except UserError as error:
        line = str(error)
        for place, url in _URLS.items():
            line = line.replace(place, url)
        if line == str(error):
            raise
        raise type(error)(line) from error.__cause__


def _kept(place: places.Place, name: str, directory: Path) -> Path:
    """Returns the file of a cache's entry with the content of a file at a distance."""
    where = f'{place.url}/{name}'
    version = _again(where, lambda: place.version(name))
    directory = directory if place.lasts(version) else _held(directory)
    depends_on = {'file': where, 'version': version}
    return cache.entry(directory, depends_on, functools.partial(_write, place, name, version)) / _CONTENT


def _write(place: places.Place, name: str, version: str, writer: cache.Writer) -> None:
    """Writes the content of a file as it comes."""
    where, done, digests = f'{place.url}/{name}', 0, {kind: hashlib.new(kind) for kind in ('md5', 'sha256')}
    writer.append(_CONTENT, np.zeros(0, np.uint8))
    last_line = time.monotonic()

    def go_on() -> None:
        nonlocal done, last_line
        for piece in _joined(place.read(name, done, version)):
            writer.append(_CONTENT, np.frombuffer(piece, np.uint8))
            for digest in digests.values():
                digest.update(piece)
            done += len(piece)
            if time.monotonic() > last_line + 10:
                last_line = time.monotonic()
                print(f'fetched {done:,} bytes of {where}', file=sys.stderr, flush=True)

    _again(where, go_on, progress=lambda: done)
    if _again(where, lambda: place.version(name)) != version:
        raise places.changed(where)
    promised = place.checksum(name)
    if promised and digests[promised[0]].hexdigest() != promised[1]:
        raise UserError(f'{where} was damaged on its way: its {promised[0]} is not the one that its server gives')


def _joined(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yields large pieces in place of small ones; of a read that is `Broken`, all that has come."""
    held = bytearray()
    try:
        for piece in pieces:
            held += piece
            if len(held) >= places.PIECE:
                yield bytes(held)
                held.clear()
    except places.Broken:
        yield bytes(held)
        raise
    yield bytes(held)


def _again(where: str, act: Callable[[], Any], progress: Callable[[], int] = lambda: 0) -> Any:
    """Returns what `act` returns, which is tried again where it is `Broken`, for as long as there is progress."""
    tries, before = 0, progress()
    while True:
        try:
            return act()
        except FileNotFoundError:
            raise UserError(f'{where} does not exist') from None
        except places.Broken as error:
            tries, before = (0 if progress() > before else tries), progress()
            tries += 1
            if tries >= TRIES:
                raise UserError(f'{where} cannot be fetched: {error} ({TRIES} times)') from None
            time.sleep(PAUSE * 2 ** (tries - 1))
