"""Experts shared out over devices, to which tokens travel, against all experts on one device."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from comparing import descent, relative
from small_training import ROWS, T, Trainer, make_batch, make_config
from starting import make_start
from tformer import checks, config
from tformer.config import Model
from tformer.distributed import collectives, device_groups, hlo, meshes, sharding
from tformer.errors import UserError
from tformer.layers import moe
from tformer.layers.moe import Moe
from tformer.layers.resolved import resolve_model

E, D, F = 4, 16, 32
MESHES = {
    'data': config.Mesh(data=2, expert=4),
    'fsdp and tensor': config.Mesh(data=1, expert=2, fsdp=2, tensor=2),
    'context': config.Mesh(data=2, expert=2, context=2),
    'kernels and rows alike': config.Mesh(data=2, expert=2, fsdp=2, overrides=('mlp=fsdp',)),
    'experts whole everywhere': config.Mesh(data=2, expert=4, overrides=('experts=none',)),
}
LAYER = resolve_model(Model(emb_dim=D, mlp_dim=F, num_experts=E, mlp_bias=True, activation='swiglu'))


def layer(**fields):
    return dataclasses.replace(LAYER, **fields)


# ------------------------------------------------------------------------------------------------ the layer
def tokens(rows=8, length=6):
    """Rows of unequal length; the last one is empty."""
    lengths = np.random.default_rng(0).integers(length // 2, length + 1, rows)
    lengths[-1] = 0
    x_BTD = jax.random.normal(jax.random.key(0), (rows, length, D))
    return x_BTD, jnp.asarray(np.arange(length) < lengths[:, None])


@functools.cache
def boxed():
    """The layer's parameters, their biases drawn too, with their logical names."""
    tree = jax.jit(Moe(LAYER, 'decoder', E).init)(jax.random.key(1), *tokens())['params']
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), tree)


def everything(apply, params, x_BTD, real_BT):
    """Output, losses, and the gradients of both by the parameters and the input."""

    def loss(params, x_BTD):
        out, sown = apply(params, x_BTD, real_BT)
        weights = np.random.default_rng(1).standard_normal(out.shape)
        return (out.astype(jnp.float32) * weights).sum() + 10 * sum(jax.tree.leaves(sown)), (out, sown)

    grads, (out, sown) = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x_BTD)
    return {'out': out, 'losses': sown, 'params': grads[0], 'x': grads[1]}


def alone(cfg):
    return lambda params, *args: Moe(cfg, 'decoder', E).apply({'params': params}, *args, mutable=['losses'])


@functools.cache
def expected(choices, *size):
    return everything(alone(layer(experts_per_token=choices)), sharding.unboxed(boxed()), *tokens(*size))


def over(mesh_config, cfg, x_BTD, real_BT):
    mesh, rules = meshes.make_mesh(mesh_config), sharding.make_rules(mesh_config)
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        params = jax.device_put(sharding.unboxed(boxed()), sharding.tree_shardings(boxed(), mesh, rules))
        return jax.device_get(everything(alone(cfg), params, x_BTD, real_BT))


def assert_same(actual, expected):
    for name in expected:
        assert relative(actual[name], expected[name]) < 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize(('mesh', 'choices'), [('data', 1), *((mesh, 2) for mesh in MESHES)])
@pytest.mark.parametrize('dispatch', ['dropless', 'capacity'])
def test_a_layer_over_devices_equals_one_device(dispatch, mesh, choices):
    """Where places suffice for every choice. Rows and tokens that the mesh does not divide are filled up."""
    cfg = layer(expert_dispatch=dispatch, experts_per_token=choices, expert_capacity=E / choices)
    size = (7, 5) if mesh == 'context' else ()
    actual = over(MESHES[mesh], cfg, *tokens(*size))
    assert_same(actual, expected(choices, *size))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(actual))


@pytest.mark.slow
def test_without_drops_tokens_stay_where_they_are_if_every_device_has_all_experts():
    sizes, cfg = config.Mesh(data=2, fsdp=2, tensor=2), layer(expert_dispatch='dropless', experts_per_token=2)
    assert_same(over(sizes, cfg, *tokens()), expected(2))
    mesh, rules = meshes.make_mesh(sizes), sharding.make_rules(sizes)
    with sharding.placed(mesh, sizes):
        params = jax.device_put(sharding.unboxed(boxed()), sharding.tree_shardings(boxed(), mesh, rules))
        rows = jax.device_put(tokens(), meshes.batch_sharding(mesh))
        forward = jax.jit(lambda *arguments: Moe(cfg, 'decoder', E).apply({'params': arguments[0]}, *arguments[1:]))
        text = forward.lower(params, *rows).compile().as_text()
    sent = {(row.kind, row.axes): row.bytes for row in collectives.of(hlo.parse(text), mesh)}
    assert sent.pop(('all-gather', ('fsdp',)))  # kernels
    own = math.prod(tokens()[1].shape) // 4  # tokens of a device
    assert sent.pop(('all-reduce', ('tensor',))) <= own * (D + E) * 4  # the sums of columns, once a token
    assert sum(sent.values()) <= 2 * D * E * 4  # nothing but the router's kernel


