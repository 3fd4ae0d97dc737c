"""Recurrent baselines: the cells' arithmetic, and what the transformer's contracts ask of a model."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import knobs
from comparing import assert_near, differs, with_gradients
from tformer import checks
from tformer.checks.model_fields import RECURRENT
from tformer.commands import attention, inspect
from tformer.commands.run import Run
from tformer.config import Config, Data, Decode, Mesh, Model, Optimizer, Train
from tformer.decode.generate import make_generate
from tformer.distributed import collectives, costs, hlo, meshes, sharding
from tformer.errors import UserError
from tformer.hf import export_params
from tformer.layers import recurrent, recurrent_cells
from tformer.layers.dropout import DropoutRates
from tformer.layers.layer_stack import PerLayer
from tformer.layers.outputs import HEADS
from tformer.layers.recurrent_attention import SCORES, CrossAttention, Source, attention_weights
from tformer.layers.recurrent_cells import CELLS, Kernels
from tformer.layers.resolved import resolve_model
from tformer.model import build
from tformer.objectives import OBJECTIVES
from tformer.optim.hyperparameters import Hyperparameters
from tformer.optim.optimizers import OPTIMIZERS, make_optimizer
from tformer.training import dummy_batch, flops
from tformer.training.state import begin, initial_variables, logical_names
from tformer.training.step import make_train_step

V, T, S, D = 12, 8, 6, 16
OBJECTIVE = {'encoder': 'masked_lm', 'decoder': 'causal_lm', 'encoder_decoder': 'seq2seq'}


def make_model(family='decoder', cell='gru', **fields):
    layers = {f'num_{stack}_layers': 2 for stack in ('encoder', 'decoder') if stack in family}
    fixed = {'vocab_size': V, 'emb_dim': D, 'max_len': 64, 'dropout_rate': 0.0, **layers}
    return Model(family=family, recurrence=cell, **{**fixed, **fields})


def make_config(cfg, **sections):
    return Config(
        model=cfg,
        data=sections.get('data', Data(length=T, encoder_length=S)),
        optimizer=sections.get('optimizer', Optimizer()),
        train=sections.get('train', Train(objective=OBJECTIVE[cfg.family], num_steps=1, batch_size=4)),
        mesh=sections.get('mesh', Mesh()),
        decode=Decode(max_len=T),
    )


# ---------------------------------------------------------------------------------------------------- arithmetic
def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_hand(cell, p, x_TD):
    """The outputs of one row, from zeros."""
    h = c = np.zeros(D)
    outputs = []
    for x in x_TD:

        def gate(name, h=h, x=x):
            read, keep = p[f'i{name}'], p[f'h{name}']
            return x @ read['kernel'] + read.get('bias', 0) + h @ keep['kernel'] + keep.get('bias', 0)

        if cell == 'rnn':
            h = np.tanh(gate(''))
        elif cell == 'lstm':
            c = sigmoid(gate('f')) * c + sigmoid(gate('i')) * np.tanh(gate('g'))
            h = sigmoid(gate('o')) * np.tanh(c)
        else:
            r, z = sigmoid(gate('r')), sigmoid(gate('z'))
            n = x @ p['in']['kernel'] + p['in']['bias'] + r * (h @ p['hn']['kernel'] + p['hn']['bias'])
            h = (1 - z) * np.tanh(n) + z * h
        outputs.append(h)
    return np.array(outputs), c


def one_layer(cfg, stack, **variables):
    @jax.jit
    def apply(variables, *args):
        return recurrent.Layer(resolve_model(cfg), stack).apply(variables, *args, DropoutRates(), PerLayer())

    x = np.random.default_rng(0).standard_normal((2, 5, D)).astype(np.float32)
    tokens, layer = (x, None, np.ones((2, 5), bool), None), recurrent.Layer(resolve_model(cfg), stack)
    shapes = jax.eval_shape(lambda: layer.init(jax.random.key(0), *tokens, DropoutRates(), PerLayer())['params'])
    return apply, x, {'params': random_params(sharding.unboxed(shapes))}


def random_params(shapes):
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape) * D**-0.5, x.dtype), shapes)


@pytest.mark.stack
@pytest.mark.parametrize('cell', CELLS)
def test_a_layer_is_its_cell_by_hand(cell):
    apply, x, variables = one_layer(make_model(cell=cell), 'decoder')
    y, state = apply(variables, x, None, np.ones((2, 5), bool), None)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), variables['params']['cell'])
    for row in range(2):
        expected, c = by_hand(cell, p, x[row].astype(np.float64))
        np.testing.assert_allclose(y[row], expected, atol=1e-5)
        last = {'lstm': (c, expected[-1])}.get(cell, (expected[-1],))
        for found, wanted in zip(jax.tree.leaves(state), last, strict=True):
            np.testing.assert_allclose(found[row], wanted, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('backwards', [False, True])
@pytest.mark.parametrize('cell', CELLS)
def test_gradients_are_those_of_the_cell_token_by_token(cell, backwards):
    """Of two rows with padding, the second of which holds two examples."""
    rng, (B, length, width, units) = np.random.default_rng(0), (2, 6, 3, 4)
    kind, gates = CELLS[cell], len(CELLS[cell].gates)
    shapes = (width, gates, units), (gates, units), (units, gates, units), (gates, units)
    kernels = Kernels(*(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes))
    state = jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), kind.zeros(B, units, jnp.float32)
    )
    x, dy = rng.standard_normal((B, length, width)).astype('f'), rng.standard_normal((B, length, units)).astype('f')
    real = np.array([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]], bool)
    segments = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 2, 2, 2]])

    def by_token(kernels, state, x):
        outputs = [None] * length
        for t in reversed(range(length)) if backwards else range(length):
            before = t + (1 if backwards else -1)
            if 0 <= before < length:
                kept = jnp.asarray(segments[:, t] == segments[:, before])[:, None]
                state = jax.tree.map(lambda s, kept=kept: s * kept, state)
            inputs = jnp.einsum('BD,DGU->BGU', x[:, t], kernels.inputs_DGU) + kernels.input_bias_GU[None]
            hidden = jax.tree.leaves(state)[-1]
            hiddens = jnp.einsum('BU,UGV->BGV', hidden, kernels.hiddens_UGU) + kernels.hidden_bias_GU[None]
            new, there = kind.update(state, inputs, hiddens), real[:, t][:, None]
            outputs[t] = jax.tree.leaves(new)[-1] * there
            state = jax.tree.map(lambda a, b, there=there: jnp.where(there, a, b), new, state)
        return state, jnp.stack(outputs, 1)

    def read(kernels, state, x):
        return recurrent_cells.read(kind, kernels, state, x, real, segments, backwards=backwards)

    def loss(function, *arguments):
        last, y = function(*arguments)
        return jnp.sum(y * dy) + sum(jnp.sum(part**2) for part in jax.tree.leaves(last))

    for argument in range(3):
        found, wanted = (
            jax.grad(functools.partial(loss, each), argument)(kernels, state, x) for each in (read, by_token)
        )
        jax.tree.map(lambda a, b: assert_near(a, b, 1e-6), found, wanted)


def test_backwards_is_forwards_over_the_real_tokens_turned_round():
    """Row 1 has padding at both ends, which the backward half starts after."""
    apply, x, variables = one_layer(make_model('encoder', 'lstm', bidirectional=True), 'encoder')
    real = np.array([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0]], bool)
    y, state = apply(variables, x, None, real, None)
    turned = {'params': {**variables['params'], 'forward_cell': variables['params']['backward_cell']}}
    for row in range(2):
        alone, ended = apply(
            turned, x[row : row + 1, real[row]][:, ::-1], None, np.ones((1, real[row].sum()), bool), None
        )
        np.testing.assert_allclose(y[row, real[row], D // 2 :], alone[0, ::-1, : D // 2], atol=1e-6)
        for found, wanted in zip(state, ended, strict=True):
            np.testing.assert_allclose(found[row, D // 2 :], wanted[0, : D // 2], atol=1e-6)
    assert (y[1, ~real[1]] == 0).all()


def test_weights_over_padding_are_0_and_the_others_sum_to_1():
    scores = np.random.default_rng(0).standard_normal((3, 2, 4)).astype(np.float32) * 50
    real = np.array([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]], bool)
    weights = attention_weights(scores, real)
    assert (weights[~np.broadcast_to(real[:, None], weights.shape)] == 0).all()
    np.testing.assert_allclose(weights[:2].sum(-1), 1, atol=1e-6)
    grads = jax.grad(lambda s: jnp.sum(attention_weights(s, real) ** 2))(scores)
    assert np.isfinite(grads).all() and (grads[2] == 0).all()


@pytest.mark.parametrize('score', SCORES)
def test_attention_by_hand(score):
    """tanh(W [c; h]) with the weights of v . tanh(W h + U k) or h . k."""
    attention = CrossAttention(resolve_model(make_model('encoder_decoder', recurrent_attention=score)), 'decoder')
    rng = np.random.default_rng(0)
    h, values = rng.standard_normal((1, 3, D)), rng.standard_normal((1, 4, D))
    positions = np.array([[0, 1, 2, -1]])

    def run(module, h, values):
        return module(h, Source(module.keys(values), values, positions))

    shapes = jax.eval_shape(lambda: attention.init(jax.random.key(0), h.astype('f'), values.astype('f'), method=run))
    params = random_params(sharding.unboxed(shapes))['params']
    found = attention.apply({'params': params}, h.astype('f'), values.astype('f'), method=run)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    for t in range(3):
        s = [h[0, t] @ values[0, i] for i in range(3)]
        if score == 'additive':
            kernels = [p['score'][name]['kernel'] for name in ('query', 'key', 'vector')]
            s = [np.tanh(h[0, t] @ kernels[0] + values[0, i] @ kernels[1]) @ kernels[2] for i in range(3)]
        weights = np.exp(s) / np.exp(s).sum()
        wanted = np.tanh(np.concatenate([weights @ values[0, :3], h[0, t]]) @ p['out']['kernel'])
        np.testing.assert_allclose(found[0, t], wanted, atol=1e-5)


# ------------------------------------------------------------------------------------------------------ contracts
CASES = {
    'decoder': make_model('decoder', 'lstm'),
    'both ways': make_model('encoder', 'gru', bidirectional=True, num_token_types=2),
    'forwards': make_model('encoder', 'rnn', tied_embeddings=None, embedding_factor_dim=8),
    'no attention': make_model('encoder_decoder', 'rnn'),
    'dot': make_model('encoder_decoder', 'gru', recurrent_attention='dot', tied_embeddings='output'),
    'additive': make_model('encoder_decoder', 'lstm', bidirectional=True, recurrent_attention='additive'),
}


def sides(cfg):
    return {'': T, 'encoder_': S} if cfg.family == 'encoder_decoder' else {'': T}


def make_batch(cfg):
    """Rows: 0 is full, 1 ends in padding, 2 begins with it, 3 holds two examples and padding where rows may."""
    rng, batch, packs = np.random.default_rng(0), {}, cfg.family != 'encoder_decoder'
    for side, length in sides(cfg).items():
        batch[f'{side}inputs'] = rng.integers(1, V, (4, length), np.int32)
        row = np.arange(length)
        packed = [0, 1, 2, 0, 1, 2, 3, -1] if packs else row
        rows = [row, np.where(row < length - 3, row, -1), np.maximum(row - 2, -1), packed]
        batch[f'{side}positions'] = np.array(rows, np.int32)
    if packs:
        batch['segment_ids'] = (batch['positions'] >= 0).astype(np.int32)
        batch['segment_ids'][3, 3:7] = 2
    if cfg.num_token_types:
        batch['token_types'] = rng.integers(0, 2, (4, T), np.int32)
    return batch


class Case:
    def __init__(self, cfg):
        self.cfg, self.batch = resolve_model(cfg), make_batch(cfg)
        self.model = build(self.cfg)
        self.boxed = jax.eval_shape(self.model.init, jax.random.key(0), self.batch)['params']
        self.params = random_params(sharding.unboxed(self.boxed))
        real = self.batch['positions'] >= 0
        self.cotangent = np.where(real[..., None], np.random.default_rng(2).standard_normal((4, T, V)), 0).astype('f')
        self.probe, self.forward = jax.jit(with_gradients(self.apply)), jax.jit(self.apply)

    def apply(self, params, batch):
        return self.model.apply({'params': params}, batch, DropoutRates())

    def logits(self, batch):
        return np.asarray(self.forward(self.params, batch))

    @functools.cached_property
    def plain(self):
        return self.logits(self.batch)

    @functools.cached_property
    def both(self):
        return jax.device_get(self.probe(self.params, self.batch, self.cotangent))


@functools.cache
def made(name):
    return Case(CASES[name])


@pytest.fixture(params=CASES)
def case(request):
    return made(request.param)


def changed(batch, name, where):
    return {**batch, name: np.where(where, batch[name] % (V - 1) + 1, batch[name])}


@pytest.mark.slow
def test_gradients_reach_every_parameter_and_every_layer(case):
    logits, grads = case.both
    assert logits.dtype == np.float32 and logits.shape == (4, T, V) and np.isfinite(logits).all()
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        layers = grad if 'layers' in [key.key for key in path] else [grad]
        assert all(np.isfinite(x).all() and np.max(np.abs(x)) > 1e-6 for x in layers), jax.tree_util.keystr(path)


@pytest.mark.slow
def test_a_token_is_seen_by_those_who_may_and_no_other(case):
    for t in (0, 3, T - 1):
        where = np.zeros((4, T), bool)
        where[0, t] = True
        seen = differs(case.logits(changed(case.batch, 'inputs', where)), case.plain)
        assert not seen[1:].any()
        assert seen[0].all() if case.cfg.bidirectional and case.cfg.family == 'encoder' else seen[0, t:].all()
        if not (case.cfg.bidirectional and case.cfg.family == 'encoder'):
            assert not seen[0, :t].any()
    if case.cfg.family == 'encoder_decoder':
        for s in (0, S - 1):
            where = np.zeros((4, S), bool)
            where[0, s] = True
            seen = differs(case.logits(changed(case.batch, 'encoder_inputs', where)), case.plain)
            assert seen[0].all() and not seen[1:].any()


def test_padding_changes_nothing(case):
    """Neither its tokens, nor more of it at either end."""
    real = case.batch['positions'] >= 0
    for side in sides(case.cfg):
        padding = case.batch[f'{side}positions'] < 0
        assert padding[1:3].any(1).all()
        assert not differs(case.logits(changed(case.batch, f'{side}inputs', padding)), case.plain)[real].any()
    for front, back in ((0, 3), (3, 0)):
        wider = {
            name: np.pad(x, [(0, 0), (front, back)], constant_values=-1 if 'positions' in name else 0)
            for name, x in case.batch.items()
        }
        assert_near(case.logits(wider)[:, front : front + T][real], case.plain[real], 1e-6)


@pytest.mark.slow
@pytest.mark.proof_cases('both ways')
def test_packed_examples_do_not_see_each_other_and_are_as_alone(case):
    if 'segment_ids' not in case.batch:
        return
    segments = case.batch['segment_ids']
    for segment in (1, 2):
        where = (segments == segment) & (np.arange(4) == 3)[:, None]
        seen = differs(case.logits(changed(case.batch, 'inputs', where)), case.plain)
        assert seen[3, where[3]].any() and not seen[3, segments[3] == 3 - segment].any()
        alone = {name: x[3:, where[3]] for name, x in case.batch.items() if name != 'segment_ids'}
        with jax.disable_jit():
            assert_near(case.apply(case.params, alone)[0], case.plain[3, where[3]], 1e-6)


def test_decoding_in_chunks_is_the_full_forward(case):
    if case.cfg.family == 'encoder':
        return
    batch = {name: x[:3] for name, x in case.batch.items() if name != 'segment_ids'}

    def decode(params, batch):
        def extend(cache, chunk):
            return case.model.apply({'params': params}, *chunk, cache, method='extend')[::-1]

        cache = case.model.apply({'params': params}, batch, T, method='start')
        chunks = [jnp.moveaxis(batch[name].reshape(3, -1, 2), 1, 0) for name in ('inputs', 'positions')]
        return jnp.moveaxis(jax.lax.scan(extend, cache, chunks)[1], 0, 1).reshape(3, T, V)

    real = batch['positions'] >= 0
    assert_near(jax.jit(decode)(case.params, batch)[real], case.plain[:3][real], 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['decoder', pytest.param('additive', marks=pytest.mark.proof)])
def test_beams_carry_their_states_along(name):
    """Three hypotheses of each of two rows go on as those that they are copies of."""
    case, first, then = made(name), np.array([[3, 3, 8], [1, 8, 4]]), np.array([[5, 6, 7], [8, 9, 5]])
    order, position = np.array([[2, 0, 0], [2, 0, 1]]), np.zeros((2, 3), np.int32)
    batch = {key: x[:2] for key, x in case.batch.items() if key != 'segment_ids'}

    @jax.jit
    def run(params, batch):
        def extend(tokens, positions, cache):
            return case.model.apply({'params': params}, tokens, positions, cache, method='extend')

        cache = extend(first, position, case.model.apply({'params': params}, batch, T, method='start').branch(3))[1]
        return extend(then, position + 1, cache.take(order))[0]

    def alone(tokens, row):
        """All of a beam's tokens at once."""
        side = {key: x[row : row + 1] for key, x in batch.items() if key.startswith('encoder_')}
        return {'inputs': np.array([tokens]), 'positions': np.arange(2)[None], **side}

    taken = run(case.params, batch)
    with jax.disable_jit():
        for row, beam in ((0, 0), (0, 1), (1, 0)):
            tokens = [first[row, order[row, beam]], then[row, beam]]
            assert_near(taken[row, beam], case.apply(case.params, alone(tokens, row))[0, 1], 1e-6)


