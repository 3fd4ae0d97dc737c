"""Optimizers and learning-rate schedules. The rate and the decay are applied here, so that both may be traced."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tformer import config as config_lib
from tformer.errors import choose
from tformer.hyper import Hyper, Scalar

DECAYED = ('kernel', 'table')  # names of the parameters that weight decay reaches; not 'scale', not 'bias'


def make_optimizer(cfg: config_lib.Optimizer) -> optax.GradientTransformation:
    """Returns the transformation from gradients to a direction of descent, clipping included, the rate not."""
    direction = choose(OPTIMIZERS, cfg.name, 'optimizer.name')(cfg)
    return direction if cfg.clip_norm is None else optax.chain(optax.clip_by_global_norm(cfg.clip_norm), direction)


def descend(params: Any, direction: Any, learning_rate: Scalar, weight_decay: Scalar) -> Any:
    """Returns params - learning_rate (direction + weight_decay params), decay on matrices only.

    Decoupled weight decay: Loshchilov & Hutter 2019, algorithm 2.
    """

    def step(path: tuple[Any, ...], param: jax.Array, d: jax.Array) -> jax.Array:
        decay = weight_decay * param if path[-1].key in DECAYED else jnp.zeros_like(param)
        return (param - learning_rate * (d + decay)).astype(param.dtype)

    return jax.tree_util.tree_map_with_path(step, params, direction)


def learning_rate(cfg: config_lib.Optimizer, hyper: Hyper, step: Scalar, *, num_steps: int, emb_dim: int) -> Scalar:
    """Returns the rate of update number `step`, counted from 1."""
    schedule = choose(SCHEDULES, cfg.schedule, 'optimizer.schedule')
    step = jnp.asarray(step, jnp.float32)
    return schedule(step, hyper.learning_rate, hyper.warmup_steps, num_steps, cfg.final_fraction, emb_dim)


def _warmup(step: jax.Array, warmup: Scalar) -> jax.Array:
    return jnp.minimum(1.0, step / jnp.maximum(warmup, 1))


def _progress(step: jax.Array, warmup: Scalar, num_steps: Scalar) -> jax.Array:
    return jnp.clip((step - warmup) / jnp.maximum(num_steps - warmup, 1), 0.0, 1.0)


def constant(step: jax.Array, peak: Scalar, warmup: Scalar, *_: Scalar) -> jax.Array:
    """peak, after warm-up."""
    return peak * _warmup(step, warmup)


def linear(step: jax.Array, peak: Scalar, warmup: Scalar, num_steps: Scalar, final: Scalar, _: Scalar) -> jax.Array:
    """From the peak to final * peak along a line."""
    return peak * _warmup(step, warmup) * (1 - (1 - final) * _progress(step, warmup, num_steps))


def cosine(step: jax.Array, peak: Scalar, warmup: Scalar, num_steps: Scalar, final: Scalar, _: Scalar) -> jax.Array:
    """From the peak to final * peak along half a cosine (Loshchilov & Hutter 2017)."""
    fall = 0.5 * (1 + jnp.cos(jnp.pi * _progress(step, warmup, num_steps)))
    return peak * _warmup(step, warmup) * (final + (1 - final) * fall)


def noam(step: jax.Array, factor: Scalar, warmup: Scalar, _: Scalar, __: Scalar, emb_dim: Scalar) -> jax.Array:
    """factor * d^-0.5 * min(step^-0.5, step * warmup^-1.5) (Vaswani et al. 2017, eq. 3)."""
    warmup = jnp.maximum(jnp.asarray(warmup, jnp.float32), 1.0)
    return factor * emb_dim**-0.5 * jnp.minimum(step**-0.5, step * warmup**-1.5)


def _adam(cfg: config_lib.Optimizer) -> optax.GradientTransformation:
    return optax.scale_by_adam(cfg.beta1, cfg.beta2, cfg.epsilon)


OPTIMIZERS: dict[str, Callable[[config_lib.Optimizer], optax.GradientTransformation]] = {
    'adam': _adam,  # Kingma & Ba 2015; no weight decay
    'adamw': _adam,  # Loshchilov & Hutter 2019
}

SCHEDULES: dict[str, Callable[..., jax.Array]] = {
    'constant': constant,
    'linear': linear,
    'cosine': cosine,
    'noam': noam,
}
