"""Directories on object stores, `s3://BUCKET/PATH` and `gs://BUCKET/PATH`: a command works in a local copy of one.

TensorStore, which Orbax needs anyway, reads and writes both kinds by the same calls. A store has no directories, no
renaming and no appending, so nothing else of the library sees one: a thread writes each file that has changed in the
copy to the store, whole. Their order makes a kill at any instant harmless: what a checkpoint needs, such as the rows of
metrics.jsonl, comes before it, and its digests.json, without which it does not count, is its last file.

A process that trains owns the directory by a lease, the object `lock`, which it writes again and again.
"""

import contextlib
import os
import pathlib
import re
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

from tformer.errors import UserError

PUSH_SECONDS = 5.0  # between two looks for files that have changed
BEAT_SECONDS = 5.0  # between two signs of life in the lease
LEASE_SECONDS = 30.0  # how long a lease lasts without one; nobody's clock is compared with another's
SETTLE_SECONDS = 1.0  # after which a new lease is read back: S3's conditional write is two requests
TIMEOUT = 60.0  # seconds for one object's request, with its retries
LEASE, DIGESTS = 'lock', 'digests.json'
PASSING = re.compile(r'\.tmp$|\.partial\b|\.deleted\b|orbax-checkpoint-tmp|(^|/)lock$')  # names that are not copied
ARRAYS = re.compile(r'(^|/)checkpoints/(\d+)/(variables|training)/')


def is_url(text: object) -> bool:
    """Returns whether a text names a place on an object store."""
    return isinstance(text, str) and text.startswith(('s3://', 'gs://'))


def require_local(path: pathlib.Path) -> None:
    """Raises a `UserError` if a path is a URL that became one, which Python's callers may pass."""
    if path.parts[:1] in (('s3:',), ('gs:',)):
        url = path.as_posix().replace(':/', '://', 1)
        raise UserError(
            f'{url} is on a store: with tformer.data.stores.local({url!r}, owns=True) as place gives a copy'
        )


class Store:
    """The objects below a URL, by their names relative to it. All methods raise a `UserError` where the store fails."""

    def __init__(self, url: str):
        self.url = url.rstrip('/')
        scheme, bucket, path = self.url.split('/', 3)[0], *f'{self.url[5:]}/'.split('/', 1)
        import tensorstore

        spec: dict[str, Any] = {'driver': 's3' if scheme == 's3:' else 'gcs', 'bucket': bucket, 'path': path}
        if scheme == 's3:' and (endpoint := os.environ.get('AWS_ENDPOINT_URL')):
            spec |= {'endpoint': endpoint, 'aws_region': os.environ.get('AWS_REGION', 'us-east-1')}
        retries = {'max_retries': 4, 'initial_delay': '200ms', 'max_delay': '2s'}
        context = tensorstore.Context({'s3_request_retries': retries, 'gcs_request_retries': retries})
        self._store = self._result(lambda: tensorstore.KvStore.open(spec, context=context))
        self.names()  # a store that cannot be reached says so before anything is done

    def _result(self, begin: Any) -> Any:
        try:
            return begin().result(timeout=TIMEOUT)
        except (ValueError, RuntimeError, OSError, TimeoutError) as error:
            why = re.split(r' \[|\n', str(error) or f'no answer in {TIMEOUT:.0f} s')[0]
            raise UserError(f'{self.url}: {why}') from error

    def names(self) -> list[str]:
        """Returns the names of all objects."""
        return [name.decode() for name in self._result(lambda: self._store.list()) if not name.endswith(b'/')]

    def read(self, name: str, unlike: bytes | None = None) -> tuple[bytes | None, bytes]:
        """Returns (the content, its generation). The content is None where there is no object, or where the reader has
        it already: its generation is `unlike`."""
        found = self._result(lambda: self._store.read(name, if_not_equal=unlike))
        return (bytes(found.value) if found.state == 'value' else None), bytes(found.stamp.generation)

    def part(self, name: str, start: int, stop: int) -> tuple[bytes, bytes] | None:
        """Returns (bytes from `start` to `stop` or the end, the object's generation), or None if there is no object."""
        for wanted in (slice(start, stop), slice(start, None), slice(0, 0)):
            try:
                found = self._result(lambda wanted=wanted: self._store.read(name, byte_range=wanted))
            except UserError as error:
                if 'OUT_OF_RANGE' not in str(error):
                    raise  # else the end comes before
            else:
                return (bytes(found.value), bytes(found.stamp.generation)) if found.state == 'value' else None
        return None

    def write(self, name: str, content: bytes | None, only: bytes | None = None) -> bytes:
        """Writes an object, None deletes it; with `only` if it is of this generation. Returns the new one, or b''."""
        done = self._result(lambda: self._store.write(name, content, if_equal=only))
        return bytes(done.generation)


