"""Text files line by line: UTF-8, optionally packed by gzip or Zstandard.

A file is hashed when it is found, and hashed again while its lines are read. So a file that changes in between is an
error, and the fingerprint of a split is that of the bytes that were really read.
"""

import contextlib
import gzip
import hashlib
import importlib
import io
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tformer.data.sources.records import Bad
from tformer.errors import UserError

_BUFFER = 1 << 20  # bytes
_KINDS = {stat.S_IFDIR: 'a directory', stat.S_IFIFO: 'a pipe', stat.S_IFSOCK: 'a socket'}  # others are devices


class File(NamedTuple):
    """A file and the BLAKE2b hash of its stored bytes."""

    path: Path
    digest: str


class Numbered:
    """A file that is read once from beginning to end, in lines or rows with numbers."""

    between = ':'  # a file's name and the number of a line, in messages
    partial = False  # whether other parts of the file are read elsewhere

    def __init__(self, file: File, bad_lines: str) -> None:
        self.path, self.file = file.path, file
        self._bad = Bad(bad_lines)

    @property
    def skipped(self) -> int:
        """The number of bad lines skipped so far."""
        return self._bad.skipped

    def where(self, number: int) -> str:
        """Returns the name of a line in messages."""
        return f'{self.path}{self.between}{number}'

    def bad(self, number: int, why: object) -> None:
        """Treats a bad line: raises a `UserError`, or counts it as skipped."""
        self._bad.found(self.where(number), why)


