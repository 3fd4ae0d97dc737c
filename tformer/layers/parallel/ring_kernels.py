"""Ring attention by the kernels of accelerators: each pair of blocks is one call, merged by log-sum-exp.

As in ring_attention.py, keys and values go round the devices of the mesh axis `context`, forward and once more
backward, with their gradients (Liu et al. 2024). Nothing is made of [T, S]: memory is linear in the length. The
backward pass gives the kernels the log-sum-exp of all blocks, so that each adds its own part of the gradient.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tformer.distributed import hlo
from tformer.layers.accelerators import mosaic, splash, tile_dropout, triton
from tformer.layers.kernels import MIN, Meeting, Pair, ScoreOptions, pad, sink_gradient, with_sink
from tformer.layers.masks import AttentionMask
from tformer.layers.parallel import each_device
from tformer.layers.parallel.ring_attention import AXIS, HALVES, go_round, half, pass_on, ways, zigzag

PAIRS = {'flash': splash.PAIR, 'mosaic': mosaic.PAIR, 'triton': triton.PAIR}
OF_KERNELS = {'flash': ('flash', 'mosaic'), 'mosaic': ('mosaic',), 'cudnn': ('triton',), 'triton': ('triton',)}


ByHead = tuple[jax.Array | None, jax.Array | None]  # of `tile_dropout`, and the bias by distance, or None


class Plan(NamedTuple):
    """What is static of a ring."""

    pair: str  # key of `PAIRS`
    options: ScoreOptions  # without arrays
    interpret: bool = False


def pick(kernel: str, T: int, S: int, mask: AttentionMask, options: ScoreOptions) -> str | None:
    """Returns the key of `PAIRS` by which `ring` computes attention of T queries and S keys in a kernel's place; None
    if there is none."""

    def serves(pair: Pair) -> bool:
        short = [-length % (HALVES * ways() * pair.multiple) for length in (T, S)]
        whole = not any(short) or (mask.order != 'zigzag' and short[0] < T and short[1] < S)
        known = pair.any_order or (mask.static and (mask.prefix_BS is None or not mask.causal))
        drops, biased = pair.drops or options.dropout_key is None, pair.biased or options.bias_1NX is None
        return whole and known and drops and biased

    names = OF_KERNELS.get(kernel, ()) if options.bias is None else ()
    return next((name for name in names if serves(PAIRS[name])), None)


def ring(
    pair: str,
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSU: jax.Array,
    mask: AttentionMask,
    options: ScoreOptions,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Attention as kernels.py defines it, under a mesh whose axis `context` splits T and S; zeros at padding."""
    rows, N, T = q_BNTH.shape[:3]
    q_BNTH, k_BKSH, v_BKSU, mask, bias_1NX = _padded(pair, q_BNTH, k_BKSH, v_BKSU, mask, options.bias_1NX)
    k_BKSH, v_BKSU = (each_device.enough_heads(x, N) for x in (k_BKSH, v_BKSU))
    sink_N, plan = options.sink_N, Plan(pair, ScoreOptions(1.0, softcap=options.softcap), interpret)
    drawn_BN3 = tile_dropout.draw(options.dropout_rate, options.dropout_key, rows, N)
    arrays = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, x.shape[1])) if x.ndim else x, mask)
    out_BNTU = attention(plan, q_BNTH * options.scale, k_BKSH, v_BKSU, arrays, sink_N, (drawn_BN3, bias_1NX))
    sees_BT = mask.sees() if mask.static else mask.query_positions_BT >= 0
    return jnp.where(sees_BT[:, None, :, None], out_BNTU, 0).astype(v_BKSU.dtype)[:, :, :T]


