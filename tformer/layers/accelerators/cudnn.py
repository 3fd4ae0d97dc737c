"""Attention on NVIDIA's GPUs: cuDNN's flash attention, and for masks that it does not know the kernel of triton.py."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from tformer.layers.accelerators.triton import triton
from tformer.layers.kernels import ScoreOptions, is_step, never_blind, pad, refuse
from tformer.layers.masks import AttentionMask, Sight
from tformer.layers.parallel.each_device import on_each_device

MOST_PAIRS = 2048**2  # of queries and keys of a head, whose biases fit beside what a layer holds


def cudnn(
    q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, mask: AttentionMask, options: ScoreOptions
) -> jax.Array:
    """`jax.nn.dot_product_attention` by cuDNN, in its own layout BTNH, on each device's own rows and heads.

    cuDNN knows causal masks, their windows, and lengths of keys: rows that are padded behind. For all others, such as
    packed rows, a prefix, or a window to both sides, `triton` reads positions and segments. A bias by distance is made
    one of all pairs for cuDNN where they are few, else it is `triton`'s, too; to a bias that is given for all pairs the
    mask is added. Queries that see nothing get zeros; those of padding get a mean of some values where cuDNN knows the
    mask of tokens among themselves, which nobody reads.
    """
    refuse('cudnn', options, 'softcap', 'sink_N', 'dropout_rate')
    few = options.bias_1NX is None or q_BNTH.shape[2] * k_BKSH.shape[2] <= MOST_PAIRS
    step = is_step(q_BNTH, k_BKSH, mask)  # for which cuDNN would turn the whole cache round
    if step or (options.bias is None and not (knows(mask) and few)):
        return triton(q_BNTH, k_BKSH, v_BKSH, mask, options)
    biases = options.bias, options.bias_1NX  # of which devices sum the gradient of the short one
    return on_each_device(functools.partial(_attend, scale=options.scale), q_BNTH, k_BKSH, v_BKSH, mask, biases)


def knows(mask: AttentionMask) -> bool:
    """Returns whether cuDNN computes a mask by itself."""
    tokens, keys = mask.query_positions_BT.shape[1], mask.key_positions_BS.shape[1]
    rows = mask.key_segments_BS is None and mask.prefix_BS is None and mask.visible_BTS is None
    return rows and mask.order == 'behind' and (tokens == keys if mask.causal else mask.window is None)


def arguments(mask: AttentionMask, sight: Sight, rows: int) -> dict[str, Any]:
    """Returns the arguments of `jax.nn.dot_product_attention` that mean a mask that cuDNN knows."""
    if mask.causal:  # a token does not see the padding behind it
        return {'is_causal': True, 'local_window_size': None if sight.before is None else (sight.before, 0)}
    lengths_B = jnp.sum(mask.key_positions_BS >= 0, 1, dtype=jnp.int32)
    return {'key_value_seq_lengths': jnp.broadcast_to(jnp.maximum(lengths_B, 1), (rows,))}


def _attend(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    mask: AttentionMask,
    biases: tuple[jax.Array | None, jax.Array | None],
    *,
    scale: float,
) -> jax.Array:
    B, _, T, _ = q_BNTH.shape
    bias_BNTS = ScoreOptions(scale, bias=biases[0], bias_1NX=biases[1]).of_pairs(T).bias
    q_BTNH, k_BSKH, v_BSKH = (pad(x, 2, 2).swapaxes(1, 2) for x in (q_BNTH, k_BKSH, v_BKSH))  # it trains on even ones
    if bias_BNTS is not None:
        bias_BNTS = pad(pad(bias_BNTS.astype(q_BNTH.dtype), 2, 2), 3, 2)

    def attend(**means: Any) -> jax.Array:
        return jax.nn.dot_product_attention(
            q_BTNH, k_BSKH, v_BSKH, bias_BNTS, scale=scale, implementation='cudnn', **means
        )

    if knows(mask):
        out_BTNH, sees_BT = mask.by_width(lambda sight: attend(**arguments(mask, sight, B))), mask.sees()
        if mask.within:  # zeros for padding would take a pass each way
            return out_BTNH.swapaxes(1, 2)[:, :, :T]
    else:
        mask_BTS = mask.array()
        padded_BTS = never_blind(pad(pad(mask_BTS, 1, 2), 2, 2))
        out_BTNH, sees_BT = attend(mask=padded_BTS[:, None]), mask_BTS.any(-1)
    out_BNTH = out_BTNH.swapaxes(1, 2)[:, :, :T]
    return jnp.where(sees_BT[:, None, :, None], out_BNTH, jnp.zeros_like(out_BNTH))
