"""The pipeline: what one device computes, on stages that hold their own layers alone."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import toy_data
from comparing import descent, relative
from places import ROOT
from small_training import ROWS, T, Trainer, make_batch, make_config
from starting import make_start
from tformer import checks, config
from tformer.commands import evaluate
from tformer.commands import train as train_command
from tformer.commands.run import Run
from tformer.config import Mesh
from tformer.distributed import hlo, meshes, sharding
from tformer.errors import UserError
from tformer.layers.dropout import DropoutRates
from tformer.layers.parallel.pipeline_stages import deal, pipelined
from tformer.model import build

STEPS, LAYERS = 3, 4

BIASED = {'position': 'relative'}
WINDOWS = {'attention_pattern': ('local', 'global'), 'window': 3}  # what differs from layer to layer
MORE_PARTS = Mesh(pipeline=2, tensor=2, fsdp=2, data=1, microbatches=4)
CASES = {  # objective, fields of the model, meshes
    'decoder': ('causal_lm', BIASED, [Mesh(pipeline=4, data=2), MORE_PARTS]),
    'encoder': ('masked_lm', {'position': 'rope', 'remat': 'dots', **WINDOWS}, [Mesh(pipeline=4, data=2)]),
    'encoder_decoder': ('seq2seq', {'remat': 'full'}, [Mesh(pipeline=2, data=4, pipeline_repeats=2)]),
}


def deep(objective, **model):
    """A config of 4 layers in each stack, without dropout unless the fields say otherwise."""
    cfg = make_config(objective, model={'dropout_rate': 0.0, **model})
    layers = {'num_encoder_layers': LAYERS, 'num_decoder_layers': LAYERS}
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **layers))


def packed(batch):
    """The batch with two sequences in a row where there is room: their segments and positions."""
    batch = dict(batch)
    for prefix in ('', 'encoder_'):
        if f'{prefix}positions' in batch:
            positions = batch[f'{prefix}positions']
            real, second = positions >= 0, positions >= 3
            batch[f'{prefix}segment_ids'] = np.where(real, np.where(second, 2, 1), 0).astype(np.int32)
            batch[f'{prefix}positions'] = np.where(second, positions - 3, positions).astype(np.int32)
    return batch


def train(cfg, mesh_config, batches, devices=8):
    """Returns (the loss of each step, the first gradient, the state after, the compiled step)."""
    trainer, mesh = Trainer(cfg, descent(0.1)), meshes.make_mesh(mesh_config, jax.devices()[:devices])
    rules = sharding.make_rules(mesh_config)
    losses, gradients = [], []
    with sharding.placed(mesh, mesh_config):
        parts = trainer.model, trainer.objective, trainer.optimizer, trainer.hyper
        start, shardings = make_start(*parts, batches[0], mesh, rules)
        state = start(parts[-1])
        placed = [jax.device_put(batch, meshes.batch_sharding(mesh)) for batch in batches]
        step = jax.jit(trainer.step, out_shardings=(shardings, None)).lower(state, placed[0], trainer.hyper).compile()
        for batch in placed:
            state, numbers = step(state, batch, trainer.hyper)
            total, weight = numbers['scores']['loss']
            losses.append(float(total / weight))
            gradients.append(jax.device_get(state.opt_state))
    return np.asarray(losses), gradients, state, step


@functools.cache
def trained(case, number):
    """`train` of a case on the mesh of that number; None: on one device."""
    objective, model, meshes = CASES[case]
    batches = [packed(make_batch(objective, seed, rows=2 * ROWS)) for seed in range(STEPS)]
    where = (Mesh(data=1), batches, 1) if number is None else (meshes[number], batches)
    return train(deep(objective, **model), *where)


# -------------------------------------------------------------------------------------------------- equality
@pytest.mark.slow
@pytest.mark.parametrize(
    ('case', 'number'),
    [
        pytest.param(case, number, marks=pytest.mark.stack if case == 'decoder' and number == 0 else pytest.mark.proof)
        for case, (_, _, meshes) in CASES.items()
        for number in range(len(meshes))
    ],
)
def test_stages_train_as_one_device_does(case, number):
    losses, gradients, state, _ = trained(case, None)
    others, other_gradients, other, _ = trained(case, number)
    assert len(set(losses.tolist())) == STEPS
    assert np.allclose(others, losses, rtol=1e-6, atol=0)
    for found, expected in zip(other_gradients, gradients, strict=True):
        assert relative(found, expected) < 1e-5
        for stack in expected.keys() & {'encoder', 'decoder'}:  # no leaf hides behind a larger one
            worst = jax.tree.map(relative, found[stack], expected[stack])
            assert max(jax.tree.leaves(worst)) < 1e-4
    assert relative(jax.device_get(other.params), jax.device_get(state.params)) < 1e-6


# ------------------------------------------------------------------------------------------------ the program
def sends(text):
    """The different sets of (source, target) devices of the program's collective-permutes."""
    found = re.findall(r'collective-permute(?:-start)?\(.*source_target_pairs=\{(\{.*?\})\}', text)
    return {frozenset(tuple(map(int, pair)) for pair in re.findall(r'\{(\d+),(\d+)\}', one)) for one in found}


