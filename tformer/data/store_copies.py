"""Local copies of directories on object stores, in which commands work.

A store has no directories, no renaming and no appending, so nothing else of the library sees one: a thread writes each
file that has changed in the copy to the store, whole. Their order makes a kill at any instant harmless: what a
checkpoint needs, such as the rows of metrics.jsonl, comes before it, and its digests.json, without which it does not
count, is its last file. A checkpoint that is being written stays on the disk until it is on the store, also if newer
ones replace it.
"""

import contextlib
import os
import pathlib
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from tformer.data import stores
from tformer.data.store_lease import BEAT_SECONDS, Lease, repeating
from tformer.data.stores import insist, say
from tformer.errors import Stopped, Unsaved, UserError

PUSH_SECONDS = 5.0  # between two looks for files that have changed
LAG_SECONDS = 30.0  # a look that takes longer is told
LEAVE_SECONDS = 5.0  # what a process that exits at once waits for a store
DIGESTS = 'digests.json'
PASSING = re.compile(r'\.tmp$|\.partial\b|\.deleted\b|orbax-checkpoint-tmp|(^|/)lock$')  # names that are not copied
CHECKPOINT = re.compile(r'(?:^|/)checkpoints/(\d+)/')
ARRAYS = re.compile(CHECKPOINT.pattern + r'(variables|training)/')
SENDING = 'sending.partial'  # where a copy holds the checkpoints that are being written


class Copy:
    """A directory of a store and its local copy. Its methods exclude each other, in whatever thread."""

    def __init__(self, store: stores.Store, place: pathlib.Path, owns: bool, arrays: bool = True):
        """Fetches all files, without incomplete checkpoints; with `owns` what is deleted here is deleted there.

        Without `arrays` those of checkpoints are left out until they are pulled.
        """
        self.store, self._place, self._owns, self._arrays = store, place, owns, arrays
        self.lease: Lease | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._known: dict[str, tuple[int, int] | None] = {}  # the files here as they are on the store
        self._generations: dict[str, bytes] = {}
        self.pull()

    def pull(self, step: int | None = None) -> None:
        """Fetches what differs on the store, with the arrays of the checkpoint at `step`, and deletes what is gone."""
        with self._lock:
            names = [name for name in self.store.names() if not PASSING.search(name) and not self._closed]
            for name in sorted(names, key=lambda name: name.endswith(DIGESTS)):  # what they list is there before
                wanted = self._arrays or not (found := ARRAYS.search(name)) or found[1] == str(step)
                if wanted and not self._fetch(name) and (found := CHECKPOINT.search(name)):  # gone since
                    names = [other for other in names if not other.startswith(name[: found.end()])]
                    shutil.rmtree(self._place / name[: found.end()], ignore_errors=True)
            for name in self._known.keys() - set(names):
                (self._place / name).unlink(missing_ok=True)
                del self._known[name]
                self._generations.pop(name, None)
            for partial in self._place.rglob('checkpoints/*'):
                if partial.is_dir() and not PASSING.search(partial.name) and not (partial / DIGESTS).is_file():
                    shutil.rmtree(partial)

    def _fetch(self, name: str) -> bool:
        """Writes an object to its file, unless that has it already; returns whether there is one."""
        unlike = self._generations.get(name) if self._state(name) else None
        content, self._generations[name] = self.store.read(name, unlike)
        if content is not None:
            (self._place / name).parent.mkdir(parents=True, exist_ok=True)
            (self._place / name).write_bytes(content)
            self._known[name] = self._state(name)
        return content is not None or self._generations[name] == unlike

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

        found = [path.as_posix() for path in (*listed(True), *listed(False))]
        return sorted(found, key=_order), not faults

    def push(self) -> None:
        """Writes the files that have changed, then deletes those that were gone before, unless another has gone since:
        a newer checkpoint, which is not on the store, may have replaced both.

        What another process has written meanwhile stays, unless this one owns the directory.
        """
        with self._lock:
            if self._closed:
                return
            gone = [name for name in self._known if self._owns and self._state(name) is None]
            names, whole = self._files()
            changed = [name for name in names if (state := self._state(name)) is None or self._known.get(name) != state]
            newer: set[str] = set()  # directories of which a checkpoint is whole on the store
            with self._held(changed) as held:
                for name, file in held.items():
                    of_one = CHECKPOINT.search(name)
                    if of_one and name[: of_one.start()] in newer and self._state(name) is None:
                        continue  # replaced since
                    written = self._write(name, file)
                    whole = whole and written
                    if of_one and written and name.endswith(DIGESTS):
                        newer.add(name[: of_one.start()])
            for name in sorted(gone if whole else (), key=lambda name: not name.endswith(DIGESTS)):
                self._check()
                self.store.write(name, None)
                del self._known[name]

    @contextlib.contextmanager
    def _held(self, names: Sequence[str]) -> Iterator[dict[str, pathlib.Path]]:
        """Gives files by their names, which for those of checkpoints are links: what is deleted meanwhile is read."""
        held, place = {name: self._place / name for name in names}, self._place / SENDING
        try:
            for number, name in enumerate(filter(CHECKPOINT.search, names)):
                place.mkdir(exist_ok=True)
                with contextlib.suppress(OSError):  # it is gone, or the file system has no links
                    os.link(self._place / name, place / str(number))
                    held[name] = place / str(number)
            yield held
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _write(self, name: str, file: pathlib.Path) -> bool:
        """Writes a file, unless another process has written it and this one does not own the directory.

        Returns whether the file is there.
        """
        try:
            found, content = file.stat(), file.read_bytes()
        except FileNotFoundError:
            return False
        self._check()
        if self._owns:
            self._generations[name] = self.store.write(name, content)
        else:
            theirs = None
            if name not in self._generations:
                theirs, self._generations[name] = self.store.read(name)
            generation = b'' if theirs is not None else self.store.write(name, content, self._generations[name])
            if not generation:
                theirs, generation = self.store.read(name)
            if theirs is not None and theirs != content:
                say(f'{self.store.url}/{name} stays as another process has written it meanwhile')
            else:
                self._generations[name] = generation  # perhaps of a write whose answer was lost
        self._known[name] = found.st_size, found.st_mtime_ns
        return True

    def _check(self) -> None:
        """Raises `Unreachable` if another process may own the directory by now."""
        if self.lease is not None:
            self.lease.check()

    def close(self) -> None:
        """Writes what has changed, if the store answers, and ends the copy: nothing is written from now on."""
        try:
            self.push()
            written = True
        except (UserError, OSError) as error:
            say(f'{error}; what could not be written is in {self._place}')
            written = False
        with self._lock:
            self._closed = True
        if self.lease is not None:
            self.lease.end()
        if written:
            shutil.rmtree(self._place, ignore_errors=True)

    def revise(self, make: Callable[[], None], names: Sequence[str]) -> None:
        """Calls `make`, which reads files of these names and writes them anew, with what is on the store now, and again
        where another process has written them there meanwhile."""
        with self._lock:
            for name in names:
                if self._known.get(name) != (state := self._state(name)) and state is not None:
                    self._write(name, self._place / name)
            while not self._closed:
                for name in names:
                    self._fetch(name)
                self._check()
                make()
                for name in filter(self._state, names):
                    content = (self._place / name).read_bytes()
                    if not (generation := self.store.write(name, content, self._generations[name])):
                        break
                    self._generations[name], self._known[name] = generation, self._state(name)
                else:
                    return


