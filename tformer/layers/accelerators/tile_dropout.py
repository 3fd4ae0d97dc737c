"""Dropout inside of kernels: whether an attention weight is dropped is computed from its place, wherever it is needed.

Nothing is kept for the backward pass, tiles may be visited in any order, and every mesh draws the same numbers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tformer.layers.dropout import MaybeScalar

UNIT = 2**24  # the rate is rounded to a multiple of 1 / UNIT


def draw(rate: MaybeScalar, key: jax.Array | None, rows: int, heads: int) -> jax.Array | None:
    """Returns what `kept` and `scale` read of each attention, drawn_BN3, int32: two random words, and below which
    number of all of int32 a weight is dropped; None where dropout is off. The rate is below 1."""
    if rate is None or key is None:
        return None
    words_BN2 = lax.bitcast_convert_type(jax.random.bits(key, (rows, heads, 2), jnp.uint32), jnp.int32)
    threshold = (jnp.round(jnp.asarray(rate, jnp.float32) * UNIT).astype(jnp.int32) - UNIT // 2) * (2**32 // UNIT)
    return jnp.concatenate([words_BN2, jnp.full((rows, heads, 1), threshold)], axis=-1)


def of_block(drawn_BN3: jax.Array | None, number: jax.Array) -> jax.Array | None:
    """Returns what is read of block `number` of each attention, where places are counted from its beginning."""
    if drawn_BN3 is None:
        return None
    words_BN2 = _finished(_mixed(drawn_BN3[..., :2] + _mixed(number.astype(jnp.int32) + 1)))
    return jnp.concatenate([words_BN2, drawn_BN3[..., 2:]], axis=-1)


def kept(drawn_3: Any, queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Returns which weights of queries and keys remain, each with probability 1 - rate.

    A query's place makes a state of two words, from which its keys are counted: a Weyl sequence whose values are mixed,
    as in SplitMix (Steele et al. 2014, section 4), here of 32 bits.

    Args:
      drawn_3: what was drawn for a row and a head.
      queries: places, int32.
      keys: places, int32, in a shape that broadcasts with that of the queries to that of the result.
    """
    first, second = (_finished(_mixed(drawn_3[i] + queries * WEYL)) for i in range(2))
    return _mixed(first + keys * WEYL, second) >= drawn_3[2]


def scale(drawn_3: Any) -> jax.Array:
    """Returns 1 / (1 - rate)."""
    kept = UNIT // 2 - lax.shift_right_arithmetic(drawn_3[2], jnp.int32(8))
    return UNIT / kept.astype(jnp.float32)


def _mixed(x: jax.Array, added: jax.Array | None = None) -> jax.Array:
    """Returns the last steps of MurmurHash3 (Appleby 2011), a bijection of 32 bits, but for the very last, which leaves
    the upper half as it is; `added` joins half-way."""
    x = (x ^ lax.shift_right_logical(x, jnp.int32(16))) * FACTORS[0]
    x = x if added is None else x + added
    return (x ^ lax.shift_right_logical(x, jnp.int32(13))) * FACTORS[1]


def _finished(x: jax.Array) -> jax.Array:
    return x ^ lax.shift_right_logical(x, jnp.int32(16))


# As int32, which all kernels have; 2^32 over the golden ratio, and MurmurHash3's.
WEYL, *FACTORS = np.array([0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35], np.uint32).view(np.int32)
