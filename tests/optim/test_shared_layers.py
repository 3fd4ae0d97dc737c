"""Whole matrices, of layers that devices share out among them for the update."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tformer.commands.planning import dry_run
from tformer.config import Config, Data, Mesh, Model, Optimizer, Train
from tformer.distributed import meshes, sharding
from tformer.distributed.devices import Target
from tformer.lab.sweep import batched_trials
from tformer.optim import shared_layers

NAMES = PartitionSpec('layers', 'embed', 'mlp')


@pytest.mark.parametrize(
    ('layers', 'mesh', 'parts', 'shared'),
    [
        (8, {'fsdp': 8}, ('fsdp', None, None), 8),
        (8, {'fsdp': 4, 'tensor': 2}, (('fsdp', 'tensor'), None, None), 8),
        (6, {'fsdp': 4, 'tensor': 2}, (('fsdp', 'tensor'), None, None), 8),
        (4, {'fsdp': 4, 'tensor': 2}, ('fsdp', None, 'tensor'), 4),
        (3, {'fsdp': 4, 'tensor': 2}, ('fsdp', None, 'tensor'), 4),
        (8, {'pipeline': 2, 'fsdp': 4}, (('pipeline', 'fsdp'), None, None), 8),
        (6, {'pipeline': 2, 'fsdp': 2}, (('pipeline', 'fsdp'), None, None), 8),
        (5, {'data': 8}, ('data', None, None), 8),
        (8, {'fsdp': 2, 'data': 2, 'context': 2}, (('fsdp', 'context', 'data'), None, None), 8),
    ],
)
def test_devices_have_whole_matrices_of_as_many_layers_each(layers, mesh, parts, shared):
    config = Mesh(**{'data': 1, **mesh})
    laid_out = meshes.make_mesh(config)
    x = jnp.arange(1, 1 + layers * 16 * 32, dtype=jnp.float32).reshape(layers, 16, 32)
    with sharding.placed(laid_out, config):
        there = sharding.spec(x.shape, NAMES, sharding.make_rules(config), laid_out)
        own = jax.device_put(x, jax.sharding.NamedSharding(laid_out, there))
        moved = jax.jit(lambda x: shared_layers.whole(x, NAMES))(own)
        back = jax.jit(lambda moved: shared_layers.stored(moved, NAMES, x.shape))(moved)
    for array, place in ((moved, PartitionSpec(*parts)), (back, there)):
        assert array.sharding.is_equivalent_to(jax.sharding.NamedSharding(laid_out, place), 3)
    stages = mesh.get('pipeline', 1)
    filled = np.zeros((stages, shared // stages, 16, 32))
    filled[:, : layers // stages] = x.reshape(stages, -1, 16, 32)
    np.testing.assert_array_equal(moved, filled.reshape(shared, 16, 32))
    np.testing.assert_array_equal(back, x)


def test_slices_have_all_layers_each():
    config = Mesh(data=2, fsdp=4)
    laid_out = meshes.make_mesh(config)
    with sharding.placed(laid_out, config), sharding._far('data'):
        moved = jax.jit(lambda x: shared_layers.whole(x, NAMES))(jnp.ones((8, 16, 32)))
    assert moved.sharding.is_equivalent_to(jax.sharding.NamedSharding(laid_out, PartitionSpec('fsdp')), 3)


def test_trials_on_devices_of_their_own_have_all_layers_each():
    """A step of several trials is of the devices of one, along the axes that are left."""
    config = Mesh(data=2, fsdp=2)
    mesh = batched_trials.make_mesh(config, 2)
    x = jnp.arange(2 * 3 * 16 * 32, dtype=jnp.float32).reshape(2, 3, 16, 32)

    def of_trials(x):
        def one(x):
            return shared_layers.stored(2 * shared_layers.whole(x, NAMES), NAMES, x.shape)

        return jax.vmap(one)(x)

    places = PartitionSpec(batched_trials.TRIALS)
    with sharding.placed(mesh, config):
        run = jax.shard_map(of_trials, in_specs=places, out_specs=places, axis_names={batched_trials.TRIALS})
        np.testing.assert_array_equal(jax.jit(run)(x), 2 * x)


def test_without_layers_or_a_mesh_nothing_moves():
    x = jnp.ones((16, 32))
    assert shared_layers.whole(x, PartitionSpec('embed', 'mlp')) is x
    assert shared_layers.stored(x, PartitionSpec('embed', 'mlp'), x.shape) is x


def compiled(optimizer, **mesh):
    """Returns a step on eight devices."""
    sizes = {'vocab_size': 16, 'emb_dim': 64, 'mlp_dim': 128, 'num_heads': 4, 'num_decoder_layers': 8, 'max_len': 16}
    config = Config(
        model=Model(family='decoder', dropout_rate=0.0, mlp_bias=False, **sizes),
        data=Data(length=16),
        train=Train(objective='causal_lm', num_steps=10, batch_size=8),
        optimizer=Optimizer(name=optimizer),
        mesh=Mesh(**{'data': 1, **mesh}),
    )
    return dry_run.compile_program('train step', config, Target('cpu', (8,)))


def sent(run):
    """Returns the bytes that a device sends in a step."""
    return sum(row.bytes for row in run.collectives)


HIDDEN = 8 * (4 * 64 * 64 + 2 * 64 * 128)  # parameters


@pytest.mark.slow
def test_muon_sends_hidden_kernels_there_and_back_besides():
    """All to all, 7 / 8 of what a device holds, in float32; and not each matrix for each product of the iteration."""
    more = sent(compiled('muon', fsdp=8)) - sent(compiled('adamw', fsdp=8))
    assert more < 1.2 * 2 * 7 / 8 * 4 * HIDDEN / 8


@pytest.mark.slow
def test_devices_with_the_same_kernels_compute_an_eighth_of_the_steps_each():
    """Five steps of a matrix [m, n], m <= n, are 10 m n m + 5 m m m multiplications, and as many additions; each device
    says to the others what steps it has found."""
    muon, adamw = compiled('muon', data=8), compiled('adamw', data=8)
    more = sum(work.flops * work.times for work in muon.works) - sum(work.flops * work.times for work in adamw.works)
    steps = 2 * 8 * (4 * 15 * 64**3 + 2 * (10 * 64**2 * 128 + 5 * 64**3))
    assert 0.9 < more / (steps / 8) < 1.1
    assert sent(muon) - sent(adamw) < 1.1 * 7 / 8 * 4 * HIDDEN
