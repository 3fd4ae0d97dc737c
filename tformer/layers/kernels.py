"""What attention is, and how XLA computes it; kernel_choice.py has the table of all implementations.

Each kernel(q_BNTH, k_BKSH, v_BKSU, mask_BTS, options) returns out_BNTU, in the values' dtype, of

    logits = scale q k^T;  softcap tanh(logits / softcap);  + bias;  masked;  softmax in float32;  dropout;  v

    q_BNTH    queries of N heads
    k_BKSH    keys of K heads; query head n uses head n // G, G = N / K (Ainslie et al. 2023)
    v_BKSU    values; U may differ from H where the kernel serves `value_dim`
    mask_BTS  True where query t may see key s; a query that sees nothing gets zeros, and zero gradients
    options   `ScoreOptions`: all else that acts on the scores
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tformer.distributed.sharding import platform
from tformer.layers.dropout import MaybeScalar, dropout
from tformer.layers.masks import AttentionMask
from tformer.layers.parallel.few_tokens import STEP
from tformer.layers.products import einsum

CHUNK = 128  # keys that `chunked` takes at a time, at most

MIN = float(jnp.finfo(jnp.float32).min)

Part = tuple[jax.Array, jax.Array, jax.Array | None]  # keys, mask and bias of a chunk


class ScoreOptions(NamedTuple):
    """What happens to the scores of queries and keys. Another such choice is one more field here and, where it acts on
    single scores, one more line in `masked`.
    """

    scale: float  # factor on the scores, usually H^-0.5 (Vaswani et al. 2017, eq. 1)
    # float32, [B or 1, N, T, S], added to the scaled, capped scores; for `masked` with the axes of its logits
    bias: jax.Array | None = None
    softcap: float | None = None  # bounds the scores by +-softcap (Gemma Team 2024)
    # float32, the score of one more key whose value is zero (gpt-oss, OpenAI 2025; zeros: Miller 2023)
    sink_N: jax.Array | None = None
    dropout_rate: MaybeScalar = None  # dropout of the probabilities, off where it or the key is None
    dropout_key: jax.Array | None = None  # a random key
    # float32, the bias in place of `bias` for a kernel that takes it `by_distance`, which is the place of a query less
    # that of a key: from 1 - S to T - 1
    bias_1NX: jax.Array | None = None
    key_scales_BK1S: jax.Array | None = None  # float32, factors on the scores: of keys that are integers (`reference`)
    value_scales_BK1S: jax.Array | None = None  # likewise on the weights
    # of queries and keys (q_BNTR, k_BKSR), a part whose products are added to those of the others (`reference`)
    apart: tuple[jax.Array, jax.Array] | None = None

    def of_pairs(self, T: int) -> 'ScoreOptions':
        """Returns the options with the bias of all pairs of T queries and their keys in place of one by distance."""
        if self.bias_1NX is None:
            return self
        S = self.bias_1NX.shape[2] - T + 1
        distances_TS = jnp.arange(T)[:, None] - jnp.arange(S)[None]
        return self._replace(bias=self.bias_1NX[:, :, distances_TS + S - 1], bias_1NX=None)

    def grouped(self, kv_heads: int) -> 'ScoreOptions':
        """Returns the options with the bias by the key head that its query heads use, BKGTS."""
        return self if self.bias is None else self._replace(bias=grouped(self.bias, kv_heads))

    def drop(self, weights: jax.Array, index: jax.Array | int | None = None) -> jax.Array:
        """Returns attention weights after dropout; parts of one attention draw by their `index`."""
        if self.dropout_rate is None or self.dropout_key is None:
            return weights
        key = self.dropout_key if index is None else jax.random.fold_in(self.dropout_key, index)
        return dropout(weights, self.dropout_rate, key)


class Meeting(NamedTuple):
    """Who sees whom in one block of queries and one of keys, of which others are elsewhere."""

    mask: AttentionMask
    offset: jax.Array  # the place of the first query less that of the first key
    drawn_BN3: jax.Array | None  # of `tile_dropout`
    bias_NX: jax.Array | None = None  # by distance, from that of the first query and the last key on


class Pair(NamedTuple):
    """A kernel of one block of queries with one of keys."""

    forward: Callable[..., Any]  # -> (outputs, log-sum-exps of the scores)
    backward: Callable[..., Any]  # from both of all keys -> gradients of queries, keys, values, and bias or None
    multiple: int  # of the lengths of blocks
    any_order: bool = False  # it reads the positions
    drops: bool = False  # it serves dropout
    biased: bool = False  # it takes a bias by distance


# ------------------------------------------------------------------------------------------------ shared parts
def with_sink(out_BNTU: jax.Array, lse_BNT: jax.Array, sink_N: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns outputs and the log-sum-exps of their scores with one more key, of value 0."""
    if sink_N is None:
        return out_BNTU, lse_BNT
    sink_1N1 = sink_N[None, :, None]
    share_BNT = jax.nn.sigmoid(lse_BNT - sink_1N1)
    return out_BNTU * share_BNT[..., None].astype(out_BNTU.dtype), jnp.logaddexp(lse_BNT, sink_1N1)