class Lease:
    """The right to write to a directory, which one process has as long as it gives signs of life."""

    def __init__(self, store: Store):
        """Waits as long as a lease lasts where another process has left one; a `UserError` says that it lives."""
        self._store, self._token = store, secrets.token_hex(8)
        content, seen = store.read(LEASE)
        if content is not None:
            time.sleep(LEASE_SECONDS)
            again, now = store.read(LEASE)
            if now != seen and again is not None:
                raise UserError(f'{store.url} is in use by {again.decode(errors="replace").split(" beat ")[0]}')
            seen = now
        self._beats = 0
        self._generation = store.write(LEASE, self._content(), only=seen)
        time.sleep(SETTLE_SECONDS)
        if not self._generation or store.read(LEASE)[1] != self._generation:
            raise UserError(f'{store.url} is in use by another process, which began at the same time')

    def _content(self) -> bytes:
        self._beats += 1
        return f'process {os.getpid()} on {socket.gethostname()} beat {self._beats} {self._token}'.encode()

    def beat(self) -> None:
        """Gives a sign of life. Ends this process where another one has taken the lease, e.g. after a long pause."""
        with contextlib.suppress(UserError):
            if generation := self._store.write(LEASE, self._content(), only=self._generation):
                self._generation = generation
            elif (self._store.read(LEASE)[0] or b'').decode(errors='replace').endswith(self._token):
                self._generation = self._store.read(LEASE)[1]  # an answer was lost on its way
            else:
                print(f'tformer: {self._store.url}: another process has taken it over', file=sys.stderr, flush=True)
                os._exit(1)

    def end(self) -> None:
        with contextlib.suppress(UserError):
            self._store.write(LEASE, None, only=self._generation)