@pytest.mark.slow
@pytest.mark.proof_cases('additive', 'both ways', 'forwards')
def test_eight_devices_are_one(case):
    """Two ways each of data, of parameters, and of vocabulary."""
    mesh, rules = meshes.make_mesh(Mesh(data=2, fsdp=2, tensor=2)), sharding.RULES['fsdp_tp']
    params = jax.device_put(case.params, sharding.tree_shardings(case.boxed, mesh, rules))
    split = [x.sharding.is_fully_replicated for x in jax.tree.leaves(params)]
    assert not all(split)
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        placed = jax.device_put((case.batch, case.cotangent), meshes.batch_sharding(mesh))
        logits, grads = jax.device_get(jax.jit(with_gradients(case.apply))(params, *placed))
    assert_near(logits, case.both[0], 1e-5)
    jax.tree.map(lambda a, b: assert_near(a, b, 1e-5), grads, case.both[1])


MESHES = {
    'data': Mesh(),
    'fsdp': Mesh(data=1, fsdp=8),
    'fsdp and tensor': Mesh(data=1, fsdp=2, tensor=4),
    'context': Mesh(data=4, context=2),
}


@pytest.mark.slow
@pytest.mark.parametrize('mesh', MESHES)
def test_devices_gather_kernels_once_and_not_for_each_token(mesh):
    """Each reads an eighth of the rows, whatever axes the mesh has."""
    rows, length, width, mesh_config = 8, 40, 64, MESHES[mesh]
    cfg = resolve_model(make_model('decoder', 'lstm', emb_dim=width, num_decoder_layers=1))
    layer, rng = recurrent.Layer(cfg, 'decoder'), np.random.default_rng(0)
    x, dy = (rng.standard_normal((rows, length, width)).astype('f') for _ in range(2))
    real = np.arange(length) < rng.integers(20, length, (rows, 1))
    boxed = jax.eval_shape(lambda: layer.init(jax.random.key(0), x, None, real, None, DropoutRates(), PerLayer()))
    params = random_params(sharding.unboxed(boxed))

    def loss(params, x):
        return jnp.sum(layer.apply(params, x, None, real, None, DropoutRates(), PerLayer())[0] * dy)

    both = jax.grad(loss, (0, 1))
    expected = jax.jit(both)(params, x)
    made, rules = meshes.make_mesh(mesh_config), sharding.make_rules(mesh_config)
    shardings = sharding.tree_shardings(boxed, made, rules)
    with sharding.placed(made, mesh_config):
        placed = jax.device_put(params, shardings), jax.device_put(x, meshes.batch_sharding(made))
        compiled = jax.jit(both, out_shardings=(shardings, None)).lower(*placed).compile()
        found, program = compiled(*placed), hlo.parse(compiled.as_text())
    jax.tree.map(lambda a, b: assert_near(a, b, 1e-5), found, expected)
    assert sum(row.count for row in collectives.of(program, made)) < length
    product = 2 * (rows // 8 * length) * width * 4 * width
    assert costs.flops(program) == 2 * product + 4 * product  # forwards, and the gradients of all operands


@pytest.mark.slow
def test_bfloat16_is_near(case):
    rounded = build(dataclasses.replace(case.cfg, dtype='bfloat16', param_dtype='bfloat16'))
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), case.params)
    boxed = jax.eval_shape(rounded.init, jax.random.key(0), case.batch)['params']
    assert {x.dtype for x in jax.tree.leaves(boxed)} == {jnp.dtype('bfloat16')}
    logits = rounded.apply({'params': params}, case.batch, DropoutRates())
    assert logits.dtype == jnp.float32 and np.max(np.abs(logits - case.plain)) < 0.1 * np.max(np.abs(case.plain))


