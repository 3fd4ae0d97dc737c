"""Normalisation of the residual stream, computed in float32 whatever the activations are.

Every norm is called with the stream x_BTD and real_BT, False at padding; only BatchNorm reads the second.
"""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.distributed.sharding import partitioned, platform
from tformer.errors import choose
from tformer.layers.accelerators import norm_kernel
from tformer.layers.resolved import ResolvedModel

MOMENTUM = 0.9  # of BatchNorm's running statistics, a step (Ioffe & Szegedy 2015)


def normalise(x: jax.Array, square: jax.Array, epsilon: float, in_root: bool) -> jax.Array:
    """Returns x / sqrt(square + epsilon), or x / (sqrt(square) + epsilon)."""
    return x * jax.lax.rsqrt(square + epsilon) if in_root else x / (_root(square) + epsilon)


def _root(square: jax.Array) -> jax.Array:
    """sqrt with gradient 0, not infinity, at 0."""
    positive = square > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, square, 1.0)), 0.0)


# The backward pass computes a norm again from its input, which may be narrower than float32, and keeps nothing else.
@functools.partial(jax.checkpoint, static_argnums=(3, 4), prevent_cse=False)
def layer_norm(x: jax.Array, scale_D: jax.Array, bias_D: jax.Array, epsilon: float, in_root: bool) -> jax.Array:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over the last axis, float32 (Ba et al. 2016, eq. 4)."""
    x = x.astype(jnp.float32)
    x -= jnp.mean(x, -1, keepdims=True)
    x = normalise(x, jnp.mean(jnp.square(x), -1, keepdims=True), epsilon, in_root)
    return x * wide(scale_D, x) + wide(bias_D, x)


@functools.partial(jax.checkpoint, static_argnums=(2, 3), prevent_cse=False)
def rms_norm(x: jax.Array, scale_D: jax.Array, epsilon: float, in_root: bool) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon) * scale over the last axis, float32 (Zhang & Sennrich 2019, eq. 4)."""
    x = x.astype(jnp.float32)
    return normalise(x, jnp.mean(jnp.square(x), -1, keepdims=True), epsilon, in_root) * wide(scale_D, x)


