"""Train steps on the chip against the CPU of the same process, and on several chips against one, in float32.

Products are of the highest precision, and both start from the same parameters. What is left are other orders of sums
and other roundings of exponentials and roots, some 2^-23 each.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import accelerator
from comparing import descent, relative
from starting import make_start
from tformer import checks
from tformer.config import Config, Data, Mesh, Model, Train
from tformer.distributed import meshes, sharding
from tformer.model import build
from tformer.objectives import OBJECTIVES
from tformer.optim.hyperparameters import Hyperparameters
from tformer.training.dummy_batch import random_batch
from tformer.training.step import make_train_step

pytestmark = pytest.mark.accelerator

LOSSES, GRADIENTS = 1e-5, 1e-4  # relative bounds; of the gradients by the norm of their difference
V, T, ROWS, STEPS, RATE = 96, 64, 8, 3, 0.1
SIZES = {'emb_dim': 64, 'mlp_dim': 128, 'num_heads': 8, 'head_dim': 16}
LAYERS = 2  # of each stack
FAMILIES = {
    'encoder': ('masked_lm', {'position': 'learned', 'norm_placement': 'post', 'activation': 'gelu'}),
    'decoder': ('causal_lm', {'position': 'rope', 'num_kv_heads': 4, 'activation': 'swiglu', 'norm': 'rmsnorm'}),
    'encoder_decoder': ('seq2seq', {'position': 'relative', 'activation': 'gelu'}),
}
MESHES = {  # of as many devices as there are, up to eight; and a family for each
    'data': ({'data': -1}, 'dp', 'encoder'),
    'fsdp': ({'data': 1, 'fsdp': -1}, 'fsdp', 'decoder'),
    'tensor': ({'data': 1, 'tensor': -1}, 'tp', 'encoder_decoder'),
    'sequence': ({'data': 1, 'tensor': -1}, 'tp_sp', 'encoder'),
    'context': ({'data': 1, 'context': -1}, 'fsdp_tp', 'decoder'),
    'pipeline': ({'data': 1, 'pipeline': 2}, 'fsdp_tp', 'decoder'),
}


WIDE = {'emb_dim': 256, 'mlp_dim': 512, 'num_heads': 4, 'head_dim': 64, 'vocab_size': 8202, 'scan_layers': False}


def make_config(family, mesh, **fields):
    objective, differences = FAMILIES[family]
    layers = {f'num_{stack}_layers': LAYERS for stack in ('encoder', 'decoder') if stack in family}
    sizes = {'vocab_size': V, **SIZES} | differences | fields
    model = Model(family=family, max_len=T, dropout_rate=0.0, **layers, **sizes)
    train = Train(objective=objective, num_steps=STEPS, batch_size=ROWS)
    return checks.resolve(Config(model=model, train=train, data=Data(length=T), mesh=mesh), vocab_size=model.vocab_size)


def make_batch(config, seed):
    """Rows of unequal length."""
    batch, rng = random_batch(config, seed), np.random.default_rng(seed)
    for side in [name.removesuffix('positions') for name in batch if name.endswith('positions')]:
        real = np.arange(T) < rng.integers(T // 4, T + 1, ROWS)[:, None]
        batch[f'{side}positions'] = np.where(real, batch[f'{side}positions'], -1)
        batch[f'{side}inputs'] = np.where(real, batch[f'{side}inputs'], 0)
        if not side:
            batch['weights'] = batch['weights'] * real
    return batch


@functools.cache
def trained(family, devices, mesh=None):
    """Returns (the losses of some steps of gradient descent, the first and the last gradients)."""
    cfg = make_config(family, Mesh(data=1) if mesh is None else mesh)
    net, objective, hyper = build(cfg.model), OBJECTIVES[cfg.train.objective], Hyperparameters.of(cfg)
    laid_out, rules = meshes.make_mesh(cfg.mesh, devices), sharding.make_rules(cfg.mesh)
    batches = [make_batch(cfg, seed) for seed in range(STEPS)]
    with sharding.placed(laid_out, cfg.mesh), jax.default_matmul_precision('highest'):
        start, placed = make_start(net, objective, descent(RATE), hyper, batches[0], laid_out, rules)
        cpu = tuple(jax.devices('cpu')[:1])
        state = start(hyper) if devices == cpu else jax.device_put(initial(family), placed)
        step = jax.jit(make_train_step(net, objective, descent(RATE), cfg), out_shardings=(placed, None))
        losses, gradients = [], []
        for batch in batches:
            state, numbers = step(state, jax.device_put(batch, meshes.batch_sharding(laid_out)), hyper)
            total, weight = numbers['scores']['loss']
            losses.append(float(total) / float(weight))
            gradients.append(jax.device_get(state.opt_state))
    return losses, gradients[0], gradients[-1]


@functools.cache
def initial(family):
    """Returns the state that all start from, made on the CPU."""
    cfg, devices = make_config(family, Mesh(data=1)), jax.devices('cpu')[:1]
    net, objective, hyper = build(cfg.model), OBJECTIVES[cfg.train.objective], Hyperparameters.of(cfg)
    laid_out = meshes.make_mesh(cfg.mesh, devices)
    with sharding.placed(laid_out, cfg.mesh):
        rules, batch = sharding.make_rules(cfg.mesh), make_batch(cfg, 0)
        return jax.device_get(make_start(net, objective, descent(RATE), hyper, batch, laid_out, rules)[0](hyper))


def first_gradients(family, devices, dtype):
    """Returns the gradients of a wide model's first step, of parameters that the CPU draws, in a type."""
    cfg = make_config(family, Mesh(data=1), **WIDE, dtype=dtype, activation='gelu_tanh', norm='layernorm')
    net, objective, hyper = build(cfg.model), OBJECTIVES[cfg.train.objective], Hyperparameters.of(cfg)
    batch, found = make_batch(cfg, 0), None
    for device in (jax.devices('cpu')[:1], devices):
        laid_out, rules = meshes.make_mesh(cfg.mesh, device), sharding.make_rules(cfg.mesh)
        with sharding.placed(laid_out, cfg.mesh):
            start, placed = make_start(net, objective, descent(RATE), hyper, batch, laid_out, rules)
            found = jax.device_put(jax.device_get(start(hyper)) if found is None else found, placed)
            step = jax.jit(make_train_step(net, objective, descent(RATE), cfg), out_shardings=(placed, None))
            if device == devices:
                found, _ = step(found, jax.device_put(batch, meshes.batch_sharding(laid_out)), hyper)
        found = jax.device_get(found)
    return found.opt_state


