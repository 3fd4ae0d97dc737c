"""Worker processes that make data: what begins each of them, and what looks after them."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from tformer.data import store_copies

LOOK_SECONDS = 1.0
_noted: set[multiprocessing.process.BaseProcess] = set()  # those that a block of `watched` has


def follow(index: int = 0, count: int = 1) -> None:
    """Lets a worker process ignore the signals that ask for an end, and exit once the process that it works for has.

    Terminals and schedulers send them to every process, and the other one may need it until it has saved. That process
    may have ended before this is called, so its number is not to be asked for.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def watched() -> Iterator[Callable[[], None]]:
    """Gives a function that takes note of the workers that have begun since. If one of those is killed while the block
    lasts, this process ends with a line and the code 1: it would wait for the rest of a batch for ever."""
    before, over = {*multiprocessing.active_children()}, threading.Event()
    mine: set[multiprocessing.process.BaseProcess] = set()

    def note() -> None:
        mine.update({*multiprocessing.active_children()} - before - _noted)
        _noted.update(mine)

    def look() -> None:
        while not over.wait(LOOK_SECONDS):
            for each in [*mine]:
                if (code := each.exitcode or 0) < 0 and not over.is_set():
                    _end(signal.Signals(-code).name)

    threading.Thread(target=look, daemon=True).start()
    try:
        yield note
    finally:
        over.set()
        _noted.difference_update(mine)


def _end(name: str) -> None:
    why = f'a process of data.num_workers ended by {name}, e.g. for want of memory; the run goes on from its checkpoint'
    print(f'tformer: {why} when it is begun again', file=sys.stderr, flush=True)
    store_copies.leave()
    os._exit(1)
