"""Heads and the statistics of their logits by value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tformer.config import Mesh, Model
from tformer.distributed import meshes, sharding
from tformer.layers import heads, outputs
from tformer.layers.dropout import DropoutRates
from tformer.layers.resolved import resolve_model


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
    assert found.correct.tolist() == [False]


@pytest.mark.parametrize('platform', ['cpu', 'gpu'])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_of_equal_logits_the_first_is_the_predicted_one(monkeypatch, platform, dtype):
    """Of all targets of rows with many equal numbers, infinite ones among them, one is correct, the first largest."""
    monkeypatch.setattr(heads, 'platform', lambda: platform)
    logits = np.random.default_rng(0).integers(-2, 2, (50, 1, 9)).astype(np.float32)
    logits[:9, 0] = np.where(np.eye(9), np.inf, logits[:9, 0])
    logits[9:12] = -np.inf
    targets = jnp.broadcast_to(jnp.arange(9), (50, 9))
    found = heads.token_statistics(jnp.asarray(np.repeat(logits, 9, 1), dtype), targets)
    np.testing.assert_array_equal(found.correct, np.eye(9, dtype=bool)[logits[:, 0].argmax(-1)])


@pytest.mark.parametrize(
    ('output', 'head', 'pooled'),
    [
        (outputs.classify, 'class_head', True), (outputs.regress, 'number_head', True),
        (outputs.choose_text, 'choice_head', True), (outputs.tag, 'tag_head', False),
        (outputs.find_spans, 'span_head', False),
    ],
)  # fmt: skip
def test_the_head_of_a_task_reads_what_the_transform_makes_of_the_features(output, head, pooled):
    """Of 2, or pooled 3, the transform makes 10 more, and the head twice that."""

    class Fake:
        def features(self, batch, rates):
            return jnp.full((1, 4, 1), 2.0)

        def pool(self, batch, rates):
            return jnp.full((1, 1), 3.0)

        def transform(self, x):
            return x + 10

    setattr(Fake, head, lambda self, x, rates: 2 * x)
    found = output(Fake(), {})
    assert set(found.ravel().tolist()) == {26 if pooled else 24}


@pytest.mark.parametrize('platform', ['cpu', 'gpu'])
def test_the_gradient_of_the_statistics_is_that_of_their_definitions(monkeypatch, platform):
    """In float64, of a weight for each statistic: softmax, a one at the target, and 1 / V (Bridle 1990)."""
    monkeypatch.setattr(heads, 'platform', lambda: platform)
    logits, targets = np.random.default_rng(0).standard_normal((2, 3, 7)), np.array([[6, 0, 2], [2, 2, 5]])
    weights = np.random.default_rng(1).standard_normal((3, 2, 3))
    softmax = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    wanted = weights[0, ..., None] * softmax + weights[1, ..., None] * np.eye(7)[targets] + weights[2, ..., None] / 7

    def weighted(logits):
        found = heads.token_statistics(logits, jnp.asarray(targets))
        return sum(jnp.sum(w * x) for w, x in zip(weights, (found.normalizer, found.target, found.mean), strict=True))

    found = jax.grad(weighted)(jnp.asarray(logits, jnp.float32))
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    narrow = jax.grad(weighted)(jnp.asarray(logits, jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.astype(np.float32), wanted, atol=0.02)


def test_statistics_of_a_vocabulary_that_the_mesh_does_not_divide():
    """Two devices have five and four logits of each token; targets are in both parts."""
    logits_BTV = jax.random.normal(jax.random.key(0), (4, 9, 9))
    targets_BT = jnp.broadcast_to(jnp.arange(9), (4, 9))

    def found(logits_BTV):
        logits_BTV = sharding.constrain(logits_BTV, 'batch', 'length', 'act_vocab')
        statistics = heads.token_statistics(logits_BTV, targets_BT)
        return (statistics.log_likelihood * statistics.mean).sum(), statistics

    (alone, statistics), gradient = jax.value_and_grad(found, has_aux=True)(logits_BTV)
    mesh_config = Mesh(data=2, tensor=2)
    with sharding.placed(meshes.make_mesh(mesh_config, jax.devices()[:4]), mesh_config):
        (total, parts), grad = jax.jit(jax.value_and_grad(found, has_aux=True))(logits_BTV)
    pairs = zip(jax.tree.leaves((total, parts, grad)), jax.tree.leaves((alone, statistics, gradient)), strict=True)
    for got, wanted in pairs:
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
