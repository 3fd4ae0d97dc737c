"""The largest of many numbers."""

import jax
import jax.numpy as jnp

BLOCK = 64  # numbers of which only the largest is looked at first


def largest(x_BN: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
    """Returns `jax.lax.top_k`: the largest numbers of each row and their places, the first of equal ones first.

    They stand in as many blocks, those of the largest maxima, so that a few hundred numbers are sorted and not all.
    """
    B, N = x_BN.shape
    blocks = -(-N // BLOCK)
    if blocks <= 2 * number:
        return jax.lax.top_k(x_BN, number)
    x_BCL = jnp.pad(x_BN, ((0, 0), (0, blocks * BLOCK - N)), constant_values=-jnp.inf).reshape(B, blocks, BLOCK)
    block_BK = jnp.sort(jax.lax.top_k(x_BCL.max(2), number)[1], 1)
    few_BKL = jnp.take_along_axis(x_BCL, block_BK[:, :, None], 1)
    values_BK, place_BK = jax.lax.top_k(few_BKL.reshape(B, number * BLOCK), number)
    block_BK = jnp.take_along_axis(block_BK, place_BK // BLOCK, 1)
    return values_BK, block_BK * BLOCK + place_BK % BLOCK
