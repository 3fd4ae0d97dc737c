"""How the tokens so far change the logits of the next one: penalties, repeated n-grams, a least length.

Shapes: R rows or hypotheses, S places of tokens (the prompt's, the new ones', and room for more), V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class History(NamedTuple):
    """The tokens of each row up to the next one."""

    tokens_RS: jax.Array
    real_RS: jax.Array  # False at padding, which is in front, and at room
    prompt: int  # places of the prompt
    step: jax.Array  # new tokens so far

    @classmethod
    def of(cls, tokens_RP: jax.Array, real_RP: jax.Array, new_RT: jax.Array, step: jax.Array) -> 'History':
        """Returns the history of a prompt and of the first `step` new tokens."""
        written_RT = jnp.broadcast_to(jnp.arange(new_RT.shape[1]) < step, new_RT.shape)
        tokens_RS, real_RS = jnp.concatenate([tokens_RP, new_RT], 1), jnp.concatenate([real_RP, written_RT], 1)
        return cls(tokens_RS, real_RS, tokens_RP.shape[1], step)

    def counts(self, vocab_size: int, *, new: bool = False) -> jax.Array:
        """Returns how often each token of the vocabulary [R, V] is there, or is among the `new` ones."""
        counted_RS = self.real_RS & (jnp.arange(self.real_RS.shape[1])[None] >= self.prompt) if new else self.real_RS
        rows_R1 = jnp.arange(self.tokens_RS.shape[0])[:, None]
        zeros_RV = jnp.zeros((self.tokens_RS.shape[0], vocab_size), jnp.int32)
        return zeros_RV.at[rows_R1, self.tokens_RS].add(counted_RS)


class Penalties(NamedTuple):
    """What is changed; the defaults change nothing."""

    repetition: float = 1.0  # divides the positive logits, and multiplies the negative ones, of all tokens so far
    presence: float = 0.0  # subtracted from the logits of tokens among the new ones
    frequency: float = 0.0  # subtracted as often as the token is among the new ones
    no_repeat_ngram: int | None = None  # no n-gram of this n comes twice
    min_len: int = 0  # the least number of new tokens before one that ends the row
    ends: tuple[int, ...] = ()  # the tokens that end a row

    def __call__(self, logits_RV: jax.Array, history: History) -> jax.Array:
        """Returns the logits, or log-probabilities, of the next token of each row, changed."""
        vocab_size = logits_RV.shape[1]
        if self.repetition != 1:
            changed_RV = jnp.where(logits_RV < 0, logits_RV * self.repetition, logits_RV / self.repetition)
            logits_RV = jnp.where(history.counts(vocab_size) > 0, changed_RV, logits_RV)
        if self.presence or self.frequency:
            counts_RV = history.counts(vocab_size, new=True)
            logits_RV = logits_RV - self.presence * (counts_RV > 0) - self.frequency * counts_RV
        if self.no_repeat_ngram is not None:
            logits_RV = jnp.where(repeats(history, self.no_repeat_ngram, vocab_size), -jnp.inf, logits_RV)
        if self.min_len:
            ends_V = jnp.zeros(vocab_size, bool).at[jnp.array(self.ends, jnp.int32)].set(True)
            logits_RV = jnp.where(ends_V[None] & (history.step < self.min_len), -jnp.inf, logits_RV)
        return logits_RV

    @property
    def any(self) -> bool:
        """Whether anything is changed."""
        return self._replace(ends=()) != Penalties()


def repeats(history: History, n: int, vocab_size: int) -> jax.Array:
    """Returns mask_RV, True at the tokens that would complete an n-gram which the row has already."""
    tokens_RS, real_RS = history.tokens_RS, history.real_RS
    R, S = tokens_RS.shape
    if n > S:
        return jnp.zeros((R, vocab_size), bool)
    end = history.prompt + history.step
    same_RW = real_RS[:, : S - n + 1] & real_RS[:, n - 1 :]  # of the windows of n tokens
    for place in range(n - 1):
        last_R1 = jax.lax.dynamic_slice_in_dim(tokens_RS, end - (n - 1) + place, 1, axis=1)
        same_RW &= tokens_RS[:, place : place + S - n + 1] == last_R1
    last_RW = tokens_RS[:, n - 1 :]  # of each window
    return jnp.zeros((R, vocab_size), bool).at[jnp.arange(R)[:, None], last_RW].max(same_RW)
