"""A train step of a table of logits: what reaches the schedule, and what counts as a token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec

from tformer import checks, objectives
from tformer.config import Config, Model, Optimizer, Train
from tformer.layers.dropout import DropoutRates
from tformer.optim.hyperparameters import Hyperparameters
from tformer.optim.optimizers import make_optimizer
from tformer.training.state import begin
from tformer.training.step import make_train_step


class Table(nn.Module):
    """Logits of a token are its row of a kernel."""

    @nn.compact
    def __call__(self, batch, rates=None):
        return self.param('kernel', nn.initializers.zeros, (3, 4))[batch['inputs']]


def metrics_of(fields=None, **more):
    """The metrics of the first step."""
    optimizer = Optimizer(name='adamw', schedule='noam', learning_rate=2.0, warmup_steps=4)
    model = Model(emb_dim=256, mlp_dim=256, num_heads=4, vocab_size=4, **(fields or {}))
    run = checks.resolve(Config(model, optimizer=optimizer, train=Train(num_steps=4)), vocab_size=4)
    hyper = Hyperparameters.of(run).replace(dropout_rates=DropoutRates())
    made = make_optimizer(run, {'kernel': PartitionSpec('embed', 'vocab')})
    step = jax.jit(make_train_step(Table(), objectives.Objective(objectives.token_scores), made, run))
    batch = {'inputs': np.array([[0, 1]]), 'targets': np.array([[3, 0]]), 'weights': np.ones((1, 2))}
    state = begin(made, hyper, {'kernel': jnp.ones((3, 4))}, {})
    return step(state, batch | {'positions': np.arange(2)[None], **more}, hyper)[1]


@pytest.mark.parametrize(('fields', 'width'), [({}, 256), ({'parametrization': 'mup', 'base_emb_dim': 64}, 64)])
def test_the_rate_of_the_transformer_is_that_of_the_base_width(fields, width):
    """Vaswani et al. 2017, eq. 3: width^-0.5 min(step^-0.5, step warmup^-1.5), at step 1 of a warm-up of 4."""
    assert float(metrics_of(fields)['learning_rate']) == pytest.approx(2 * width**-0.5 * 4**-1.5)


def test_tokens_are_those_of_both_sides_without_padding():
    assert metrics_of(encoder_positions=np.array([[0, 1, 2, -1]]))['tokens'] == 2 + 3