def test_the_heads_of_tasks_read_the_stream():
    cfg = resolve_model(make_model('encoder', bidirectional=True, num_classes=5, pooling='last', pooler=True))
    model, batch = build(cfg), {'inputs': np.ones((2, T), np.int32), 'targets': np.ones((2, T), np.int32)}

    def every(model, batch):
        outputs = {name: HEADS[name].method(model, batch) for name in ('class', 'number', 'tags', 'spans')}
        return {
            **outputs,
            'pairs': HEADS['sentences'].method(model, batch)[1],
            'statistics': model.token_statistics(batch, chunk=3).target,
        }

    shapes = jax.eval_shape(lambda: model.init_with_output(jax.random.key(0), batch, method=every)[0])
    wanted = {'class': (2, 5), 'number': (2,), 'tags': (2, T, 5), 'spans': (2, T, 2), 'pairs': (2, 2)}
    assert {name: x.shape for name, x in shapes.items()} == {**wanted, 'statistics': (2, T)}


# ------------------------------------------------------------------------------------------------------- training
COPIED, BOS, EOS = 4, 1, 2


def copies(rng, rows):
    """Numbers to be written again, then EOS."""
    text = rng.integers(3, V, (rows, COPIED), np.int32)
    ends = np.full((rows, 1), EOS, np.int32)
    targets = np.concatenate([text, ends], 1)
    inputs = np.concatenate([np.full((rows, 1), BOS, np.int32), text], 1)
    return {
        'inputs': inputs,
        'targets': targets,
        'weights': np.ones(inputs.shape, np.float32),
        'encoder_inputs': targets,
        'positions': np.broadcast_to(np.arange(COPIED + 1, dtype=np.int32), inputs.shape),
        'encoder_positions': np.broadcast_to(np.arange(COPIED + 1, dtype=np.int32), inputs.shape),
    }


