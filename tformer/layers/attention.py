"""Multi-head attention: projections around a kernel, for self, causal and cross attention alike."""

import functools
import itertools
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.config import Model
from tformer.distributed.sharding import constrain, partitioned, platform
from tformer.errors import choose
from tformer.layers import kernel_choice, kernels
from tformer.layers.dropout import MaybeScalar
from tformer.layers.layer_stack import NamedValue
from tformer.layers.linear import Dense
from tformer.layers.masks import AttentionMask
from tformer.layers.norms import HEAD_NORMS
from tformer.layers.parallel import ring_attention, ring_kernels
from tformer.layers.parallel.few_tokens import STEP
from tformer.layers.positions import Angles, make_bias, rotate
from tformer.layers.products import fork
from tformer.layers.quantized import Quantized, numbers
from tformer.layers.resolved import ResolvedModel

ATTENTION_PATTERNS = {'global': False, 'local': True}  # whether a layer sees only the positions within the window


def windows(cfg: Model, layers: int) -> tuple[int | None, ...]:
    """Returns the window of each of a stack's layers; None where it has none."""
    pattern = itertools.islice(itertools.cycle(cfg.attention_pattern), layers)
    return tuple(cfg.window if ATTENTION_PATTERNS[kind] else None for kind in pattern)


def widths(cfg: Model) -> tuple[int | None, ...]:
    """Returns the windows that a model's layers have, None where one has none."""
    return tuple(dict.fromkeys(windows(cfg, len(cfg.attention_pattern))))


def num_narrow(cfg: Model, layers: int) -> int:
    """Returns how many of a stack's layers have the window."""
    return sum(window is not None for window in windows(cfg, layers))


def has_window(cfg: Model) -> bool:
    """Returns whether a layer sees only the positions within the window."""
    return any(ATTENTION_PATTERNS[kind] for kind in cfg.attention_pattern)


class AttentionContext(flax.struct.PyTreeNode):
    """What the queries of a stack see in self-attention, or in cross-attention: the same in every layer."""

    mask: AttentionMask
    # added to the scores; None where the position encoding has none, or one for each layer
    bias_BNTS: jax.Array | None = None
    bias_1NX: jax.Array | None = None  # the same by distance, as `ScoreOptions` has it
    query_angles: Angles | None = None  # rotary; None where nothing is turned
    key_angles: Angles | None = None  # likewise
    local_angles: Angles | None = None  # of queries and keys in local layers; None: those of all layers

    def of_layer(self, local: jax.Array | None) -> 'AttentionContext':
        """Returns the context of one layer; `local` says whether it is a local one; None: all have the same angles."""
        if local is None or self.query_angles is None or self.local_angles is None:
            return self
        (a, b), (c, d) = self.local_angles, self.query_angles
        return self.replace(query_angles=(jnp.where(local, a, c), jnp.where(local, b, d)))

    @property
    def positions(self) -> tuple[jax.Array, jax.Array]:
        """The positions of the queries [B, T] and of the keys [B, S]; -1 is padding."""
        return self.mask.query_positions_BT, self.mask.key_positions_BS


