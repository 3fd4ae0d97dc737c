"""The loss of each row of a replayed batch, of given outputs."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tformer.commands.replay import row_losses
from tformer.config import Config, Train
from tformer.objectives import OBJECTIVES
from tformer.optim.optimizers import ScheduleFree
from tformer.training.state import TrainState

RNG = np.random.default_rng(0)
LOGITS, DETECTED = RNG.normal(size=(3, 4, 5)).astype(np.float32), RNG.normal(size=(3, 4)).astype(np.float32)
INPUTS, TARGETS, TOKENS = RNG.integers(0, 5, (3, 3, 4))
WEIGHTS = np.float32([[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]])
POSITIONS = np.array([[0, 1, 2, 3], [0, 1, -1, -1], [0, 1, 2, -1]])
BATCH = {'inputs': INPUTS, 'targets': TARGETS, 'weights': WEIGHTS, 'positions': POSITIONS}


def losses(objective, outputs, **state):
    """The losses of the rows of a model that has these outputs, times its one parameter."""
    config = Config(train=Train(objective=objective))
    model = types.SimpleNamespace(
        apply=lambda variables, batch, rates, method: jax.tree.map(lambda x: x * variables['params']['scale'], outputs)
    )
    program = types.SimpleNamespace(
        model=model, objective=OBJECTIVES[objective], config=config, teacher=None, taught=()
    )
    made = TrainState(**{'step': jnp.zeros((), jnp.int32), 'params': {'scale': 1}, 'opt_state': {}, **state})
    return row_losses(program, made, jax.tree.map(jnp.asarray, BATCH))


def nll(row):
    """The mean over the tokens of a row that count."""
    each = np.log(np.exp(LOGITS[row]).sum(-1)) - LOGITS[row, range(4), TARGETS[row]]
    return each[WEIGHTS[row] > 0].mean()


def test_a_row_has_the_mean_of_its_own_tokens_and_one_without_any_has_0():
    np.testing.assert_allclose(losses('masked_lm', LOGITS), [nll(0), 0, nll(2)], rtol=1e-5)


def test_a_row_has_the_loss_of_the_parameters_that_are_trained_and_not_of_their_averages():
    params, others = ({'scale': jnp.float32(value)} for value in (1.0, 3.0))
    schedule_free = ScheduleFree(others, jnp.ones(()), {}, 0.9)
    for averaged in ({'averages': others}, {'opt_state': schedule_free}):
        found = losses('masked_lm', LOGITS, params=params, **averaged)
        np.testing.assert_allclose(found, [nll(0), 0, nll(2)], rtol=1e-5)


def test_the_detector_of_a_row_is_judged_by_the_tokens_of_that_row():
    """Clark et al. 2020: 50 times the mean loss of all tokens of the row, which were replaced or not."""

    def judged(row):
        real = POSITIONS[row] >= 0
        replaced = TOKENS[row] != np.where(WEIGHTS[row] > 0, TARGETS[row], INPUTS[row])
        return np.log1p(np.exp(np.where(replaced, -1, 1) * DETECTED[row]))[real].mean()

    wanted = [nll(0) + 50 * judged(0), 0, nll(2) + 50 * judged(2)]
    found = losses('replaced_token', (LOGITS, TOKENS, DETECTED))
    assert found.tolist() == pytest.approx(wanted, rel=1e-5)
