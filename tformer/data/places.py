"""Where files at a distance are: HTTP servers, object stores, and the file systems of fsspec."""

import base64
import binascii
import contextlib
import fnmatch
import functools
import glob
import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tformer.data import stores
from tformer.data.sources.text_reader import PACKS, needed
from tformer.errors import UserError

T = TypeVar('T')

TIMEOUT = 60.0  # seconds without any byte
PIECE = 1 << 23  # bytes that are read together
_BESIDE = {'.bin': '.idx'}  # endings of files, and of those that they need beside them
_OF_URLS = "%/:=&?~#+!$,;'@()*[]"  # what stays as it is beside letters and digits (RFC 3986, section 2.2)


class Broken(Exception):
    """A read that may succeed when it is tried again."""


class Place(Protocol):
    """The files below a URL, by their names relative to it."""

    url: str

    def names(self) -> list[str]:
        """Returns the names of all files that are wanted."""

    def version(self, name: str) -> str:
        """Returns what differs when the file differs. Raises `FileNotFoundError` or `Broken`."""

    def lasts(self, version: str) -> bool:
        """Returns whether a later process may take equal versions for equal files."""

    def read(self, name: str, start: int, version: str) -> Iterator[bytes]:
        """Yields the bytes from `start` to the end. Raises `Broken` where the end was not reached."""

    def checksum(self, name: str) -> tuple[str, str] | None:
        """Returns the algorithm and hexadecimal digest that the server gives, once the file has been read."""


def changed(where: str) -> UserError:
    return UserError(f'{where} changed while it was being fetched: run again when it is complete')


def _beside(name: str) -> str | None:
    ending = _BESIDE.get(Path(name).suffix)
    return ending and str(Path(name).with_suffix(ending))


# -------------------------------------------------------------------------------------------------------------- http


