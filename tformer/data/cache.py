"""A cache of arrays on disk: each is computed once and shared by every run that needs it.

An entry is a directory whose name is a hash of everything that its arrays depend on. It is written under a temporary
name and then renamed, so it is never half-written. If two processes want the same entry, the second waits for the
first. Where the file system has no locks, both write it, and the entry of the first to finish is kept.

An entry is read only after all its bytes have passed their checksums, and an entry that fails is made again.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import sys
import zlib
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
# The dtypes of arrays. A file of another one is refused: bytes that are read as Python objects are used as addresses.
_DTYPES = frozenset(np.dtype(kind).str for kind in (np.uint8, np.uint16, np.int32, np.int64, np.float32))

Arrays = dict[str, np.ndarray]
Facts = dict[str, Any]
Check = Callable[[Arrays, Facts], object]  # raises a ValueError where an entry does not hold what its reader needs


class Writer:
    """Writes the arrays of a new entry, piece by piece; `facts` are JSON values to store with them."""

    def __init__(self, place: Path) -> None:
        self.facts: dict[str, Any] = {}
        self._place = place
        self._dtypes: dict[str, str] = {}
        self._checksums: dict[str, int] = {}

    def append(self, name: str, values: np.ndarray) -> None:
        """Appends `values` [any number] to the array `name`, which has the dtype of its first values."""
        dtype = self._dtypes.setdefault(name, values.dtype.str)
        piece = np.ascontiguousarray(values, dtype).data
        self._checksums[name] = zlib.crc32(piece, self._checksums.get(name, 0))
        with open(self._place / name, 'ab') as file:
            file.write(piece)

    def close(self) -> None:
        """Flushes all arrays to the disk and writes their manifest."""
        sizes = {}
        for name in self._dtypes:
            with open(self._place / name, 'rb+') as file:
                os.fsync(file.fileno())
                sizes[name] = os.fstat(file.fileno()).st_size
        checksums = {name: f'{value:08x}' for name, value in self._checksums.items()}
        manifest = {'dtypes': self._dtypes, 'bytes': sizes, 'crc32': checksums, 'facts': self.facts}
        manifest['digest'] = hashing.digest_json(manifest)
        (self._place / _MANIFEST).write_text(json.dumps(manifest, indent=1))


def directory(data: Data) -> Path:
    """Returns the cache's directory: data.cache_dir, else the environment's TFORMER_CACHE, else ~/.cache/tformer."""
    return Path(data.cache_dir or os.environ.get('TFORMER_CACHE') or '~/.cache/tformer').expanduser()


def arrays(
    place: Path, depends_on: Mapping[str, Any], make: Callable[[Writer], None], check: Check = lambda *_: None
) -> tuple[Arrays, Facts]:
    """Returns the memory-mapped arrays by name, and the facts, of the `entry` of `depends_on`, which pass `check`."""
    return _read(entry(place, depends_on, make, check))


def entry(
    place: Path,
    depends_on: Mapping[str, Any],
    make: Callable[[Writer], None],
    check: Check = lambda *_: None,
    named_by: str = 'data.cache_dir',
) -> Path:
    """Returns the directory of the entry of `depends_on` in `place`, with a file for each array.

    An entry that is missing, damaged or fails `check` is made. `depends_on` holds JSON values; equal values mean equal
    arrays. `make` appends the arrays to the writer. In messages, `named_by` is what names the directory.

    Raises:
      UserError: the directory cannot be written, e.g. the disk is full. A half-written entry is removed.
    """
    wanted = place / hashing.digest_json({'format': _FORMAT, **depends_on})
    try:
        if not wanted.exists() or _fault(wanted, check):
            place.mkdir(parents=True, exist_ok=True)
            _make_alone(wanted, make, check)
    except OSError as error:
        raise UserError(f'cannot use the token cache in {place} ({named_by}): {error.strerror or error}') from error
    return wanted


def made(place: Path, depends_on: Mapping[str, Any]) -> tuple[Arrays, Facts]:
    """Returns what `arrays` does, of an entry that this run has made or checked: its bytes are not read again."""
    return _read(place / hashing.digest_json({'format': _FORMAT, **depends_on}))


def _fault(entry: Path, check: Check) -> str | None:
    """Returns why an entry cannot be used; None if it can. All its bytes are read."""
    try:
        _read(entry, check)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        return f'{Path(error.filename).name}: {error.strerror}'
    except (LookupError, AttributeError, TypeError) as error:
        return f'{_MANIFEST} is not one: {type(error).__name__} {error}'
    except (ValueError, RecursionError, OverflowError) as error:
        return ' '.join(str(error).split())
    return None


def _read(entry: Path, check: Check | None = None) -> tuple[Arrays, Facts]:
    """Returns the arrays and the facts of an entry; with a `check`, its checksums are compared first.

    Raises:
      ValueError, LookupError, AttributeError, TypeError: it is not what a `Writer` wrote, or fails `check`.
    """
    manifest = json.loads((entry / _MANIFEST).read_text())
    written = manifest.pop('digest')
    if written != hashing.digest_json(manifest):
        raise ValueError(f'{_MANIFEST} has changed since it was written')
    arrays = {}
    for name, dtype in manifest['dtypes'].items():
        file, size = entry / name, manifest['bytes'][name]
        if dtype not in _DTYPES or Path(name).name != name or size % np.dtype(dtype).itemsize:
            raise ValueError(f'{_MANIFEST} names an array {name!r} of {size!r} bytes and dtype {dtype!r}')
        if not file.is_file() or file.stat().st_size != size:
            raise ValueError(f'{name} is not a file of {size:,} bytes')
        if check and hashing.crc32_file(file) != manifest['crc32'][name]:
            raise ValueError(f'{name} has changed since it was written')
        arrays[name] = mapped(str(file), dtype)
    if check:
        check(arrays, manifest['facts'])
    return arrays, manifest['facts']


def _make_alone(entry: Path, make: Callable[[Writer], None], check: Check) -> None:
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
        if entry.exists() or entry.is_symlink():
            if (fault := _fault(entry, check)) is None:
                return
            print(f'the token cache makes a damaged entry again: {entry}: {fault}', file=sys.stderr, flush=True)
            if entry.is_symlink() or not entry.is_dir():
                entry.unlink()
            shutil.rmtree(entry, ignore_errors=True)
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
            if not isinstance(error, OSError) or _fault(entry, check):  # else another process has written it meanwhile
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
