"""A batch in two halves, which the cores of a CPU write at the same time.

Of a step of decoding only large products run on several cores. Two programs, each over half of the rows, fill two.
"""

import concurrent.futures
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Both halves read the parameters: a step of fewer tokens, or of fewer for each million of parameters, is not faster.
TOKENS = 16
TOKENS_A_MILLION = 1


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
        leaves = jax.tree.leaves((variables, batch, rng))
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            return False
        devices = {device for x in leaves if isinstance(x, jax.Array) for device in x.devices()}
        step, parameters = len(batch['inputs']) * self.tokens, sum(x.size for x in jax.tree.leaves(variables))
        here = devices or set(jax.devices()[:1])
        enough = step >= max(TOKENS, TOKENS_A_MILLION * parameters / 1e6) and len(batch['inputs']) % 2 == 0
        return enough and len(here) == 1 and all(device.platform == 'cpu' for device in here)

    def program(self, variables: Any, half: Mapping[str, Any], rng: jax.Array | None) -> Any:
        """Returns the program of a half, compiled by the thread whose context (mesh, precision) holds."""
        leaves, structure = jax.tree.flatten((variables, half, rng))
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        context = jax.sharding.get_abstract_mesh(), precision
        key = structure, context, tuple((x.shape, x.dtype, getattr(x, 'sharding', None)) for x in leaves)
        if key not in self.compiled:
            self.compiled[key] = self.whole.lower(variables, half, rng).compile()
        return self.compiled[key]
