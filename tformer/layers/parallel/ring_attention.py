"""Attention over tokens that are split between devices: keys and values go round a ring of them (Liu et al. 2024).

Every device of the mesh axis `context` holds its part of the queries, keys and values of each row. In as many turns as
there are devices, it attends to the keys and values that it holds; between turns they are passed on, so that no device
ever holds them all. Blocks that the mask leaves empty are skipped: a causal mask halves the cost where the order of the
tokens balances the work (`balance`).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tformer.data.examples.example_arrays import OF_ROWS
from tformer.layers.dropout import MaybeScalar, dropout
from tformer.layers.kernels import MIN, ScoreOptions, grouped, masked_logits, pad, seen
from tformer.layers.masks import Order

AXIS = 'context'
HALVES = 2  # blocks of each device's queries and keys

# (keys that are here, sums of the queries, its number) -> (what it adds to the keys' sums, the queries' sums after it)
Turn = Callable[[Any, Any, Any], tuple[Any, Any]]


def ways() -> int:
    """Returns the number of devices that share the tokens of a row in the current mesh."""
    return int(jax.sharding.get_abstract_mesh().shape.get(AXIS, 1))


def zigzag(length: int, count: int) -> np.ndarray:
    """Returns the order of `length` tokens in which device i of `count` has blocks i and 2 count - 1 - i of 2 count.

    Each device then has as many keys before its queries as the others (Llama Team 2024, 3.3.2).
    """
    blocks = np.arange(length).reshape(HALVES * count, -1)
    pairs = np.stack([blocks[:count], blocks[::-1][:count]], axis=1)
    return pairs.reshape(-1)


def balance(batch: Mapping[str, jax.Array]) -> tuple[dict[str, jax.Array], Order]:
    """Returns (a batch whose decoder tokens, and all arrays about them, are in the order that `zigzag` gives, that
    order) of one that is padded behind.

    The result does not depend on the order, as masks come from positions. Lengths that do not divide are unchanged.
    """
    count, length = ways(), batch['inputs'].shape[1]
    if count == 1 or length % (HALVES * count):
        return dict(batch), 'behind'
    order = zigzag(length, count)

    def moved(name: str, x: jax.Array) -> jax.Array:
        ours = not name.startswith('encoder_') and name not in OF_ROWS and x.shape[1:2] == (length,)
        return jnp.take(x, order, axis=1) if ours else x

    counted = jnp.broadcast_to(jnp.arange(length), batch['inputs'].shape)
    return {name: moved(name, x) for name, x in {'positions': counted, **batch}.items()}, 'zigzag'


class Inputs(NamedTuple):
    """Inputs of attention, padded so that each device has whole blocks. None is off."""

    q_BKGTH: Any  # scaled
    k_BKSH: Any
    v_BKSU: Any
    bias_BKGTS: Any = None
    sink_KG: Any = None
    mask_BTS: Any = None
    busy_QR: Any = None  # whether any query of a block sees any key of a block
    rate: Any = None
    key: Any = None


_SPLIT = Inputs(
    *(P(None, None, None, AXIS), P(None, None, AXIS), P(None, None, AXIS), P(None, None, None, AXIS), P()),
    *(P(None, AXIS), P(AXIS), P(), P()),
)
_ROWS = P(None, None, None, AXIS)  # of a number or a vector for each query, [B, K, G, T, ...]


def ring(
    q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array, mask_BTS: jax.Array, options: ScoreOptions
) -> jax.Array:
    """Attention as kernels.py defines it, under a mesh whose axis `context` splits T and S.

    A device holds O(T S / n) of the mask, and of the bias where there is one. Dropout draws other numbers than on one
    device.
    """
    (B, N, T, _), K, multiple = q_BNTH.shape, k_BKSH.shape[1], HALVES * ways()
    masked_BTS = pad(pad(mask_BTS, 1, multiple), 2, multiple)
    blocks = masked_BTS.reshape(B, multiple, masked_BTS.shape[1] // multiple, multiple, -1)
    bias_BNTS, sink_N, rate, key = options.bias, options.sink_N, options.dropout_rate, options.dropout_key
    bias_BNTS = None if bias_BNTS is None else pad(pad(bias_BNTS, 2, multiple), 3, multiple)
    inputs = Inputs(
        q_BKGTH=grouped(pad(q_BNTH * options.scale, 2, multiple), K),
        k_BKSH=pad(k_BKSH, 2, multiple),
        v_BKSU=pad(v_BKSU, 2, multiple),
        bias_BKGTS=None if bias_BNTS is None else grouped(bias_BNTS, K),
        sink_KG=None if sink_N is None else sink_N.reshape(K, N // K),
        mask_BTS=masked_BTS,
        busy_QR=blocks.any((0, 2, 4)),
        rate=rate if key is not None else None,
        key=key if rate is not None else None,
    )
    fixed = options._replace(bias=None, sink_N=None, dropout_rate=None, dropout_key=None)
    out_BKGTU = attention(fixed, inputs)
    out_BNTU = out_BKGTU.reshape(B, N, *out_BKGTU.shape[3:])[:, :, :T]
    return seen(out_BNTU.astype(v_BKSU.dtype), mask_BTS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(options: ScoreOptions, inputs: Inputs) -> jax.Array:
    """Returns out_BKGTU, float32; `options` holds no arrays, which are in `inputs`.

    The backward pass sends keys and values round once more, with their gradients.
    """
    return _forward(options, inputs)[0]


def _forward(options: ScoreOptions, inputs: Inputs) -> tuple[jax.Array, Any]:
    local = functools.partial(_attend, options=options)
    out_BKGTU, lse_BKGT = _on_each(local, (_present(inputs),), (_ROWS, _ROWS))(inputs)
    return out_BKGTU, (inputs, out_BKGTU, lse_BKGT)


def _backward(options: ScoreOptions, kept: Any, dout_BKGTU: jax.Array) -> tuple[Inputs]:
    inputs, out_BKGTU, lse_BKGT = kept
    delta_BKGT = jnp.sum(dout_BKGTU * out_BKGTU, -1)  # Dao et al. 2022, appendix B.4
    specs = _present(inputs)
    grads = Inputs(*specs[:4])
    local = functools.partial(_differentiate, options=options)
    found = _on_each(local, (specs, _ROWS, _ROWS, _ROWS), grads)(inputs, lse_BKGT, delta_BKGT, dout_BKGTU)
    if inputs.sink_KG is not None:
        share_BKGT = jnp.exp(inputs.sink_KG[None, :, :, None] - lse_BKGT)
        found = found._replace(sink_KG=-jnp.sum(share_BKGT * delta_BKGT, (0, 3)))
    return (found,)


attention.defvjp(_forward, _backward)


def _present(inputs: Inputs) -> Inputs:
    """Returns the specs of the inputs that are present."""
    return Inputs(*(None if x is None else spec for x, spec in zip(inputs, _SPLIT, strict=True)))


def _on_each(function: Any, in_specs: Any, out_specs: Any) -> Any:
    """Returns `function`, applied to each device's own part."""
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names={AXIS}, check_vma=False)


