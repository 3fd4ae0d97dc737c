"""Steps that are not made: whose loss or gradient is no number, or stands far above those of the steps before."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from tformer.layers.dropout import MaybeScalar

WINDOW = 128  # steps that a spike is measured by; half of them must have been made


class Guard(flax.struct.PyTreeNode):
    """Attributes:
    skipped: how many steps in a row were not made, up to this one, int32.
    recent: [2, WINDOW] losses and gradient norms of the last steps, NaN where there are none; None: spikes are made.
    """

    skipped: jax.Array
    recent: Any = None


def begin(skip_spikes: MaybeScalar) -> Guard:
    """Returns the guard before the first step."""
    return Guard(jnp.zeros((), jnp.int32), None if skip_spikes is None else jnp.full((2, WINDOW), jnp.nan))


def judge(
    guard: Guard, step: jax.Array, loss: jax.Array, norm: jax.Array, skip_spikes: MaybeScalar
) -> tuple[jax.Array, Guard]:
    """Returns (whether a step is to be made, the guard after it).

    A spike is a loss or a norm over mean + skip_spikes x standard deviation of the last `WINDOW` steps; spikes count
    among those steps, so that a new level is taken for one only for a while.

    Args:
      guard: before the step.
      step: its number, int32.
      loss: of its batch, a scalar.
      norm: of its gradient, a scalar.
      skip_spikes: in standard deviations; None: spikes are made.
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
