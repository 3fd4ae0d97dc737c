"""Dropout whose rate may be a traced number, so that one program serves a sweep over rates."""

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.config import Model

MaybeScalar = float | jax.Array | None  # traced or not; None is off


class DropoutRates(flax.struct.PyTreeNode):
    """Dropout rates, scalars. None is off, and leaves no trace in the program."""

    residual: MaybeScalar = None  # on the embeddings and on the output of each sub-layer
    attention: MaybeScalar = None  # on the attention probabilities
    activation: MaybeScalar = None  # inside the feed-forward
    head: MaybeScalar = None  # before the heads of fine-tuning

    @classmethod
    def of(cls, cfg: Model, given: 'DropoutRates | None' = None) -> 'DropoutRates':
        """Returns the rates that are given, or those of `cfg`, 0 as None."""
        if given is not None:
            return given
        rates = cfg.dropout_rate, cfg.attention_dropout_rate, cfg.activation_dropout_rate, cfg.head_dropout_rate
        return cls(*(rate or None for rate in rates))


def dropout(x: jax.Array, rate: MaybeScalar, key: jax.Array) -> jax.Array:
    """Zeroes each element with probability `rate` and divides the rest by 1 - rate (Srivastava et al. 2014).

    Uses 16 random bits per element: the rate, and with it the divisor, is rounded to a multiple of 2^-16.
    """
    if rate is None:
        return x
    *lead, last = x.shape
    words = jax.random.bits(key, (*lead, (last + 1) // 2), jnp.uint32)
    bits = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(*lead, -1)[..., :last]
    threshold = jnp.round(jnp.asarray(rate, jnp.float32) * 2**16)
    keep = bits >= threshold.astype(jnp.uint32)
    scale = (2**16 / (2**16 - threshold)).astype(x.dtype)
    return jnp.where(keep, x * scale, jnp.zeros_like(x))


def drop(module: nn.Module, x: jax.Array, rate: MaybeScalar) -> jax.Array:
    """Returns `x` after dropout with the module's random key; unchanged without a rate, or where it has no key."""
    return dropout(x, rate, module.make_rng('dropout')) if module.has_rng('dropout') and rate is not None else x
