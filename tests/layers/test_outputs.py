"""Poolings and heads by value, on rows with padding in front, behind and between."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tformer.config import Model
from tformer.layers import heads
from tformer.layers.dropout import DropoutRates
from tformer.layers.resolved import resolve_model

X_BTD = np.array([
    [[1.0, -9.0], [2.0, -7.0], [6.0, -8.0], [99.0, 99.0]],
    [[99.0, 99.0], [-1.0, 4.0], [99.0, 99.0], [-5.0, 0.0]],
    [[99.0, 99.0]] * 4,
], np.float32)  # fmt: skip
REAL_BT = np.array([[1, 1, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0]], bool)
POOLED = {
    'cls': [[1, -9], [99, 99], [99, 99]],  # the first token, whatever it is
    'last': [[6, -8], [-5, 0], [99, 99]],
    'mean': [[3, -8], [-3, 2], [0, 0]],
    'max': [[6, -7], [-1, 4], [0, 0]],
}


@pytest.mark.parametrize('name', heads.POOLINGS)
def test_a_pooling_reads_the_tokens_that_its_name_says_and_no_padding(name):
    found = heads.POOLINGS[name](jnp.asarray(X_BTD), jnp.asarray(REAL_BT))
    np.testing.assert_array_equal(found, POOLED[name])


@pytest.mark.parametrize('pooler', [True, False])
def test_a_pooler_is_a_tanh_of_a_dense_layer(pooler):
    """Devlin et al. 2019, as their code does."""
    layer = heads.Pooler(resolve_model(Model(emb_dim=2, num_heads=1, pooling='last', pooler=pooler)))
    kernel, bias = np.array([[0.5, -1.0], [0.25, 2.0]], np.float32), np.array([0.1, -0.2], np.float32)
    params = {'dense': {'kernel': kernel, 'bias': bias}} if pooler else {}
    found = layer.apply({'params': params}, jnp.asarray(X_BTD[:1]), jnp.asarray(REAL_BT[:1]))
    expected = np.tanh([6 * 0.5 - 8 * 0.25 + 0.1, -6 - 16 - 0.2]) if pooler else [6, -8]
    np.testing.assert_allclose(found[0], expected, rtol=1e-5)


def test_a_linear_head_of_a_wider_model_has_smaller_inputs_under_mup_and_drops_them_out():
    """Yang et al. 2022, table 8: four times the base width, a fourth of the inputs; then halves of them, twice each."""
    cfg = resolve_model(Model(emb_dim=64, num_heads=1, num_classes=64, parametrization='mup', base_emb_dim=16))
    params = {'classes': {'kernel': jnp.eye(64), 'bias': jnp.full(64, 3.0)}}
    layer, x = heads.LinearHead(cfg), jnp.full((1, 64), 8.0)
    np.testing.assert_array_equal(layer.apply({'params': params}, x, DropoutRates()), np.full((1, 64), 2 + 3))
    apply = jax.jit(lambda key: layer.apply({'params': params}, x, DropoutRates(head=0.5), rngs={'dropout': key}))
    dropped = np.asarray(apply(jax.random.key(0)))
    assert set(dropped.ravel().tolist()) == {3, 4 + 3} and 16 < (dropped == 3).sum() < 48


def test_the_statistics_of_logits_are_all_that_a_loss_needs():
    """Probabilities 1/8, 1/2, 3/8 times 16: the normalizer is log 16, the target's logit log 6."""
    logits = jnp.log(jnp.asarray([[2.0, 8.0, 6.0]]))
    found = jax.jit(heads.token_statistics)(logits, jnp.asarray([2]))
    np.testing.assert_allclose(found.normalizer, [np.log(16)], rtol=1e-6)
    np.testing.assert_allclose(found.target, [np.log(6)], rtol=1e-6)
    np.testing.assert_allclose(found.mean, [np.log(96) / 3], rtol=1e-6)
    assert found.best.tolist() == [1]