@pytest.mark.proof
def test_copying_is_learned_and_every_strategy_writes_the_copy():
    cfg = make_model(
        'encoder_decoder', 'gru', emb_dim=32, bidirectional=True, recurrent_attention='dot', num_encoder_layers=1,
        num_decoder_layers=1,
    )  # fmt: skip
    fast = Optimizer(learning_rate=0.01, schedule='constant', warmup_steps=0)
    run = make_config(cfg, optimizer=fast, train=Train(objective='seq2seq', num_steps=150, batch_size=64))
    run = checks.resolve(run, vocab_size=V, encoder_vocab_size=V)
    model, objective, hyper, rng = (
        build(run.model),
        OBJECTIVES['seq2seq'],
        Hyperparameters.of(run),
        np.random.default_rng(0),
    )
    batch = copies(rng, 64)
    optimizer = make_optimizer(run, logical_names(model, objective, batch))
    state = begin(optimizer, hyper, sharding.unboxed(initial_variables(model, objective, hyper, batch)['params']), {})
    step = jax.jit(make_train_step(model, objective, optimizer, run), donate_argnums=0)
    for _ in range(150):
        state, found = step(state, copies(rng, 64), hyper)
    right, weight = found['scores']['accuracy']
    assert right / weight > 0.97
    unseen = copies(np.random.default_rng(1), 8)
    prompt = {name: x[:, :1] if not name.startswith('encoder_') else x for name, x in unseen.items()}
    for decode in (Decode('greedy', max_len=5), Decode('beam', beam_size=3, max_len=5)):
        tokens, _ = make_generate(model, decode, eos=EOS)({'params': state.params}, prompt, None)
        assert (np.asarray(tokens) == unseen['targets']).mean() > 0.95
    sample = make_generate(model, Decode('sample', top_k=1, max_len=5), eos=EOS)
    tokens, _ = sample({'params': state.params}, prompt, jax.random.key(0))
    assert (np.asarray(tokens) == unseen['targets']).mean() > 0.95


