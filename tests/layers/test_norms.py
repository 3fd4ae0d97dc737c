"""Norms by value: the epsilon inside and outside of the root, scale and bias, and which one a table names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tformer.config import Model
from tformer.layers import norms
from tformer.layers.resolved import resolve_model

X = np.array([1.0, 2.0, 3.0, 6.0])  # mean 3, variance 3.5, mean square 12.5, length 50^0.5
SCALE, BIAS, EPSILON = np.array([1.0, -2.0, 0.5, 3.0]), np.array([0.0, 1.0, -1.0, 2.0]), 0.25
EXPECTED = {  # (epsilon in the root, outside of it)
    'layernorm': (SCALE * (X - 3) / 3.75**0.5 + BIAS, SCALE * (X - 3) / (3.5**0.5 + 0.25) + BIAS),
    'rmsnorm': (SCALE * X / 12.75**0.5, SCALE * X / (12.5**0.5 + 0.25)),
    'rmsnorm_offset': ((1 + SCALE) * X / 12.75**0.5, (1 + SCALE) * X / (12.5**0.5 + 0.25)),
    'scalenorm': (1.5 * X / 50.25**0.5, 1.5 * X / (50**0.5 + 0.25)),
    'dyt': (SCALE * np.tanh(1.5 * X) + BIAS,) * 2,
    # by the running statistics, mean 2 and variance 4 of every feature
    'batchnorm': (SCALE * (X - 2) / 4.25**0.5 + BIAS, SCALE * (X - 2) / (2 + 0.25) + BIAS),
    None: (X, X),
}


def apply(layer, x):
    """The layer with the parameters above, eagerly."""
    real = jnp.ones(x.shape[:-1], bool)
    given = {'scale': SCALE, 'bias': BIAS, 'gain': 1.5, 'mean': np.full(4, 2.0), 'variance': np.full(4, 4.0)}
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x, real)
    variables = {
        collection: {name: jnp.float32(given[name]) for name in values} for collection, values in shapes.items()
    }
    return layer.apply(variables, x, real)


@pytest.mark.parametrize('name', norms.NORMS)
def test_a_norm_has_the_values_of_its_paper_with_the_epsilon_in_the_root_and_outside(name):
    x = jnp.float32(np.stack([X, X[::-1]]))[None]
    for in_root, expected in zip((True, False), EXPECTED[name], strict=True):
        cfg = resolve_model(Model(norm=name, norm_epsilon=EPSILON, norm_epsilon_in_root=in_root))
        np.testing.assert_allclose(apply(norms.make_norm(cfg), x)[0, 0], expected, rtol=1e-5)


@pytest.mark.parametrize('name', [name for name, row in norms.NORMS.items() if 'norm_bias' in row.fields])
def test_a_norm_without_a_bias_adds_nothing(name):
    cfg = resolve_model(Model(norm=name, norm_epsilon=EPSILON, norm_bias=False))
    np.testing.assert_allclose(
        apply(norms.make_norm(cfg), jnp.float32(X)[None, None])[0, 0], EXPECTED[name][0] - BIAS, rtol=1e-5
    )


@pytest.mark.parametrize('name', [name for name in norms.HEAD_NORMS if name != 'rmsnorm_joint'])
def test_a_norm_of_heads_is_over_one_head_of_one_token(name):
    cfg = resolve_model(Model(norm_epsilon=EPSILON))
    x = jnp.float32(np.stack([X, 10 * X, X[::-1]]))[None, :, None]
    np.testing.assert_allclose(apply(norms.HEAD_NORMS[name](cfg), x)[0, 0, 0], EXPECTED[name][0], rtol=1e-5)


def test_a_joint_norm_is_over_all_heads_of_one_token():
    """Two heads [3, 4] and [0, 12] of a token have the mean square 42.25, whatever another token has."""
    cfg = resolve_model(Model(norm_epsilon=1e-12))
    x = jnp.float32([[[[3, 4], [1, 1]], [[0, 12], [1, 1]]]])
    scale = jnp.float32([[1, 2], [3, 0.5]])
    found = norms.JointRMSNorm(cfg).apply({'params': {'scale': scale}}, x)
    np.testing.assert_allclose(found[0, :, 0], [[3 / 6.5, 8 / 6.5], [0, 6 / 6.5]], rtol=1e-6)
    np.testing.assert_allclose(found[0, :, 1], scale, rtol=1e-6)


def test_scale_norm_begins_at_the_root_of_the_width_and_tanh_at_a_half():
    """Nguyen & Salazar 2019, eq. 5; Zhu et al. 2025, eq. 1."""
    cfg, x = resolve_model(Model()), jnp.ones((1, 1, 9))
    for layer, gain in ((norms.ScaleNorm(cfg), 3.0), (norms.DyT(cfg), 0.5)):
        (found,) = [v for k, v in layer.init(jax.random.key(0), x)['params'].items() if k == 'gain']
        assert float(jax.tree.leaves(found)[0]) == gain


def test_half_precision_is_normalised_in_float32():
    """256 + 1 and 256 - 1 in bfloat16 would have no variance: its steps there are 2."""
    x = jnp.asarray([[[256.0, 258.0]]], jnp.bfloat16)
    found = norms.layer_norm(x, jnp.ones(2), jnp.zeros(2), 0.0, True)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found[0, 0], [-1, 1], atol=1e-6)


@pytest.mark.parametrize('name', norms.NORMS)
def test_every_norm_of_half_precision_is_computed_in_float32(name):
    x, cfg = jnp.asarray(X[None, None], jnp.bfloat16), resolve_model(Model(norm=name, norm_epsilon=EPSILON))
    found = np.asarray(apply(norms.make_norm(cfg), x)[0, 0], np.float32)
    np.testing.assert_allclose(found, EXPECTED[name][0], rtol=1e-5)


def test_running_statistics_move_a_tenth_of_the_way_to_a_batch_and_stay_where_it_is_all_padding():
    """Ioffe & Szegedy 2015, with a momentum of 0.9."""
    layer, x = norms.BatchNorm(resolve_model(Model())), jnp.float32(np.stack([X, X + 4]))[None]
    given = {'statistics': {'mean': jnp.zeros(4), 'variance': jnp.ones(4)}}
    given['params'] = {'scale': jnp.ones(4), 'bias': jnp.zeros(4)}
    for real, mean, variance in ((True, 0.1 * (X + 2), 0.9 + 0.1 * 4), (False, 0.0, 1.0)):
        _, found = layer.apply(given, x, jnp.full((1, 2), real), mutable=['statistics'])
        np.testing.assert_allclose(found['statistics']['mean'], np.broadcast_to(mean, 4), rtol=1e-6)
        np.testing.assert_allclose(found['statistics']['variance'], np.broadcast_to(variance, 4), rtol=1e-6)


@pytest.mark.parametrize('in_root', [True, False])
def test_a_vector_of_zeros_stays_one_and_has_a_gradient(in_root):
    """Of x / (|x| + epsilon) at 0 it is 1 / epsilon; the root itself has none there."""
    found, gradient = jax.value_and_grad(lambda x: norms.rms_norm(x, jnp.ones(4), 0.25, in_root).sum())(jnp.zeros(4))
    assert found == 0
    np.testing.assert_allclose(gradient, np.full(4, 0.25**-0.5 if in_root else 0.25**-1), rtol=1e-6)
