"""Dropout: what it keeps, how it scales, and that no two places of a block share a mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tformer.config import Model
from tformer.distributed import sharding
from tformer.layers import dropout, kernels
from tformer.layers.attention import AttentionContext
from tformer.layers.block import Block, StackInputs
from tformer.layers.dropout import DropoutRates
from tformer.layers.layer_stack import PerLayer
from tformer.layers.masks import AttentionMask
from tformer.layers.resolved import resolve_model


def test_a_tenth_is_dropped_and_the_rest_divided_by_nine_tenths():
    x = jnp.full((100, 1001), 2.0)
    found = np.asarray(dropout.dropout(x, 0.1, jax.random.key(0)))
    kept = found != 0
    np.testing.assert_allclose(found[kept], 2 / 0.9, rtol=1e-4)
    assert abs(kept.mean() - 0.9) < 4 * (0.09 / x.size) ** 0.5
    np.testing.assert_array_equal(dropout.dropout(x, None, jax.random.key(0)), x)
    assert (np.asarray(dropout.dropout(x, 0.0, jax.random.key(0))) == 2).all()


@pytest.mark.slow
@pytest.mark.parametrize('shape', [(6,), (2, 3, 7), (3, 4, 5, 8)], ids=str)
def test_a_tpu_drops_what_every_other_device_drops(monkeypatch, shape):
    """On one device and split over several, and for each of many keys."""
    drop = jax.vmap(lambda key: dropout.dropout(jnp.ones(shape), 0.3, key))
    keys = jax.random.split(jax.random.key(5), 4)
    expected = drop(keys)
    monkeypatch.setattr(sharding, 'platform', lambda: 'tpu')
    np.testing.assert_array_equal(drop(keys), expected)
    mesh = jax.make_mesh((4,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
    alone = jax.shard_map(drop, mesh=mesh, in_specs=P('data'), out_specs=P('data'))
    np.testing.assert_array_equal(jax.jit(alone)(keys), expected)
    whole = jax.jit(drop, out_shardings=jax.NamedSharding(mesh, P(None, *[None] * (len(shape) - 1))))
    np.testing.assert_array_equal(whole(keys), expected)


def test_each_place_of_a_block_has_a_rate_and_a_mask_of_its_own(monkeypatch):
    """The calls of dropout in one block: on the probabilities of both attentions and behind them, inside the
    feed-forward and behind it."""
    calls = []

    def noted(x, rate, key):
        calls.append((rate, tuple(np.asarray(jax.random.key_data(key)).tolist())))
        return x

    monkeypatch.setattr(dropout, 'dropout', noted)
    monkeypatch.setattr(kernels, 'dropout', noted)
    cfg = resolve_model(Model(family='encoder_decoder', emb_dim=4, mlp_dim=8, num_heads=1, num_decoder_layers=1))
    places, x = jnp.arange(2)[None], jnp.ones((1, 2, 4))
    own = AttentionContext(AttentionMask(places, places))
    inputs = StackInputs(own, DropoutRates(0.1, 0.2, 0.3), cross=own, encoded_BSD=x)
    one, arguments = Block(cfg, 'decoder', cross=True), (x, None, None, PerLayer(), inputs)
    shapes = jax.eval_shape(one.init, jax.random.key(0), *arguments)
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)
    one.apply(params, *arguments, rngs={'dropout': jax.random.key(1)})
    assert [rate for rate, _ in calls] == [0.2, 0.1, 0.2, 0.1, 0.3, 0.1]
    assert len({key for _, key in calls}) == 6