def score_bias(
    bias: nn.Module | None, asks: nn.Module, cfg: ResolvedModel, mask: AttentionMask, *, cross: bool
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns (bias_BNTS, None), or (None, bias_1NX) for a kernel that takes it by distance, where the places of tokens
    tell how far apart their positions are; None for both without a position bias. `asks` is the module that adds it."""
    if bias is None:
        return None, None
    queries_BT, keys_BS = mask.query_positions_BT, mask.key_positions_BS
    T, S = queries_BT.shape[1], keys_BS.shape[1]
    name, told = kernel_choice.pick(cfg, platform(), drops=False), mask.order is not None and mask.visible_BTS is None
    by_distance = kernel_choice.KERNELS[name].by_distance and told and T > 1 and not cross
    if by_distance and ring_attention.ways() > 1:
        by_distance = ring_kernels.pick(name, T, S, mask, kernels.ScoreOptions(1.0)) is not None
    if by_distance and not asks.is_mutable_collection('intermediates'):  # for which `mix` looks at all pairs
        return None, bias(jnp.arange(1 - S, T)[None], jnp.zeros((1, 1), jnp.int32))[..., 0]
    return bias(queries_BT, keys_BS), None


class Attention(nn.Module):
    """Keys and values come from `keys_values`, so that a cache can stand between."""

    cfg: ResolvedModel
    stack: str
    cross: bool = False

    def setup(self) -> None:
        cfg, stack = self.cfg, self.stack
        D, N, K, H, U = cfg.emb_dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.value_dim

        def project(role: str, equation: str, heads: int, size: int, axis: str) -> Dense:
            shape, names = (D, heads, size), ('embed', axis, 'head_dim')
            return Dense(cfg, equation, shape, names, role in cfg.attention_bias, role, stack)

        if cfg.attention_projections:
            self.query = project('query', 'BTD,DNH->BNTH', N, H, 'heads')
            self.key = project('key', 'BSD,DKH->BKSH', K, H, 'kv_heads')
            self.value = project('value', 'BSD,DKU->BKSU', K, U, 'kv_heads')
            out, names = 'out' in cfg.attention_bias, ('heads', 'head_dim', 'embed')
            self.out = Dense(cfg, 'BNTU,NUD->BTD', (N, U, D), names, out, 'attention_out', stack)
        self.set_up_scores()

    @property
    def query_width(self) -> int:
        """The numbers of a head that a score is the product of."""
        return self.cfg.head_dim

    def set_up_scores(self) -> None:
        """Makes what acts on queries, keys and their scores."""
        cfg, stack = self.cfg, self.stack
        norm = choose(HEAD_NORMS, cfg.qk_norm, 'model.qk_norm')
        self.query_norm, self.key_norm = norm(cfg), norm(cfg)
        sink = choose(SINKS, cfg.attention_sink, 'model.attention_sink')
        self.sink = sink and sink(cfg)
        self.probabilities = NamedValue()
        self.bias = make_bias(cfg, stack, cross=self.cross, per_layer=True)

    def keys_values(self, x_BSD: jax.Array, angles: Angles | None) -> tuple[jax.Array, jax.Array]:
        """Returns (k_BKSH, v_BKSU), the keys turned by their positions' angles."""
        if not self.cfg.attention_projections:
            heads_BNSH = split_heads(x_BSD, self.cfg.num_heads)
            return rotate(self.key_norm(heads_BNSH), angles), heads_BNSH
        for_values, for_keys = fork(x_BSD)
        return rotate(self.key_norm(self.key(for_keys)), angles), self.value(for_values)

    def __call__(
        self,
        x_BTD: jax.Array,
        k_BKSH: jax.Array | Quantized,
        v_BKSU: jax.Array | Quantized,
        context: AttentionContext,
        window: jax.Array | None = None,
        dropout_rate: MaybeScalar = None,
    ) -> jax.Array:
        cfg = self.cfg
        q_BNTH = self.query(x_BTD) if cfg.attention_projections else split_heads(x_BTD, cfg.num_heads)
        q_BNTH = rotate(self.query_norm(q_BNTH), context.query_angles)
        out_BNTU = self.mix(q_BNTH, k_BKSH, v_BKSU, context, window, dropout_rate)
        return self.out(out_BNTU) if cfg.attention_projections else join_heads(out_BNTU)

    def few(self, q_BNTH: jax.Array) -> bool:
        """Returns whether the queries are as few as those of a step, and nobody looks at their weights."""
        looked_at = any(map(self.is_mutable_collection, ('alignments', 'intermediates')))
        return q_BNTH.shape[2] <= STEP and not looked_at

    def mix(
        self,
        q_BNTH: jax.Array,
        k_BKSH: jax.Array | Quantized,
        v_BKSU: jax.Array | Quantized,
        context: AttentionContext,
        window: jax.Array | None,
        dropout_rate: MaybeScalar,
        apart: tuple[jax.Array, jax.Array] | None = None,
    ) -> jax.Array:
        """Returns the values' sums out_BNTU under the weights of the scores.

        `apart`: of a few queries, as ScoreOptions.apart.
        """
        cfg = self.cfg
        q_BNTH = constrain(q_BNTH, 'batch', 'act_heads', 'length', 'act_head_dim')
        mask, bias_BNTS, bias_1NX = context.mask, context.bias_BNTS, context.bias_1NX
        if window is not None:
            layers = cfg.num_decoder_layers if mask.causal else cfg.num_encoder_layers
            mask = mask.replace(window=window, widths=widths(cfg), narrow=num_narrow(cfg, layers) / layers)
        if self.bias is not None:
            bias_BNTS, bias_1NX = score_bias(self.bias, self, cfg, context.mask, cross=self.cross)
        training = self.has_rng('dropout') and dropout_rate is not None
        scale = choose(SCALES, cfg.attention_scale, 'model.attention_scale')
        options = kernels.ScoreOptions(
            scale=scale(self.query_width, cfg.emb_dim, cfg.attention_scale_dim),
            bias=bias_BNTS,
            bias_1NX=bias_1NX,
            softcap=cfg.attention_softcap,
            sink_N=None if self.sink is None else self.sink(),
            dropout_rate=dropout_rate if training else None,
            dropout_key=self.make_rng('dropout') if training else None,
            apart=apart,
        )
        if self.few(q_BNTH) and isinstance(k_BKSH, Quantized) and isinstance(v_BKSU, Quantized):
            return of_integers(q_BNTH, k_BKSH, v_BKSU, mask, options)
        k_BKSH, v_BKSU = numbers(k_BKSH, cfg.dtype), numbers(v_BKSU, cfg.dtype)
        if apart is not None:
            return kernel_choice.on_arrays(kernels.reference)(q_BNTH, k_BKSH, v_BKSU, mask, options)
        if self.cross and self.is_mutable_collection('alignments'):
            probs_BKGTS = kernels.probabilities(q_BNTH, k_BKSH, mask.array(), options)
            self.sow('alignments', 'weights_BTS', probs_BKGTS.mean((1, 2)))
        if self.is_mutable_collection('intermediates'):  # `reference` in steps: evaluation.activations comes between
            mask_BTS = mask.array()
            probs_BKGTS = self.probabilities(kernels.probabilities(q_BNTH, k_BKSH, mask_BTS, options))
            out_BNTU = kernels.attend(options.drop(probs_BKGTS), v_BKSU, q_BNTH.shape[1])
            out_BNTU = kernels.seen(out_BNTU, mask_BTS)
        else:
            name = kernel_choice.pick(cfg, platform(), drops=training)
            kernel = kernel_choice.KERNELS[name].function
            if self.is_initializing():  # no parameter depends on it, and libraries of kernels may be missing
                kernel = kernel_choice.KERNELS['reference'].function
            elif ring_attention.ways() > 1:
                step = kernels.is_step(q_BNTH, k_BKSH, mask)  # in which each device sums its own slots
                pair = None if step else ring_kernels.pick(name, q_BNTH.shape[2], k_BKSH.shape[2], mask, options)
                plain = kernel_choice.on_arrays(kernels.reference if step else ring_attention.ring)
                kernel = functools.partial(ring_kernels.ring, pair) if pair else plain
            out_BNTU = kernel(q_BNTH, k_BKSH, v_BKSU, mask, options)
        return out_BNTU


def of_integers(
    q_BNTH: jax.Array, k_BKSH: Quantized, v_BKSU: Quantized, mask: AttentionMask, options: kernels.ScoreOptions
) -> jax.Array:
    """Returns what `kernels.reference` does of the numbers that integers stand for, and reads the integers alone: a
    token's scales are factors on its score and its weight."""
    k, v = (x.integers.astype(q_BNTH.dtype) for x in (k_BKSH, v_BKSU))
    key_scales, value_scales = (jnp.swapaxes(x.scales, 2, 3) for x in (k_BKSH, v_BKSU))
    options = options._replace(key_scales_BK1S=key_scales, value_scales_BK1S=value_scales)
    return kernel_choice.on_arrays(kernels.reference)(q_BNTH, k, v, mask, options)


def split_heads(x_BTD: jax.Array, num_heads: int) -> jax.Array:
    """Returns the stream cut into heads, x_BNTH."""
    B, T, D = x_BTD.shape
    return jnp.moveaxis(x_BTD.reshape(B, T, num_heads, D // num_heads), 2, 1)


def join_heads(x_BNTH: jax.Array) -> jax.Array:
    """The inverse of `split_heads`."""
    B, N, T, H = x_BNTH.shape
    return jnp.moveaxis(x_BNTH, 1, 2).reshape(B, T, N * H)


class Sink(nn.Module):
    """The score, for each head, of a key whose value is 0."""

    cfg: ResolvedModel
    trained: bool

    @nn.compact
    def __call__(self) -> jax.Array:
        N = self.cfg.num_heads
        init = partitioned(nn.initializers.zeros, 'heads')
        return self.param('sink', init, (N,), jnp.float32) if self.trained else jnp.zeros(N)


SINKS: dict[str | None, Callable[[ResolvedModel], nn.Module] | None] = {
    'zero': functools.partial(Sink, trained=False),  # 1 is added to softmax's denominator (Miller 2023)
    'learned': functools.partial(Sink, trained=True),  # Agarwal et al. 2025 (gpt-oss)
    None: None,
}

SCALES: dict[str, Callable[[int, int, float], float]] = {  # of (head_dim, emb_dim, attention_scale_dim)
    'sqrt_head_dim': lambda head_dim, emb_dim, scale_dim: head_dim**-0.5,  # Vaswani et al. 2017, eq. 1
    'sqrt_emb_dim': lambda head_dim, emb_dim, scale_dim: emb_dim**-0.5,
    'sqrt_scale_dim': lambda head_dim, emb_dim, scale_dim: scale_dim**-0.5,  # Gemma Team 2024, whose 27B has 144
    'head_dim': lambda head_dim, emb_dim, scale_dim: 1 / head_dim,  # Yang et al. 2022, definition 4.1
    'unscaled': lambda head_dim, emb_dim, scale_dim: 1.0,  # Raffel et al. 2020: the initial queries are small instead
}

PROJECTIONS = ('query', 'key', 'value', 'out')