@pytest.mark.parametrize('family', FAMILIES)
def test_bfloat16_is_as_near_to_float32_on_the_chip_as_on_the_cpu(family):
    """With the kernels of norms, activations, attention and losses, biases and a vocabulary that is padded."""
    cpu, chip = (tuple(jax.devices(name)[:1]) for name in ('cpu', jax.default_backend()))
    exact = first_gradients(family, cpu, 'float32')
    theirs, own = (relative(first_gradients(family, devices, 'bfloat16'), exact) for devices in (cpu, chip))
    assert own <= 1.5 * theirs < 0.1


def assert_near(found, wanted):
    assert len(set(wanted[0])) == STEPS
    np.testing.assert_allclose(found[0], wanted[0], rtol=LOSSES)
    for mine, theirs in zip(found[1:], wanted[1:], strict=True):
        assert relative(mine, theirs) <= GRADIENTS


@pytest.mark.parametrize('family', FAMILIES)
def test_the_chip_trains_as_the_cpu(family):
    chip = jax.devices()[-1:]  # in the rehearsal another than the first CPU
    assert_near(trained(family, tuple(chip)), trained(family, tuple(jax.devices('cpu')[:1])))


@pytest.mark.parametrize('mesh', MESHES)
def test_several_chips_train_as_one(mesh):
    count = min(1 << (jax.device_count().bit_length() - 1), 8 if accelerator.MODE == 'chip' else 2)
    if count < 2:
        pytest.skip('one chip: meshes of several need more')
    sizes, rules, family = MESHES[mesh]
    asked = dataclasses.replace(Mesh(**sizes), rules=rules)
    assert_near(trained(family, tuple(jax.devices()[:count]), asked), trained(family, tuple(jax.devices()[:1])))
