"""Activations by value, and what a gated feed-forward multiplies."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tformer.config import Model
from tformer.layers import mlp
from tformer.layers.mlp import ACTIVATIONS, Mlp
from tformer.layers.resolved import resolve_model

POINTS = (-4.0, -1.0, -0.3, 0.0, 0.7, 2.0, 5.0)


def logistic(x):
    return 1 / (1 + math.exp(-x))


def normal(x):
    """The normal distribution function Phi."""
    return math.erfc(-x / math.sqrt(2)) / 2


def tanh_of_cubic(x):
    """Hendrycks & Gimpel 2016, 2."""
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ALONE = {
    'relu': lambda x: max(x, 0),
    'relu_squared': lambda x: max(x, 0) ** 2,
    'gelu': lambda x: x * normal(x),
    'gelu_tanh': tanh_of_cubic,
    'silu': lambda x: x * logistic(x),
}
GATES = {
    'glu': logistic,
    'reglu': ALONE['relu'],
    'geglu': ALONE['gelu'],
    'geglu_tanh': ALONE['gelu_tanh'],
    'swiglu': ALONE['silu'],
}


def test_a_clamped_swiglu_bounds_both_projections():
    """gpt-oss: the gate is at most 7, the other projection between -7 and 7, and 1 is added to it."""
    activation = ACTIVATIONS['swiglu_clamped'][1]
    for gate, up, expected in ((100, 100, 7 * 8), (2, -100, -6 * 2 / (1 + math.exp(-3.404))), (-40, 3, 0), (0, 5, 0)):
        assert float(activation(jnp.float32(gate), jnp.float32(up))) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize('name', [name for name in ACTIVATIONS if name != 'swiglu_clamped'])
def test_an_activation_has_the_values_of_its_paper(name):
    inputs, activation = ACTIVATIONS[name]
    up = np.asarray([2.0, -3.0, 0.5, 1.0, -1.0, 3.0, -2.0])
    if inputs == 1:
        expected, given = [ALONE[name](x) for x in POINTS], [POINTS]
    else:
        expected, given = [GATES[name](x) * y for x, y in zip(POINTS, up, strict=True)], [POINTS, up]
    np.testing.assert_allclose(activation(*map(jnp.float32, given)), expected, atol=2e-6)


def test_the_two_gelus_are_apart_where_they_are_apart():
    """At 2 the exact one is 2 * 0.9772499 = 1.9544997, the approximation 1.9545977."""
    exact, near = (float(ACTIVATIONS[name][1](jnp.float32(2))) for name in ('gelu', 'gelu_tanh'))
    assert exact == pytest.approx(1.9544997, abs=1e-6) and near == pytest.approx(1.9545977, abs=1e-6)


def test_the_slope_of_the_exact_gelu_is_its_own():
    """(x Phi(x))' = Phi(x) + x phi(x)."""
    slope = jax.vmap(jax.grad(ACTIVATIONS['gelu'][1]))(jnp.asarray(POINTS))
    expected = [normal(x) + x * math.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in POINTS]
    np.testing.assert_allclose(slope, expected, atol=2e-6)


@pytest.mark.parametrize(('name', 'value'), [('gelu', lambda x: x * normal(x)), ('gelu_tanh', tanh_of_cubic)])
def test_gelu_of_bfloat16_is_rounded_once(name, value):
    """As its slope, which is that of the values to within their difference quotient."""
    function, points = ACTIVATIONS[name][1], np.unique(np.linspace(-8, 8, 20_001).astype(jnp.bfloat16))
    exact = [value(float(x)) for x in points]
    slopes = [(value(float(x) + 1e-5) - value(float(x) - 1e-5)) / 2e-5 for x in points]
    found, gradients = function(jnp.asarray(points)), jax.vmap(jax.grad(function))(jnp.asarray(points))
    assert found.dtype == gradients.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float64(found), exact, rtol=2**-8, atol=2e-6)
    np.testing.assert_allclose(np.float64(gradients), slopes, rtol=2**-8, atol=2e-6)


@pytest.mark.parametrize('name', ['gelu', 'gelu_tanh'])
def test_on_a_gpu_the_gradient_of_a_narrow_gelu_is_rounded_before_all_that_read_it(monkeypatch, name):
    """Else XLA writes it in float32 for the sum that is the bias's gradient, and again in bfloat16 for the products."""

    def gradients(x, bias):
        return jax.grad(lambda x, bias: ACTIVATIONS[name][1](x + bias.astype(x.dtype)).sum(), (0, 1))(x, bias)

    arguments, found = (jnp.linspace(-3, 3, 32, dtype=jnp.bfloat16).reshape(4, 8), jnp.zeros((1, 8), jnp.bfloat16)), {}
    for platform in ('cpu', 'gpu'):
        monkeypatch.setattr(mlp, 'platform', lambda platform=platform: platform)
        lowered = jax.jit(lambda *given: gradients(*given)).lower(*arguments)
        barriers = [line for line in lowered.as_text().splitlines() if 'optimization_barrier' in line]
        assert [line.rpartition(' ')[2] for line in barriers] == ['tensor<4x8xbf16>'] * (platform == 'gpu')
        found[platform] = lowered.compile()(*arguments)
    jax.tree.map(np.testing.assert_array_equal, found['cpu'], found['gpu'])


@pytest.mark.parametrize('bias', [True, False])
def test_the_first_projection_is_the_gate(bias):
    """Shazeer 2020, eq. 6: out(silu(x W) * (x V)), W in_0 and V in_1; each with its bias where there are biases."""
    cfg = resolve_model(Model(emb_dim=3, mlp_dim=4, activation='swiglu', mlp_bias=bias))
    rng, x = np.random.default_rng(0), np.random.default_rng(1).standard_normal((1, 2, 3))
    shapes = {'in_0': (3, 4), 'in_1': (3, 4), 'out': (4, 3)}
    params = {name: {'kernel': rng.standard_normal(shape)} for name, shape in shapes.items()}
    if bias:
        params = {name: {**part, 'bias': rng.standard_normal(shapes[name][1])} for name, part in params.items()}

    def dense(name, x):
        return x @ params[name]['kernel'] + params[name].get('bias', 0)

    gate = dense('in_0', x)
    expected = dense('out', gate / (1 + np.exp(-gate)) * dense('in_1', x))
    found = Mlp(cfg, 'decoder').apply({'params': jax.tree.map(jnp.float32, params)}, jnp.float32(x))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