def _order(name: str) -> tuple[bool, int, str, bool]:
    """Returns a key that sorts files as they are written: checkpoints last, the newest first, its digests after all."""
    found = CHECKPOINT.search(name)
    step, place = (int(found[1]), name[: found.end()]) if found else (0, '')
    return found is not None, -step, place, name.endswith(f'/{DIGESTS}')


COPIES: dict[str, Copy] = {}  # those that there are, by their places


def revise(directory: pathlib.Path, make: Callable[[], None], names: Sequence[str]) -> None:
    """Calls `make`, which reads files of a directory and writes them anew; in a local copy as `Copy.revise`."""
    place = next((place for place in COPIES if directory.is_relative_to(place)), None)
    if place is None:
        make()
        return
    copy, below = COPIES[place], directory.relative_to(place)
    insist(lambda: copy.revise(make, [(below / name).as_posix() for name in names]))


def shown(text: object) -> str:
    """Returns a text, such as a path, with URLs in the place of the local copies of directories on stores."""
    line = str(text)
    for place, copy in COPIES.items():
        line = line.replace(place, copy.store.url)
    return line


def name_of(directory: pathlib.Path) -> str:
    """Returns the last name in the path of a directory, or in the URL that it is the local copy of."""
    return pathlib.PurePosixPath(shown(directory.resolve())).name


@contextlib.contextmanager
def local(url: str, owns: bool, arrays: bool = True) -> Iterator[str]:
    """Gives a local copy of a directory on a store; what the block writes is written to the store, last at its end.

    Only a block that `owns` it deletes there, and no other process may own it meanwhile. `arrays` as in `Copy`.

    Raises:
      UserError: the store cannot be used, or another process owns the directory.
      Unsaved: the store does not take what the block has written; the local copy stays.
    """
    store = stores.Store(url)
    ended: BaseException | None = None
    with contextlib.ExitStack() as contexts:
        if lease := Lease(store) if owns else None:
            contexts.callback(lease.end)
            contexts.enter_context(repeating(BEAT_SECONDS, lease.beat))
        place = pathlib.Path(tempfile.mkdtemp(prefix='tformer-')).resolve()
        try:
            copy = Copy(store, place, owns, arrays)
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
        copy.lease, COPIES[str(place)] = lease, copy
        contexts.callback(COPIES.pop, str(place))
        try:
            with repeating(PUSH_SECONDS, _Pushing(copy, place)):
                yield str(place)
        except BaseException as error:
            if isinstance(error, UserError):
                error.args = (shown(error),)
            ended = error
            raise
        finally:
            try:
                insist(copy.push)
                shutil.rmtree(place, ignore_errors=True)
            except BaseException as error:
                line = f'{error or type(error).__name__}; what could not be written is in {place}'
                if isinstance(ended, Stopped | None) and isinstance(error, Unsaved | OSError):
                    raise Unsaved(line) from error
                say(line)
                if not isinstance(error, Unsaved | OSError):
                    raise


class _Pushing:
    """Writes to a store what has changed, and says when it cannot, and when it can again."""

    def __init__(self, copy: Copy, place: pathlib.Path):
        self._copy, self._place = copy, place
        self._fails = self._lags = False

    def __call__(self) -> None:
        copy, began = self._copy, time.monotonic()
        try:
            copy.push()
        except (UserError, OSError) as error:
            if not self._fails:
                say(f'{error}; asking again every {PUSH_SECONDS:.0f} s, until then all is in {self._place} alone')
            self._fails = True
            return
        if self._fails:
            say(f'{copy.store.url} takes what is written again')
        if (took := time.monotonic() - began) > LAG_SECONDS and not self._lags:
            say(f'{copy.store.url} takes {took:.0f} s for what has changed: a kill loses what is newer')
            self._lags = True
        self._fails = False


def leave() -> None:
    """Ends what a process has on stores, before it exits without ending its blocks; waits for a store a few seconds."""

    def close() -> None:
        for copy in list(COPIES.values()):
            copy.close()

    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    thread.join(LEAVE_SECONDS)
