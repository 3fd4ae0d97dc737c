"""Eight devices, however the work is split, give what one gives: every strategy and useful pairs, in every family."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

from tformer import config, sharding
from tformer.config import Config, Mesh, Model, Train
from tformer.hyper import Hyper
from tformer.model import build
from tformer.objectives import OBJECTIVES
from tformer.state import start_state
from tformer.step import make_train_step

V, T, S, ROWS, STEPS, RATE = 32, 32, 16, 8, 3, 0.1
BASE = Model(emb_dim=16, mlp_dim=32, num_heads=8, head_dim=4, max_len=64, vocab_size=V, dropout_rate=0.0)
FAMILIES = {
    'encoder': ('masked_lm', {'position': 'learned', 'num_encoder_layers': 2, 'norm_placement': 'post'}),
    'decoder': ('causal_lm', {'position': 'rope', 'num_decoder_layers': 2, 'num_kv_heads': 4, 'activation': 'swiglu'}),
    'encoder_decoder': (
        'seq2seq',
        {'position': 'relative', 'num_encoder_layers': 2, 'num_decoder_layers': 2, 'tied_embeddings': 'all'},
    ),
}
MESHES = {
    'data': Mesh(data=8, rules='dp'),
    'replicated': Mesh(data=8, rules='replicated'),
    'fsdp': Mesh(data=1, fsdp=8, rules='fsdp'),
    'tensor': Mesh(data=1, tensor=8, rules='tp'),
    'sequence': Mesh(data=2, tensor=4, rules='tp_sp'),
    'context': Mesh(data=1, context=8),
    'fsdp x tensor': Mesh(data=2, fsdp=2, tensor=2),
    'fsdp x sequence': Mesh(data=1, fsdp=4, tensor=2, rules='fsdp_tp_sp'),
    'fsdp x context': Mesh(data=1, fsdp=4, context=2),
    'context x sequence': Mesh(data=2, context=2, tensor=2, rules='fsdp_tp_sp'),
}


def make_config(family, mesh, **model):
    objective, differences = FAMILIES[family]
    cfg = Config(
        model=dataclasses.replace(BASE, family=family, **{**differences, **model}),
        train=Train(objective=objective, num_steps=STEPS, batch_size=ROWS),
        data=config.Data(length=T),
        mesh=mesh,
    )
    return config.resolve(cfg, vocab_size=V)


def make_batch(family, seed, packed=False):
    """Rows of unequal length, the last one empty; `packed`: two examples in each."""
    rng, batch = np.random.default_rng(seed), {}
    for prefix, length in {'encoder_': S, '': T}.items():
        if prefix and family != 'encoder_decoder':
            continue
        lengths = rng.integers(2, length + 1, ROWS)
        lengths[0], lengths[-1] = length, 0
        columns = np.arange(length)[None]
        real, first = columns < lengths[:, None], columns < lengths[:, None] // 2
        counted = (
            np.where(first, columns, columns - lengths[:, None] // 2) if packed else columns + 0 * lengths[:, None]
        )
        batch[f'{prefix}inputs'] = np.where(real, rng.integers(1, V, (ROWS, length)), 0).astype(np.int32)
        batch[f'{prefix}positions'] = np.where(real, counted, -1).astype(np.int32)
        if packed:
            batch[f'{prefix}segment_ids'] = np.where(real, 2 - first, 0).astype(np.int32)
    weights = real * (rng.random((ROWS, T)) < 0.7)
    return {**batch, 'targets': rng.integers(1, V, (ROWS, T), np.int32), 'weights': weights.astype(np.float32)}


def descent():
    """Stochastic gradient descent whose state is the gradient that it was given last."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jax.numpy.zeros_like, params),
        lambda grads, state, params=None: (jax.tree.map(lambda g: -RATE * g, grads), grads),
    )


@functools.cache
def trained(family, name, packed=False, **model):
    """Returns (the losses of three steps, the first step's gradients, the last parameters, the compiled text)."""
    mesh_config = MESHES.get(name, Mesh(data=1))
    cfg = make_config(family, mesh_config, **model)
    net, objective, hyper = build(cfg.model), OBJECTIVES[cfg.train.objective], Hyper.of(cfg)
    mesh = sharding.make_mesh(mesh_config, jax.devices()[: 8 if name in MESHES else 1])
    rules, batches = sharding.make_rules(mesh_config), [make_batch(family, seed, packed) for seed in range(STEPS)]
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        state, placed = start_state(net, objective, descent(), hyper, batches[0], mesh, rules)
        step = jax.jit(make_train_step(net, objective, descent(), cfg), out_shardings=(placed, None))
        split = [jax.device_put(batch, sharding.batch_sharding(mesh)) for batch in batches]
        compiled = step.lower(state, split[0], hyper).compile()
        losses, first = [], None
        for batch in split:
            state, numbers = compiled(state, batch, hyper)
            total, weight = numbers['scores']['loss']
            losses.append(float(total) / float(weight))
            first = jax.device_get(state.opt_state) if first is None else first
    return losses, first, state.params, compiled.as_text()


def relative(found, expected):
    """Returns the norm of a tree's difference over its norm, in float64."""
    a, b = (np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(t)]) for t in (found, expected))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize('name', MESHES)
@pytest.mark.parametrize('family', FAMILIES)
def test_eight_devices_train_as_one(family, name):
    losses, gradients, params, _ = trained(family, 'one')
    other_losses, other_gradients, other_params, _ = trained(family, name)
    assert len(set(losses)) == STEPS
    assert np.allclose(other_losses, losses, rtol=1e-6, atol=0)
    assert relative(other_gradients, gradients) <= 1e-5
    assert relative(jax.device_get(other_params), jax.device_get(params)) <= 1e-6
