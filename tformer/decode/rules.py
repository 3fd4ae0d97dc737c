"""What may be written next: a constraint on the whole text, biases, and penalties for what there is of it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tformer.data.tokenizers.biased_texts import Biases
from tformer.decode.bias import biased
from tformer.decode.constraints import Constraint
from tformer.decode.penalties import History, Penalties


class Rules(NamedTuple):
    """How the distribution of the next token is changed before a strategy chooses from it."""

    penalties: Penalties = Penalties()
    constraint: Constraint | None = None
    bias: Biases = ()

    @property
    def any(self) -> bool:
        """Whether anything is changed."""
        return self.constraint is not None or bool(self.bias) or self.penalties.any

    def start(self, shape: tuple[int, ...]) -> Any:
        """Returns the constraint's state before the first token of so many rows [B] or hypotheses [B, M]."""
        return () if self.constraint is None else self.constraint.start(shape)

    def follow(self, state: Any, tokens: jax.Array) -> Any:
        """Returns the constraint's state after one more token of each."""
        return () if self.constraint is None else self.constraint.follow(state, tokens)

    def __call__(
        self, logits_RV: jax.Array, state: Any, history: History, max_len: int | jax.Array, eos: int
    ) -> jax.Array:
        """Returns the logits of each row. Where no token is left, the end is."""
        logits_RV = self.changed(logits_RV, state, history, max_len)
        none_R1 = jnp.all(jnp.isneginf(logits_RV), 1, keepdims=True)
        return jnp.where(none_R1 & (jnp.arange(logits_RV.shape[1]) == eos)[None], 0.0, logits_RV)

    def changed(self, logits_RV: jax.Array, state: Any, history: History, max_len: int | jax.Array) -> jax.Array:
        """Returns the logits, or log-probabilities, of each row or hypothesis; all are -inf where no token is left.

        Texts have at most `max_len` new tokens, of rows [R, 1] maybe each its own number.
        """
        if self.constraint is not None:
            allowed_RV = self.constraint.allows(state, max_len - history.step).reshape(logits_RV.shape)
            logits_RV = jnp.where(allowed_RV, logits_RV, -jnp.inf)
        if self.bias:
            logits_RV = biased(logits_RV, history, self.bias)
        return self.penalties(logits_RV, history)
