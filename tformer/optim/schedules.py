"""Learning-rate schedules: pure functions of scalars, traced or not. Updates count from 1, so the first has a rate."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from tformer.errors import choose
from tformer.optim.hyperparameters import Hyperparameters, Scalar


def learning_rate(schedule: str, hyper: Hyperparameters, step: Scalar, *, num_steps: int, emb_dim: int) -> jax.Array:
    """Returns the learning rate of update number `step`, counted from 1."""
    return choose(SCHEDULES, schedule, 'optimizer.schedule')(
        jnp.asarray(step, jnp.float32),
        hyper.learning_rate,
        hyper.warmup_steps,
        num_steps=num_steps,
        final=hyper.final_fraction,
        decay=hyper.decay_fraction,
        emb_dim=emb_dim,
    )


def _warmup(step: jax.Array, warmup: Scalar) -> jax.Array:
    return jnp.minimum(1.0, step / jnp.maximum(warmup, 1))


def _progress(step: jax.Array, begin: Scalar, num_steps: Scalar) -> jax.Array:
    return jnp.clip((step - begin) / jnp.maximum(num_steps - begin, 1), 0.0, 1.0)


def constant(step: jax.Array, peak: Scalar, warmup: Scalar, **_: Scalar) -> jax.Array:
    """The peak, after a linear warm-up."""
    return peak * _warmup(step, warmup)


def linear(
    step: jax.Array, peak: Scalar, warmup: Scalar, *, num_steps: Scalar, final: Scalar, **_: Scalar
) -> jax.Array:
    """From the peak to final * peak along a straight line."""
    return peak * _warmup(step, warmup) * (1 - (1 - final) * _progress(step, warmup, num_steps))


def cosine(
    step: jax.Array, peak: Scalar, warmup: Scalar, *, num_steps: Scalar, final: Scalar, **_: Scalar
) -> jax.Array:
    """From the peak to final * peak along half a cosine (Loshchilov & Hutter 2017, eq. 5)."""
    fall = 0.5 * (1 + jnp.cos(jnp.pi * _progress(step, warmup, num_steps)))
    return peak * _warmup(step, warmup) * (final + (1 - final) * fall)


def noam(step: jax.Array, factor: Scalar, warmup: Scalar, *, emb_dim: Scalar, **_: Scalar) -> jax.Array:
    """factor * d^-0.5 * min(step^-0.5, step * warmup^-1.5) (Vaswani et al. 2017, eq. 3)."""
    warmup = jnp.maximum(jnp.asarray(warmup, jnp.float32), 1.0)
    return factor * emb_dim**-0.5 * jnp.minimum(step**-0.5, step * warmup**-1.5)


def inverse_sqrt(step: jax.Array, peak: Scalar, warmup: Scalar, **_: Scalar) -> jax.Array:
    """peak * sqrt(warmup / max(step, warmup)): flat, not rising, through the warm-up (Raffel et al. 2020, 3.1.2)."""
    warmup = jnp.maximum(jnp.asarray(warmup, jnp.float32), 1.0)
    return peak * jnp.sqrt(warmup / jnp.maximum(step, warmup))


def wsd(
    step: jax.Array, peak: Scalar, warmup: Scalar, *, num_steps: Scalar, final: Scalar, decay: Scalar, **_: Scalar
) -> jax.Array:
    """Warm-up, the peak, and a line to final * peak over the last fraction `decay` of the steps.

    Hu et al. 2024, section 4.2, leave the shape of the decay open, and theirs is exponential.
    """
    begin = jnp.maximum(num_steps * (1 - decay), warmup)
    return peak * _warmup(step, warmup) * (1 - (1 - final) * _progress(step, begin, num_steps))


SCHEDULES: dict[str, Callable[..., jax.Array]] = {
    'constant': constant,
    'linear': linear,
    'cosine': cosine,
    'noam': noam,
    'inverse_sqrt': inverse_sqrt,
    'wsd': wsd,
}