@pytest.mark.slow
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_every_optimizer_updates_every_parameter(name):
    case = made('additive')
    optimizer = Optimizer(name=name, weight_decay=0.0, frozen_layers=1, layer_decay=0.5)
    names = nn.get_partition_spec(case.boxed)
    update = make_optimizer(make_config(CASES['additive'], optimizer=optimizer), names)
    state = update.init(case.params)
    step = jax.jit(
        lambda grads, state: update.update(grads, state, case.params, learning_rate=0.1, weight_decay=0.0)[0]
    )
    for path, moved in jax.tree_util.tree_leaves_with_path(step(case.both[1], state)):
        keys = [key.key for key in path]
        if keys[0] == 'embed':  # below a frozen layer
            assert (np.asarray(moved) == 0).all()
        elif 'layers' in keys:
            assert (moved[0] == 0).all() and np.all(np.any(moved[1:], axis=tuple(range(1, moved.ndim))))
        else:
            assert np.any(moved)


# ------------------------------------------------------------------------------------------------------ the fields
@pytest.mark.parametrize('field', [field.name for field in dataclasses.fields(Model) if field.name not in RECURRENT])
def test_a_field_of_the_block_is_refused(field):
    value = knobs.KNOBS[field][2]
    cfg = make_model('decoder')
    checks.check_here(make_config(cfg))
    with pytest.raises(UserError) as error:
        checks.check_here(make_config(dataclasses.replace(cfg, **{field: value})))
    assert str(error.value) == f'model.{field}={value} has no effect here: it applies where model.recurrence is None'