# --------------------------------------------------------------------------------------------- on each device
def half(x: jax.Array, number: int | jax.Array, axis: int, of: int = HALVES) -> jax.Array:
    """Returns block `number` of the blocks along an axis."""
    size = x.shape[axis] // of
    return jax.lax.dynamic_slice_in_dim(x, number * size, size, axis)


def pass_on(tree: Any) -> Any:
    """Returns what the device before holds."""
    count = jax.lax.axis_size(AXIS)
    return jax.lax.ppermute(tree, AXIS, [(i, (i + 1) % count) for i in range(count)])


def go_round(turn: Turn, keys: Any, of_queries: Any) -> tuple[Any, Any]:
    """Returns the sums (of keys, `of_queries`) after as many turns as there are devices.

    In each turn but the last the keys that are here are passed on, in each but the first the sums that belong to those
    of the turn before: one hop more takes them home. What a turn adds to them waits for neither.
    """
    last = ways() - 1

    def step(carry: Any, number: jax.Array | int, more: bool = True) -> tuple[Any, None]:
        keys, of_keys, of_queries = carry
        coming, arrived = pass_on((keys if more else None, of_keys))
        added, of_queries = turn(keys, of_queries, number)
        return (coming, jax.tree.map(jnp.add, arrived, added), of_queries), None

    of_keys, of_queries = turn(keys, of_queries, 0)
    carry = pass_on(keys), of_keys, of_queries
    carry, _ = jax.lax.scan(step, carry, jnp.arange(1, last))
    (_, *sums), _ = step(carry, last, more=False)
    return tuple(sums)


