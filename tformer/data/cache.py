"""A cache of arrays on disk: each is computed once and shared by every run that needs it.

An entry is a directory whose name is a hash of everything that its arrays depend on. It is written under a temporary
name and then renamed, so it is never half-written. If two processes want the same entry, the second waits for the
first. Where the file system has no locks, both write it, and the entry of the first to finish is kept.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tformer.config import hashing
from tformer.config.run import Data
from tformer.data.ragged import mapped
from tformer.errors import UserError

_FORMAT = 1  # increased when the same key stands for different arrays
_MANIFEST = 'manifest.json'


class Writer:
    """Writes the arrays of a new entry, piece by piece; `facts` are JSON values to store with them."""

    def __init__(self, place: Path) -> None:
        self.facts: dict[str, Any] = {}
        self._place = place
        self._dtypes: dict[str, str] = {}

    def append(self, name: str, values: np.ndarray) -> None:
        """Appends `values` [any number] to the array `name`, which has the dtype of its first values."""
        dtype = self._dtypes.setdefault(name, values.dtype.str)
        with open(self._place / name, 'ab') as file:
            file.write(np.ascontiguousarray(values, dtype).data)

    def close(self) -> None:
        """Flushes all arrays to the disk and writes their manifest."""
        sizes = {}
        for name in self._dtypes:
            with open(self._place / name, 'rb+') as file:
                os.fsync(file.fileno())
                sizes[name] = os.fstat(file.fileno()).st_size
        manifest = {'dtypes': self._dtypes, 'bytes': sizes, 'facts': self.facts}
        (self._place / _MANIFEST).write_text(json.dumps(manifest, indent=1))


def directory(data: Data) -> Path:
    """Returns the cache's directory: data.cache_dir, else the environment's TFORMER_CACHE, else ~/.cache/tformer."""
    return Path(data.cache_dir or os.environ.get('TFORMER_CACHE') or '~/.cache/tformer').expanduser()


def arrays(place: Path, depends_on: Mapping[str, Any], make: Callable[[Writer], None]) -> tuple[dict, dict]:
    """Returns the memory-mapped arrays by name, and the facts, of the `entry` of `depends_on`."""
    own = entry(place, depends_on, make)
    manifest = json.loads((own / _MANIFEST).read_text())
    return {name: mapped(str(own / name), dtype) for name, dtype in manifest['dtypes'].items()}, manifest['facts']


def entry(place: Path, depends_on: Mapping[str, Any], make: Callable[[Writer], None]) -> Path:
    """Returns the directory of the entry of `depends_on` in `place`, with a file for each array; makes a missing entry.

    `depends_on` holds JSON values; equal values mean equal arrays. `make` appends the arrays to the writer.

    Raises:
      UserError: the directory cannot be written, e.g. the disk is full. A half-written entry is removed.
    """
    wanted = place / hashing.digest_json({'format': _FORMAT, **depends_on})
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
    """Makes a missing or damaged entry, unless another process makes it meanwhile."""
    host = socket.gethostname()
    with open(entry.with_suffix('.lock'), 'w') as lock:  # released when the process ends, however it ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f'another process is writing {entry}: waiting for it', file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # the file system has no locks
            pass
        _remove_left(entry, host)
        if _whole(entry):
            return
        shutil.rmtree(entry, ignore_errors=True)  # damaged on disk
        # The name holds the host and the process, so that no other writer uses it.
        partial = entry.with_name(f'{entry.name}.{host}.{os.getpid()}.{secrets.token_hex(8)}.partial')
        partial.mkdir()
        writer = Writer(partial)
        try:
            make(writer)
            writer.close()
            partial.rename(entry)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if not isinstance(error, OSError) or not _whole(entry):  # else another process has written it meanwhile
                raise


def _remove_left(entry: Path, host: str) -> None:
    """Removes the unfinished directories of an entry that dead processes of this host left behind."""
    pattern = re.compile(re.escape(f'{entry.name}.{host}') + r'\.(\d{1,9})\.[0-9a-f]+\.partial')
    for path in list(entry.parent.iterdir()):
        match = pattern.fullmatch(path.name)
        if match and not _runs(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # it runs as another user
    return True
