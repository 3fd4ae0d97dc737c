"""Attention on CPUs: block after block of queries, each with the keys that some of them see."""

import jax
import jax.numpy as jnp

from tformer.layers.kernels import ScoreOptions, masked, normalized, seen
from tformer.layers.masks import AttentionMask, Sight
from tformer.layers.products import einsum

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
        part = q_BNTH[:, :, queries], k_BKSH[:, :, keys], v_BKSU[:, :, keys], mask_BTS[:, queries, keys]
        blocks.append(_block(*part, options._replace(bias=bias_BNTS), index if size < T else None))
    return seen(jnp.concatenate(blocks, axis=2), mask_BTS)


def _block(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSU: jax.Array,
    mask_BTS: jax.Array,
    options: ScoreOptions,
    index: int | None,
) -> jax.Array:
    """`reference`, with all queries of a key head as rows (R) of one product: what XLA fuses without reshapes between.

    Dropout draws by the `index` of a block.
    """
    (B, N, T, _), (_, K, _, U) = q_BNTH.shape, v_BKSU.shape

    def rows(x_BNTX: jax.Array) -> jax.Array:
        return x_BNTX.reshape(-1, K, N // K * T, x_BNTX.shape[-1])

    sink_1KR1 = None
    if options.sink_N is not None:
        sink_1KR1 = rows(jnp.broadcast_to(options.sink_N[None, :, None, None], (1, N, T, 1)))
    by_row = options if options.bias is None else options._replace(bias=rows(options.bias))
    logits_BKRS = einsum('BKRH,BKSH->BKRS', jnp.float32, rows(q_BNTH * options.scale), k_BKSH)
    logits_BKRS = masked(logits_BKRS, jnp.tile(mask_BTS, (1, N // K, 1))[:, None], by_row)
    probs_BKRS = options.drop(normalized(logits_BKRS, sink_1KR1), index).astype(v_BKSU.dtype)
    return einsum('BKRS,BKSU->BKRU', v_BKSU.dtype, probs_BKRS, v_BKSU).reshape(B, N, T, U)
