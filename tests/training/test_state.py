"""Which parameters are evaluated."""

import jax.numpy as jnp
import optax

from tformer.optim.optimizers import ScheduleFree
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
