"""How far arrays are from each other, and how their gradients are seen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax


def relative(found, expected):
    """Returns the norm of a tree's difference over its norm, in float64."""
    a, b = (np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(t)]) for t in (found, expected))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def errors(found, expected):
    """Returns the norm of each array's error over its own norm, by name."""
    return {name: relative(found[name], x) for name, x in expected.items()}


def assert_near(found, expected, tolerance):
    """Differences are measured by the largest of the expected numbers, or 1."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    assert np.max(np.abs(found - expected), initial=0) <= tolerance * max(1, np.max(np.abs(expected), initial=0))


def differs(a, b):
    """Which vectors of the last axis are not bit for bit the same."""
    return np.any(a != b, axis=-1)


def with_gradients(apply):
    """Returns (params, batch, cotangent) -> (logits, the gradients of their product with the cotangent)."""

    def probe(params, batch, cotangent):
        def scored(params):
            logits = apply(params, batch)
            return jnp.sum(logits * cotangent), logits

        grads, logits = jax.grad(scored, has_aux=True)(params)
        return logits, grads

    return probe


def descent(rate):
    """Stochastic gradient descent whose state is the last gradient."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params=None: (jax.tree.map(lambda g: -rate * g, grads), grads),
    )
