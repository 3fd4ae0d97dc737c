"""Attention on TPUs: the Pallas kernel that ships with jax, "splash attention".

Which places of a row see which is static, so that blocks of which no query sees a key are never touched. Packing and
padding are segment ids, 4 bytes a token. Memory is linear in the length.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tformer.layers.accelerators.mosaic import mosaic
from tformer.layers.kernels import Meeting, Pair, ScoreOptions, pad, refuse
from tformer.layers.masks import HIDDEN, AttentionMask, Sight
from tformer.layers.parallel.each_device import on_each_device

LANES = 128  # lengths are padded to a multiple
BLOCKS = (512, 384, 256, 128)  # queries and keys of a tile: the first that divides the length


def flash(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSU: jax.Array,
    mask: AttentionMask,
    options: ScoreOptions,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Attention as kernels.py defines it, by splash attention on each device's own rows and heads.

    Queries of padding get zeros. Where the order of the tokens is unknown (a user's own positions, tokens of decoding)
    `mosaic` reads the positions; so it does where a window may end inside a prefix.
    """
    refuse('flash', options, 'bias', 'bias_1NX', 'dropout_rate')
    if not mask.static or (mask.prefix_BS is not None and mask.window is not None):
        return mosaic(q_BNTH, k_BKSH, v_BKSU, mask, options, interpret=interpret)

    def attend(q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array, mask: AttentionMask, sink_N: Any) -> jax.Array:
        own = options._replace(sink_N=sink_N)
        return mask.by_width(lambda sight: _attend(q_BNTH, k_BKSH, v_BKSU, mask, sight, own, interpret))

    return on_each_device(attend, q_BNTH, k_BKSH, v_BKSU, mask, options.sink_N)