class Text(Numbered):
    """The lines of a text file."""

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Yields the number and text of each line, with its line feed, and without a byte order mark.

        Raises:
          UserError: the file cannot be read to its end, is not UTF-8, or has changed since it was found.
        """
        for number, line in self._numbered():
            if number == 1:
                _refuse_utf16(self.path, line)
                line = line.removeprefix(b'\xef\xbb\xbf')
            if b'\0' in line:
                self.bad(number, 'it has a NUL byte, so it is not text')
                continue
            try:
                yield number, line.decode()
            except UnicodeDecodeError as error:
                self.bad(number, f'not UTF-8: byte 0x{line[error.start]:02x}')

    def _numbered(self) -> Iterator[tuple[int, bytes]]:
        with opened(self.file) as lines:
            yield from enumerate(lines, start=1)

    def filled(self) -> Iterator[tuple[int, str]]:
        """Yields the number and text of each line that is not blank, without its end."""
        for number, line in self:
            if line.strip():
                yield number, line.removesuffix('\n').removesuffix('\r')


class Part(Text):
    """The lines of a file, which is not packed, that begin from byte `start` on and before `stop`.

    The file is not hashed again: it must have the size and the time that it had `before`.
    """

    partial = True

    def __init__(self, file: File, bad_lines: str, start: int, stop: int, before: tuple[int, int]) -> None:
        super().__init__(file, bad_lines)
        self._start, self._stop, self._before = start, stop, before

    def where(self, number: int) -> str:
        with self.path.open('rb') as file:
            ahead = range(0, self._start, _BUFFER)
            lines = sum(file.read(min(_BUFFER, self._start - place)).count(b'\n') for place in ahead)
            if self._start:  # a line that begins before, and ends in this part
                file.seek(self._start - 1)
                lines += file.readline() != b'\n'
        return super().where(number + lines - bool(self._start))

    def _numbered(self) -> Iterator[tuple[int, bytes]]:
        with self.path.open('rb', _BUFFER) as file:
            yield from self._lines(file)
        if state(self.path) != self._before:
            raise changed(self.path)

    def _lines(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        place = 0
        if self._start:
            file.seek(self._start - 1)
            place = self._start - 1 + len(file.readline())
        number = int(self._start > 0)  # the first line of a file is number 1, and special
        while place < self._stop and (line := file.readline()):
            number, place = number + 1, place + len(line)
            yield number, line


def find(path: Path) -> File:
    """Returns the file at `path` with its hash; raises a `UserError` if it cannot be read."""
    with _opened(path, pack='') as (stored, digest):
        while stored.read(_BUFFER):
            pass
    return File(path, digest.hexdigest())


def read_text(path: Path) -> str:
    """Returns the whole file, decoded as UTF-8, with its line ends and without a byte order mark."""
    return ''.join(line for _, line in Text(find(path), 'stop'))


@contextlib.contextmanager
def opened(file: File) -> Iterator[io.BufferedIOBase]:
    """Yields the unpacked bytes of a file, which are to be read once to their end.

    Raises:
      UserError: the file cannot be read to its end, or has changed since it was found.
    """
    with _noticing(file), _opened(file.path, pack=file.path.suffix) as (unpacked, digest):
        yield unpacked
    if digest.hexdigest() != file.digest:
        raise changed(file.path)


@contextlib.contextmanager
def unchanged(file: File) -> Iterator[None]:
    """Guards a block that reads a file in any order: as `opened`, the file is hashed again after it."""
    with _noticing(file):
        yield
    if find(file.path).digest != file.digest:
        raise changed(file.path)


@contextlib.contextmanager
def _noticing(file: File) -> Iterator[None]:
    """Says of a file that cannot be read whether it has changed, which is the likelier reason."""
    try:
        yield
    except UserError:
        if find(file.path).digest != file.digest:
            raise changed(file.path) from None
        raise


@contextlib.contextmanager
def _opened(path: Path, pack: str) -> Iterator[tuple[io.BufferedIOBase, hashlib.blake2b]]:
    """Yields the bytes of a file, unpacked as its last suffix asks, and the hash of the stored bytes that were read."""
    before = state(path)
    digest, unpacked = hashlib.blake2b(digest_size=16), None
    try:
        with path.open('rb', buffering=0) as file:
            stored = io.BufferedReader(_Hashed(file, digest), _BUFFER)
            unpacked = PACKS[pack](stored) if pack in PACKS else None
            yield unpacked or stored, digest
    except (UserError, OSError, EOFError, zlib.error) as error:
        if state(path) != before:  # which is also the likelier reason for a bad line
            raise changed(path) from None
        if isinstance(error, UserError):
            raise
        raise UserError(f'{path} cannot be read: {_reason(error, unpacked)}') from None
    if state(path) != before:
        raise changed(path)


def _unzstd(stored: io.BufferedReader) -> io.BufferedReader:
    arrow = needed('pyarrow', 'Zstandard files')
    return io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(stored, 'r'), 'zstd'), _BUFFER)


def needed(package: str, what: str, install: str = "'tformer[parquet]'") -> Any:
    """Returns a module of an optional package; raises a `UserError` that says how to install it where it is missing."""
    try:
        return importlib.import_module(package)
    except ImportError:
        package = package.partition('.')[0]
        raise UserError(f'{what} need the package {package}: pip install {install}') from None


def state(path: Path) -> tuple[int, int]:
    """Returns the size and modification time of a regular file; reading a pipe or a device might never end."""
    try:
        state = path.stat()
    except OSError as error:
        raise UserError(f'{path} cannot be read: {error.strerror}') from None
    if not stat.S_ISREG(state.st_mode):
        kind = _KINDS.get(stat.S_IFMT(state.st_mode), 'a device')
        raise UserError(f'{path} is {kind}, where a file is expected')
    return state.st_size, state.st_mtime_ns


def _reason(error: Exception, unpacked: io.BufferedIOBase | None) -> str:
    if unpacked is None or (isinstance(error, OSError) and error.errno):
        return getattr(error, 'strerror', None) or str(error)
    try:
        place = unpacked.tell()
    except OSError:  # of a Zstandard file nothing but its error is known
        place = 0
    if isinstance(error, EOFError):
        return f'the gzip file is cut off after {place:,} bytes of text'
    if place and 'Not a gzipped file' in str(error):
        return f'the data after {place:,} bytes of text is not gzip'
    if 'Truncated compressed stream' in str(error):
        return 'the Zstandard file is cut off'
    return f'the gzip file is damaged after {place:,} bytes of text' if place else f'{error}'


def changed(path: Path) -> UserError:
    return UserError(f'{path} changed while it was being read: run again when it is complete')


def _refuse_utf16(path: Path, line: bytes) -> None:
    """Raises a `UserError` if the first line has UTF-16's byte order mark, or NUL in every other byte."""
    head = line[:256]
    fewer, more = sorted(half.count(0) for half in (head[::2], head[1::2]))
    if head.startswith((b'\xff\xfe', b'\xfe\xff')) or (fewer == 0 and more > max(1, len(head) / 4)):
        raise UserError(f'{path} looks like UTF-16: write it as UTF-8, e.g. iconv -f UTF-16 -t UTF-8 {path.name}')


class _Hashed(io.RawIOBase):
    """A file that hashes the stored bytes that are read from it, also where `gzip` reads them."""

    def __init__(self, file: io.FileIO, digest: hashlib.blake2b) -> None:
        self._file, self._digest = file, digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._file.readinto(buffer)
        self._digest.update(memoryview(buffer)[:count])
        return count


PACKS: dict[str, Callable[[Any], io.BufferedIOBase]] = {  # by the last suffix of a file's name
    '.gz': lambda stored: gzip.GzipFile(fileobj=stored),
    '.zst': _unzstd,
}