def batch_moments(x_BTD: jax.Array, real_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (mean_D, variance_D) over real tokens, float32 (Ioffe & Szegedy 2015, algorithm 1)."""
    weights_BT1 = real_BT[:, :, None].astype(jnp.float32)
    count = jnp.maximum(jnp.sum(weights_BT1), 1.0)
    x = x_BTD.astype(jnp.float32)
    mean_D = jnp.sum(x * weights_BT1, (0, 1)) / count
    return mean_D, jnp.sum(jnp.square(x - wide(mean_D, x)) * weights_BT1, (0, 1)) / count


def wide(vector_D: jax.Array, x: jax.Array) -> jax.Array:
    return vector_D.astype(jnp.float32).reshape((1,) * (x.ndim - vector_D.ndim) + vector_D.shape)


class Norm(nn.Module):
    """A norm of the stream."""

    cfg: ResolvedModel

    fields: ClassVar[tuple[str, ...]] = ('norm_epsilon', 'norm_epsilon_in_root')  # the fields of `Model` that it reads
    whole_batch: ClassVar[bool] = False  # its result depends on the other rows of the batch

    def vector(self, name: str, value: float, *shape: int) -> jax.Array:
        init = partitioned(nn.initializers.constant(value), *['norm'] * len(shape))
        return self.param(name, init, shape, jnp.float32)

    def bias(self, D: int) -> jax.Array:
        return self.vector('bias', 0.0, D) if self.cfg.norm_bias else jnp.zeros(D)


BIASED = (*Norm.fields, 'norm_bias')


class LayerNorm(Norm):
    fields = BIASED

    @nn.compact
    def __call__(self, x: jax.Array, real_BT: jax.Array | None = None) -> jax.Array:
        cfg, D = self.cfg, x.shape[-1]
        scale, bias = self.vector('scale', 1.0, D), self.bias(D)
        if has_kernel(cfg, x):
            return norm_kernel.norm(norm_kernel.Options(True, cfg.norm_epsilon, cfg.dtype), x, scale, bias)
        return layer_norm(x, scale, bias, cfg.norm_epsilon, cfg.norm_epsilon_in_root).astype(cfg.dtype)


class RMSNorm(Norm):
    @nn.compact
    def __call__(self, x: jax.Array, real_BT: jax.Array | None = None) -> jax.Array:
        return scaled_rms_norm(self.cfg, x, self.vector('scale', 1.0, x.shape[-1]))


class OffsetRMSNorm(Norm):
    """RMSNorm whose scale is 1 + a parameter, 0 at first, so that weight decay pulls it to 1 (Gemma's code)."""

    @nn.compact
    def __call__(self, x: jax.Array, real_BT: jax.Array | None = None) -> jax.Array:
        return scaled_rms_norm(self.cfg, x, 1 + self.vector('scale', 0.0, x.shape[-1]))


def scaled_rms_norm(cfg: ResolvedModel, x: jax.Array, scale_D: jax.Array) -> jax.Array:
    if has_kernel(cfg, x):
        options = norm_kernel.Options(False, cfg.norm_epsilon, cfg.dtype)
        return norm_kernel.norm(options, x, scale_D, jnp.zeros_like(scale_D))
    return rms_norm(x, scale_D, cfg.norm_epsilon, cfg.norm_epsilon_in_root).astype(cfg.dtype)


def has_kernel(cfg: ResolvedModel, x: jax.Array) -> bool:
    """Tells whether a norm of x is computed by a kernel: of streams that are more than a step of decoding."""
    return platform() == 'gpu' and cfg.norm_epsilon_in_root and x.ndim == 3 and x.shape[1] > 1 and x.shape[2] >= 256


class JointRMSNorm(Norm):
    """RMSNorm of x_BNTH over all heads of a token together (OLMo Team 2025)."""

    @nn.compact
    def __call__(self, x: jax.Array, real_BT: jax.Array | None = None) -> jax.Array:
        cfg, scale_NH = self.cfg, self.vector('scale', 1.0, x.shape[1], x.shape[3])
        square = jnp.mean(jnp.square(x.astype(jnp.float32)), (1, 3), keepdims=True)
        x = normalise(x.astype(jnp.float32), square, cfg.norm_epsilon, cfg.norm_epsilon_in_root)
        return (x * scale_NH[None, :, None]).astype(cfg.dtype)


class ScaleNorm(Norm):
    """gain x / |x|: one number for the whole vector, at first sqrt(D) (Nguyen & Salazar 2019, eq. 5)."""

    @nn.compact
    def __call__(self, x: jax.Array, real_BT: jax.Array | None = None) -> jax.Array:
        cfg, gain = self.cfg, self.vector('gain', x.shape[-1] ** 0.5)
        x = x.astype(jnp.float32)
        square = jnp.sum(jnp.square(x), -1, keepdims=True)
        return (wide(gain, x) * normalise(x, square, cfg.norm_epsilon, cfg.norm_epsilon_in_root)).astype(cfg.dtype)


class BatchNorm(Norm):
    """Normalises each feature over the batch's tokens, or by running statistics where their collection is immutable.

    A batch's mean includes later tokens, which is what this ablation is about. Not exact under microbatches.
    """

    fields = BIASED
    whole_batch = True

    @nn.compact
    def __call__(self, x_BTD: jax.Array, real_BT: jax.Array) -> jax.Array:
        cfg, D = self.cfg, x_BTD.shape[-1]
        scale, bias = self.vector('scale', 1.0, D), self.bias(D)
        mean = self.variable('statistics', 'mean', jnp.zeros, (D,), jnp.float32)
        variance = self.variable('statistics', 'variance', jnp.ones, (D,), jnp.float32)
        mean_D, variance_D = mean.value, variance.value
        if self.is_mutable_collection('statistics') and not self.is_initializing():
            mean_D, variance_D = batch_moments(x_BTD, real_BT)
            share = (1 - MOMENTUM) * jnp.any(real_BT)  # a batch of padding has no moments
            mean.value += share * (mean_D - mean.value)
            variance.value += share * (variance_D - variance.value)
        x = x_BTD.astype(jnp.float32)
        x = normalise(x - wide(mean_D, x), wide(variance_D, x), cfg.norm_epsilon, cfg.norm_epsilon_in_root)
        return (x * wide(scale, x) + wide(bias, x)).astype(cfg.dtype)


class DyT(Norm):
    """scale tanh(gain x) + bias: no statistics at all (Zhu et al. 2025, eq. 1)."""

    fields = ('norm_bias',)

    @nn.compact
    def __call__(self, x: jax.Array, real_BT: jax.Array | None = None) -> jax.Array:
        D, gain = x.shape[-1], self.vector('gain', 0.5)
        scale, bias = self.vector('scale', 1.0, D), self.bias(D)
        x = jnp.tanh(wide(gain, x) * x.astype(jnp.float32))
        return (x * wide(scale, x) + wide(bias, x)).astype(self.cfg.dtype)


class Identity(Norm):
    fields = ()

    def __call__(self, x: jax.Array, real_BT: jax.Array | None = None) -> jax.Array:
        return x


def make_norm(cfg: ResolvedModel) -> Norm:
    """Returns the norm of the stream that `cfg.norm` names."""
    return choose(NORMS, cfg.norm, 'model.norm')(cfg)


NORMS: dict[str | None, type[Norm]] = {
    'layernorm': LayerNorm,  # Ba et al. 2016
    'rmsnorm': RMSNorm,  # Zhang & Sennrich 2019
    'rmsnorm_offset': OffsetRMSNorm,  # Gemma Team 2024
    'scalenorm': ScaleNorm,  # Nguyen & Salazar 2019
    'batchnorm': BatchNorm,  # Ioffe & Szegedy 2015; Shen et al. 2020 on why not
    'dyt': DyT,  # Zhu et al. 2025
    None: Identity,
}

HEAD_NORMS: dict[str | None, type[Norm]] = {  # of queries and keys, over each head unless they say so
    'layernorm': LayerNorm,  # Dehghani et al. 2023
    'rmsnorm': RMSNorm,
    'rmsnorm_offset': OffsetRMSNorm,
    'rmsnorm_joint': JointRMSNorm,
    None: Identity,
}
