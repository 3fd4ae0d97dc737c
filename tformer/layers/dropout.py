"""Dropout whose rate may be a traced number, so that one program serves a sweep over rates."""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.extend.random import threefry2x32_p

from tformer.config import Model
from tformer.distributed import sharding

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
    counted = str(jax.random.key_impl(key)) == 'threefry2x32' and x.size < 2**32
    bits = (_bits_of_elements if counted and sharding.platform() == 'tpu' else _bits_of_words)(key, x.shape)
    threshold = jnp.round(jnp.asarray(rate, jnp.float32) * 2**16)
    keep = bits >= threshold.astype(jnp.uint32)
    scale = (2**16 / (2**16 - threshold)).astype(x.dtype)
    return jnp.where(keep, x * scale, jnp.zeros_like(x))


def _bits_of_words(key: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns 16 random bits for each element, two elements to a word of 32."""
    *lead, last = shape
    words = jax.random.bits(key, (*lead, (last + 1) // 2), jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(*lead, -1)[..., :last]


def _bits_of_elements(key: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns the same bits, each word computed for both of its elements: Threefry of the word's number.

    On a TPU that is one fused operation in half the time, for there the halves of words are far apart.
    """
    *lead, last = shape
    column = jax.lax.broadcasted_iota(jnp.uint32, shape, len(lead))
    word, words_below = column // 2, (last + 1) // 2
    for axis in reversed(range(len(lead))):
        word += jnp.uint32(words_below) * jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        words_below *= shape[axis]
    first, second = threefry2x32_p.bind(*jax.random.key_data(key), jnp.zeros_like(word), word)
    return ((first ^ second) >> (16 * (column % 2))) & 0xFFFF


def drop(module: nn.Module, x: jax.Array, rate: MaybeScalar) -> jax.Array:
    """Returns `x` after dropout with the module's random key; unchanged without a rate, or where it has no key."""
    return dropout(x, rate, module.make_rng('dropout')) if module.has_rng('dropout') and rate is not None else x
