"""The right to write to a directory on an object store, which one process has: it writes the object `lock` again and
again."""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator

from tformer.data.stores import Store, Unreachable, say
from tformer.errors import UserError

BEAT_SECONDS = 5.0  # between two signs of life
LEASE_SECONDS = 30.0  # how long a lease lasts without one; nobody's clock is compared with another's
SETTLE_SECONDS = 1.0  # after which a new lease is read back: S3's conditional write is two requests
LEASE = 'lock'  # the name of the object


class Lease:
    """The right to write to a directory, which one process has as long as it gives signs of life."""

    def __init__(self, store: Store):
        """Waits as long as a lease lasts where another process has left one; a `UserError` says that it lives."""
        self._store, self._token, self._turn = store, secrets.token_hex(8), threading.Lock()
        content, seen = store.read(LEASE)
        if content is not None:
            who = content.decode(errors='replace').split(' beat ')[0]
            say(f'{store.url} was in use by {who}: seeing in {LEASE_SECONDS:.0f} s whether that process lives')
            time.sleep(LEASE_SECONDS)
            again, now = store.read(LEASE)
            if now != seen and again is not None:
                raise UserError(f'{store.url} is in use by {again.decode(errors="replace").split(" beat ")[0]}')
            seen = now
        self._beats, self._beaten, self._ended = 0, time.monotonic(), False
        self._generation = store.write(LEASE, self._content(), only=seen)
        time.sleep(SETTLE_SECONDS)
        if not self._generation or store.read(LEASE)[1] != self._generation:
            raise UserError(f'{store.url} is in use by another process, which began at the same time')

    def _content(self) -> bytes:
        self._beats += 1
        return f'process {os.getpid()} on {socket.gethostname()} beat {self._beats} {self._token}'.encode()

    def beat(self) -> None:
        """Gives a sign of life. Ends this process where another one has taken the lease, e.g. after a long pause."""
        with self._turn, contextlib.suppress(UserError):
            if self._ended:
                return
            if generation := self._store.write(LEASE, self._content(), only=self._generation):
                self._generation = generation
            elif (self._store.read(LEASE)[0] or b'').decode(errors='replace').endswith(self._token):
                self._generation = self._store.read(LEASE)[1]  # an answer was lost on its way
            else:
                say(f'{self._store.url}: another process has taken it over')
                os._exit(1)
            self._beaten = time.monotonic()

    def check(self) -> None:
        """Gives a sign of life if the last one is old.

        Raises:
          Unreachable: it is so old that another process may have taken the lease.
        """
        if time.monotonic() - self._beaten > LEASE_SECONDS / 2:
            self.beat()
        if time.monotonic() - self._beaten > LEASE_SECONDS:
            raise Unreachable(f'{self._store.url}: no answer for as long as a lease lasts')

    def end(self) -> None:
        with self._turn, contextlib.suppress(UserError):
            self._ended = True
            self._store.write(LEASE, None, only=self._generation)


@contextlib.contextmanager
def repeating(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    """Calls a function again and again in a thread, until the block ends."""
    ends = threading.Event()

    def repeat() -> None:
        while not ends.wait(seconds):
            act()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
