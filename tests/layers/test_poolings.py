"""One vector of a sequence, on three tokens and by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from tformer.config import Model
from tformer.layers.heads import OUTPUT_SCALES, POOLINGS, Pooler
from tformer.layers.resolved import resolve_model

X = jnp.array([[[1.0, -9.0], [3.0, -7.0], [8.0, -2.0]]])


@pytest.mark.parametrize(
    ('name', 'front', 'behind'),
    [
        ('cls', [3, -7], [1, -9]),
        ('mean', [5.5, -4.5], [2, -8]),  # of the last two tokens, and of the first two
        ('max', [8, -2], [3, -7]),
        ('last', [8, -2], [3, -7]),
    ],
)
def test_padding_on_either_side_is_no_token(name, front, behind):
    np.testing.assert_allclose(POOLINGS[name](X, jnp.array([[False, True, True]]))[0], front)
    np.testing.assert_allclose(POOLINGS[name](X, jnp.array([[True, True, False]]))[0], behind)


@pytest.mark.parametrize('name', ['mean', 'max'])
def test_a_row_of_padding_alone_has_the_vector_0(name):
    np.testing.assert_array_equal(POOLINGS[name](X, jnp.zeros((1, 3), bool)), [[0.0, 0.0]])


def test_tied_logits_of_t5_are_divided_by_the_root_of_the_width():
    assert OUTPUT_SCALES['rsqrt_dim'](64) == 1 / 8
    assert OUTPUT_SCALES[None](64) == 1


def test_a_pooled_vector_is_the_tanh_of_a_dense_layer():
    """Devlin et al. 2019, 3.2, and its code."""
    kernel, bias = jnp.array([[1.0, 2.0], [0.0, 0.5]]), jnp.array([0.1, -0.2])
    params = {'params': {'dense': {'kernel': kernel, 'bias': bias}}}
    cfg = resolve_model(Model(emb_dim=2, num_heads=1, pooling='cls', pooler=True))
    found = Pooler(cfg).apply(params, X, jnp.ones((1, 3), bool))
    np.testing.assert_allclose(found, np.tanh([[1 + 0.1, 2 - 4.5 - 0.2]]), rtol=1e-5)


def test_the_pooler_has_the_activation_that_its_field_names():
    """DistilBERT has relu in place of the tanh, ELECTRA gelu: of 2 and -1 tanh makes 0.9640 and -0.7616, relu 2 and 0,
    gelu 1.9545 and -0.1587."""
    x, real = jnp.asarray([[[2.0, -1.0]]]), jnp.ones((1, 1), bool)
    params = {'dense': {'kernel': jnp.eye(2), 'bias': jnp.zeros(2)}}
    for name, expected in (('tanh', [0.9640, -0.7616]), ('relu', [2, 0]), ('gelu', [1.9545, -0.1587])):
        cfg = resolve_model(Model(emb_dim=2, num_heads=1, pooling='cls', pooler=True, pooler_activation=name))
        np.testing.assert_allclose(Pooler(cfg).apply({'params': params}, x, real)[0], expected, atol=1e-4)
