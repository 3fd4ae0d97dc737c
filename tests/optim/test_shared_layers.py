"""Whole matrices, of layers that devices share out among them for the update."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tformer.commands import dry_run
from tformer.config import Config, Data, Mesh, Model, Optimizer, Train
from tformer.distributed import sharding
from tformer.distributed.devices import Target
from tformer.optim import shared_layers

NAMES = PartitionSpec('layers', 'embed', 'mlp')


@pytest.mark.parametrize(
    ('layers', 'mesh', 'parts'),
    [
        (8, {'fsdp': 8}, ('fsdp', None, None)),
        (8, {'fsdp': 4, 'tensor': 2}, (('fsdp', 'tensor'), None, None)),
        (4, {'fsdp': 4, 'tensor': 2}, ('fsdp', None, 'tensor')),
        (6, {'fsdp': 4, 'tensor': 2}, ('tensor', 'fsdp', None)),
        (3, {'fsdp': 4, 'tensor': 2}, (None, 'fsdp', 'tensor')),
        (8, {'pipeline': 2, 'fsdp': 4}, (('pipeline', 'fsdp'), None, None)),
        (8, {'data': 8}, (None, None, None)),
    ],
)
def test_devices_that_hold_parts_of_matrices_share_out_as_many_layers_as_the_mesh_divides(layers, mesh, parts):
    config = Mesh(**{'data': 1, **mesh})
    laid_out = sharding.make_mesh(config)
    x = jnp.arange(layers * 16 * 32, dtype=jnp.float32).reshape(layers, 16, 32)
    with sharding.placed(laid_out, config):
        there = sharding.spec(x.shape, NAMES, sharding.make_rules(config), laid_out)
        own = jax.device_put(x, jax.sharding.NamedSharding(laid_out, there))
        moved = jax.jit(lambda x: shared_layers.whole(x, NAMES))(own)
        back = jax.jit(lambda x: shared_layers.stored(x, NAMES))(moved)
    for array, place in ((moved, PartitionSpec(*parts)), (back, there)):
        assert array.sharding.is_equivalent_to(jax.sharding.NamedSharding(laid_out, place), 3)
    np.testing.assert_array_equal(moved, x)
    np.testing.assert_array_equal(back, x)


def test_without_layers_or_a_mesh_nothing_moves():
    x = jnp.ones((16, 32))
    assert shared_layers.whole(x, PartitionSpec('embed', 'mlp')) is x
    assert shared_layers.stored(x, PartitionSpec('embed', 'mlp')) is x


def sent(optimizer):
    """Returns the bytes that a device of eight sends in a step."""
    sizes = {'vocab_size': 16, 'emb_dim': 64, 'mlp_dim': 128, 'num_heads': 4, 'num_decoder_layers': 8, 'max_len': 16}
    config = Config(
        model=Model(family='decoder', dropout_rate=0.0, mlp_bias=False, **sizes),
        data=Data(length=16),
        train=Train(objective='causal_lm', num_steps=10, batch_size=8),
        optimizer=Optimizer(name=optimizer),
        mesh=Mesh(data=1, fsdp=8),
    )
    run = dry_run.compile_program('train step', config, Target('cpu', (8,)))
    return sum(row.bytes for row in run.collectives)


def test_muon_sends_hidden_kernels_there_and_back_besides():
    """All to all, 7 / 8 of what a device holds, in float32; and not each matrix for each product of the iteration."""
    hidden = 8 * (4 * 64 * 64 + 2 * 64 * 128)
    more = sent('muon') - sent('adamw')
    assert more < 1.2 * 2 * 7 / 8 * 4 * hidden / 8