def _logits(block: Any, mask_BTS: jax.Array, options: ScoreOptions) -> jax.Array:
    q_BKGTH, k_BKSH, _, bias_BKGTS = block
    return masked_logits(q_BKGTH, k_BKSH, mask_BTS, options._replace(bias=bias_BKGTS))


def _weights(block: Any, lse_BKGT: jax.Array, mask_BTS: jax.Array, options: ScoreOptions) -> jax.Array:
    logits_BKGTS = _logits(block, mask_BTS, options)
    return jnp.where(mask_BTS[:, None, None], jnp.exp(logits_BKGTS - lse_BKGT[..., None]), 0)


def _summed(weights_BKGTS: jax.Array, v_BKSU: jax.Array, rate: MaybeScalar, key: jax.Array | None) -> jax.Array:
    if rate is not None and key is not None:
        weights_BKGTS = dropout(weights_BKGTS, rate, key)
    weights_BKGTS = weights_BKGTS.astype(v_BKSU.dtype)
    return jnp.einsum('BKGTS,BKSU->BKGTU', weights_BKGTS, v_BKSU, preferred_element_type=jnp.float32)


def _blocks(inputs: Inputs, keys: Any, turn: jax.Array | int) -> Any:
    """Yields (a, b, number, busy, block, mask, key) of the queries' half a with half b of the keys that are here at
    `turn`, which is block `number` of them all."""
    count, index = jax.lax.axis_size(AXIS), jax.lax.axis_index(AXIS)
    owner = (index - turn) % count
    for a in range(HALVES):
        for b in range(HALVES):
            number = owner * HALVES + b
            bias, key = inputs.bias_BKGTS, inputs.key
            rows = None if bias is None else half(bias, a, 3)
            block = (
                half(inputs.q_BKGTH, a, 3),
                *(half(x, b, 2) for x in keys),
                None if rows is None else half(rows, number, 4, HALVES * count),
            )
            mask_BTS = half(half(inputs.mask_BTS, a, 1), number, 2, HALVES * count)
            if key is not None:
                key = jax.random.fold_in(key, (index * HALVES + a) * HALVES * count + number)
            yield a, b, number, inputs.busy_QR[a, number], block, mask_BTS, key


