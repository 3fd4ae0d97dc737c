"""Worker processes that make data: what begins each of them, and what looks after them."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tformer.data import store_copies

T = TypeVar('T')

LOOK_SECONDS = 1.0
_watched: set[multiprocessing.process.BaseProcess] = set()  # by whatever iteration


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


def watched(batches: Iterable[T], count: int) -> Iterator[T]:
    """Yields what `count` workers make, each of which begins for its first batch.

    If one of them is killed, this process ends with a line and the code 1: it would wait for the rest of a batch for
    ever.
    """
    before, over = {*multiprocessing.active_children()}, threading.Event()
    mine: set[multiprocessing.process.BaseProcess] = set()

    def look() -> None:
        while not over.wait(LOOK_SECONDS):
            for each in [*mine]:
                if (code := each.exitcode or 0) < 0 and not over.is_set():
                    _end(signal.Signals(-code).name)

    threading.Thread(target=look, daemon=True).start()
    try:
        for number, batch in enumerate(batches):
            if number < count:
                mine |= {*multiprocessing.active_children()} - before - _watched
                _watched.update(mine)
            yield batch
    finally:
        over.set()
        _watched.difference_update(mine)


def _end(name: str) -> None:
    line = f'tformer: a process of data.num_workers ended by {name}, e.g. for want of memory; the same command goes on'
    print(line, file=sys.stderr, flush=True)
    store_copies.leave()
    os._exit(1)
