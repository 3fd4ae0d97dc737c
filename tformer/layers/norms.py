"""Normalisation of the residual stream, computed in float32 whatever the activations are."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.config import Model
from tformer.errors import choose
from tformer.sharding import partitioned


def layer_norm(x_BTD: jax.Array, scale_D: jax.Array, bias_D: jax.Array, epsilon: float) -> jax.Array:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over the last axis, float32 (Ba et al. 2016, eq. 4)."""
    x = x_BTD.astype(jnp.float32)
    x -= jnp.mean(x, -1, keepdims=True)
    x *= jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + epsilon)
    return x * _wide(scale_D, x) + _wide(bias_D, x)


def rms_norm(x_BTD: jax.Array, scale_D: jax.Array, epsilon: float) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon) * scale over the last axis, float32 (Zhang & Sennrich 2019, eq. 4)."""
    x = x_BTD.astype(jnp.float32)
    x *= jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + epsilon)
    return x * _wide(scale_D, x)


def _wide(vector_D: jax.Array, x: jax.Array) -> jax.Array:
    return vector_D.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + vector_D.shape)


class LayerNorm(nn.Module):
    cfg: Model

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        scale = self.param('scale', partitioned(nn.initializers.ones, 'norm'), x_BTD.shape[-1:], jnp.float32)
        bias = self.param('bias', partitioned(nn.initializers.zeros, 'norm'), x_BTD.shape[-1:], jnp.float32)
        return layer_norm(x_BTD, scale, bias, self.cfg.norm_epsilon).astype(self.cfg.dtype)


class RMSNorm(nn.Module):
    cfg: Model

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        scale = self.param('scale', partitioned(nn.initializers.ones, 'norm'), x_BTD.shape[-1:], jnp.float32)
        return rms_norm(x_BTD, scale, self.cfg.norm_epsilon).astype(self.cfg.dtype)


class Identity(nn.Module):
    cfg: Model

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return x_BTD


def make_norm(cfg: Model) -> nn.Module:
    """Returns the norm that `cfg.norm` names."""
    return choose(NORMS, cfg.norm, 'model.norm')(cfg)


NORMS: dict[str | None, Callable[[Model], nn.Module]] = {
    'layernorm': LayerNorm,  # Ba et al. 2016
    'rmsnorm': RMSNorm,  # Zhang & Sennrich 2019
    None: Identity,
}