@pytest.mark.slow
@pytest.mark.parametrize('field', [field for field in RECURRENT if field not in ('family', 'max_len')])
def test_a_field_of_a_recurrent_model_changes_it(field):
    """`max_len` bounds the data: no table has its length."""
    objective, _, value = knobs.KNOBS[field]
    if field in ('num_classes', 'pooling', 'pooler', 'head_dropout_rate'):
        objective = 'classification'
    family = {'masked_lm': 'encoder', 'classification': 'encoder', 'seq2seq': 'encoder_decoder'}.get(
        objective, 'decoder'
    )
    needed = {'encoder_vocab_size': {'tied_embeddings': 'output'}, 'pooler_activation': {'pooler': True}}
    cfg = make_model(family, dropout_rate=0.1, **needed.get(field, {}))
    if field == 'num_classes':
        cfg = dataclasses.replace(cfg, num_classes=3)
    other = dataclasses.replace(cfg, **{field: value})
    layers = ('num_encoder_layers', 'num_decoder_layers')
    if field in layers:
        other = dataclasses.replace(cfg, **dict.fromkeys(layers, 3))
    assert other != cfg
    checks.check_here(make_config(other, train=Train(objective=objective, num_steps=1)))
    assert knobs.trace(objective, other) != knobs.trace(objective, cfg)


