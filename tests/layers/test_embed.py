"""What is done to token embeddings before the first block, by value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from comparing import assert_near
from tformer.config import Mesh, Model
from tformer.distributed import meshes, sharding
from tformer.layers.dropout import DropoutRates
from tformer.layers.embed import InputEmbedding
from tformer.layers.lookup import lookup
from tformer.layers.resolved import resolve_model
from tformer.model import build

X, TYPES = np.array([[[1.0, -2.0, 3.0, 4.0]] * 3]), np.array([[0.5, 0, 0, 0], [0, 7.0, 0, 0]])


@pytest.mark.parametrize(('given', 'rows'), [(None, [0, 0, 0]), ([[1, 0, 1]], [1, 0, 1])])
def test_tokens_have_the_first_type_unless_a_batch_says_otherwise(given, rows):
    """The table's rows times the root of their width, 2, and a vector for the type (Devlin et al. 2019)."""
    layer = InputEmbedding(resolve_model(Model(emb_dim=4, num_heads=1, num_token_types=2)), None)
    params = {'token_types': {'table': jnp.float32(TYPES)}}
    types = None if given is None else jnp.asarray(given)
    found = layer.apply({'params': params}, jnp.float32(X), jnp.arange(3)[None], DropoutRates(), types)
    np.testing.assert_allclose(found[0], 2 * X[0] + TYPES[rows], rtol=1e-6)


@pytest.mark.parametrize(
    ('fields', 'scale'),
    [
        ({}, 2.0),
        ({'embedding_scale': None}, 1.0),
        ({'parametrization': 'mup', 'base_emb_dim': 1}, 1.0),  # the root of the base width
        ({'emb_dim': 16, 'embedding_factor_dim': 4}, 2.0),  # of the table's width, before the projection
    ],
)
def test_the_scale_is_the_root_of_the_width_of_the_table(fields, scale):
    """Vaswani et al. 2017, 3.4; Lan et al. 2020, 3.1."""
    layer = InputEmbedding(resolve_model(Model(**{'emb_dim': 4, 'num_heads': 1, **fields})), None)
    kernel = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
    params = {'projection': {'kernel': kernel, 'bias': np.ones(16, np.float32)}} if 'emb_dim' in fields else {}
    found = layer.apply({'params': params}, jnp.float32(X), jnp.arange(3)[None], DropoutRates())
    expected = scale * X[0] @ kernel + 1 if params else scale * X[0]
    np.testing.assert_allclose(found[0], expected, rtol=1e-5)


def test_the_gradient_of_a_row_that_is_read_often_is_the_whole_sum():
    """A thousand ones are 1,000; added up in bfloat16 they would stay at 256, where the next number is 258."""
    table, rows = jnp.ones((3, 2), jnp.bfloat16), jnp.asarray([[1] * 1000 + [2] * 3])
    found, pull = jax.vjp(lambda table: lookup(table, rows), table)
    assert found.shape == (1, 1003, 2) and found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(pull(jnp.ones_like(found))[0].astype(np.float32), [[0, 0], [1000, 1000], [3, 3]])


@pytest.mark.slow
@pytest.mark.parametrize('chunk', [None, 3])
@pytest.mark.parametrize(
    ('mesh', 'rows', 'length'),
    [
        (Mesh(data=4, tensor=2), 3, 8),
        (Mesh(data=2, context=2, tensor=2), 4, 9),
        (Mesh(data=2, context=2, tensor=2), 3, 8),
        (Mesh(data=4, context=2), 4, 9),
    ],
)
def test_gradients_hold_where_devices_cannot_have_equal_parts(mesh, rows, length, chunk):
    """XLA adds what fills the smaller parts to the rows of a table."""
    sizes = {'vocab_size': 16, 'emb_dim': 16, 'mlp_dim': 32, 'num_heads': 4, 'num_decoder_layers': 1, 'max_len': 16}
    model = build(Model(family='decoder', dropout_rate=0.0, tied_embeddings=None, **sizes))
    random = np.random.default_rng(0)
    batch = {name: random.integers(1, 16, (rows, length), np.int32) for name in ('inputs', 'targets')}
    boxed = model.init(jax.random.key(0), batch)['params']

    def loss(params):
        statistics = model.apply({'params': params}, batch, method='token_statistics', chunk=chunk)
        return jnp.sum(statistics.target - statistics.normalizer)

    expected = jax.jit(jax.grad(loss))(sharding.unboxed(boxed))
    made, rules = meshes.make_mesh(mesh), sharding.make_rules(mesh)
    with sharding.placed(made, mesh):
        params = jax.device_put(sharding.unboxed(boxed), sharding.tree_shardings(boxed, made, rules))
        found = jax.jit(jax.grad(loss))(params)
    jax.tree.map(lambda a, b: assert_near(a, b, 1e-5), found, expected)
