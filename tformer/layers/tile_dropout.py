"""Dropout inside of kernels: whether an attention weight is dropped is computed from its place, wherever it is needed.

Nothing is kept for the backward pass, tiles may be visited in any order, and every mesh draws the same numbers.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tformer.layers.dropout import MaybeScalar

UNIT = 2**24  # the rate is rounded to a multiple of 1 / UNIT


def draw(rate: MaybeScalar, key: jax.Array | None, rows: int, heads: int) -> jax.Array | None:
    """Returns what `kept` and `scale` read of each attention, drawn_BN3: two random words, and UNIT times the rate, all
    uint32; None where dropout is off."""
    if rate is None or key is None:
        return None
    words_BN2 = jax.random.bits(key, (rows, heads, 2), jnp.uint32)
    rate_BN1 = jnp.full((rows, heads, 1), jnp.round(jnp.asarray(rate, jnp.float32) * UNIT)).astype(jnp.uint32)
    return jnp.concatenate([words_BN2, rate_BN1], axis=-1)


def of_block(drawn_BN3: jax.Array | None, number: jax.Array) -> jax.Array | None:
    """Returns what is read of block `number` of each attention, where places are counted from its beginning."""
    if drawn_BN3 is None:
        return None
    words_BN2 = _mixed(drawn_BN3[..., :2] + _mixed(number.astype(jnp.uint32) + 1))
    return jnp.concatenate([words_BN2, drawn_BN3[..., 2:]], axis=-1)


def kept(drawn_3: Any, queries_Q: jax.Array, keys_K: jax.Array) -> jax.Array:
    """Returns which weights of queries and keys at the given places remain, [Q, K], each with probability 1 - rate.

    A query's place makes a state of two words, from which its keys are counted: a Weyl sequence whose values are mixed,
    as in SplitMix (Steele et al. 2014, section 4), here of 32 bits.
    """
    columns_1K, rows_Q1 = keys_K[None].astype(jnp.uint32), queries_Q[:, None].astype(jnp.uint32)
    first_Q1, second_Q1 = (_mixed(drawn_3[i] + rows_Q1 * jnp.uint32(WEYL)) for i in range(2))
    bits_QK = _mixed(first_Q1 + columns_1K * jnp.uint32(WEYL), second_Q1) >> 8
    return bits_QK.astype(jnp.int32) >= drawn_3[2].astype(jnp.int32)


def scale(drawn_3: Any) -> jax.Array:
    """Returns 1 / (1 - rate)."""
    return UNIT / (UNIT - drawn_3[2].astype(jnp.int32)).astype(jnp.float32)


WEYL = 0x9E3779B9  # 2^32 over the golden ratio


def _mixed(x: jax.Array, added: jax.Array | None = None) -> jax.Array:
    """Returns the last steps of MurmurHash3 (Appleby 2011), a bijection of 32 bits; `added` joins half-way."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = x if added is None else x + added
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
