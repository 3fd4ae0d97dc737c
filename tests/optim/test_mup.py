"""The coordinate check of muP: what a few updates do to activations does not depend on the width (Yang et al. 2022, D).

Under the standard parametrization it grows with the width, so that the best learning rate falls.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tformer import checks, config
from tformer.config import Config, Model, Train
from tformer.distributed.sharding import unboxed
from tformer.layers.dropout import DropoutRates
from tformer.layers.outputs import classify
from tformer.model import build
from tformer.objectives import OBJECTIVES
from tformer.optim.hyperparameters import Hyperparameters
from tformer.optim.optimizers import make_optimizer
from tformer.training.dummy_batch import random_batch
from tformer.training.state import logical_names, make_init
from tformer.training.step import make_train_step

WIDTHS = (32, 64, 128, 256)
UPDATES = 4
MUP = {'parametrization': 'mup', 'base_emb_dim': WIDTHS[0]}


@functools.cache
def changes(width, tied, mup, optimizer='adam', rate=0.003, experts=None):
    """Mean absolute changes of the last block's stream and of the logits by a few updates, at one learning rate."""
    model_config = Model(
        vocab_size=64,
        emb_dim=width,
        mlp_dim=4 * width,
        head_dim=16,
        num_heads=width // 16,
        num_decoder_layers=2,
        max_len=16,
        tied_embeddings=tied,
        num_experts=experts,
        final_norm=False,
        dropout_rate=0.0,
        **(MUP if mup else {}),
    )
    cfg = checks.resolve(
        Config(
            model=model_config,
            data=config.Data(length=16),
            optimizer=config.Optimizer(name=optimizer, learning_rate=rate, schedule='constant', warmup_steps=0),
            train=Train(num_steps=UPDATES, batch_size=8),
        ),
        vocab_size=64,
    )
    model, objective, hyper, batch = (
        build(cfg.model),
        OBJECTIVES['causal_lm'],
        Hyperparameters.of(cfg),
        random_batch(cfg),
    )
    optimizer = make_optimizer(cfg, logical_names(model, objective, batch))
    step = make_train_step(model, objective, optimizer, cfg)
    init = make_init(model, objective, optimizer)

    def both(params):
        def stream(model, batch):
            return model.decoder(model.embed(batch['inputs']), batch, DropoutRates())

        variables = {'params': params}
        return model.apply(variables, batch, method=stream), model.apply(variables, batch, DropoutRates())

    @jax.jit
    def run(hyper):
        state = unboxed(init(hyper, batch))
        if tied is None:  # what random readouts make of the stream falls with the width, and would hide the rest
            head = state.params['head']['logits']
            head['kernel'] = jnp.zeros_like(head['kernel'])
        before = both(state.params)
        state = jax.lax.fori_loop(0, UPDATES, lambda _, state: step(state, batch, hyper)[0], state)
        return jax.tree.map(lambda a, b: jnp.mean(jnp.abs(a - b)), both(state.params), before)

    return [float(x) for x in run(hyper)]


def slopes(tied, mup, **more):
    """The exponents of the width in the changes of stream and logits."""
    found = np.log([changes(width, tied, mup, **more) for width in WIDTHS])
    return np.polyfit(np.log(WIDTHS), found, 1)[0]


@pytest.mark.proof
@pytest.mark.parametrize('tied', ['all', None])
def test_changes_do_not_grow_with_the_width_under_mup_and_do_under_the_standard_parametrization(tied):
    stream, logits = slopes(tied, mup=True)
    assert abs(stream) < 0.1 and logits < 0.1
    if tied is None:
        assert abs(logits) < 0.1
    stream, logits = slopes(tied, mup=False)
    assert stream > 0.1 and logits > 0.4


@pytest.mark.proof
@pytest.mark.parametrize('more', [{'experts': 4}, {'optimizer': 'adafactor', 'rate': 0.03}], ids=str)
def test_so_with_experts_and_with_steps_relative_to_the_parameters(more):
    assert np.abs(slopes(None, mup=True, **more)).max() < 0.15


@pytest.mark.slow
def test_the_logits_of_classes_do_not_grow_with_the_width():
    def spread(width):
        cfg = Model(family='encoder', vocab_size=64, num_classes=5, emb_dim=width, num_encoder_layers=1, **MUP)
        model, batch = build(cfg), {'inputs': jnp.arange(64).reshape(8, 8)}
        init = jax.jit(lambda: model.init_with_output(jax.random.key(0), batch, DropoutRates(), method=classify)[0])
        return float(jnp.std(init()))

    assert spread(512) < spread(128) < spread(32)
