"""A batch in two halves, which the cores of a CPU write at the same time.

Of a step of decoding only large products run on several cores. Two programs, each over half of the rows, fill two.
"""

import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tformer.distributed.compilers import traced

# Both halves read the parameters: a step of fewer tokens, or of fewer for each million of parameters, is not faster.
TOKENS = 16
TOKENS_A_MILLION = 1


Item = TypeVar('Item')


def pay(variables: Any, rows: int, tokens: int, given: Any = ()) -> bool:
    """Returns whether two halves of so many rows are faster: on one CPU device, in steps that do enough.

    A step reads `tokens` of a row. `given` is what else a program gets.
    """
    if traced((variables, given)):
        return False
    leaves = jax.tree.leaves((variables, given))
    devices = {device for x in leaves if isinstance(x, jax.Array) for device in x.devices()} or {jax.devices()[0]}
    parameters = sum(x.size for x in jax.tree.leaves(variables))
    enough = rows * tokens >= max(TOKENS, TOKENS_A_MILLION * parameters / 1e6) and rows % 2 == 0
    return enough and len(devices) == 1 and devices.pop().platform == 'cpu'


def at_once(parts: Sequence[Generator[Item, None, None]]) -> Iterator[Item]:
    """Yields what generators yield, as it comes. A thread for each advances it, and ends it where nobody asks on."""
    if len(parts) == 1:
        yield from parts[0]
        return
    found: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    over = threading.Event()

    def advance(part: Generator[Item, None, None]) -> None:
        try:
            with contextlib.closing(part):  # here, as what it has opened (a mesh) may belong to its thread
                for item in part:
                    found.put(('item', item))
                    if over.is_set():
                        return
            found.put(('end', None))
        except BaseException as error:
            found.put(('error', error))

    threads = [threading.Thread(target=advance, args=(part,), daemon=True) for part in parts]
    try:
        for thread in threads:
            thread.start()
        running = len(threads)
        while running:
            kind, item = found.get()
            if kind == 'error':
                raise item
            running -= kind == 'end'
            if kind == 'item':
                yield item
    finally:
        over.set()
        for thread in threads:
            thread.join()


class Halves:
    """A jitted function of `make_generate` whose rows do not depend on each other."""

    def __init__(self, whole: Any, tokens: int) -> None:
        self.whole, self.lower = whole, whole.lower
        self.tokens = tokens  # of a row that a step reads
        self.compiled: dict[Any, Any] = {}

    def __call__(
        self, variables: Any, batch: Mapping[str, Any], rng: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        if not self.pay(variables, batch, rng):
            found: tuple[jax.Array, jax.Array] = self.whole(variables, batch, rng)
            return found
        rows = len(batch['inputs'])
        fields = {'rows': np.arange(rows), **batch}
        halves = [
            {name: np.asarray(x)[half] for name, x in fields.items()}
            for half in (slice(0, rows // 2), slice(rows // 2, rows))
        ]
        program = self.program(variables, halves[0], rng)
        with concurrent.futures.ThreadPoolExecutor(len(halves)) as threads:
            written = threads.map(lambda half: jax.block_until_ready(program(variables, half, rng)), halves)
            tokens, scores = zip(*written, strict=True)
        return jnp.concatenate(tokens), jnp.concatenate(scores)

    def pay(self, variables: Any, batch: Mapping[str, Any], rng: jax.Array | None) -> bool:
        """Returns whether two halves are faster: on one CPU device, in a step that reads more than parameters."""
        return pay(variables, len(batch['inputs']), self.tokens, (batch, rng))

    def program(self, variables: Any, half: Mapping[str, Any], rng: jax.Array | None) -> Any:
        """Returns the program of a half, compiled by the thread whose context (mesh, precision) holds."""
        leaves, structure = jax.tree.flatten((variables, half, rng))
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        context = jax.sharding.get_abstract_mesh(), precision
        key = structure, context, tuple((x.shape, x.dtype, getattr(x, 'sharding', None)) for x in leaves)
        if key not in self.compiled:
            self.compiled[key] = self.whole.lower(variables, half, rng).compile()
        return self.compiled[key]
