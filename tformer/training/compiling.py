"""Compiling ahead: a thread compiles programs that a run will need, while it makes its first state and its first steps.

JAX keeps what it has compiled with the function, so a later call with arguments of the same shapes and places finds it.
"""

import concurrent.futures
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax

from tformer.distributed import compilation_cache

Key = tuple[Hashable, ...]


class Ahead:
    """The programs that a thread compiles, in the order in which they are added.

    On one core it would win nothing, and several processes that run as one compile in the same order by themselves:
    there it does nothing.
    """

    def __init__(self) -> None:
        helps = jax.process_count() == 1 and compilation_cache.cores() > 1
        self._pool = concurrent.futures.ThreadPoolExecutor(1, 'compiling') if helps else None
        self._coming: dict[Key, concurrent.futures.Future[Any]] = {}
        self._done = self._added = 0
        self.tell: Callable[[int, int], object] = lambda done, of: None  # of how many programs the thread has compiled

    def add(self, key: Key, compiled: Callable[[], Any]) -> None:
        """Has the thread call `compiled`, which compiles the program of a key."""
        if self._pool is not None and key not in self._coming:
            self._added += 1
            self._coming[key] = self._pool.submit(self._compile, compiled)

    def _compile(self, compiled: Callable[[], Any]) -> None:
        compiled()
        self._done += 1
        self.tell(self._done, self._added)

    def wait(self, key: Key) -> None:
        """Waits for the program of a key if the thread compiles it now; if it has not begun, the caller is to do it.

        Raises what compiling it raised.
        """
        coming = self._coming.pop(key, None)
        if coming is not None and not coming.cancel():
            coming.result()

    def wait_for_all(self, kind: Hashable) -> None:
        """Waits likewise for all programs whose keys begin with `kind`."""
        for key in [key for key in self._coming if key[0] == kind]:
            self.wait(key)

    def close(self) -> None:
        """Ends the thread once it has compiled the program that it has begun."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def shapes(kind: Hashable, batch: Mapping[str, Any]) -> Key:
    """Returns the key of the program of a `kind` for batches of these shapes."""
    return (kind, *(tuple(x.shape) for x in batch.values()))
