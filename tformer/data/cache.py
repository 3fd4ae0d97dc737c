"""A cache of arrays on disk: each is computed once and shared by every run that needs it.

An entry is a directory whose name is a hash of everything that its arrays depend on. It is written under a temporary
name and then renamed, so it is never half-written. If two processes want the same entry, the second waits for the
first. Where the file system has no locks, both write it, and the entry of the first to finish is kept.

The locks are flock's: the system releases them when their process ends, however it ends.
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

_FORMAT = 1  # increased when the same key stands for different arrays
_MANIFEST = 'manifest.json'


class Writer:
    """Writes the arrays of a new entry, piece by piece.

    Attributes:
      facts: JSON values to store with the arrays.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._files: dict[str, BinaryIO] = {}
        self._dtypes: dict[str, str] = {}
        self.facts: dict[str, Any] = {}

    def append(self, name: str, values: np.ndarray) -> None:
        """Appends `values` [any number] to the array `name`."""
        if name not in self._files:
            self._files[name] = open(self._place / name, 'wb')  # noqa: SIM115
            self._dtypes[name] = values.dtype.str
        self._files[name].write(np.ascontiguousarray(values, self._dtypes[name]).data)

    def close(self) -> None:
        """Flushes all arrays to the disk and writes their manifest."""
        for file in self._files.values():
            with file:
                file.flush()
                os.fsync(file.fileno())
        sizes = {name: (self._place / name).stat().st_size for name in self._files}
        manifest = {'dtypes': self._dtypes, 'bytes': sizes, 'facts': self.facts}
        (self._place / _MANIFEST).write_text(json.dumps(manifest, indent=1))

    def abandon(self) -> None:
        """Closes the files of an entry that cannot be finished."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # the disk may have no room for its last bytes
                file.close()


def directory(data: Data) -> Path:
    """Returns the cache's directory: data.cache_dir, else the environment's TFORMER_CACHE, else ~/.cache/tformer."""
    return Path(data.cache_dir or os.environ.get('TFORMER_CACHE') or '~/.cache/tformer').expanduser()


def arrays(place: Path, depends_on: Mapping[str, Any], make: Callable[[Writer], None]) -> tuple[dict, dict]:
    """Returns the memory-mapped arrays by name, and the facts, of the `entry` of `depends_on`."""
    own = entry(place, depends_on, make)
    manifest = json.loads((own / _MANIFEST).read_text())
    return {name: mapped(str(own / name), dtype) for name, dtype in manifest['dtypes'].items()}, manifest['facts']


def entry(place: Path, depends_on: Mapping[str, Any], make: Callable[[Writer], None]) -> Path:
    """Returns the directory of the entry of `depends_on`, which has a file for each array; makes a missing entry.

    Args:
      place: the directory of all entries.
      depends_on: JSON values; equal values mean equal arrays.
      make: appends the arrays to the writer that it is given.

    Raises:
      UserError: the directory cannot be written, e.g. the disk is full. A half-written entry is removed.
    """
    text = json.dumps({'format': _FORMAT, **depends_on}, sort_keys=True)
    wanted = place / hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    try:
        if not _whole(wanted):
            place.mkdir(parents=True, exist_ok=True)
            _make_alone(wanted, make)
    except OSError as error:
        raise UserError(
            f'cannot write the token cache in {place} (data.cache_dir): {error.strerror or error}'
        ) from error
    return wanted


def _whole(entry: Path) -> bool:
    """Whether the entry exists and its files have the sizes that were written."""
    try:
        sizes = json.loads((entry / _MANIFEST).read_text())['bytes']
        return all((entry / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _make_alone(entry: Path, make: Callable[[Writer], None]) -> None:
    with open(entry.with_suffix('.lock'), 'w') as lock:  # released when the process ends, however it ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f'another process is writing {entry}: waiting for it', file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # the file system has no locks
            pass
        for left in _left(entry):
            shutil.rmtree(left, ignore_errors=True)
        if _whole(entry):
            return
        if entry.exists():  # damaged on disk
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
    """Returns a path beside an entry that no other writer uses: its name holds the host and the process."""
    name = f'{entry.name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(8)}.partial'
    return entry.with_name(name)


def _left(entry: Path) -> list[Path]:
    """Returns the unfinished directories of an entry that dead processes of this host left behind."""
    pattern = re.compile(re.escape(f'{entry.name}.{socket.gethostname()}') + r'\.(\d{1,9})\.[0-9a-f]+\.partial')
    matches = [(path, pattern.fullmatch(path.name)) for path in entry.parent.iterdir()]
    return [path for path, match in matches if match and not _runs(int(match[1]))]


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs as another user
        pass
    return True


def _remove(entry: Path) -> None:
    """Removes a damaged entry. It is renamed first, so that no process sees a part of it."""
    aside = _partial(entry)
    with contextlib.suppress(FileNotFoundError):  # another host has removed it
        entry.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _publish(partial: Path, entry: Path) -> None:
    """Renames a written entry to its final name, unless another process has written it meanwhile."""
    try:
        partial.rename(entry)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) or not _whole(entry):
            raise
        shutil.rmtree(partial, ignore_errors=True)
