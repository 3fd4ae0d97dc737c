"""Workdirs on object stores of several processes, each of which works in a local copy of its own.

Only the first process writes to the workdir, here as in a directory that all share, and its copy is the one that is
written to the store, under its lease. The others follow: at a few points, which all processes reach, the first one
writes what it has changed to the store, and they fetch it, of checkpoints only the arrays that they load. Of a
checkpoint that is being saved, each process writes its arrays to its own disk and sends them by the store, under names
that do not count and that no other life of the run uses; the first one receives them all before it lists the digests.
So the store sees what it sees of a single process, and what holds for its kills holds here.
"""

import contextlib
import functools
import json
import pathlib
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import jax

from tformer.data import store_copies
from tformer.data.stores import insist
from tformer.distributed import processes
from tformer.errors import UserError

T = TypeVar('T')

BOX = re.compile(r'\d+\.partial/')  # names of what is sent; `store_copies.PASSING` has them

WAITING_SECONDS = 3600  # for the lease and the copies of all processes

_boxes: dict[str, str] = {}  # place of a copy -> the beginning of the names of what this life sends


@contextlib.contextmanager
def local(url: str, owns: bool) -> Iterator[str]:
    """Gives each process a local copy of a directory on a store, as `store_copies.local` does; all must call this.

    The first process owns the directory, if it is owned, and all leave the block once everything is on the store.

    Raises:
      UserError: as `store_copies.local`.
    """
    with contextlib.ExitStack() as contexts:
        if processes.first():
            place = contexts.enter_context(store_copies.local(url, owns))
            if owns:
                copy = store_copies.COPIES[place]
                copy.push()  # deletes incomplete checkpoints
                for name in filter(BOX.match, copy.store.names()):
                    copy.store.write(name, None)
        _wait('the first copy')
        if not processes.first():
            place = contexts.enter_context(store_copies.local(url, owns=False, arrays=False))
        _wait('all copies')
        _boxes[place] = f'{processes.same_number(lambda: secrets.randbits(31))}.partial'
        contexts.callback(_boxes.pop, place)
        yield place
        if processes.first():
            insist(store_copies.COPIES[place].push)
        processes.meet('the last copy')


def _wait(name: str) -> None:
    """Waits for all processes, however long a lease or a copy takes: the first meeting by Gloo fails after 30 s."""
    if jax.process_count() > 1:
        import orbax.checkpoint as ocp

        ocp.multihost.get_barrier_sync_fn()(key=name, timeout_ms=1000 * WAITING_SECONDS)


def follow(workdir: pathlib.Path, step: int | None = None) -> None:
    """Gives all processes what the first one has written, with the arrays of the checkpoint at `step`.

    All must call this. Nothing happens where they share the directory.
    """
    if (copy := _copy(workdir)) is None:
        return
    if processes.first():
        insist(copy.push)
    processes.meet('a copy')
    if not processes.first():
        insist(lambda: copy.pull(step))


def after_first(workdir: pathlib.Path, make: Callable[[], T], find: Callable[[], T]) -> T:
    """Returns make() in the first process; after it, find() in the others, which write nothing."""
    made = [make()] if processes.first() else []
    processes.meet('made')
    follow(workdir)
    return made[0] if made else find()


class Sending:
    """A future of Orbax: sends the files below a checkpoint's directory to the first process, and deletes them."""

    def __init__(self, directory: pathlib.Path, items: Sequence[str]):
        """Makes the directories of these trees, for which Orbax waits: it makes those of the first process."""
        self._directory = directory
        self._copy = None if processes.first() else _copy(directory.parents[1])
        for item in items if self._copy else ():
            (directory / f'{item}.orbax-checkpoint-tmp' / 'array_metadatas').mkdir(parents=True)

    def result(self, timeout: float | None = None) -> None:
        """Returns once all are on the store, however long it takes; Orbax has the first process wait for it."""
        if self._copy:
            store, box = self._copy.store, _box(self._directory)
            files = list(filter(pathlib.Path.is_file, self._directory.rglob('*')))
            names = [file.relative_to(self._directory).as_posix() for file in files]
            for name, file in zip(names, files, strict=True):
                insist(functools.partial(store.write, box + name, file.read_bytes()))
            insist(lambda: store.write(f'{box}{jax.process_index()}', json.dumps(names).encode()))
            shutil.rmtree(self._directory)

    def cancel(self) -> None:
        """Does nothing: what is sent does not count by itself."""


def receive(directory: pathlib.Path) -> None:
    """Fetches what the other processes have sent of a checkpoint to its directory of the first one.

    Raises:
      UserError: some of it is gone, as another life of the run that has taken the workdir over deletes it.
    """
    if (copy := _copy(directory.parents[1])) is None:
        return
    box = _box(directory)

    def taken(name: str) -> bytes:
        content, _ = insist(lambda: copy.store.read(box + name))
        if content is None:
            raise UserError(f'{copy.store.url}/{box}{name}, which another process has sent, is gone')
        insist(lambda: copy.store.write(box + name, None))
        return content

    for number in range(1, jax.process_count()):
        for name in json.loads(taken(str(number))):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(taken(name))


def _copy(workdir: pathlib.Path) -> store_copies.Copy | None:
    """Returns the copy that this one of several processes works in; None where all share the directory."""
    return store_copies.COPIES.get(str(workdir)) if jax.process_count() > 1 else None


def _box(directory: pathlib.Path) -> str:
    return f'{_boxes[str(directory.parents[1])]}/{directory.name}/'