def _padded(
    pair: str, q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array, mask: AttentionMask, bias_1NX: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array, AttentionMask, jax.Array | None]:
    """Returns the arrays of attention with padding behind, so that each device has whole blocks, and without a cache's
    slots behind a prompt."""
    T, S, multiple = q_BNTH.shape[2], k_BKSH.shape[2], HALVES * ways() * PAIRS[pair].multiple
    seen = T if mask.order == 'front' and mask.causal else S

    def behind(x_BX: jax.Array | None, value: int) -> jax.Array | None:
        return None if x_BX is None else pad(x_BX, 1, multiple, value)

    def keys(x_BX: jax.Array | None, value: int) -> jax.Array | None:
        return None if x_BX is None else behind(x_BX[:, :seen], value)

    if bias_1NX is not None:  # from the last key and the first query on
        bias_1NX = jnp.pad(bias_1NX[..., S - seen :], ((0, 0), (0, 0), (-seen % multiple, -T % multiple)))
    mask = mask.replace(
        query_positions_BT=behind(mask.query_positions_BT, -1),
        query_segments_BT=behind(mask.query_segments_BT, 0),
        key_positions_BS=keys(mask.key_positions_BS, -1),
        key_segments_BS=keys(mask.key_segments_BS, 0),
        prefix_BS=keys(mask.prefix_BS, False),
    )
    k_BKSH, v_BKSU = (pad(x[:, :, :seen], 2, multiple) for x in (k_BKSH, v_BKSU))
    return pad(q_BNTH, 2, multiple), k_BKSH, v_BKSU, mask, bias_1NX


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(
    plan: Plan, q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array, mask: AttentionMask,
    sink_N: jax.Array | None, heads: ByHead,
) -> jax.Array:  # fmt: skip
    """Returns out_BNTU of scaled queries."""
    return _forward(plan, q_BNTH, k_BKSH, v_BKSU, mask, sink_N, heads)[0]


def _forward(
    plan: Plan, q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array, mask: AttentionMask,
    sink_N: jax.Array | None, heads: ByHead,
) -> tuple[jax.Array, Any]:  # fmt: skip
    spec, *seen, _ = _specs(q_BNTH, mask)
    run = _on_each(functools.partial(_attend, plan), (spec, spec, spec, *seen), (spec, spec))
    out_BNTU, lse_BNT = run(q_BNTH, k_BKSH, v_BKSU, mask, heads)
    out_BNTU, lse_BNT = with_sink(out_BNTU, lse_BNT, sink_N)
    out_BNTU = out_BNTU.astype(v_BKSU.dtype)
    return out_BNTU, (q_BNTH, k_BKSH, v_BKSU, mask, sink_N, heads, out_BNTU, lse_BNT)


def _backward(plan: Plan, kept: Any, dout_BNTU: jax.Array) -> tuple[Any, ...]:
    q_BNTH, k_BKSH, v_BKSU, mask, sink_N, heads, out_BNTU, lse_BNT = kept
    spec, *seen, each = _specs(q_BNTH, mask)
    specs = *[spec] * 3, *seen, *[spec] * 3
    run = _on_each(functools.partial(_differentiate, plan), specs, (spec, spec, spec, each))
    *grads, dbias = run(q_BNTH, k_BKSH, v_BKSU, mask, heads, out_BNTU, lse_BNT, dout_BNTU)
    delta_BNT = jnp.sum(dout_BNTU.astype(jnp.float32) * out_BNTU.astype(jnp.float32), -1)
    return (
        *grads,
        None,
        sink_gradient(lse_BNT, delta_BNT, sink_N),
        (None, None if dbias is None else dbias.sum(0, keepdims=True)),
    )


attention.defvjp(_forward, _backward)


def _specs(q_BNTH: jax.Array, mask: AttentionMask) -> tuple[P, Any, Any, P]:
    """Returns the specs of arrays [B, N, T, ...], of a mask's arrays, of `ByHead`, and of what is [1, N, ...] on each
    device."""
    rows, heads = each_device.split('batch', len(q_BNTH)), each_device.split('act_heads', q_BNTH.shape[1])
    masks = jax.tree.map(lambda x: P(rows, AXIS) if x.ndim else P(), mask)
    return P(rows, heads, AXIS), masks, (P(rows, heads), P(None, heads)), P((*(rows or ()), AXIS), heads)


def _on_each(function: Any, in_specs: Any, out_specs: Any) -> Any:
    axes = each_device.free_axes()
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


