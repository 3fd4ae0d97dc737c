"""Skipping bad steps: an update whose loss or gradient is not finite, or is a spike, is not applied."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from tformer.layers.dropout import MaybeScalar

WINDOW = 128  # a spike is measured against this many steps, once half of them have a finite loss


class Guard(flax.struct.PyTreeNode):
    """The guard's state."""

    skipped: jax.Array  # number of consecutive skipped steps, up to and including the latest, int32
    recent: Any = None  # losses and gradient norms of the latest steps [2, WINDOW], NaN: unknown; None: spikes apply


def init_guard(skip_spikes: MaybeScalar) -> Guard:
    """Returns the guard before the first step."""
    return Guard(jnp.zeros((), jnp.int32), None if skip_spikes is None else jnp.full((2, WINDOW), jnp.nan))


def update_guard(
    guard: Guard, step: jax.Array, loss: jax.Array, norm: jax.Array, skip_spikes: MaybeScalar
) -> tuple[jax.Array, Guard]:
    """Returns (whether to apply this step's update, the guard after it).

    A spike is a loss or norm above mean + skip_spikes x standard deviation of the latest `WINDOW` steps. Spikes enter
    the window too, so a lasting new level stops counting as a spike after a while.
    With skip_spikes=None spikes are applied. `step` is int32; the loss of its batch and the norm of its gradient are
    scalars.
    """
    values = jnp.stack([loss, norm]).astype(jnp.float32)
    is_finite = jnp.isfinite(values).all()
    should_apply, recent = is_finite, guard.recent
    if skip_spikes is not None:
        limit = jnp.nanmean(recent, 1) + skip_spikes * jnp.nanstd(recent, 1)
        enough = jnp.isfinite(recent[0]).sum() >= WINDOW // 2
        should_apply = is_finite & ~(enough & (values > limit).any())
        recent = recent.at[:, step % WINDOW].set(jnp.where(is_finite, values, jnp.nan))
    return should_apply, Guard(jnp.where(should_apply, 0, guard.skipped + 1), recent)
