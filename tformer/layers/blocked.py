"""Attention on CPUs: block after block of queries, each with the keys that some of them see."""

import jax
import jax.numpy as jnp

from tformer.layers.kernels import ScoreOptions, attend, row_probabilities, seen
from tformer.layers.masks import AttentionMask, Sight

SIZE = 128  # the queries of a block are a multiple
BLOCKS = 8  # of a row, at most: each is compiled


def blocked(
    q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array, mask: AttentionMask, options: ScoreOptions
) -> jax.Array:
    """Attention as kernels.py defines it, where a causal mask or a window leaves out keys that no query of a block
    sees: of long causal rows nearly half the work and the memory of `reference`.

    One block are rows with a prefix, and those of which the places do not tell the mask: a user's own positions,
    tokens of decoding. Where there are several, dropout draws other numbers than in `reference`.
    """
    mask_BTS, options = mask.array(), options.of_pairs(q_BNTH.shape[2])
    if not mask.static or mask.prefix_BS is not None:
        return _attend(q_BNTH, k_BKSH, v_BKSU, mask_BTS, Sight(), options)
    return mask.by_width(lambda sight: _attend(q_BNTH, k_BKSH, v_BKSU, mask_BTS, sight, options))


def _attend(
    q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array, mask_BTS: jax.Array, sight: Sight, options: ScoreOptions
) -> jax.Array:
    T = q_BNTH.shape[2]
    size = T if sight == Sight() else -(-T // (SIZE * BLOCKS)) * SIZE
    blocks = []
    for index, first in enumerate(range(0, T, size)):
        start = None if sight.before is None else max(first - sight.before, 0)
        end = None if sight.after is None else first + size + sight.after
        queries, keys = slice(first, first + size), slice(start, end)
        bias_BNTS = None if options.bias is None else options.bias[:, :, queries, keys]
        part = q_BNTH[:, :, queries], k_BKSH[:, :, keys], mask_BTS[:, queries, keys]
        probs_BKRS = row_probabilities(*part, options._replace(bias=bias_BNTS))
        kept_BKRS = options.drop(probs_BKRS, index if size < T else None)
        blocks.append(attend(kept_BKRS, v_BKSU[:, :, keys], q_BNTH.shape[1]))
    return seen(jnp.concatenate(blocks, axis=2), mask_BTS)
