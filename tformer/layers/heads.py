"""Heads: from the residual stream to vocabulary logits, classes or numbers."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from tformer.distributed.sharding import constrain, partitioned, platform
from tformer.errors import choose
from tformer.layers.accelerators import softmax_kernel
from tformer.layers.dropout import DropoutRates, drop
from tformer.layers.embed import embedding_width
from tformer.layers.linear import Dense
from tformer.layers.mlp import activated, gelu
from tformer.layers.norms import make_norm
from tformer.layers.parallel.each_device import split
from tformer.layers.parametrization import base_width, width_factor
from tformer.layers.resolved import ResolvedModel


class Transform(nn.Module):
    """A dense layer, an activation and a norm, from x [..., D] to [..., W] (Devlin et al. 2019, as its code does)."""

    cfg: ResolvedModel

    @nn.compact
    def __call__(self, x: jax.Array, real_BT: jax.Array | None = None, width: int | None = None) -> jax.Array:
        cfg = self.cfg
        shape, names = (cfg.emb_dim, width or cfg.emb_dim), ('embed', 'mlp')
        equation = 'BD,DW->BW' if x.ndim == 2 else 'BTD,DW->BTW'
        dense = functools.partial(Dense, cfg, equation, shape, names, bias=cfg.transform_bias)
        x = activated(cfg.transform_activation, x, lambda i: dense(name=f'transform_{i}'))
        return make_norm(cfg)(x, real_BT)


class VocabularyHead(nn.Module):
    """logits_BTV, float32, from x_BTD: by `tied` where given (an `Embedding.logits`), else by a kernel of its own.

    Where they may be `padded`, a GPU adds some that mean nothing behind those of the vocabulary: to leave them out it
    would have to copy the others for a kernel.
    """

    cfg: ResolvedModel

    def setup(self) -> None:
        self.transform = Transform(self.cfg)
        nn.share_scope(self, self.transform)

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        real_BT: jax.Array,
        tied: Callable[..., jax.Array] | None = None,
        padded: bool = False,
    ) -> jax.Array:
        cfg, width = self.cfg, embedding_width(self.cfg) if tied is not None else self.cfg.emb_dim
        if cfg.mlm_transform:
            x_BTD = self.transform(x_BTD, real_BT, width)
        elif width != cfg.emb_dim:
            x_BTD = Dense(cfg, 'BTD,DW->BTW', (cfg.emb_dim, width), ('embed', 'factor'), name='projection')(x_BTD)
        scale = choose(OUTPUT_SCALES, cfg.output_scale, 'model.output_scale')(base_width(cfg))
        x_BTD = x_BTD * (scale / width_factor(cfg))
        bias_V = None
        if cfg.output_bias:
            bias_V = self.param('bias', partitioned(nn.initializers.zeros, 'vocab'), (cfg.vocab_size,), jnp.float32)
        if tied is not None:
            logits_BTV = tied(x_BTD, bias_V, padded)
        else:
            shape, names = (cfg.emb_dim, cfg.vocab_size), ('embed', 'vocab')
            head = Dense(cfg, 'BTD,DV->BTV', shape, names, role='output', output='float32', name='logits')
            logits_BTV = constrain(head(x_BTD), 'batch', 'length', 'act_vocab')
            if bias_V is not None:
                logits_BTV += bias_V[None, None]
        if cfg.output_softcap is not None:
            logits_BTV = cfg.output_softcap * jnp.tanh(logits_BTV / cfg.output_softcap)
        return logits_BTV


STATISTICS = 'statistics'  # the name of what a pass of recomputed logits keeps of them


class TokenStatistics(NamedTuple):
    """All that losses and metrics need of logits [..., V], each [...]."""

    normalizer: jax.Array  # the log-sum-exp of the logits, float32
    target: jax.Array  # the logit of the target, float32
    mean: jax.Array  # the mean logit, float32
    correct: jax.Array  # whether the target is the largest logit, the first of equals
    divergence: jax.Array | None = None  # from the teacher's distribution, float32; None: there is no teacher

    @property
    def log_likelihood(self) -> jax.Array:
        """The log-probability of the target."""
        return self.target - self.normalizer


def token_statistics(
    logits: jax.Array,
    targets: jax.Array,
    teacher: jax.Array | None = None,
    temperature: float | jax.Array = 1.0,
    *,
    size: int | None = None,
) -> TokenStatistics:
    """Returns the statistics of logits [..., V] for targets [...], int, with the `divergence` from a teacher's logits
    where they are given. Logits from number `size` on mean nothing; None: all are some. Where V is split over devices,
    XLA computes them from each device's share, without gathering logits."""
    size = logits.shape[-1] if size is None else size
    apart = None if teacher is None else divergence(logits[..., :size], teacher, temperature)
    return TokenStatistics(*_statistics(size, logits, targets), apart)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(size: int, logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The first four of `TokenStatistics`, whose gradient is made in one pass over the logits; of logits that are
    computed again it needs no sums."""
    return _statistics_forward(size, logits, targets)[0]


def _statistics_forward(size: int, logits: jax.Array, targets: jax.Array) -> Any:
    wide = logits.astype(jnp.float32)
    target = _at(targets, wide)
    if platform() == 'gpu' and softmax_kernel.serves(wide):
        largest, total, best, plain = softmax_kernel.sums(wide, size)
        correct, mean = best == targets, plain / size
    else:
        wide = wide[..., :size]
        largest, correct = _largest(wide, targets, target)
        total, mean = jnp.sum(jnp.exp(wide - largest[..., None]), axis=-1), jnp.mean(wide, axis=-1)
    kept = [checkpoint_name(x, STATISTICS) for x in (largest, total)]
    return (kept[0] + jnp.log(kept[1]), target, mean, correct), (logits, targets, *kept)


def _largest(logits: jax.Array, targets: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (the largest logit, whether it is that of the target, the first of equals), each [...]."""
    if platform() != 'cpu':
        best = jnp.argmax(logits, axis=-1)
        return _at(best, logits), best == targets
    largest = jnp.max(logits, axis=-1)  # an argmax takes seven times as long as both passes
    earlier = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) < targets[..., None]
    correct = (target == largest) & ~jnp.any(earlier & (logits == largest[..., None]), axis=-1)
    return jax.lax.optimization_barrier((largest, correct))  # what these passes hold is free before the next