class _ByHttp:
    """One file, by HTTP's ranges where the server has them (RFC 9110, section 14)."""

    def __init__(self, path: str) -> None:
        try:
            parts = urllib.parse.urlsplit(path)
        except ValueError as error:
            raise UserError(f'{path} cannot be fetched: {error}') from None
        if re.search(r'[*[]', parts.path) or parts.path.rpartition('/')[2] in ('', '.', '..'):
            raise UserError(f'{path} names no file: http has no list of them, name each in data.path')
        self._query = f'?{parts.query}' if parts.query else ''
        self.url, _, self._name = path.partition('?')[0].rpartition('/')
        self._checksums: dict[str, tuple[str, str]] = {}

    def names(self) -> list[str]:
        names = [self._name]
        if beside := _beside(self._name):
            with contextlib.suppress(FileNotFoundError):
                self.version(beside)
                names.append(beside)
        return names

    def _ask(self, name: str, start: int) -> Any:
        """Returns a server's answer: of status 206 with the bytes from `start` on, of 200 with all."""
        where = f'{self.url}/{name}'
        url = urllib.parse.quote(where + self._query, safe=_OF_URLS)
        request = urllib.request.Request(url, headers={'Range': f'bytes={start}-'} if start else {})
        try:
            answer = urllib.request.urlopen(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            if error.code in (404, 410):
                raise FileNotFoundError from None
            if error.code < 500 and error.code not in (408, 416, 425, 429):
                raise UserError(f'{where} cannot be fetched: {error.code} {error.reason}') from None
            raise Broken(f'{error.code} {error.reason}') from None
        except http.client.InvalidURL as error:
            raise UserError(f'{where} cannot be fetched: {error}') from None
        except (OSError, http.client.HTTPException) as error:
            raise Broken(str(getattr(error, 'reason', None) or error) or type(error).__name__) from None
        part = start and re.match(rf'bytes {start}-', answer.headers.get('Content-Range', ''))
        if answer.status != 200 and not (answer.status == 206 and part):
            answer.close()
            raise Broken(f'it was asked for the bytes from {start:,} on, and gave others ({answer.status})')
        return answer

    def version(self, name: str) -> str:
        with self._ask(name, 0) as answer:  # some servers refuse HEAD, and links that are signed do
            length, marks = answer.headers.get('Content-Length', ''), self._marks(answer.headers)
            return json.dumps([*marks, int(length) if length.isdecimal() else None, self._query])

    def lasts(self, version: str) -> bool:
        return any(json.loads(version)[:2])

    def _marks(self, headers: Any) -> list[str | None]:
        return [headers.get('ETag'), headers.get('Last-Modified')]

    def read(self, name: str, start: int, version: str) -> Iterator[bytes]:
        *marks, size, _ = json.loads(version)
        with self._ask(name, start) as answer:
            if self._marks(answer.headers) != marks:
                raise changed(f'{self.url}/{name}')
            self._refuse_packed(name, answer.headers)
            place = start if answer.status == 206 else 0
            self._promise(name, answer.headers, whole=place == 0)
            while piece := self._piece(answer):
                kept = piece[max(start - place, 0) :]
                place += len(piece)
                if kept:
                    yield kept
            if size is not None and place > size:
                raise changed(f'{self.url}/{name}')
            if (size is not None and place < size) or answer.length:
                raise Broken('the answer was cut off')

    def _refuse_packed(self, name: str, headers: Any) -> None:
        """Raises a `UserError` where the server packs the bytes of a file, which nobody asked it to do."""
        packed = headers.get('Content-Encoding', 'identity')
        if packed != 'identity' and Path(name).suffix not in PACKS:
            raise UserError(f'{self.url}/{name} cannot be fetched: its server packs it by {packed}')

    def _piece(self, answer: Any) -> bytes:
        try:
            return bytes(answer.read1(PIECE))
        except (OSError, http.client.HTTPException) as error:
            raise Broken(str(error) or type(error).__name__) from None

    def _promise(self, name: str, headers: Any, whole: bool) -> None:
        """Keeps the digest of the whole file, in base64, that the headers of some servers give."""
        given = ','.join(headers.get_all('Repr-Digest', []) + headers.get_all('x-goog-hash', []))
        if whole and (md5 := headers.get('Content-MD5')):
            given += f',md5={md5}'
        for kind, text in re.findall(r'\b(sha-256|md5)=:?([A-Za-z0-9+/]+=*)', given):
            with contextlib.suppress(binascii.Error):
                self._checksums[name] = (kind.replace('-', ''), base64.b64decode(text).hex())

    def checksum(self, name: str) -> tuple[str, str] | None:
        return self._checksums.get(name)


# ------------------------------------------------------------------------------------------------------------ stores


class _OnStore:
    """Objects of s3:// and gs://, read by TensorStore in pieces."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._store = self._asked(lambda: stores.Store(re.split(r'[^/]*[*?[]', path, maxsplit=1)[0]))
        self.url = self._store.url

    def _asked(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except stores.Unreachable as error:
            raise Broken(str(error).removeprefix(f'{self._path.rstrip("/")}: ')) from None

    def names(self) -> list[str]:
        names = self._asked(self._store.names)
        if not names and self.url == self._path.rstrip('/') and self._path.count('/') > 2:  # perhaps an object
            above, _, last = self.url.rpartition('/')
            self._store = self._asked(lambda: stores.Store(above))
            self.url = above
            names = [name for name in self._asked(self._store.names) if name in (last, _beside(last))]
            return names if last in names else []
        if not glob.has_magic(self._path):
            return names
        pattern = self._path[len(self.url) :].strip('/')
        found = {name for name in names if _matches(name.split('/'), pattern.split('/'))}
        return [name for name in names if name in found or name in map(_beside, found)]

    def version(self, name: str) -> str:
        found = self._asked(lambda: self._store.part(name, 0, 0))
        if found is None:
            raise FileNotFoundError
        return found[1].hex()

    def lasts(self, version: str) -> bool:
        return True

    def read(self, name: str, start: int, version: str) -> Iterator[bytes]:
        while True:
            found = self._asked(lambda start=start: self._store.part(name, start, start + PIECE))  # type: ignore[misc]
            if found is None or found[1].hex() != version:
                raise changed(f'{self.url}/{name}')
            if found[0]:
                yield found[0]
            start += len(found[0])
            if len(found[0]) < PIECE:
                return

    def checksum(self, name: str) -> tuple[str, str] | None:
        return None


def _matches(name: Sequence[str], pattern: Sequence[str]) -> bool:
    """Returns whether the parts of a name, or the first of them, which are a directory, match those of a pattern."""
    if not pattern or not name:
        return not pattern
    if pattern[0] == '**':
        return any(_matches(name[skipped:], pattern[1:]) for skipped in range(len(name) + 1))
    return fnmatch.fnmatchcase(name[0], pattern[0]) and _matches(name[1:], pattern[1:])


class ByFsspec:
    """Files of any file system that fsspec has a package for, by its contract alone."""

    def __init__(self, path: str) -> None:
        core = needed('fsspec.core', f'Paths such as {path.partition(":")[0]}://', "'tformer[hub]'")
        self._path = path
        self._files, self._root = self._asked(lambda: core.url_to_fs(path))
        self.url = re.split(r'[^/]*[*?[]', path, maxsplit=1)[0].rstrip('/')

    def _asked(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except FileNotFoundError:
            raise
        except (PermissionError, ValueError, NotImplementedError, ImportError) as error:
            raise UserError(f'{self._path} cannot be read: {error}') from None
        except Exception as error:  # a file system passes on what its own client raises
            raise Broken(str(error) or type(error).__name__) from None

    def names(self) -> list[str]:
        self._files.invalidate_cache()
        root = self._root.rstrip('/')
        if glob.has_magic(root):
            base = re.split(r'[^/]*[*?[]', root, maxsplit=1)[0].rstrip('/')
            found = [name for name in self._asked(lambda: self._files.glob(root)) if self._files.isfile(name)]
        elif self._asked(lambda: self._files.isdir(root)):
            base, found = root, self._asked(lambda: self._files.find(root))
        else:
            base, _, own = root.rpartition('/')
            wanted = [f'{base}/{name}' for name in (own, _beside(own)) if name]
            found = [name for name in wanted if self._asked(functools.partial(self._files.isfile, name))]
            self.url = self.url.rpartition('/')[0]
            found = found if root in found else []
        self._base = base
        return [name[len(base) :].lstrip('/') for name in found]

    def version(self, name: str) -> str:
        self._files.invalidate_cache()
        return str(self._asked(lambda: self._files.ukey(f'{self._base}/{name}')))

    def lasts(self, version: str) -> bool:
        return True

    def read(self, name: str, start: int, version: str) -> Iterator[bytes]:
        path = f'{self._base}/{name}'
        size = self._asked(lambda: self._files.info(path))['size']
        with self._asked(lambda: self._files.open(path, 'rb')) as file:
            self._asked(lambda: file.seek(start))
            while piece := self._asked(lambda: file.read(PIECE)):
                start += len(piece)
                yield piece
        if size is not None and start < size:
            raise Broken('the file was cut off')

    def checksum(self, name: str) -> tuple[str, str] | None:
        return None


PLACES: dict[str, Callable[[str], Place]] = {  # others are fsspec's
    'http': _ByHttp,
    'https': _ByHttp,
    's3': _OnStore,
    'gs': _OnStore,
}