def _attend(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSU: jax.Array,
    mask: AttentionMask,
    sight: Sight,
    options: ScoreOptions,
    interpret: bool,
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash  # slow to import

    T, reach_BT, segments = q_BNTH.shape[2], mask.reach(), mask.segments()
    q_BNTH, k_BKSH, v_BKSU = (pad(x, 2, LANES) for x in (q_BNTH * options.scale, k_BKSH, v_BKSU))
    infos = mask_infos(sight if reach_BT is None else Sight(), q_BNTH.shape[2], k_BKSH.shape[2])

    def one(q_NTH: jax.Array, k_KSH: jax.Array, v_KSU: jax.Array, ids: Any, reach_T: jax.Array | None) -> Any:
        found = infos if reach_T is None else [info._replace(q_sequence=reach_T) for info in infos]
        kernel = splash.SplashAttentionKernel(*found, **settings(sight, q_NTH, k_KSH, options, interpret))
        return kernel(q_NTH, k_KSH, v_KSU, splash.SegmentIds(*ids), options.sink_N)

    rows = len(q_BNTH)
    by_row = [None if x is None else jnp.broadcast_to(x, (rows, x.shape[1])) for x in (*segments, reach_BT)]
    queries_BT, keys_BS, reach_BT = (None if x is None else pad(x, 1, LANES, HIDDEN) for x in by_row)
    with jax.named_scope(f'pairs_{visited(infos[0], q_BNTH.shape[2], k_BKSH.shape[2])}'):  # for distributed.costs
        out_BNTU: jax.Array = jax.vmap(one)(q_BNTH, k_BKSH, v_BKSU, (queries_BT, keys_BS), reach_BT)[:, :, :T]
    return jnp.where(mask.sees()[:, None, :, None], out_BNTU, 0).astype(v_BKSU.dtype)


def settings(
    sight: Sight, q_NTH: jax.Array, k_KSH: jax.Array, options: ScoreOptions, interpret: bool
) -> dict[str, Any]:
    """Returns the arguments of splash attention that are not arrays, for lengths that are multiples of `LANES`."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    q, k = block(q_NTH.shape[1]), block(k_KSH.shape[1])
    return {
        'block_sizes': splash.BlockSizes(q, k, k, q, k, k, q, k),
        'is_mqa': False,
        'save_residuals': False,
        'mask_value': splash.DEFAULT_MASK_VALUE,
        'attn_logits_soft_cap': options.softcap,
        'residual_checkpoint_name': None,
        'mask_function': None if sight == Sight() else sight,
        'interpret': interpret,
    }


def block(length: int) -> int:
    """Returns the queries or keys of a tile."""
    return next(size for size in BLOCKS if length % size == 0)


def visited(info: Any, length: int, keys: int) -> int:
    """Returns the number of pairs of a query and a key in the blocks that a kernel visits."""
    busy = info.block_mask
    return length * keys if busy is None else int(busy.sum()) * block(length) * block(keys)


@functools.cache
def mask_infos(sight: Sight, length: int, keys: int) -> list[Any]:
    """Returns what the three kernels (forward, gradient of the queries, of keys and values) visit, where queries and
    keys at places from 0 on see as `sight` says: for each block of queries those of keys, for the last the reverse."""
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    if sight == Sight():
        return [MaskInfo(None, None, None, None, None)] * 3
    q, k = block(length), block(keys)
    first_Q1, first_1K = np.arange(0, length, q)[:, None], np.arange(0, keys, k)[None]
    # The nearest places of two blocks, in both directions.
    busy_QK = np.ones((length // q, keys // k), bool)
    if sight.after is not None:
        busy_QK &= first_1K - (first_Q1 + q - 1) <= sight.after
    if sight.before is not None:
        busy_QK &= first_Q1 - (first_1K + k - 1) <= sight.before

    def info(busy_QK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (the block of keys at each step of each block of queries, 1 where there is one): they are a run."""
        steps_1X = np.arange(max(busy_QK.sum(1).max(), 1))[None]
        last_Q1 = busy_QK.sum(1, keepdims=True) - 1
        visited_QX = busy_QK.argmax(1)[:, None] + np.minimum(steps_1X, np.maximum(last_Q1, 0))
        return visited_QX.astype(np.int32), (steps_1X <= last_Q1).astype(np.int32)

    places_T = np.arange(length, dtype=np.int32)
    rows, columns = info(busy_QK), [x.T for x in info(busy_QK.T)]
    return [MaskInfo(visited[None], None, busy[None], None, places_T) for visited, busy in (rows, rows, columns)]


# ------------------------------------------------------------------------------------------------ in a ring
def _pair(meeting: Meeting, sight: Sight, q_BNTH: jax.Array) -> Any:
    """Returns (who sees whom in a pair of blocks, segment ids) by how far the first query is from the first key."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    places_T: Any = None if sight == Sight() else meeting.offset + jnp.arange(q_BNTH.shape[2], dtype=jnp.int32)
    return MaskInfo(None, None, None, None, places_T), splash.SegmentIds(*meeting.mask.segments())


def pair_forward(
    q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array, meeting: Meeting,
    options: ScoreOptions, interpret: bool,
) -> Any:  # fmt: skip
    """Returns (out_BNTU, lse_BNT) of scaled queries and some of their keys, a part of a ring."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    def attend(sight: Sight) -> Any:
        info, segments = _pair(meeting, sight, q_BNTH)

        def one(q_NTH: jax.Array, k_KSH: jax.Array, v_KSU: jax.Array, ids: Any) -> Any:
            words = {**settings(sight, q_NTH, k_KSH, options, interpret), 'save_residuals': True}
            return splash.SplashAttentionKernel(info, None, None, **words)(q_NTH, k_KSH, v_KSU, ids)

        with jax.named_scope(f'pairs_{q_BNTH.shape[2] * k_BKSH.shape[2]}'):
            out_BNTU, (lse_BNT,) = jax.vmap(one)(q_BNTH, k_BKSH, v_BKSU, segments)
        return out_BNTU, lse_BNT

    return meeting.mask.by_width(attend)


def pair_backward(
    q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array, meeting: Meeting,
    options: ScoreOptions, interpret: bool, out_BNTU: jax.Array, lse_BNT: jax.Array, dout_BNTU: jax.Array,
) -> Any:  # fmt: skip
    """Returns the gradients of queries, keys and values, from the outputs and log-sum-exps of the whole ring.

    jax has no public name for a backward pass that takes them.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    def attend(sight: Sight) -> Any:
        info, segments = _pair(meeting, sight, q_BNTH)

        def one(
            q: jax.Array, k: jax.Array, v: jax.Array, ids: Any, out: jax.Array, lse: jax.Array, do: jax.Array
        ) -> Any:
            words = settings(sight, q, k, options, interpret)
            found = splash._splash_attention_bwd(**words, res=(q, k, v, ids, None, out, lse, info, info), do=do)
            return found[3:6]

        with jax.named_scope(f'pairs_{q_BNTH.shape[2] * k_BKSH.shape[2]}'):
            return *jax.vmap(one)(q_BNTH, k_BKSH, v_BKSU, segments, out_BNTU, lse_BNT, dout_BNTU), None

    return meeting.mask.by_width(attend)


PAIR = Pair(pair_forward, pair_backward, LANES)
