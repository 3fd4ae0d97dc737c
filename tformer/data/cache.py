"""Arrays on disk that cost much to make: made once, then shared by every run that needs the same ones.

An entry is a directory whose name is a hash of all that its arrays depend on. It appears whole or not at all: it is
written beside its place and renamed. Of two processes that want the same one at once the second waits for the first;
where the file system's locks do not tell one of the other, both write, each beside, and the first to end is kept.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tformer.config.run import Data
from tformer.data.ragged import mapped
from tformer.errors import UserError

_FORMAT = 1  # counts up where the same key stands for other arrays
_MANIFEST = 'manifest.json'


class Writer:
    """Takes the arrays of a new entry, in pieces."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._files: dict[str, BinaryIO] = {}
        self._dtypes: dict[str, str] = {}
        self.facts: dict[str, Any] = {}  # what else the entry tells, as JSON

    def append(self, name: str, values: np.ndarray) -> None:
        """Adds `values` [any number] to the end of the array `name`."""
        if name not in self._files:
            self._files[name] = open(self._place / name, 'wb')  # noqa: SIM115
            self._dtypes[name] = values.dtype.str
        self._files[name].write(np.ascontiguousarray(values, self._dtypes[name]).data)

    def close(self) -> None:
        """Brings everything to the disk."""
        for file in self._files.values():
            with file:
                file.flush()
                os.fsync(file.fileno())
        sizes = {name: (self._place / name).stat().st_size for name in self._files}
        manifest = {'dtypes': self._dtypes, 'bytes': sizes, 'facts': self.facts}
        (self._place / _MANIFEST).write_text(json.dumps(manifest, indent=1))

    def abandon(self) -> None:
        """Closes what cannot be finished."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # its last bytes have no room either
                file.close()


def directory(data: Data) -> Path:
    """Where the entries of a run are: data.cache_dir, or the environment's TFORMER_CACHE, or ~/.cache/tformer."""
    return Path(data.cache_dir or os.environ.get('TFORMER_CACHE') or '~/.cache/tformer').expanduser()


def arrays(place: Path, depends_on: Mapping[str, Any], make: Callable[[Writer], None]) -> tuple[dict, dict]:
    """Returns (the arrays by name, memory-mapped; the facts) of the `entry` of `depends_on`."""
    found = entry(place, depends_on, make)
    manifest = json.loads((found / _MANIFEST).read_text())
    return {name: mapped(str(found / name), dtype) for name, dtype in manifest['dtypes'].items()}, manifest['facts']


def entry(place: Path, depends_on: Mapping[str, Any], make: Callable[[Writer], None]) -> Path:
    """Returns the directory of the entry of `depends_on`, with a file for each array, made where it is not there.

    Args:
      place: the directory of all entries.
      depends_on: JSON values; equal ones mean equal arrays.
      make: appends the arrays to the writer that it is given.

    Raises:
      UserError: the place cannot be written, e.g. the disk is full. Nothing half-made stays.
    """
    text = json.dumps({'format': _FORMAT, **depends_on}, sort_keys=True)
    wanted = place / hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    try:
        if not _whole(wanted):
            place.mkdir(parents=True, exist_ok=True)
            _make_alone(wanted, make)
    except OSError as error:
        raise UserError(f'the cache of tokens in {place} (data.cache_dir): {error.strerror or error}') from error
    return wanted


def _whole(entry: Path) -> bool:
    """Whether the entry is there, with files of the sizes that were written."""
    try:
        sizes = json.loads((entry / _MANIFEST).read_text())['bytes']
        return all((entry / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _make_alone(entry: Path, make: Callable[[Writer], None]) -> None:
    with open(entry.with_suffix('.lock'), 'w') as lock:  # given back when the process ends, however it ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f'another process writes {entry}: waiting for it', file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system that has no locks
            pass
        for left in _left(entry):
            shutil.rmtree(left, ignore_errors=True)
        if _whole(entry):
            return
        if entry.exists():  # a disk has damaged it
            _remove(entry)
        partial = _partial(entry)
        partial.mkdir()
        writer = Writer(partial)
        try:
            make(writer)
            writer.close()
            _publish(partial, entry)
        except BaseException:
            writer.abandon()
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _partial(entry: Path) -> Path:
    """Returns a name beside an entry that is of no other writer: it tells the host and the process."""
    name = f'{entry.name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(8)}.partial'
    return entry.with_name(name)


def _left(entry: Path) -> list[Path]:
    """Returns what processes of this host that are gone have left of an entry."""
    named = re.compile(re.escape(f'{entry.name}.{socket.gethostname()}') + r'\.(\d{1,9})\.[0-9a-f]+\.partial')
    found = [(path, named.fullmatch(path.name)) for path in entry.parent.iterdir()]
    return [path for path, match in found if match and not _runs(int(match[1]))]


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        pass
    return True


def _remove(entry: Path) -> None:
    """Removes a damaged entry; it is renamed first, so that nobody finds a part of it."""
    aside = _partial(entry)
    with contextlib.suppress(FileNotFoundError):  # another host was sooner
        entry.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _publish(partial: Path, entry: Path) -> None:
    """Gives a written entry its name, where nobody else has written it meanwhile."""
    try:
        partial.rename(entry)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) or not _whole(entry):
            raise
        shutil.rmtree(partial, ignore_errors=True)