def sink_gradient(lse_BNT: jax.Array, delta_BNT: jax.Array, sink_N: jax.Array | None) -> jax.Array | None:
    """Returns the gradient of the sink, from what `with_sink` gave and each output times its gradient, summed."""
    return None if sink_N is None else -jnp.sum(jnp.exp(sink_N[None, :, None] - lse_BNT) * delta_BNT, (0, 2))


def grouped(x_BNTX: jax.Array, kv_heads: int) -> jax.Array:
    """Returns x_BKGTX: the query heads, or their biases, by the key head that they use."""
    B, N, T, X = x_BNTX.shape
    return x_BNTX.reshape(B, kv_heads, N // kv_heads, T, X)


def masked_logits(q_BKGTH: jax.Array, k_BKSH: jax.Array, mask_BTS: jax.Array, options: ScoreOptions) -> jax.Array:
    """Returns logits_BKGTS, float32, of scaled queries; `MIN` where masked. The bias of `options` is BKGTS."""
    logits_BKGTS = einsum('BKGTH,BKSH->BKGTS', jnp.float32, q_BKGTH, k_BKSH)
    return masked(logits_BKGTS, mask_BTS[:, None, None], options)


def masked(logits: jax.Array, mask: jax.Array, options: ScoreOptions) -> jax.Array:
    """Returns products of queries and keys with all that acts on single ones; `MIN` where masked."""
    if options.softcap is not None:
        logits = options.softcap * jnp.tanh(logits / options.softcap)
    if options.bias is not None:
        logits += options.bias
    if platform() == 'cpu':  # where XLA adds to a product as it makes it
        return logits + jnp.where(mask, 0, MIN)
    return jnp.where(mask, logits, MIN)


def seen(out_BNTU: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    """Returns `out_BNTU`, zero for queries that see nothing."""
    return jnp.where(mask_BTS.any(-1)[:, None, :, None], out_BNTU, jnp.zeros_like(out_BNTU))


def never_blind(mask_BTS: jax.Array) -> jax.Array:
    """Returns `mask_BTS` with the first key for queries that see none, for kernels that would divide by zero."""
    first_S = jnp.arange(mask_BTS.shape[-1]) == 0
    return mask_BTS | (~mask_BTS.any(-1, keepdims=True) & first_S[None, None])


def pad(x: jax.Array, axis: int, multiple: int, value: int = 0) -> jax.Array:
    """Returns `x` with a value after the end of `axis`, up to a multiple."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths, constant_values=value)


# ------------------------------------------------------------------------------------------------ reference
@jax.custom_jvp
def softmax(logits: jax.Array) -> jax.Array:
    """exp(x) / sum(exp(x)) over the last axis. For the backward pass it keeps its result and nothing else: that of JAX
    keeps the exponentials, too, which are as large."""
    return jax.nn.softmax(logits, axis=-1)


@softmax.defjvp
def _softmax_tangent(logits: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    probs = softmax(*logits)
    moved = probs * tangents[0]
    return probs, moved - probs * jnp.sum(moved, axis=-1, keepdims=True)


def probabilities(q_BNTH: jax.Array, k_BKSH: jax.Array, mask_BTS: jax.Array, options: ScoreOptions) -> jax.Array:
    """Returns the attention probabilities before dropout, probs_BKGTS, float32; head n = k G + g.

    They sum to 1, with a sink to less. A query that sees nothing has uniform weights, with a sink zeros.
    """
    (B, N, T, _), K = q_BNTH.shape, k_BKSH.shape[1]
    return row_probabilities(q_BNTH, k_BKSH, mask_BTS, options).reshape(B, K, N // K, T, -1)


def row_probabilities(q_BNTH: jax.Array, k_BKSH: jax.Array, mask_BTS: jax.Array, options: ScoreOptions) -> jax.Array:
    """Returns the same as probs_BKRS: R = G T queries of a key head, of whose product XLA makes all that follows in one
    pass."""
    (_, N, T, _), K = q_BNTH.shape, k_BKSH.shape[1]

    def rows(x_BNTX: jax.Array) -> jax.Array:
        return x_BNTX.reshape(-1, K, N // K * T, x_BNTX.shape[-1])

    sink_1KR1, by_row = None, options
    if options.sink_N is not None:
        sink_1KR1 = rows(jnp.broadcast_to(options.sink_N[None, :, None, None], (1, N, T, 1)))
    if options.bias is not None:
        by_row = options._replace(bias=rows(options.bias))
    logits_BKRS = einsum('BKRH,BKSH->BKRS', jnp.float32, rows(q_BNTH * options.scale), k_BKSH)
    if options.key_scales_BK1S is not None:
        logits_BKRS *= options.key_scales_BK1S
    if options.apart is not None:
        q_BNTR, k_BKSR = options.apart
        logits_BKRS += einsum('BKRH,BKSH->BKRS', jnp.float32, rows(q_BNTR * options.scale), k_BKSR)
    logits_BKRS = masked(logits_BKRS, jnp.tile(mask_BTS, (1, N // K, 1))[:, None], by_row)
    return normalized(logits_BKRS, sink_1KR1)


def normalized(logits: jax.Array, sink: jax.Array | None) -> jax.Array:
    """Returns the softmax of logits [..., S] and a sink [..., 1], without the sink's own share."""
    probs = softmax(logits)
    if sink is not None:  # e^x / (Z + e^sink) = (e^x / Z) sigmoid(log Z - sink)
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        probs *= jax.nn.sigmoid(total - sink)
    return probs


def attend(weights: jax.Array, v_BKSU: jax.Array, heads: int) -> jax.Array:
    """Returns the values' sums out_BNTU of as many heads under weights BKGTS or BKRS."""
    B, K, S, U = v_BKSU.shape
    weights_BKRS = weights.astype(v_BKSU.dtype).reshape(B, K, -1, S)
    out_BKRU = einsum('BKRS,BKSU->BKRU', v_BKSU.dtype, weights_BKRS, v_BKSU)
    return out_BKRU.reshape(B, heads, -1, U)


def reference(
    q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array, mask_BTS: jax.Array, options: ScoreOptions
) -> jax.Array:
    """The definition, written down. Memory O(T S)."""
    if platform() == 'tpu' and q_BNTH.shape[1:3] == (k_BKSH.shape[1], 1) and options.dropout_key is None:
        return _one_query(q_BNTH, k_BKSH, v_BKSU, mask_BTS, options)
    probs_BKRS = options.drop(row_probabilities(q_BNTH, k_BKSH, mask_BTS, options))
    if options.value_scales_BK1S is not None:
        probs_BKRS *= options.value_scales_BK1S
    return seen(attend(probs_BKRS, v_BKSU, q_BNTH.shape[1]), mask_BTS)


def _one_query(
    q_BN1H: jax.Array, k_BNSH: jax.Array, v_BNSU: jax.Array, mask_B1S: jax.Array, options: ScoreOptions
) -> jax.Array:
    """Returns what `reference` does of a query a head, asked twice: of a product of one row a TPU's compiler makes
    sums, which keep it from the units for products."""
    bias_BN2S = None if options.bias is None else jnp.repeat(options.bias, 2, 2)
    apart = None if options.apart is None else (jnp.repeat(options.apart[0], 2, 2), options.apart[1])
    options = options._replace(bias=bias_BN2S, apart=apart)
    return reference(jnp.repeat(q_BN1H, 2, 2), k_BNSH, v_BNSU, jnp.repeat(mask_B1S, 2, 1), options)[:, :, :1]


# ------------------------------------------------------------------------------------------------ chunked
def chunked(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSU: jax.Array,
    mask_BTS: jax.Array,
    options: ScoreOptions,
    *,
    chunk: int = CHUNK,
) -> jax.Array:
    """Attention of `chunk` keys at a time, forward and backward: memory O(T chunk) (Rabe & Staats 2021).

    The paper rescales the sums where the running maximum grows, so that the backward pass keeps the sums of each chunk,
    O(T U S / chunk). Here a first pass over the keys finds the maximum and a second one adds, so that the backward pass
    keeps nothing of a chunk, at the cost of one more product of queries and keys. On 2 CPU cores at T = S = 1024,
    H = 64 a gradient takes 0.27 s, that of `reference` 0.51 s. Dropout draws other numbers than in `reference`.
    """
    (B, N, T, _), K, U = q_BNTH.shape, k_BKSH.shape[1], v_BKSU.shape[-1]
    chunks = -(-k_BKSH.shape[2] // chunk)

    def split(x: jax.Array, axis: int) -> jax.Array:
        x = pad(x, axis, chunks)
        shape = (*x.shape[:axis], chunks, x.shape[axis] // chunks, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    q_BKGTH, options = grouped(q_BNTH * options.scale, K), options.grouped(K)
    parts: Part = split(k_BKSH, 2), split(mask_BTS, 2), None if options.bias is None else split(options.bias, 4)
    start_N = jnp.full((N,), MIN) if options.sink_N is None else options.sink_N
    start_BKGT = jnp.broadcast_to(start_N.reshape(1, K, -1, 1), (B, K, N // K, T))

    def logits(q_BKGTH: jax.Array, part: Part) -> jax.Array:
        k_BKSH, mask_BTS, bias_BKGTS = part
        return masked_logits(q_BKGTH, k_BKSH, mask_BTS, options._replace(bias=bias_BKGTS))

    def maximum(m_BKGT: jax.Array, part: Part) -> tuple[jax.Array, None]:
        return jnp.maximum(m_BKGT, logits(jax.lax.stop_gradient(q_BKGTH), part).max(-1)), None

    m_BKGT, _ = jax.lax.scan(maximum, *jax.lax.stop_gradient((start_BKGT, parts)))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def sums(index: jax.Array, part: Part, v_BKSU: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights_BKGTS = jnp.exp(logits(q_BKGTH, part) - m_BKGT[..., None])
        kept_BKGTS = options.drop(weights_BKGTS, index).astype(v_BKSU.dtype)
        out = einsum('BKGTS,BKSU->BKGTU', jnp.float32, kept_BKGTS, v_BKSU)
        return out, weights_BKGTS.sum(-1)

    def add(carry: tuple, xs: tuple) -> tuple[tuple, None]:
        return jax.tree.map(jnp.add, carry, sums(*xs)), None

    zeros = jnp.zeros((*m_BKGT.shape, U), jnp.float32), jnp.zeros_like(m_BKGT)
    (out_BKGTU, total_BKGT), _ = jax.lax.scan(add, zeros, (jnp.arange(chunks), parts, split(v_BKSU, 2)))
    if options.sink_N is not None:
        total_BKGT += jnp.exp(start_BKGT - m_BKGT)
    out_BKGTU /= total_BKGT[..., None]
    return seen(out_BKGTU.reshape(B, N, T, U).astype(v_BKSU.dtype), mask_BTS)


# ------------------------------------------------------------------------------------------------ jax's own
def refuse(kernel: str, options: ScoreOptions, *fields: str) -> None:
    """Raises a `ValueError` where `options` sets a field that the kernel does not serve; users see `unserved`."""
    given = options if options.dropout_key is not None else options._replace(dropout_rate=None)
    for name in fields:
        if getattr(given, name) is not None:
            raise ValueError(f'the attention kernel {kernel} does not serve {name}')


def xla(
    q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, mask_BTS: jax.Array, options: ScoreOptions
) -> jax.Array:
    """`jax.nn.dot_product_attention`, in its own layout BTNH, as XLA makes it. Memory O(T S)."""
    refuse('xla', options, 'softcap', 'sink_N', 'dropout_rate')
    q_BTNH, k_BSKH, v_BSKH = (x.swapaxes(1, 2) for x in (q_BNTH, k_BKSH, v_BKSH))
    masked_BNTS = never_blind(mask_BTS)[:, None]
    out_BTNH = jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, options.bias, masked_BNTS, scale=options.scale, implementation='xla'
    )
    return seen(out_BTNH.swapaxes(1, 2), mask_BTS)


def is_step(q_BNTH: jax.Array, k_BKSH: jax.Array, mask: AttentionMask) -> bool:
    """Returns whether the queries are a step of decoding: a few tokens of a row, or one of each of its hypotheses."""
    T, S = q_BNTH.shape[2], k_BKSH.shape[2]
    drafted = T <= STEP and T < S and mask.order is None  # a short prompt is in order
    return T == 1 or drafted or mask.visible_BTS is not None


def plain(
    q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSU: jax.Array, mask: AttentionMask, options: ScoreOptions
) -> jax.Array:
    """The kernel for what an accelerator's own does not serve: any mask, and memory O(T)."""
    kernel = reference if is_step(q_BNTH, k_BKSH, mask) else chunked
    return kernel(q_BNTH, k_BKSH, v_BKSU, mask.array(), options.of_pairs(q_BNTH.shape[2]))
