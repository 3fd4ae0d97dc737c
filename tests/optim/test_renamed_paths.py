"""A checkpoint with the names of an earlier version gives the same arrays under the names of now."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tformer.config import Config, Model
from tformer.model import build
from tformer.optim import renamed_paths
from tformer.optim.hyperparameters import Hyperparameters
from tformer.optim.parameters import within
from tformer.training import checkpoint, checkpoint_writer
from tformer.training.state import begin

OLD = {new: old for old, new in renamed_paths.RENAMED.items()}


@pytest.fixture(scope='module')
def state():
    """Returns a state whose optimizer, averages and parameters all have every renamed part."""
    cfg = Model(vocab_size=7, emb_dim=8, mlp_dim=8, num_decoder_layers=1, max_len=4, position='learned')
    params = build(cfg).init(jax.random.key(0), {'inputs': jnp.ones((1, 4), jnp.int32)})['params']
    params = jax.tree.map(lambda x: x.value, params, is_leaf=lambda x: hasattr(x, 'value'))
    hyper = Hyperparameters.of(Config(model=cfg)).replace(ema_decay=0.9)
    return jax.tree.map(lambda x: jnp.asarray(x) + 0, begin(optax.adam(1e-3), hyper, params, {}))


@pytest.mark.slow
def test_every_renamed_part_is_in_the_model(state):
    assert set(OLD) <= renamed_paths.names(state.params)


@pytest.mark.slow
def test_a_checkpoint_with_the_old_names_restores_under_the_new_ones(state, tmp_path):
    fields = ('params', 'opt_state', 'averages')
    old = state.replace(**{name: renamed_paths.rename(getattr(state, name), OLD) for name in fields})
    assert not renamed_paths.names(old) & set(OLD)
    assert set(renamed_paths.RENAMED) <= renamed_paths.names(old.opt_state) & renamed_paths.names(old.averages)
    for name, saved in {'old': old, 'new': state}.items():
        writer = checkpoint_writer.CheckpointWriter(tmp_path / name)
        writer.save(saved, {}, None)
        writer.finish()
        start = jax.tree.map(jnp.zeros_like, state)
        found = checkpoint.restore(tmp_path / name, 0, start)
        assert jax.tree.structure(found) == jax.tree.structure(state)
        assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(state)))
        variables, _ = checkpoint.load_variables(tmp_path / name)
        assert jax.tree.structure(variables['params']) == jax.tree.structure(state.params)
        average, _ = checkpoint.load_average(tmp_path / name, 1, 1)
        assert all(map(np.array_equal, jax.tree.leaves(average), jax.tree.leaves(variables)))


def test_settings_may_name_parameters_as_before():
    assert within(('decoder', 'input_embedding', 'positions', 'table'), 'decoder.foot')
    assert not within(('decoder', 'stack', 'norm', 'scale'), 'decoder.foot')