@pytest.mark.slow
@pytest.mark.parametrize('mesh', ['data', 'context'])
def test_places_that_are_short_are_those_of_each_device(mesh):
    """A device drops what it would drop if its tokens were the whole batch; the losses are of the whole batch."""
    cfg, sizes = layer(expert_dispatch='capacity', expert_capacity=0.75), MESHES[mesh]
    x_BTD, real_BT = tokens()
    ways = sizes.data * sizes.expert, sizes.context

    def groups(x):
        """[B, T, ...] as [groups, B / rows, T / columns, ...]."""
        x = x.reshape(ways[0], len(x) // ways[0], ways[1], -1, *x.shape[2:])
        return jnp.moveaxis(x, 2, 1).reshape(-1, x.shape[1], *x.shape[3:])

    def reference(params, x_BTD, real_BT):
        out = jax.lax.map(lambda group: alone(cfg)(params, *group)[0], (groups(x_BTD), groups(real_BT)))
        out = jnp.moveaxis(out.reshape(*ways, -1, *out.shape[2:]), 1, 2).reshape(x_BTD.shape)
        return out, alone(layer(expert_dispatch='capacity'))(params, x_BTD, real_BT)[1]

    short = everything(reference, sharding.unboxed(boxed()), x_BTD, real_BT)
    assert_same(over(sizes, cfg, x_BTD, real_BT), short)
    assert relative(expected(2)['out'], short['out']) > 0.1


@pytest.mark.parametrize('dispatch', ['dropless', 'capacity'])
def test_bfloat16_is_near_float32(dispatch):
    cfg = layer(expert_dispatch=dispatch, expert_capacity=2.0)
    actual = over(MESHES['fsdp and tensor'], dataclasses.replace(cfg, dtype='bfloat16'), *tokens())
    assert actual['out'].dtype == jnp.bfloat16
    assert all(relative(actual[name], expected(2)[name]) < 2**-5 for name in ('out', 'params', 'x'))


@pytest.mark.parametrize(('dispatch', 'mesh'), [('dropless', 'fsdp and tensor'), ('capacity', 'context')])
def test_no_two_devices_draw_the_same_dropout(dispatch, mesh):
    cfg = layer(expert_dispatch=dispatch, expert_capacity=2.0)
    whole, dropped = of_one_token(cfg, mesh, sharding.unboxed(boxed()))
    assert len(np.unique(np.round(whole.reshape(-1, D), 4), axis=0)) == 1
    assert len(np.unique(dropped.reshape(-1, D), axis=0)) == 8 * 6


def of_one_token(cfg, mesh, params):
    """Returns what the same token, 8 x 6 times, becomes without dropout and with it."""
    x_BTD, sizes = jnp.broadcast_to(tokens()[0][:1, :1], (8, 6, D)), MESHES[mesh]
    mesh, rules = meshes.make_mesh(sizes), sharding.make_rules(sizes)

    @jax.jit
    def run(rate):
        rngs = {'dropout': jax.random.key(5)}
        return Moe(cfg, 'decoder', E).apply({'params': params}, x_BTD, jnp.ones((8, 6), bool), rate, rngs=rngs)

    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        return run(0.0), run(0.5)


def test_devices_that_share_an_expert_drop_its_columns_apart():
    """All hidden numbers are alike, and their two halves cancel one another where both are dropped alike."""
    params = jax.tree.map(np.zeros_like, sharding.unboxed(boxed()))
    signs_F = np.repeat([1.0, -1.0], F // 2)
    params['in_0']['bias'] += 1
    params['in_1']['bias'] += 1
    params['out']['kernel'] += signs_F[:, None]
    whole, dropped = of_one_token(layer(expert_dispatch='dropless'), 'fsdp and tensor', params)
    assert not np.any(whole) and np.mean(np.asarray(dropped) == 0) < 0.5


def test_the_router_sends_nothing():
    mesh = meshes.make_mesh(config.Mesh(data=2, expert=4))
    logits_BTE = jax.device_put(jax.random.normal(jax.random.key(0), (8, 6, E)), meshes.batch_sharding(mesh))
    compiled = jax.jit(functools.partial(moe.route, choices=2)).lower(logits_BTE).compile()
    assert not re.search('all-gather|all-to-all|all-reduce|collective-permute', compiled.as_text())


# ------------------------------------------------------------------------------------------------ training
def train(cfg, sizes, count):
    """(loss and gradient of each of three steps, the last state, the mesh, the compiled step's text)."""
    trainer, found = Trainer(cfg, descent(0.5)), []
    mesh, rules = meshes.make_mesh(sizes, jax.devices()[:count]), sharding.make_rules(sizes)
    batches = [make_batch(cfg.train.objective, seed) for seed in range(3)]
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        args = trainer.model, trainer.objective, trainer.optimizer, trainer.hyper, batches[0], mesh, rules
        start, shardings = make_start(*args)
        state = start(trainer.hyper)
        batches = [jax.device_put(batch, meshes.batch_sharding(mesh)) for batch in batches]
        step = jax.jit(trainer.step, out_shardings=(shardings, None)).lower(state, batches[0], trainer.hyper).compile()
        for batch in batches:
            state, numbers = step(state, batch, trainer.hyper)
            total, weight = numbers['scores']['loss']
            found.append((float(total / weight), jax.device_get(state.opt_state)))
            assert 'aux_loss' in numbers['scores']
    return found, state, mesh, step.as_text()


def experts(objective, dispatch, choices):
    room = {'expert_capacity': E / choices} if dispatch == 'capacity' else {}
    return make_config(
        objective, model={'num_experts': E, 'experts_per_token': choices, 'expert_dispatch': dispatch, **room}
    )


@functools.cache
def trained(objective, choices):
    """What three steps on one device find; where places suffice, for either dispatch."""
    return train(experts(objective, 'dropless', choices), config.Mesh(data=1), 1)[0]


def exchanged(text, mesh, kind):
    """[(float32 bytes of the result, axes of the mesh)] of a compiled program's instructions."""
    found = [i for each in hlo.parse(text).computations.values() for i in each.values()]
    found = [i for i in found if i.opcode.removesuffix('-start') == kind]
    sizes = [sum(map(hlo.num_bytes, re.findall(r'f32\[[\d,]*\]', i.shape))) for i in found]
    axes = [device_groups.of(i.attributes, tuple(mesh.shape.items()))[0] for i in found]
    return list(zip(sizes, axes, strict=True))


@pytest.mark.parametrize(
    ('objective', 'dispatch', 'choices', 'mesh'),
    [
        pytest.param('causal_lm', 'dropless', 1, 'data', marks=pytest.mark.stack),
        *(
            pytest.param(*case, marks=pytest.mark.proof)
            for case in (
                ('causal_lm', 'capacity', 2, 'data'),
                ('seq2seq', 'dropless', 2, 'data'),
                ('causal_lm', 'capacity', 1, 'fsdp and tensor'),
            )
        ),
    ],
)
@pytest.mark.proof_cases('causal_lm-dropless-1-data')
def test_training_over_devices_equals_one_device(objective, dispatch, choices, mesh):
    sizes, cfg = MESHES[mesh], experts(objective, dispatch, choices)
    found, state, made, text = train(cfg, sizes, 8)
    for (loss, gradient), (same, same_gradient) in zip(found, trained(objective, choices), strict=True):
        assert loss == pytest.approx(same, rel=1e-6)
        assert relative(gradient, same_gradient) <= 1e-5
    assert len({loss for loss, _ in found}) == 3

    layers = state.params['decoder']['stack']['layers']['mlp']
    for name, (wide, high) in {'in_0': (D, F), 'out': (F, D)}.items():
        split = (sizes.fsdp, sizes.tensor) if name == 'in_0' else (sizes.tensor, sizes.fsdp)
        held = {shard.data.shape for shard in layers[name]['kernel'].addressable_shards}
        assert held == {(2, E // sizes.expert, wide // split[0], high // split[1])}

    gathers = exchanged(text, made, 'all-gather')
    assert max(size for size, _ in gathers) < 4 * E * D * F // sizes.tensor  # no kernels of all experts
    if objective == 'causal_lm':  # one loop over the layers forwards, one backwards: there and back in each
        r = ROWS * T // (sizes.data * sizes.fsdp * sizes.expert)
        if dispatch == 'capacity':
            places = E * math.ceil(cfg.model.expert_capacity * r * choices / E)
            sent = [size for size, axes in exchanged(text, made, 'all-to-all') if axes == ('expert',)]
            assert sent.count(4 * places * D) == 4
            assert len(sent) <= 5  # the gradient of a table, too, of which each adds up its own part of the width
        else:
            sums = [size for size, axes in exchanged(text, made, 'reduce-scatter') if axes == ('expert',)]
            assert gathers.count((4 * sizes.expert * r * D, ('expert',))) == sums.count(4 * r * D) == 2


# ------------------------------------------------------------------------------------------------ refusals
def test_experts_that_do_not_divide_are_refused():
    cfg = make_config('causal_lm', model={'num_experts': 6})
    for sizes, model, line in [
        ({'expert': 4}, cfg.model, 'mesh.expert=4 does not divide model.num_experts=6; nearest that does: 3'),
        ({'expert': 2}, dataclasses.replace(cfg.model, num_experts=None), 'model.num_experts=None; valid here: 1'),
    ]:
        with pytest.raises(UserError, match=line):
            checks.check(dataclasses.replace(cfg, model=model, mesh=config.Mesh(**sizes)))
    checks.check(dataclasses.replace(cfg, mesh=config.Mesh(expert=3)))
