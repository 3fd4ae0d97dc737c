"""Adafactor: the second moment of a matrix is kept as one row and one column."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from tformer.optim.parameters import each, matrix_axes


class Factored(NamedTuple):
    """The state of `adafactor`."""

    step: jax.Array  # updates made
    moments: Any  # the mean squares of each array, as (of rows, of columns) where it is factored


def adafactor(names: Any, *, smallest: int = 128) -> optax.GradientTransformation:
    """Adafactor without momentum: the second moment of a matrix from the means of its rows and columns.

    Shazeer & Stern 2018, algorithms 4 and 5, with their constants: decay 1 - t^-0.8, clipped to an rms of 1, relative
    to the parameter's rms (or 1e-3). Unlike optax's, it treats the matrix of each layer and expert separately,
    whatever the order and number of its axes. `names` are the logical names of every parameter's axes. A matrix with
    fewer than `smallest` rows or columns is not factored.
    """

    def matrices(role: str, axes: PartitionSpec, x: jax.Array) -> jax.Array:
        rows, columns = (math.prod(x.shape[axis] for axis in side) for side in matrix_axes(role, axes))
        return x.reshape(-1, rows, columns)

    def rms(x: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.mean(jnp.square(x), (-2, -1), keepdims=True))

    def start(role: str, axes: PartitionSpec, param: jax.Array) -> Any:
        stack, rows, columns = matrices(role, axes, param).shape
        if min(rows, columns) < smallest:
            return jnp.zeros_like(param)
        return jnp.zeros((stack, rows), param.dtype), jnp.zeros((stack, columns), param.dtype)

    def follow(decay: jax.Array, role: str, axes: PartitionSpec, grad: jax.Array, moment: Any) -> Any:
        square = jnp.square(grad) + 1e-30
        if not isinstance(moment, tuple):
            return (decay * moment + (1 - decay) * square).astype(moment.dtype)
        square = matrices(role, axes, square)
        return tuple(
            (decay * mean + (1 - decay) * jnp.mean(square, axis)).astype(mean.dtype)
            for mean, axis in zip(moment, (-1, -2), strict=True)
        )

    def direct(role: str, axes: PartitionSpec, grad: jax.Array, moment: Any, param: jax.Array) -> jax.Array:
        if isinstance(moment, tuple):
            rows, columns = moment
            rows = rows / jnp.mean(rows, -1, keepdims=True)
            estimate = rows[:, :, None] * columns[:, None, :]
        else:
            estimate = matrices(role, axes, moment)
        direction = matrices(role, axes, grad) * jax.lax.rsqrt(estimate)
        scale = jnp.maximum(rms(matrices(role, axes, param)), 1e-3)
        return (direction * scale / jnp.maximum(1.0, rms(direction))).reshape(grad.shape)

    def init(params: Any) -> Factored:
        return Factored(jnp.zeros((), jnp.int32), each(start, names, params))

    def update(grads: Any, state: Factored, params: Any) -> tuple[Any, Factored]:
        step = state.step + 1
        decay = 1 - step.astype(jnp.float32) ** -0.8
        moments = each(functools.partial(follow, decay), names, grads, state.moments)
        return each(direct, names, grads, moments, params), Factored(step, moments)

    return optax.GradientTransformation(init, update)