class Copy:
    """A directory of a store and its local copy. Its methods exclude each other, in whatever thread."""

    def __init__(self, store: Store, place: pathlib.Path, owns: bool, arrays: bool = True):
        """Fetches all files, without incomplete checkpoints; with `owns` what is deleted here is deleted there.

        Without `arrays` those of checkpoints are left out until they are pulled.
        """
        self.store, self._place, self._owns, self._arrays = store, place, owns, arrays
        self._lock = threading.Lock()
        self._known: dict[str, tuple[int, int] | None] = {}  # the files here as they are on the store
        self._generations: dict[str, bytes] = {}
        self.pull()

    def pull(self, step: int | None = None) -> None:
        """Fetches what differs on the store, with the arrays of the checkpoint at `step`, and deletes what is gone."""
        with self._lock:
            names = [name for name in self.store.names() if not PASSING.search(name)]
            for name in names:
                if self._arrays or not (found := ARRAYS.search(name)) or found[2] == str(step):
                    unlike = self._generations.get(name) if self._state(name) else None
                    self._generations[name] = fetch(self.store, name, self._place / name, unlike)
                    if self._generations[name] != unlike:
                        self._known[name] = self._state(name)
            for name in self._known.keys() - set(names):
                (self._place / name).unlink(missing_ok=True)
                del self._known[name]
                self._generations.pop(name, None)
            for partial in self._place.rglob('checkpoints/*'):
                if partial.is_dir() and not PASSING.search(partial.name) and not (partial / DIGESTS).is_file():
                    shutil.rmtree(partial)

    def _state(self, name: str) -> tuple[int, int] | None:
        try:
            found = (self._place / name).stat()
        except FileNotFoundError:
            return None
        return found.st_size, found.st_mtime_ns

    def _files(self) -> tuple[list[str], bool]:
        """Returns (the names of the files here in the order in which they are written, whether no directory was deleted
        while they were listed).

        Checkpoints are listed first, so that the files that are written before them are as new as they are.
        """
        faults: list[OSError] = []

        def listed(of_checkpoints: bool) -> list[pathlib.Path]:
            walked = os.walk(self._place, onerror=faults.append)
            found = [pathlib.Path(where, name).relative_to(self._place) for where, _, files in walked for name in files]
            found = [path for path in found if not PASSING.search(path.as_posix())]
            return [path for path in found if ('checkpoints' in path.parts) == of_checkpoints]

        found = [*listed(True), *listed(False)]
        ordered = sorted(found, key=lambda path: ('checkpoints' in path.parts, path.name == DIGESTS))
        return [path.as_posix() for path in ordered], not faults

    def push(self) -> None:
        """Writes the files that have changed, then deletes those that were gone before, unless another has gone since:
        a newer checkpoint, which is not on the store, may have replaced both."""
        with self._lock:
            gone = [name for name in self._known if self._owns and self._state(name) is None]
            names, whole = self._files()
            for name in names:
                state = self._state(name)
                try:
                    if state is not None and self._known.get(name) != state:
                        self._generations[name] = self.store.write(name, (self._place / name).read_bytes())
                        self._known[name] = state
                except FileNotFoundError:
                    state = None
                whole = whole and state is not None
            for name in sorted(gone if whole else (), key=lambda name: not name.endswith(DIGESTS)):
                self.store.write(name, None)
                del self._known[name]


COPIES: dict[str, Copy] = {}  # those that there are, by their places


def fetch(store: Store, name: str, file: pathlib.Path, unlike: bytes | None = None) -> bytes:
    """Writes an object to a local file, unless it is of the generation `unlike`. Returns its generation."""
    content, generation = store.read(name, unlike)
    if content is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return generation


@contextlib.contextmanager
def local(url: str, owns: bool, arrays: bool = True) -> Iterator[str]:
    """Gives a local copy of a directory on a store; what the block writes is written to the store, last at its end.

    Only a block that `owns` it deletes there, and no other process may own it meanwhile. `arrays` as in `Copy`.

    Raises:
      UserError: the store cannot be used, or another process owns the directory.
    """
    store = Store(url)
    lease = Lease(store) if owns else None
    place, ends, failed = pathlib.Path(tempfile.mkdtemp(prefix='tformer-')), threading.Event(), False
    copy = COPIES[str(place)] = Copy(store, place, owns, arrays)

    def repeat(seconds: float, act: Any) -> None:
        while not ends.wait(seconds):
            with contextlib.suppress(UserError, OSError):  # the last one, at the end, reports it
                act()

    threads = [threading.Thread(target=repeat, args=(PUSH_SECONDS, copy.push), daemon=True)]
    if lease is not None:
        threads.append(threading.Thread(target=repeat, args=(BEAT_SECONDS, lease.beat), daemon=True))
    for thread in threads:
        thread.start()
    try:
        yield str(place)
    except UserError as error:
        raise UserError(str(error).replace(str(place), store.url)) from error
    finally:
        ends.set()
        threads[0].join()
        try:
            copy.push()
        except UserError as error:
            failed = True
            print(f'tformer: {error}; what could not be written is in {place}', file=sys.stderr, flush=True)
        del COPIES[str(place)]
        if lease is not None:
            threads[1].join()
            lease.end()
        if not failed:
            shutil.rmtree(place, ignore_errors=True)
