"""Activations with their gradients, and that of a bias before them, by a function and by hand in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special


def normal(x):
    return special.ndtr(x), np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def normal_tanh(x):
    z, slope = (math.sqrt(2 / math.pi) * each for each in (x + 0.044715 * x**3, 1 + 3 * 0.044715 * x**2))
    return (1 + np.tanh(z)) / 2, slope / (2 * np.cosh(z) ** 2)


SHARES = {'gelu': normal, 'gelu_tanh': normal_tanh}  # of x, with its slope: gelu(x) = x Phi(x)


def make(shape, dtype='bfloat16'):
    """Returns (x [B, T, F], a bias that it has already, float32, the gradient of its activation)."""
    rng = np.random.default_rng(0)
    x, dy = 2 * rng.standard_normal(shape), rng.standard_normal(shape)
    return jnp.asarray(x, dtype), jnp.float32(rng.standard_normal(shape[-1])), jnp.asarray(dy, dtype)


def run(activate, x, bias, dy):
    """Returns activate(x, bias) and its gradients, by name."""

    @jax.jit
    def program(x, bias, dy):
        y, pull = jax.vjp(activate, x, bias)
        return dict(zip(('y', 'x', 'bias'), (y, *pull(dy)), strict=True))

    return jax.device_get(program(x, bias, dy))


def by_hand(name, x, bias, dy):
    """The same of `run` in float64."""
    x, dy = (np.asarray(each, np.float64) for each in (x, dy))
    share, slope = SHARES[name](x)
    dx = dy * (share + x * slope)
    return {'y': x * share, 'x': dx, 'bias': dx.sum((0, 1))}