@pytest.mark.slow
def test_activations_go_to_the_next_stage_and_parameters_stay_where_they_are():
    _, _, state, step = trained('decoder', 0)
    text, stages = step.as_text(), meshes.make_mesh(Mesh(pipeline=4, data=2)).devices.reshape(4, 2)
    ahead = {(stages[i, j].id, stages[i + 1, j].id) for i in range(3) for j in range(2)}
    assert sends(text) == {frozenset(ahead), frozenset((target, source) for source, target in ahead)}
    program = hlo.parse(text)
    executed = [i for i, _, _ in hlo.executions(program, hlo.nothing)]
    gathered = [i for i in executed if i.opcode.startswith('all-gather')]
    tokens = 4 * ROWS * T * 16  # bytes of a gradient, of the rows of one number of data
    assert gathered and max(hlo.num_bytes(i.shape) for i in gathered) == tokens, [i.shape for i in gathered]
    # The table has more rows than a stage has tokens: each stage adds up its own part of the width.
    (exchanged,) = (i for i in executed if i.opcode.startswith('all-to-all'))
    assert hlo.num_bytes(exchanged.shape) == tokens / 4, exchanged
    assert re.search('op_name=".*/embed/', exchanged.attributes), exchanged
    layers = jax.tree.leaves(state.params['decoder']['stack']['layers'])
    assert layers and all(x.sharding.shard_shape(x.shape) == (1, *x.shape[1:]) for x in layers)


def test_the_backward_pass_keeps_activations_of_turns_alone_and_no_weights():
    """A stack of weights, one for each turn, would be as many copies of the stage's layers."""
    D, F, mesh = 5, 77, jax.make_mesh((2,), ('pipeline',), axis_types=(AxisType.Auto,))
    each, x_BTD = {'in': jnp.ones((8, D, F)), 'out': jnp.ones((8, F, D))}, jnp.ones((6, 3, D))

    def layer(own, x, side, part):
        own = jax.tree.map(lambda w: w.astype(jnp.bfloat16), own)
        return x + (jnp.tanh(x.astype(jnp.bfloat16) @ own['in']) @ own['out']).astype(jnp.float32)

    def total(rounds, each, x_BTD):
        return pipelined(layer, each, x_BTD, (), sharding.Schedule(6, rounds)).sum()

    for rounds in (1, 2):
        turns, ticks = 6 * rounds, 2 + 6 * rounds - 1
        with jax.set_mesh(mesh):
            program = str(jax.make_jaxpr(jax.grad(functools.partial(total, rounds)))(each, x_BTD))
        shapes = re.findall(r'(?:f32|bf16)\[([\d,]+)\]', program)
        kept = {tuple(map(int, shape.split(','))) for shape in shapes}
        assert (turns, 4 // rounds, 1, 3, F) in kept  # activations: remat is off
        assert not [shape for shape in kept if {D, F} <= set(shape) and shape[0] in (turns, ticks)]
        assert not [shape for shape in kept if F in shape and shape[0] == ticks]


@pytest.mark.proof
def test_a_stage_keeps_of_each_turn_what_model_remat_says():
    """Attention's probabilities of every turn and layer, or not them, or the stream alone."""
    mesh_config = Mesh(pipeline=2, data=1)
    mesh, turns, layers, each = meshes.make_mesh(mesh_config, jax.devices()[:2]), 8, LAYERS // 2, 1
    batch = make_batch('causal_lm', rows=8)

    def kept(remat):
        cfg = deep('causal_lm', remat=remat, head_dim=4).model  # so that no keys have the shape of scores
        model = build(cfg)
        params = sharding.unboxed(jax.eval_shape(model.init, jax.random.key(0), batch)['params'])

        def total(params):
            return model.apply({'params': params}, batch, method='features').sum()

        with sharding.placed(mesh, mesh_config):
            program = str(jax.make_jaxpr(jax.grad(total))(params))
        found = re.findall(rf'\w+\[{turns},{layers},([\d,]+)\]', program)
        return {tuple(map(int, shape.split(','))) for shape in found}, cfg

    (everything, cfg), (without_scores, _), (stream, _) = kept(None), kept('attention'), kept('full')
    scores = (each, cfg.num_heads, T, T)
    assert scores in everything and scores not in without_scores | stream
    assert (each, T, cfg.mlp_dim) in everything & without_scores
    assert stream == {(each, T, cfg.emb_dim)}


def test_a_stage_that_waits_makes_no_nan():
    """A layer that has no gradient at 0, which is what a stage has received before its first part."""
    mesh = jax.make_mesh((4,), ('pipeline',), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    each, x_BTD = jax.random.normal(jax.random.key(0), (8, 6, 6)), jax.random.normal(jax.random.key(1), (8, 3, 6))
    weights = jnp.arange(8.0)

    def layer(kernel, x, weight, part):
        return (x @ kernel) / jnp.linalg.norm(x, axis=-1, keepdims=True) + weight[:, None, None]

    def loop(each, x_BTD):
        for kernel in each:
            x_BTD = layer(kernel, x_BTD, weights, 0)
        return x_BTD

    def loss(function):
        return jax.jit(jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(function(*args))), (0, 1)))(each, x_BTD)

    expected = loss(loop)
    for parts, rounds in ((2, 1), (8, 2)):
        with jax.set_mesh(mesh):
            found = loss(lambda *args: pipelined(layer, *args, weights, sharding.Schedule(parts, rounds)))  # noqa: B023
        assert relative(found, expected) < 1e-5