REFUSED = {
    'num_decoder_layers=3 must be': {'model': make_model('encoder_decoder', num_decoder_layers=3)},
    'emb_dim=15: it must be even': {'model': make_model('encoder', bidirectional=True, emb_dim=15)},
    'mesh.context=2': {'mesh': Mesh(context=2)},
    'mesh.pipeline=2': {'mesh': Mesh(pipeline=2)},
    'mesh.expert=2': {'mesh': Mesh(expert=2)},
    'not for data.batching=pack': {'model': make_model('encoder_decoder'), 'data': Data(length=T, batching='pack')},
    'bidirectional_prefix must be False': {'train': Train(objective='prefix_lm', num_steps=1)},
    'no generator': {'model': make_model('encoder'), 'train': Train(objective='replaced_token', num_steps=1)},
    "model.recurrence='lstmm'": {'model': make_model(cell='lstmm')},
}


@pytest.mark.parametrize('words', REFUSED)
def test_what_a_recurrent_model_cannot_do_is_refused_in_a_line(words):
    sections = dict(REFUSED[words])
    with pytest.raises(UserError) as error:
        checks.check_here(make_config(sections.pop('model', make_model()), **sections))
    assert words in str(error.value) and '\n' not in str(error.value)


def test_what_reads_no_further_than_its_turn_is_taken():
    data = Data(length=T, bidirectional_prefix=False)
    checks.check_here(make_config(make_model(), data=data, train=Train(objective='prefix_lm', num_steps=1)))
    checks.check_here(make_config(make_model(), data=Data(length=T, batching='pack')))
    odd = make_model('encoder_decoder', emb_dim=15, recurrent_attention='dot')  # no heads, no sinusoids
    checks.check_here(make_config(checks.resolve(make_config(odd), vocab_size=V).model))
    case = made('dot')
    with pytest.raises(ValueError, match='one source per row'):
        case.apply(case.params, {**case.batch, 'segment_ids': np.ones((4, T), np.int32)})