def _statistics_backward(size: int, residuals: Any, gradients: Any) -> tuple[jax.Array, None]:
    logits, targets, largest, total = residuals
    normalizer, target, mean = (x[..., None] for x in gradients[:3])
    softmax = jnp.exp(logits.astype(jnp.float32) - largest[..., None]) * (normalizer / total[..., None])
    if platform() == 'cpu':  # a scatter, which elsewhere takes a pass of its own, or longer than the whole model
        (at_target,) = jax.linear_transpose(functools.partial(_at, targets), softmax)(gradients[1])
    else:
        places = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
        at_target = jnp.where(places == targets[..., None], target, 0)
    slope = at_target + softmax + mean / size
    if size < logits.shape[-1]:
        slope = jnp.where(places < size, slope, 0)
    return slope.astype(logits.dtype), None


_statistics.defvjp(_statistics_forward, _statistics_backward)


def _at(indices: jax.Array, logits: jax.Array) -> jax.Array:
    if split('act_vocab', logits.shape[-1]) is None:  # XLA would gather what devices hold unequal parts of
        places = jax.lax.broadcasted_iota(indices.dtype, logits.shape, logits.ndim - 1)
        return jnp.sum(jnp.where(places == indices[..., None], logits, 0), axis=-1)
    return jnp.take_along_axis(logits, indices[..., None], axis=-1)[..., 0]


def divergence(logits: jax.Array, teacher: jax.Array, temperature: float | jax.Array) -> jax.Array:
    """Returns KL(p || q) in nats, float32, of the softmax p of a teacher's logits [..., V] and q of `logits`, both
    divided by the temperature first (Hinton et al. 2015, eq. 1)."""
    log_q, log_p = (jax.nn.log_softmax(x.astype(jnp.float32) / temperature) for x in (logits, teacher))
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


