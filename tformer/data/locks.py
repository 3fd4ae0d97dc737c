"""Files that one process holds at a time, by flock: the system lets them go when that process ends, however it ends."""

import contextlib
import fcntl
import os
import pathlib
import socket
import sys
import time
from collections.abc import Iterator

from tformer.errors import UserError


@contextlib.contextmanager
def alone(file: pathlib.Path, what: str, seconds: float = 0) -> Iterator[None]:
    """Holds a lock file, which is made where there is none; `what` names in messages the thing that it guards.

    Raises:
      UserError: another process holds it, for `seconds` or longer.
    """
    with file.open('a+') as held:
        end = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= end:
                    held.seek(0)
                    holder = held.read().strip() or 'another process'
                    raise UserError(f'{what} is in use by {holder}') from error
                time.sleep(0.1)
            except OSError as error:
                say_none(what, error)
                break
        held.truncate(0)
        held.write(f'process {os.getpid()} on {socket.gethostname()}, since {time.strftime("%Y-%m-%d %H:%M:%S")}\n')
        held.flush()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(held, fcntl.LOCK_UN)  # data workers that have not ended hold the file, too


def say_none(what: object, error: OSError) -> None:
    """Says that the file system of a thing that is to be held has no locks."""
    line = f'nothing keeps a second process out of it: its file system has no locks ({error.strerror})'
    print(f'{what}: {line}', file=sys.stderr, flush=True)


@contextlib.contextmanager
def in_turn(directory: pathlib.Path) -> Iterator[None]:
    """Waits while another process is in such a block on a directory, where its file system has locks."""
    held = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)
