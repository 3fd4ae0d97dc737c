"""Classifier-free guidance: the model reads each row with its prompt and without, and what the prompt adds counts more.

(Ho & Salimans 2022; for text, Sanchez et al. 2024.) Shapes: B rows, 2 B rows that are read, T tokens, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from tformer.decode.growth import for_steps, slots_of
from tformer.decode.sample import Extend
from tformer.model import positions_of


class Doubled(flax.struct.PyTreeNode):
    """A cache of 2 B rows, first those with their prompts, as one of B rows."""

    cache: Any
    last_B: jax.Array  # where each prompt's last token stands: at position 0 of the row without it

    @property
    def slots(self) -> int | None:
        return slots_of(self.cache)

    def branch(self, hypotheses: int) -> 'Doubled':
        return self.replace(cache=self.cache.branch(hypotheses))

    def take(self, parents_BM: jax.Array) -> 'Doubled':
        return self.replace(cache=self.cache.take(jnp.concatenate([parents_BM, parents_BM])))

    def coverage(self) -> jax.Array:
        given_BM, _ = jnp.split(self.cache.coverage(), 2)
        return given_BM

    def repeat(self, times: int) -> 'Doubled':
        return Doubled(self.cache.repeat(times), jnp.repeat(self.last_B, times))

    def for_steps(self) -> 'Doubled':
        return self.replace(cache=for_steps(self.cache))

    def by_row(self) -> 'Doubled':
        return self.replace(cache=self.cache.by_row())

    def back(self, tokens_B: jax.Array) -> 'Doubled':
        return self.replace(cache=self.cache.back(jnp.concatenate([tokens_B, tokens_B])))


def with_and_without(batch: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Returns the batch's rows, and then the same without their prompts, of which the last token is left.

    Of an encoder's text the last one is left, too, which ends it.
    """
    both = dict(batch)
    both |= {'positions': positions_of(batch)}
    last_B1 = both['positions'][:, -1:]
    without = {**both, 'positions': _from_last(both['positions'], last_B1)}
    if 'prefix' in batch:
        without['prefix'] = batch['prefix'] & (without['positions'] >= 0)
    if 'encoder_inputs' in batch:
        positions_BS = batch['encoder_positions']
        last_B1 = jnp.argmax(positions_BS, 1, keepdims=True)
        first_BS = jnp.broadcast_to(jnp.arange(positions_BS.shape[1])[None] == 0, positions_BS.shape)
        ends_BS = jnp.take_along_axis(batch['encoder_inputs'], last_B1, 1)
        without['encoder_inputs'] = jnp.where(first_BS, ends_BS, batch['encoder_inputs'])
        without['encoder_positions'] = jnp.where(first_BS & (positions_BS >= 0), 0, -1)
    return {name: jnp.concatenate([both[name], without[name]]) for name in both}


def guided(extend: Extend, scale: float | jax.Array) -> Extend:
    """Returns a step function over a `Doubled` cache, whose logits are u + scale (c - u) of the log-probabilities with
    the prompt, c, and without it, u."""

    def both(tokens_BT: jax.Array, positions_BT: jax.Array, cache: Doubled) -> tuple[jax.Array, Doubled]:
        positions_2BT = jnp.concatenate([positions_BT, _from_last(positions_BT, cache.last_B[:, None])])
        logits_2BTV, held = extend(jnp.concatenate([tokens_BT, tokens_BT]), positions_2BT, cache.cache)
        with_BTV, without_BTV = jnp.split(jax.nn.log_softmax(logits_2BTV.astype(jnp.float32)), 2)
        return without_BTV + scale * (with_BTV - without_BTV), cache.replace(cache=held)

    return both


def _from_last(positions: jax.Array, last_B1: jax.Array) -> jax.Array:
    return jnp.where((last_B1 >= 0) & (positions >= last_B1), positions - last_B1, -1)