# --------------------------------------------------------------------------------------------- on each device
def _meetings(q_BNTH: jax.Array, keys: Any, mask: AttentionMask, heads: ByHead, turn: jax.Array | int) -> Any:
    """Yields (a, b, whether a query may see a key, in which share of turns, the `Meeting`) of the queries' half a with
    half b of the keys that are here at `turn`."""
    (k_BKSH, _, key_arrays), (drawn_BN3, bias_1NX) = keys, heads
    count, index = ways(), jax.lax.axis_index(AXIS)
    T, S = q_BNTH.shape[2] // HALVES, k_BKSH.shape[2] // HALVES
    order = zigzag(HALVES * count, count) if mask.order == 'zigzag' else np.arange(HALVES * count)
    bounded = mask.static and mask.prefix_BS is None
    own_width: Any = next(iter(mask.shares_by_width)) if len(mask.shares_by_width) == 1 else mask.window

    def meets(offset: Any, width: Any) -> Any:
        """Whether a query may see a key of blocks so far apart in a window of this width."""
        seen, sight = offset == offset, mask.sight(width)
        if bounded and sight.after is not None:
            seen &= -offset - (T - 1) <= sight.after
        if bounded and sight.before is not None:
            seen &= offset - (S - 1) <= sight.before
        return seen

    shares = _shares(order, count, mask.shares_by_width, lambda own, other, width: meets(own * T - other * S, width))
    for a in range(HALVES):
        for b in range(HALVES):
            own = jnp.asarray(order)[index * HALVES + a]
            other = jnp.asarray(order)[(index - turn) % count * HALVES + b]
            offset = own * T - other * S
            queries = (None if x is None else half(x, a, 1) for x in (mask.query_positions_BT, mask.query_segments_BT))
            places_BT, segments_BT = queries
            key_halves = [None if x is None else half(x, b, 1) for x in key_arrays]
            part = mask.replace(
                query_positions_BT=places_BT,
                query_segments_BT=segments_BT,
                key_positions_BS=key_halves[0],
                key_segments_BS=key_halves[1],
                prefix_BS=key_halves[2],
            )
            drawn = tile_dropout.of_block(drawn_BN3, own * len(order) + other)
            bias = None
            if bias_1NX is not None:
                bias = jax.lax.dynamic_slice_in_dim(bias_1NX[0], _first(offset, S), T + S - 1, axis=1)
            yield a, b, meets(offset, own_width), float(shares[a, b]), Meeting(part, offset, drawn, bias)


def _shares(
    order: np.ndarray, count: int, layers: Mapping[int | None, float], meets: Callable[[Any, Any, Any], Any]
) -> np.ndarray:
    """Returns in which share of the turns each half of a device's queries meets each half of the keys that are there,
    [HALVES, HALVES], in the mean of the devices and of the layers, as `AttentionMask.shares_by_width` has them; in each
    turn devices wait for the one that meets most."""
    indices, turns, a, b = np.meshgrid(*map(np.arange, (count, count, HALVES, HALVES)), indexing='ij')
    own, other = order[indices * HALVES + a], order[(indices - turns) % count * HALVES + b]
    total = np.zeros((HALVES, HALVES))
    for width, layers_share in layers.items():
        met = np.asarray(meets(own, other, width), float)
        waits = met.sum((2, 3)).max(0).sum() / met.sum((2, 3)).mean(0).sum()
        total += layers_share * np.minimum(met.mean((0, 1)) * waits, 1.0)
    return total


def _first(offset: jax.Array, S: int) -> jax.Array:
    """Returns where in the bias of the ring that of one block of queries and one of S keys begins."""
    return offset + (HALVES * ways() - 1) * S


def _keys(k_BKSH: jax.Array, v_BKSU: jax.Array, mask: AttentionMask) -> Any:
    """Returns what goes round."""
    return k_BKSH, v_BKSU, (mask.key_positions_BS, mask.key_segments_BS, mask.prefix_BS)