def test_no_hub_and_no_attention_maps():
    with pytest.raises(UserError, match=r"model\.recurrence='gru' has no counterpart in the hub"):
        export_params('gpt2', {}, make_model())
    run = Run(None, make_config(make_model()), None, {}, 0)
    with pytest.raises(UserError, match=r'model\.recurrence=gru has no attention maps'):
        attention.attention(run, ['a'])


# ------------------------------------------------------------------------------------------------------- accounting
GATES = {'rnn': 1, 'lstm': 4, 'gru': 3}
BIASES = {'rnn': 1, 'lstm': 4, 'gru': 4}


def weights_of(cell, inputs, width):
    """Kernels that read inputs and state, for each gate."""
    return GATES[cell] * (inputs + width) * width


@pytest.mark.parametrize('cell, attention', list(itertools.product(CELLS, (*SCORES, None))))
def test_parameters_and_operations_by_the_formula(cell, attention):
    cfg = make_model(
        'encoder_decoder', cell, bidirectional=True, recurrent_attention=attention, tied_embeddings='output'
    )
    run = dummy_batch.assumed(make_config(cfg))
    batch = dummy_batch.random_batch(run)
    params = jax.eval_shape(build(run.model).init, jax.random.key(0), batch)['params']
    half = 2 * weights_of(cell, D, D // 2)
    whole = weights_of(cell, D, D)
    attends = {'dot': 2 * D * D, 'additive': 4 * D * D + D, None: 0}[attention]
    tables = 2 * V * D
    biases = 2 * 2 * BIASES[cell] * D
    found = sum(x.size for x in jax.tree.leaves(params))
    assert found == 2 * (half + whole) + biases + attends + tables
    products = 2 * half * S + 2 * whole * T + V * D * T  # weights and the tokens that they multiply
    products += {'dot': 2 * D * D * T + 2 * D * T * S, 'additive': (3 * T + S) * D * D + 2 * D * T * S, None: 0}[
        attention
    ]
    assert flops.model_flops(run, params, batch) == 6 * 4 * products


def test_costs_by_the_length_of_a_row():
    """Vaswani et al. 2017, table 1, for n = 100, d = 16 and r = 8."""
    decoder = Model(family='decoder', emb_dim=16, attention_pattern=('local', 'global'), window=8)
    assert flops.layer_costs(decoder, 100) == {'local': (8 * 100 * 16, 1, 13), 'global': (100 * 100 * 16, 1, 1)}
    seq2seq = make_model('encoder_decoder', 'lstm', recurrent_attention='dot')
    found = flops.layer_costs(seq2seq, 100)
    assert found == {'lstm': (100 * 16 * 16, 100, 100), 'attention': (100 * 100 * 16, 1, 1)}
    said = inspect.inspect(make_config(make_model(cell='lstm')))
    assert said.splitlines()[-1].split() == ['lstm', f'{T * D * D:,}', str(T), str(T)]


def test_a_prefix_that_is_read_in_both_directions_is_refused_before_anything_is_computed():
    model = build(make_model())
    tokens = np.ones((1, 2), np.int32)
    prefix = np.ones((1, 2), bool)
    with pytest.raises(ValueError, match='a bidirectional prefix is not supported'):
        jax.eval_shape(model.init, jax.random.key(0), {'inputs': tokens, 'prefix': prefix})
    batch = {'inputs': tokens, 'prefix': prefix, 'positions': np.arange(2)[None]}

    def extended(key):
        return model.init(key, tokens, batch['positions'], None, prefix, method='extend')

    with pytest.raises(ValueError, match='a bidirectional prefix is not supported'):
        jax.eval_shape(extended, jax.random.key(0))


@pytest.mark.slow
def test_decoding_takes_one_source_a_row():
    batch = {'inputs': np.ones((1, 1), np.int32), 'encoder_segment_ids': np.ones((1, S), np.int32)}
    transformer = Model(family='encoder_decoder', vocab_size=V, emb_dim=D, max_len=64)
    with pytest.raises(ValueError, match='decoding takes one source per row: encoder_segment_ids are not supported'):
        build(transformer).apply({}, batch, 8, method='start')
