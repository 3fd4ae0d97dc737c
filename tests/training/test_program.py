"""The program of a run: made from a config and a batch, it starts and takes steps without files."""

import jax
import numpy as np

from tformer.config import Config, Data, Model, Train
from tformer.training import dummy_batch
from tformer.training.program import make_program

CONFIG = dummy_batch.assumed(
    Config(
        model=Model(num_decoder_layers=1, emb_dim=16, num_heads=2, mlp_dim=32, vocab_size=64, max_len=8),
        data=Data(length=8),
        train=Train(batch_size=8, num_steps=3),
    )
)


def test_a_program_starts_and_takes_a_step_without_files() -> None:
    batch = dummy_batch.random_batch(CONFIG)
    program = make_program(CONFIG, batch)
    state = program.init()
    before = jax.device_get(state.params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), before) == jax.tree.map(
        lambda x: (x.value.shape, x.value.dtype), program.abstract.params, is_leaf=lambda x: hasattr(x, 'names')
    )
    state, metrics = program.train_step(state, batch)
    total, weight = metrics['scores']['loss']
    assert int(state.step) == 1 and np.isfinite(total / weight) and int(metrics['tokens']) == 64
    moved = jax.tree.map(lambda one, other: np.abs(one - other).max(), before, jax.device_get(state.params))
    assert max(jax.tree.leaves(moved)) > 0
    assert jax.tree.all(jax.tree.map(np.array_equal, before, jax.device_get(program.init().params)))
    assert repr(program).startswith('Program(causal_lm of a decoder, ')


def test_only_the_shapes_of_a_batch_are_read() -> None:
    batch = dummy_batch.random_batch(CONFIG)
    abstract = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
    one, other = make_program(CONFIG, batch), make_program(CONFIG, abstract)
    assert jax.tree.all(jax.tree.map(np.array_equal, one.init().params, other.init().params))
