"""Norms of tokens with their gradients, by a function and by hand in float64."""

import jax
import jax.numpy as jnp
import numpy as np


def make(shape, dtype='float32'):
    """Returns (x_BTD, the gradient of its norm, {scale, bias}): vectors of unequal means and lengths."""
    rng = np.random.default_rng(0)
    B, T, D = shape
    x, dy = 2 * rng.standard_normal(shape) + rng.standard_normal((B, T, 1)), rng.standard_normal(shape)
    vectors = {'scale': 1 + 0.2 * rng.standard_normal(D), 'bias': 0.2 * rng.standard_normal(D)}
    return jnp.asarray(x, dtype), jnp.asarray(dy, dtype), {name: jnp.float32(v) for name, v in vectors.items()}


def run(norm, x, dy, vectors):
    """Returns the norm (x, scale, bias) and its gradients, by name."""

    @jax.jit
    def program(x, dy, vectors):
        y, pull = jax.vjp(lambda x, vectors: norm(x, vectors['scale'], vectors['bias']), x, vectors)
        dx, gradients = pull(dy)
        return {'y': y, 'x': dx, **gradients}

    return jax.device_get(program(x, dy, vectors))


def by_hand(centred, epsilon, x, dy, vectors):
    """The same of `run` in float64 (Ba et al. 2016, eq. 4, without the mean where it is not centred)."""
    x, dy, scale, bias = (np.asarray(a, np.float64) for a in (x, dy, vectors['scale'], vectors['bias']))

    def mean(x):
        return x.mean(-1, keepdims=True) if centred else 0

    root = np.sqrt(np.mean(np.square(x - mean(x)), -1, keepdims=True) + epsilon)
    normal, slope = (x - mean(x)) / root, dy * scale
    dx = (slope - mean(slope) - normal * np.mean(slope * normal, -1, keepdims=True)) / root
    return {'y': normal * scale + bias, 'x': dx, 'scale': (dy * normal).sum((0, 1)), 'bias': dy.sum((0, 1))}
