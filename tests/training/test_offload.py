"""What waits in the host's memory between updates, and that it changes no number."""

import functools

import jax
import numpy as np
import pytest

from tformer.config import Config, Data, Mesh, Model, Optimizer, Train, override
from tformer.training import checkpoint, checkpoint_writer, dummy_batch
from tformer.training.program import make_program
from tformer.training.state import OFFLOADED, evaluation_params

CONFIG = dummy_batch.assumed(
    Config(
        model=Model(num_decoder_layers=1, emb_dim=16, num_heads=2, mlp_dim=32, vocab_size=64, max_len=8),
        data=Data(length=8),
        train=Train(batch_size=8, num_steps=3, microbatches=2),
        optimizer=Optimizer(ema_decay=0.9),
        mesh=Mesh(data=2, fsdp=2),
    )
)
BATCH = dummy_batch.random_batch(CONFIG)


@functools.cache
def trained(offload, **optimizer):
    """Returns a program, and its state after three steps."""
    fields = {f'optimizer.{name}': value for name, value in {'offload': offload, **optimizer}.items()}
    program = make_program(override(CONFIG, fields), BATCH)
    state = program.init()
    for _ in range(3):
        state, _ = program.train_step(state, BATCH)
    return program, state


def kinds(tree):
    """Returns the memories that hold the arrays of more than one number."""
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.size > 1}


@pytest.mark.slow
def test_moments_and_averages_wait_on_the_host_and_parameters_stay_on_the_devices():
    _, state = trained(True)
    assert [kinds(getattr(state, name)) for name in OFFLOADED] == [{'pinned_host'}] * 2
    assert kinds(state.params) == kinds(evaluation_params(state)) == {'device'}
    assert {x.sharding.shard_shape(x.shape) == x.shape for x in jax.tree.leaves(state.averages)} == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize(
    'fields', [{}, pytest.param({'name': 'schedule_free', 'ema_decay': None}, marks=pytest.mark.proof)]
)
def test_where_the_state_waits_changes_no_number(fields):
    (_, one), (_, other) = (trained(offload, **fields) for offload in (True, False))
    for got, wanted in zip(*(jax.tree.leaves(jax.device_get(state)) for state in (one, other)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7)
    best = [jax.device_get(evaluation_params(state)) for state in (one, other)]
    jax.tree.map(lambda got, wanted: np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7), *best)


@pytest.mark.slow
def test_a_checkpoint_comes_back_to_where_its_reader_keeps_the_state(tmp_path):
    program, state = trained(True)
    writer = checkpoint_writer.CheckpointWriter(tmp_path)
    writer.save(state, {}, None)
    writer.wait()
    back = checkpoint.restore(tmp_path, 3, program.init())
    assert kinds(back.opt_state) == {'pinned_host'}
    assert jax.tree.all(jax.tree.map(np.array_equal, jax.device_get(back), jax.device_get(state)))
    elsewhere = checkpoint.restore(tmp_path, 3, trained(False)[1])
    assert kinds(elsewhere) == {'device'}
    assert jax.tree.all(jax.tree.map(np.array_equal, jax.device_get(elsewhere), jax.device_get(state)))