def _attend(
    plan: Plan,
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSU: jax.Array,
    mask: AttentionMask,
    heads: ByHead,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out_BNTU, float32, the log-sum-exp of the scores lse_BNT) of this device's queries."""
    pair, shape = PAIRS[plan.pair], q_BNTH.shape[:3]

    def turn(keys: Any, halves: Any, number: jax.Array | int) -> tuple[None, Any]:
        halves = list(halves)
        for a, b, busy, share, meeting in _meetings(q_BNTH, keys, mask, heads, number):
            block = half(q_BNTH, a, 2), half(keys[0], b, 2), half(keys[1], b, 2)

            def add(sums: Any, block: Any = block, meeting: Meeting = meeting) -> Any:
                out, lse = sums
                more, more_lse = pair.forward(*block, meeting, plan.options, plan.interpret)
                whole = jnp.logaddexp(lse, more_lse)
                fade, rise = jnp.exp(lse - whole), jnp.exp(more_lse - whole)
                return out * fade[..., None] + more.astype(jnp.float32) * rise[..., None], whole

            halves[a] = hlo.cond(share, busy, add, lambda sums: sums, halves[a])
        return None, tuple(halves)

    start = jnp.zeros((*shape, v_BKSU.shape[-1]), jnp.float32), jnp.full(shape, MIN)
    halves = tuple(tuple(half(x, a, 2) for x in start) for a in range(HALVES))
    _, halves = go_round(turn, _keys(k_BKSH, v_BKSU, mask), halves)
    out_BNTU, lse_BNT = (jnp.concatenate(parts, axis=2) for parts in zip(*halves, strict=True))
    return out_BNTU, lse_BNT


def _differentiate(
    plan: Plan,
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSU: jax.Array,
    mask: AttentionMask,
    heads: ByHead,
    out_BNTU: jax.Array,
    lse_BNT: jax.Array,
    dout_BNTU: jax.Array,
) -> tuple[Any, ...]:
    """Returns the gradients of this device's queries, keys and values, and of the bias by them."""
    pair = PAIRS[plan.pair]

    def turn(keys: Any, of_queries: Any, number: jax.Array | int) -> tuple[Any, Any]:
        *dqueries, dbias = of_queries
        dkeys = [[jnp.zeros_like(half(x, b, 2), jnp.float32) for x in keys[:2]] for b in range(HALVES)]
        for a, b, busy, share, meeting in _meetings(q_BNTH, keys, mask, heads, number):
            block = half(q_BNTH, a, 2), half(keys[0], b, 2), half(keys[1], b, 2)
            kept = tuple(half(x, a, 2) for x in (out_BNTU, lse_BNT, dout_BNTU))

            def add(sums: Any, block: Any = block, kept: Any = kept, meeting: Meeting = meeting) -> Any:
                *more, by_distance = pair.backward(*block, meeting, plan.options, plan.interpret, *kept)
                *sums, total = sums
                if total is not None:
                    first = _first(meeting.offset, block[1].shape[2])
                    part = jax.lax.dynamic_slice_in_dim(total, first, by_distance.shape[1], axis=2)
                    total = jax.lax.dynamic_update_slice_in_dim(total, part + by_distance[None], first, axis=2)
                return *(x + g.astype(jnp.float32) for x, g in zip(sums, more, strict=True)), total

            sums = dqueries[a], *dkeys[b], dbias
            dqueries[a], *dkeys[b], dbias = hlo.cond(share, busy, add, lambda sums: sums, sums)
        return tuple(map(tuple, dkeys)), (*dqueries, dbias)

    dq = [jnp.zeros_like(half(q_BNTH, a, 2), jnp.float32) for a in range(HALVES)]
    start = *dq, jax.tree.map(jnp.zeros_like, heads[1])
    dkeys, (*dqueries, dbias) = go_round(turn, _keys(k_BKSH, v_BKSU, mask), start)
    found = zip((dqueries, *zip(*dkeys, strict=True)), (q_BNTH, k_BKSH, v_BKSU), strict=True)
    of_queries, *of_keys = (jnp.concatenate(parts, axis=2).astype(x.dtype) for parts, x in found)
    return of_queries, *pass_on(of_keys), dbias