class Pooler(nn.Module):
    """One vector x_BD of a sequence (Devlin et al. 2019, 3.2), or x_BKD of the K texts that share a row."""

    cfg: ResolvedModel

    @nn.compact
    def __call__(self, x_BTD: jax.Array, real: jax.Array) -> jax.Array:
        """Takes real_BT, True at the tokens of the sequence, or real_BKT, True at those of each text."""
        cfg = self.cfg
        pool, several = choose(POOLINGS, cfg.pooling, 'model.pooling'), real.ndim == 3
        x = jax.vmap(pool, (None, 1), 1)(x_BTD, real) if several else pool(x_BTD, real)
        if cfg.pooler:
            shape = (cfg.emb_dim, cfg.emb_dim)
            activation = choose(POOLER_ACTIVATIONS, cfg.pooler_activation, 'model.pooler_activation')
            equation = 'BKD,DF->BKF' if several else 'BD,DF->BF'
            x = activation(Dense(cfg, equation, shape, ('embed', 'mlp'), bias=True, name='dense')(x))
        return x


class LinearHead(nn.Module):
    """A linear map from vectors [..., D] to scores [..., C], float32 (Devlin et al. 2019, 3.2)."""

    cfg: ResolvedModel
    num_outputs: int | None = None  # None: the number of classes
    bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, dropout_rates: DropoutRates | None = None) -> jax.Array:
        cfg = self.cfg
        x = drop(self, x, DropoutRates.of(cfg, dropout_rates).head)
        equation = 'BD,DC->BC' if x.ndim == 2 else 'BTD,DC->BTC'
        shape, names = (cfg.emb_dim, self.num_outputs or cfg.num_classes or 0), ('embed', 'classes')
        return Dense(cfg, equation, shape, names, self.bias, 'output', output='float32', name='classes')(
            x * (1 / width_factor(cfg))
        )


def first_token(x_BTD: jax.Array, real_BT: jax.Array) -> jax.Array:
    """The vector of the first token that is not padding, [CLS] (Devlin et al. 2019)."""
    return jnp.take_along_axis(x_BTD, jnp.argmax(real_BT, 1)[:, None, None], 1)[:, 0]


def mean_token(x_BTD: jax.Array, real_BT: jax.Array) -> jax.Array:
    """The mean over the tokens that are not padding, in float32."""
    weights_BT1 = real_BT[:, :, None].astype(jnp.float32)
    total_BD = jnp.sum(x_BTD.astype(jnp.float32) * weights_BT1, 1)
    return (total_BD / jnp.maximum(jnp.sum(weights_BT1, 1), 1.0)).astype(x_BTD.dtype)


def max_token(x_BTD: jax.Array, real_BT: jax.Array) -> jax.Array:
    """The largest of each feature over the tokens that are not padding (Collobert et al. 2011); 0 without any."""
    largest_BD = jnp.max(jnp.where(real_BT[:, :, None], x_BTD, -jnp.inf), 1)
    return jnp.where(jnp.any(real_BT, 1)[:, None], largest_BD, 0)


def last_token(x_BTD: jax.Array, real_BT: jax.Array) -> jax.Array:
    """The vector of the last token that is not padding, the only one that has seen all (Radford et al. 2018, 3.2)."""
    last_B = jnp.max(jnp.where(real_BT, jnp.arange(real_BT.shape[1])[None], 0), 1)
    return jnp.take_along_axis(x_BTD, last_B[:, None, None], 1)[:, 0]


POOLINGS = {'cls': first_token, 'last': last_token, 'mean': mean_token, 'max': max_token}

POOLER_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    'tanh': jnp.tanh,  # Devlin et al. 2019
    'relu': jax.nn.relu,
    'gelu': gelu,
}

OUTPUT_SCALES: dict[str | None, Callable[[int], float]] = {
    'rsqrt_dim': lambda emb_dim: emb_dim**-0.5,  # Raffel et al. 2020, where tied
    None: lambda emb_dim: 1.0,
}