def _attend(inputs: Inputs, options: ScoreOptions) -> tuple[jax.Array, jax.Array]:
    """Returns (out_BKGTU, the log-sum-exp of the scores lse_BKGT) of this device's queries."""
    B, K, G, T, _ = inputs.q_BKGTH.shape
    top, total = jnp.full((B, K, G, T), MIN), jnp.zeros((B, K, G, T))
    if inputs.sink_KG is not None:
        top, total = jnp.broadcast_to(inputs.sink_KG[None, :, :, None], top.shape), total + 1
    out = jnp.zeros((B, K, G, T, inputs.v_BKSU.shape[-1]), jnp.float32)

    def turn(keys: Any, sums: Any, number: jax.Array | int) -> tuple[None, Any]:
        halves = [[half(x, a, 3) for x in sums] for a in range(HALVES)]
        for a, _, _, busy, block, mask_BTS, key in _blocks(inputs, keys, number):

            def add(sums: Any, block: Any = block, mask_BTS: jax.Array = mask_BTS, key: Any = key) -> Any:
                top, total, out = sums
                higher = jnp.maximum(top, _logits(block, mask_BTS, options).max(-1))
                weights = _weights(block, higher, mask_BTS, options)
                fade = jnp.exp(top - higher)
                added = _summed(weights, block[2], inputs.rate, key)
                return [higher, total * fade + weights.sum(-1), out * fade[..., None] + added]

            halves[a] = jax.lax.cond(busy, add, lambda sums: sums, halves[a])
        return None, tuple(jnp.concatenate(parts, axis=3) for parts in zip(*halves, strict=True))

    _, (top, total, out) = go_round(turn, (inputs.k_BKSH, inputs.v_BKSU), (top, total, out))
    found = jnp.where(total > 0, total, 1)
    return out / found[..., None], jnp.where(total > 0, top, 0) + jnp.log(found)


def _differentiate(
    inputs: Inputs, lse_BKGT: jax.Array, delta_BKGT: jax.Array, dout_BKGTU: jax.Array, options: ScoreOptions
) -> Inputs:
    """Returns the gradients of this device's queries, keys, values and bias."""

    def turn(keys: Any, of_queries: Any, number: jax.Array | int) -> tuple[Any, Any]:
        dk, dv = (jnp.zeros(x.shape, jnp.float32) for x in keys)
        dq, dbias = of_queries
        for a, b, place, busy, block, mask_BTS, key in _blocks(inputs, keys, number):
            lse, given = half(lse_BKGT, a, 3), (half(dout_BKGTU, a, 3), -half(delta_BKGT, a, 3))

            def gradient(
                block: Any, mask_BTS: Any = mask_BTS, key: Any = key, lse: Any = lse, given: Any = given
            ) -> Any:
                def sums(block: Any) -> Any:
                    weights = _weights(block, lse, mask_BTS, options)
                    return _summed(weights, block[2], inputs.rate, key), weights.sum(-1)

                return jax.vjp(sums, block)[1](given)[0]

            zeros = functools.partial(jax.tree.map, jnp.zeros_like)
            dq_a, dk_b, dv_b, dbias_ab = jax.lax.cond(busy, gradient, zeros, block)
            dq, dk, dv = (
                _added(x, part, number, axis)
                for x, part, number, axis in ((dq, dq_a, a, 3), (dk, dk_b, b, 2), (dv, dv_b, b, 2))
            )
            if dbias is not None:
                rows = _added(half(dbias, a, 3), dbias_ab, place, 4)
                dbias = jax.lax.dynamic_update_slice_in_dim(dbias, rows, a * rows.shape[3], 3)
        return (dk, dv), (dq, dbias)

    dq = jnp.zeros(inputs.q_BKGTH.shape, jnp.float32)
    dbias = None if inputs.bias_BKGTS is None else jnp.zeros_like(inputs.bias_BKGTS)
    (dk, dv), (dq, dbias) = go_round(turn, (inputs.k_BKSH, inputs.v_BKSU), (dq, dbias))
    dq, dk, dv = (g.astype(x.dtype) for g, x in zip((dq, dk, dv), inputs, strict=False))
    dk, dv = pass_on((dk, dv))
    return Inputs(dq, dk, dv, dbias)


def _added(x: jax.Array, part: jax.Array, number: int | jax.Array, axis: int) -> jax.Array:
    """Returns `x` with `part` added to its block `number` along `axis`."""
    size = part.shape[axis]
    there = jax.lax.dynamic_slice_in_dim(x, number * size, size, axis)
    return jax.lax.dynamic_update_slice_in_dim(x, there + part, number * size, axis)