@pytest.mark.parametrize(('stages', 'rounds'), [(4, 2), (2, 4), (3, 2), (4, 6), (8, 3), (1, 2)])
def test_every_layer_is_dealt_to_the_stage_that_computes_it(stages, rounds):
    """Two layers a block: stage s computes in round r the layers from (r stages + s) 2 on."""
    mesh = jax.make_mesh((stages,), ('pipeline',), axis_types=(AxisType.Auto,), devices=jax.devices()[:stages])
    spec = PartitionSpec('pipeline')

    def dealt(layers):
        return deal(layers, jax.lax.axis_index('pipeline'), stages, rounds)

    with jax.set_mesh(mesh):
        found = jax.jit(jax.shard_map(dealt, in_specs=spec, out_specs=spec))(jnp.arange(stages * rounds * 2))
    for stage, layers in enumerate(np.asarray(found).reshape(stages, 2, rounds)):
        assert layers.T.tolist() == [[2 * (turn * stages + stage) + i for i in range(2)] for turn in range(rounds)]


# --------------------------------------------------------------------------------------------------- dropout
@pytest.mark.slow
@pytest.mark.parametrize('ways', [1, 2])
def test_dropout_is_drawn_anew_for_each_part_each_layer_and_each_device_and_always_alike(ways):
    """Each layer adds 2 or, where it is dropped, nothing: after 4 layers there are 0 to 4 of them."""
    cfg = deep('masked_lm', dropout_rate=0.5, position=None, final_norm=False).model
    model, batch = build(cfg), {'inputs': np.ones((4, T), np.int32)}
    params = sharding.unboxed(jax.eval_shape(model.init, jax.random.key(0), batch)['params'])
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
    params['encoder']['stack']['layers']['mlp']['out']['bias'] += 1

    @jax.jit
    def encode(key):
        return model.apply(
            {'params': params}, batch, DropoutRates(residual=0.5), rngs={'dropout': key}, method='features'
        )

    mesh_config = Mesh(pipeline=2, data=ways)
    with sharding.placed(meshes.make_mesh(mesh_config), mesh_config):
        x, same, other = (np.asarray(encode(jax.random.key(seed))) for seed in (0, 0, 1))
    assert np.array_equal(x, same) and not np.array_equal(x, other)
    counts = np.bincount((x / 2).astype(int).ravel(), minlength=LAYERS + 1)
    binomial = x.size * np.array([1, 4, 6, 4, 1]) / 16
    assert x.max() == 2 * LAYERS and np.all(np.abs(counts - binomial) < 5 * np.sqrt(binomial))
    rows = x.reshape(4, -1)
    assert all(0.1 < np.mean(rows[i] == rows[j]) < 0.5 for i in range(4) for j in range(i))  # 70 / 256 are


# ------------------------------------------------------------------------------------------------ what is refused
def refused(words, mesh, objective='causal_lm', train=None, **model):
    base = deep(objective, **model)
    cfg = dataclasses.replace(base, mesh=Mesh(**mesh), train=dataclasses.replace(base.train, **(train or {})))
    with pytest.raises(UserError, match=words) as error:
        checks.check(cfg)
    assert '\n' not in str(error.value)


