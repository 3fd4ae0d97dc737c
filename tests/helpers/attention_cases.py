"""Attention of many masks: the arrays of each case, its mask, and the same attention in float64 without JAX."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from tformer.layers.masks import AttentionMask

B = 2


class Case(NamedTuple):
    """What differs from causal attention of eight heads, in rows of which the second is padded."""

    causal: bool = True
    order: str | None = 'behind'
    lengths: tuple[int, int] = (140, 140)  # T, S; keys beyond the queries are free slots of a cache
    heads: tuple[int, int] = (8, 8)  # N, K
    sizes: tuple[int, int] = (16, 16)  # H, U
    packed: bool = False
    prefix: bool = False
    across: bool = False  # the keys are another sequence's
    widths: tuple[int | None, ...] = (None,)
    window: int | None = None
    softcap: float | None = None
    sink: bool = False
    bias: bool = False  # one by distance


CASES = {
    'causal': Case(),
    'several blocks': Case(lengths=(1100, 1100), heads=(2, 1)),
    'a window in several blocks': Case(lengths=(1100, 1100), heads=(2, 1), widths=(300,), window=300),
    'padded in front': Case(order='front'),
    'a prompt and free slots': Case(order='front', lengths=(140, 300)),
    'groups': Case(heads=(8, 4), sizes=(8, 24)),
    'fewer key heads than devices': Case(heads=(8, 2)),
    'packed': Case(packed=True),
    'packed in several blocks': Case(lengths=(300, 300), heads=(2, 1), packed=True),
    'full': Case(causal=False, order=None),
    'full and packed': Case(causal=False, order=None, packed=True, heads=(4, 2)),
    'across': Case(causal=False, order=None, across=True, lengths=(140, 260)),
    'across and packed': Case(causal=False, order=None, across=True, packed=True),
    'prefix': Case(prefix=True),
    'prefix and packed': Case(prefix=True, packed=True, heads=(8, 4), softcap=3.0),
    'window': Case(widths=(5,), window=5),
    'window, here none': Case(widths=(5, None), window=2**31 - 1),
    'window in some layers': Case(widths=(5, None), window=5, packed=True),
    'window to both sides': Case(causal=False, widths=(5,), window=5),
    'encoder, window in several blocks': Case(
        causal=False, lengths=(1100, 1100), heads=(2, 1), widths=(150, None), window=150
    ),
    'encoder, packed in several blocks': Case(causal=False, lengths=(300, 300), heads=(2, 1), packed=True),
    'encoder, packed, window': Case(causal=False, lengths=(300, 300), heads=(2, 1), packed=True, widths=(9,), window=9),
    'window and prefix': Case(prefix=True, widths=(5,), window=5),
    'unknown order': Case(order=None),
    'softcap and sink': Case(softcap=2.0, sink=True, packed=True),
}
BIASED = {  # where the places of tokens tell how far apart they are
    'bias, groups': Case(heads=(8, 4), sizes=(8, 24), bias=True),
    'bias, full': Case(causal=False, heads=(4, 4), bias=True),
    'bias, packed in several blocks, softcap, sink': Case(
        lengths=(600, 600), heads=(2, 1), packed=True, softcap=2.0, sink=True, bias=True
    ),
    'bias, a window in blocks of 384': Case(
        lengths=(1100, 1100), heads=(2, 1), widths=(300, None), window=300, bias=True
    ),
    'bias, wide heads': Case(lengths=(100, 100), heads=(2, 1), sizes=(256, 16), bias=True),
    'bias, encoder, window in several blocks': Case(
        causal=False, lengths=(600, 600), heads=(2, 1), widths=(70,), window=70, bias=True
    ),
    'bias, prefix': Case(prefix=True, bias=True),
    'bias, padded in front': Case(order='front', bias=True),
    'bias, a prompt and free slots': Case(order='front', lengths=(140, 300), bias=True),
}


def make_mask(case):
    """Returns the mask, and mask_BT, True at queries that are no padding. The second row has fewer tokens."""
    T, S = case.lengths
    own = min(T, S)

    def side(length, full):
        real = np.array([full, full - 40])[:, None]
        place = np.arange(length)[None]
        if case.order == 'front':
            place = np.where(place < full, place - (full - real), length)
        positions = np.where((place >= 0) & (place < real), place, -1)
        cuts = np.array([[0, 50, 90], [0, 20, 60]])
        which = (positions[:, :, None] >= cuts[:, None, :]).sum(-1)
        if case.packed:
            positions = np.where(positions >= 0, positions - np.take_along_axis(cuts, np.maximum(which - 1, 0), 1), -1)
        return positions, which

    (queries, query_segments), (keys, key_segments) = side(T, own), side(S, S if case.across else own)
    if case.across and case.packed:
        key_segments = np.where(key_segments == 3, 2, key_segments)  # the third target has no source
    if case.order is None and case.causal:
        queries = keys = np.where(queries >= 0, 200 - queries, -1)
    prefix = None
    if case.prefix:
        prefix = (keys >= 0) & (keys < np.array([[30], [7]]))
    arrays = [queries, keys, *((query_segments, key_segments) if case.packed else (None, None)), prefix]
    arrays = [None if x is None else jnp.asarray(x, bool if x.dtype == bool else jnp.int32) for x in arrays]
    window = None if case.window is None else jnp.int32(case.window)
    static = {'causal': case.causal, 'widths': case.widths, 'order': case.order}
    return AttentionMask(*arrays, window, **static, within=not case.across and T == S), queries >= 0


def make(case, dtype=jnp.float32):
    draw = np.random.default_rng(0).standard_normal
    (N, K), (T, S), (H, U) = case.heads, case.lengths, case.sizes
    arrays = {'q': draw((B, N, T, H)), 'k': draw((B, K, S, H)), 'v': draw((B, K, S, U))}
    arrays = {name: jnp.asarray(x, dtype) for name, x in arrays.items()}
    vectors = {'sink_N': (N,)} if case.sink else {}
    vectors |= {'bias_1NX': (1, N, T + S - 1)} if case.bias else {}
    return arrays | {name: jnp.asarray(draw(shape), jnp.float32) for name, shape in vectors.items()}


def by_hand(arrays, mask_BTS, options, dout_BNTU, factor_BNTS=1.0):
    """Returns (the outputs, the gradients of their products with `dout_BNTU`), all in float64; dropout multiplies the
    weights by a factor.

    The gradient of the scores is that of Dao et al. 2022, appendix B.2.
    """
    q, k, v = (np.asarray(arrays[name], np.float64) for name in 'qkv')
    groups = q.shape[1] // k.shape[1]
    keys, values = (np.repeat(x, groups, 1) for x in (k, v))
    scores, slope = options.scale * q @ keys.swapaxes(2, 3), 1.0
    if options.softcap is not None:
        tanh = np.tanh(scores / options.softcap)
        scores, slope = options.softcap * tanh, 1 - tanh**2
    (T, S), distances = scores.shape[2:], np.subtract.outer(*(np.arange(n) for n in scores.shape[2:]))
    if 'bias_1NX' in arrays:
        scores = scores + np.asarray(arrays['bias_1NX'], np.float64)[:, :, distances + S - 1]
    sink = np.asarray(arrays['sink_N'], np.float64)[None, :, None, None] if 'sink_N' in arrays else -np.inf
    scores = np.where(mask_BTS[:, None], scores, -np.inf)
    top = np.maximum(scores.max(-1, keepdims=True), sink)
    top = np.where(np.isfinite(top), top, 0)
    weights, left = np.exp(scores - top), np.exp(sink - top)
    total = weights.sum(-1, keepdims=True) + left
    weights, left = (x / np.where(total > 0, total, 1) for x in (weights, left))
    dropped, dout = weights * factor_BNTS, np.asarray(dout_BNTU, np.float64)
    out = dropped @ values
    delta = (dout * out).sum(-1, keepdims=True)
    biased = weights * (factor_BNTS * (dout @ values.swapaxes(2, 3)) - delta)
    dscores = biased * slope * options.scale
    grads = {'q': dscores @ keys, 'k': dscores.swapaxes(2, 3) @ q, 'v': dropped.swapaxes(2, 3) @ dout}
    for name, x in (('k', k), ('v', v)):
        grads[name] = grads[name].reshape(*x.shape[:2], groups, *x.shape[2:]).sum(2)
    if 'bias_1NX' in arrays:
        grads['bias_1NX'] = np.stack([biased.sum(0).trace(s, 1, 2) for s in range(S - 1, -T, -1)], -1)[None]
    if 'sink_N' in arrays:
        grads['sink_N'] = -(left * delta).sum((0, 2, 3))
    return out, grads
