"""Which parameters are evaluated."""

import jax.numpy as jnp
import optax

from tformer.optim.optimizers import ScheduleFree
from tformer.optim.precision import MasterParams
from tformer.training.state import TrainState, evaluation_params


def test_averages_are_evaluated_where_a_run_has_them_in_the_dtype_of_the_parameters():
    params = {'w': jnp.array([1.0, 2.0], jnp.bfloat16)}
    assert evaluation_params(TrainState(jnp.array(1), params, ())) is params
    found = evaluation_params(TrainState(jnp.array(1), params, (), {'w': jnp.array([3.0, 4.0])}))
    assert found['w'].tolist() == [3, 4]
    assert found['w'].dtype == jnp.bfloat16


def test_a_schedule_free_run_evaluates_the_average_that_its_parameters_lie_towards():
    """y = (1 - beta) z + beta x: with z = 2, y = 5 and beta = 0.75 the average x is 6."""
    params, frozen = {'w': jnp.array(5.0), 'b': jnp.array(1.0)}, optax.MaskedNode()
    free = ScheduleFree({'w': jnp.array(2.0), 'b': frozen}, jnp.array(1.0), (), 0.75)
    found = evaluation_params(TrainState(jnp.array(1), params, (optax.EmptyState(), free)))
    assert (float(found['w']), float(found['b'])) == (6, 1)


def test_the_average_of_a_schedule_free_run_is_of_the_master_copies():
    """z = 1, y = 1 + 3/512, which bfloat16 rounds to 1 + 4/512, and beta = 1/4: x = 1 + 12/512."""
    narrow = {'w': jnp.array(1 + 4 / 512, jnp.bfloat16)}
    free = ScheduleFree({'w': jnp.array(1.0)}, jnp.array(1.0), (), 0.25)
    found = evaluation_params(TrainState(jnp.array(1), narrow, (MasterParams({'w': jnp.array(1 + 3 / 512)}, free),)))
    assert float(found['w']) == 1 + 12 / 512 and found['w'].dtype == jnp.bfloat16