def test_what_a_pipeline_cannot_split_is_refused_before_a_run():
    two = {'pipeline': 2, 'data': 1}
    for fields in ({'pipeline_repeats': 2}, {'microbatches': 4}):
        with pytest.raises(UserError, match=r'it applies where mesh\.pipeline is above 1'):
            stated = [f'mesh.{name}' for name in fields]
            checks.settle(dataclasses.replace(deep('causal_lm'), mesh=Mesh(**fields)), stated)
    refused(r'model.num_decoder_layers=4 is not a multiple of .* nearest that is: 3$', {'pipeline': 3, 'data': 1})
    refused(
        r'model.num_encoder_layers=4 .*=2 stages x mesh.pipeline_repeats=4; .*: 8$',
        {**two, 'pipeline_repeats': 4},
        'masked_lm',
    )
    refused(
        r'mesh.microbatches=3 is not a multiple of mesh.pipeline=2', {**two, 'pipeline_repeats': 2, 'microbatches': 3}
    )
    refused(r'train.batch_size=8 is not a multiple of .*microbatches=3 ', {**two, 'microbatches': 3})
    refused(r'train.batch_size=8 .* x 8 ways', {**two, 'data': 4, 'fsdp': 2})
    refused(r'train.batch_size=8 .*train.microbatches=8 ', two, train={'microbatches': 8})
    refused('layer_sharing=all .* mesh.pipeline=2', two, layer_sharing='all')
    refused(r'remat=offload: .*\(mesh.pipeline=2\) .*; use dots or full$', two, remat='offload')
    refused('norm=batchnorm .* mesh.pipeline=2', two, norm='batchnorm')
    refused('balance_weight', two, num_experts=2)
    dropless = {'num_experts': 2, 'balance_weight': 0.0, 'router_z_weight': 0.0}
    refused('expert_dispatch=capacity', two, **dropless, expert_dispatch='capacity')
    refused('batchnorm', {'pipeline': -1, 'data': 1}, norm='batchnorm')
    for mesh in (
        two,
        {**two, 'pipeline_repeats': 2},
        {**two, 'microbatches': 8},
        {'pipeline': -1, 'data': 2, 'pipeline_repeats': 2},
    ):
        checks.check(dataclasses.replace(deep('causal_lm', **dropless), mesh=Mesh(**mesh)))


def test_what_is_known_with_the_devices_is_refused_then():
    def run(mesh_config, rows):
        model, batch = build(deep('causal_lm').model), make_batch('causal_lm', rows=rows)
        params = sharding.unboxed(jax.eval_shape(model.init, jax.random.key(0), batch)['params'])
        with sharding.placed(meshes.make_mesh(mesh_config, jax.devices()), mesh_config):
            return jax.eval_shape(lambda params: model.apply({'params': params}, batch), params).shape

    assert run(Mesh(pipeline=-1, data=2), 8)[:2] == (8, T)
    for mesh, rows, words in (
        (Mesh(pipeline=-1, data=1), 8, '4 layers do not divide into mesh.pipeline=8 stages'),
        (Mesh(pipeline=-1, data=2), 6, 'a batch of 6 rows does not divide into mesh.microbatches=4'),
        (Mesh(pipeline=-1, data=4, pipeline_repeats=2, microbatches=3), 6, 'mesh.pipeline_repeats=2 needs'),
    ):
        with pytest.raises(UserError, match=words):
            run(mesh, rows)


def test_generation_of_any_number_of_rows_is_in_no_pipeline():
    model, batch = build(deep('seq2seq').model), make_batch('seq2seq', rows=3)
    params = sharding.unboxed(jax.eval_shape(model.init, jax.random.key(0), batch)['params'])
    mesh_config = Mesh(pipeline=2, data=4)
    with sharding.placed(meshes.make_mesh(mesh_config), mesh_config):
        cache = jax.eval_shape(lambda p: model.apply({'params': p}, batch, 16, method='start'), params)
    assert [layer.v_BKSU.shape[0] for layer in cache.cross] == [3] * LAYERS


# ------------------------------------------------------------------------------------------------- a whole run
@pytest.mark.proof
def test_a_run_in_stages_is_saved_and_scored_and_one_device_scores_it_alike(tmp_path, capsys):
    fields = {
        'data.source': 'files', 'data.path': str(toy_data.running(tmp_path / 'data')), 'data.tokenizer': 'symbol',
        'data.length': '32', 'train.batch_size': '8', 'train.num_steps': '2', 'train.eval_batches': '1',
        'evaluate.samples': '0', 'evaluate.max_examples': '4', 'mesh.data': '2', 'mesh.pipeline': '2',
    }  # fmt: skip
    train_command.train_and_evaluate(config.load(f'{ROOT}/configs/lm_stdlib.py:smoke', fields), str(tmp_path / 'run'))
    run = Run.load(tmp_path / 'run')
    found = json.loads((tmp_path / 'run' / 'result.json').read_text())['test']['loss']
    assert run.config.mesh.pipeline == 2 and run.step == 2
    alone = dataclasses.replace(run, config=dataclasses.replace(run.config, mesh=Mesh(data=1)))
    assert evaluate.evaluate(alone, 'test')['loss'] == pytest.approx(found, rel=1e-6)
