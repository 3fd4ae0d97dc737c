"""Eight devices, however the work is split, give what one gives: every strategy and useful pairs, in every family."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from comparing import descent, relative
from starting import make_start
from tformer import checks, config
from tformer.config import Config, Mesh, Model, Train
from tformer.distributed import collectives, hlo, meshes, sharding
from tformer.errors import UserError
from tformer.layers import kernels
from tformer.layers.parallel import each_device, ring_attention
from tformer.model import build
from tformer.objectives import OBJECTIVES
from tformer.optim.hyperparameters import Hyperparameters
from tformer.training.step import make_train_step

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
    return checks.resolve(cfg, vocab_size=V)


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


@functools.cache
def trained(family, name, packed=False, **model):
    """Returns (the losses of three steps, the first step's gradients, the last parameters, the compiled text)."""
    mesh_config = MESHES.get(name, Mesh(data=1))
    cfg = make_config(family, mesh_config, **model)
    net, objective, hyper = build(cfg.model), OBJECTIVES[cfg.train.objective], Hyperparameters.of(cfg)
    mesh = meshes.make_mesh(mesh_config, jax.devices()[: 8 if name in MESHES else 1])
    rules, batches = sharding.make_rules(mesh_config), [make_batch(family, seed, packed) for seed in range(STEPS)]
    with sharding.placed(mesh, mesh_config):
        start, placed = make_start(net, objective, descent(RATE), hyper, batches[0], mesh, rules)
        state = start(hyper)
        step = jax.jit(make_train_step(net, objective, descent(RATE), cfg), out_shardings=(placed, None))
        split = [jax.device_put(batch, meshes.batch_sharding(mesh)) for batch in batches]
        compiled = step.lower(state, split[0], hyper).compile()
        losses, first = [], None
        for batch in split:
            state, numbers = compiled(state, batch, hyper)
            total, weight = numbers['scores']['loss']
            losses.append(float(total) / float(weight))
            first = jax.device_get(state.opt_state) if first is None else first
    return losses, first, state.params, compiled.as_text()


QUICK = {  # every axis in some mesh; the others are proofs that take minutes
    *(('encoder', name) for name in ('data', 'sequence')),
    *(('decoder', name) for name in ('fsdp x tensor', 'context x sequence')),
}
STACK = {*QUICK, ('encoder_decoder', 'fsdp x context')}
EVERY = [
    pytest.param(
        *(family, name),
        marks=[
            *([pytest.mark.stack] if (family, name) in STACK else []),
            *([] if (family, name) in QUICK else [pytest.mark.proof]),
        ],
    )
    for family in FAMILIES
    for name in MESHES
]


@pytest.mark.parametrize('family, name', EVERY)
@pytest.mark.proof_cases('decoder-fsdp x tensor', 'encoder-sequence')
def test_eight_devices_train_as_one(family, name, **model):
    losses, gradients, params, _ = trained(family, 'one', **model)
    other_losses, other_gradients, other_params, _ = trained(family, name, **model)
    assert len(set(losses)) == STEPS
    assert np.allclose(other_losses, losses, rtol=1e-6, atol=0)
    assert relative(other_gradients, gradients) <= 1e-5
    assert relative(jax.device_get(other_params), jax.device_get(params)) <= 1e-6


@pytest.mark.proof
@pytest.mark.parametrize('family', ['decoder', 'encoder_decoder'])
@pytest.mark.parametrize('name', ['tensor', 'fsdp x tensor', 'context x sequence'])
def test_eight_devices_train_latents_as_one(family, name):
    latent = {'position': 'rope', 'num_kv_heads': None, 'kv_latent_dim': 8, 'query_latent_dim': 8, 'rotary_dim': 4}
    test_eight_devices_train_as_one(family, name, **latent)


# ---------------------------------------------------------------------------------------------------- what is sent
D, F, N, H, L, LONGEST = BASE.emb_dim, BASE.mlp_dim, BASE.num_heads, BASE.head_dim, 2, BASE.max_len
KERNELS = 4 * D * N * H + 2 * D * F  # numbers in a layer's kernels: encoder
STREAM = ROWS * T * D  # numbers in the stream
FLOAT = 4


def gathered(ways, numbers):
    """Bytes that a device sends so that all have `numbers` float32, of which it had its share."""
    return (ways - 1) / ways * FLOAT * numbers


def summed(ways, numbers):
    return 2 * gathered(ways, numbers)


def expected_traffic(name, num_params):
    """Closed formulas of what one step of the encoder sends: (kind, axis) -> bytes, without what is below 1 %.

    The CPU's compiler sums the gradients of what several projections read one by one, where others would first add
    them up (`PROJECTIONS`), and writes a reduce-scatter as an all-reduce.
    """
    PROJECTIONS = 4  # query, key, value, mlp in
    gradients = num_params + V * D  # the table's twice: as it is looked up, and as it makes logits
    if name == 'data':
        return {('all-reduce', 'data'): summed(8, gradients)}
    split = {  # each kernel forward and backward, the tables and the biases that are added to the stream once
        # of tables as they are looked up, those who hold a row's parts sum its gradient, each of its own part, for
        # which they send each other the stream's; that of the positions is then gathered
        ('all-gather', name): gathered(8, 2 * L * KERNELS + V * D + 2 * LONGEST * D + L * D),
        ('all-reduce', name): summed(8, num_params - LONGEST * D),
        ('all-to-all', name): 2 * gathered(8, STREAM / 8),
    }
    if name == 'fsdp':
        return split
    # of the softmax over the vocabulary: largest, sum, the target's logit; in a byte, whether one before it is as large
    per_token = 3.25 * ROWS * T
    if name == 'tensor':  # embedding; after attention and feed-forward; backward before them; before the vocabulary
        stream = STREAM * (1 + L * (2 + PROJECTIONS) + 1)
        return {('all-reduce', 'tensor'): summed(8, stream + per_token)}
    if name == 'sequence':  # the stream between is split: gathered where tensor sums, at the top and back at the foot
        stream, rows = STREAM / 2 * (1 + L * (2 + PROJECTIONS) + 1), per_token / 2
        return {
            ('all-gather', 'tensor'): gathered(4, STREAM / 2 * (L * 4 + 2)),
            ('all-reduce', 'tensor'): summed(4, stream + rows + LONGEST * D),
        }
    assert name == 'context'  # keys and values forward and backward, 7 hops of 8; their gradients come home in 8
    hops = (4 * 7 / 8 + 2) * L * ROWS * N * T * H * FLOAT
    return {('collective-permute', 'context'): hops, **split}


@pytest.mark.slow
@pytest.mark.parametrize('name', ['data', 'fsdp', 'tensor', 'sequence', 'context'])
@pytest.mark.proof_cases('tensor')
def test_what_is_sent_is_what_the_closed_formula_says(name):
    _, _, params, text = trained('encoder', name)
    num_params = sum(x.size for x in jax.tree.leaves(params))
    found = {
        (row.kind, '+'.join(row.axes)): row.bytes
        for row in collectives.of(hlo.parse(text), meshes.make_mesh(MESHES[name]))
    }
    for key, wanted in expected_traffic(name, num_params).items():
        assert found.pop(key) == pytest.approx(wanted, rel=0.05), key
    others = sum(rest for (_, axes), rest in found.items() if axes != 'data')
    assert 'data' in name or others < 0.05 * max(expected_traffic(name, num_params).values())


EXPECTED = {  # strategy -> the collectives that it is made of
    'data': {('all-reduce', 'data')},
    'fsdp': {('all-gather', 'fsdp'), ('all-reduce', 'fsdp')},
    'tensor': {('all-reduce', 'tensor')},
    'sequence': {('all-gather', 'tensor'), ('all-reduce', 'tensor')},
    'context': {('collective-permute', 'context'), ('all-gather', 'context')},
    'fsdp x tensor': {('all-gather', 'fsdp'), ('all-reduce', 'tensor')},
    'fsdp x sequence': {('all-gather', 'fsdp'), ('all-gather', 'tensor'), ('all-reduce', 'tensor')},
    'fsdp x context': {('all-gather', 'fsdp+context'), ('collective-permute', 'context')},
    'context x sequence': {
        *(('collective-permute', 'context'), ('all-gather', 'context')),
        *(('all-gather', 'tensor'), ('all-reduce', 'tensor')),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize('family, name', [param for param in EVERY if param.values[1] in EXPECTED])
def test_a_strategy_is_made_of_its_collectives(family, name):
    """Besides them, gradients are summed over the axes that split rows and lengths, and little else is sent."""
    _, _, params, text = trained(family, name)
    found = {
        (row.kind, '+'.join(row.axes)): row.bytes
        for row in collectives.of(hlo.parse(text), meshes.make_mesh(MESHES[name]))
    }
    assert found.keys() >= EXPECTED[name]
    if name == 'data':
        assert {kind for kind, _ in found} == {'all-reduce'}
    rest = {key: found[key] for key in found.keys() - EXPECTED[name]}
    sums = sum(size for (kind, _), size in rest.items() if kind == 'all-reduce')
    if (family, name) in QUICK:
        assert sums <= 2 * FLOAT * sum(x.size for x in jax.tree.leaves(params))
        assert sum(rest.values()) - sums <= 0.01 * sum(found.values())


def largest_gather(text):
    """The most numbers that one all-gather of a program makes."""
    program = hlo.parse(text)
    reached = [i for i, _, _ in hlo.executions(program, hlo.nothing) if i.opcode.startswith('all-gather')]
    return max(hlo.num_bytes(i.shape) / FLOAT for i in reached)


@pytest.mark.slow
@pytest.mark.parametrize('family', ['encoder', *(pytest.param(f, marks=pytest.mark.proof) for f in list(FAMILIES)[1:])])
def test_fsdp_gathers_one_layer_at_a_time(family):
    largest = max(LONGEST * D, V * D, D * F, D * N * H)  # a table, or one kernel of one layer
    assert largest_gather(trained(family, 'fsdp')[3]) <= largest


@pytest.mark.slow
def test_gathering_all_parameters_at_once_would_be_seen():
    mesh_config = MESHES['fsdp']
    cfg = make_config('encoder', mesh_config)
    net, objective, hyper = build(cfg.model), OBJECTIVES[cfg.train.objective], Hyperparameters.of(cfg)
    mesh, rules, batch = meshes.make_mesh(mesh_config), sharding.make_rules(mesh_config), make_batch('encoder', 0)
    with sharding.placed(mesh, mesh_config):
        start, placed = make_start(net, objective, descent(RATE), hyper, batch, mesh, rules)
        state = start(hyper)
        step = make_train_step(net, objective, descent(RATE), cfg)

        def gathers_first(state, batch, hyper):
            whole = jax.lax.with_sharding_constraint(state.params, jax.sharding.PartitionSpec())
            return step(state.replace(params=whole), batch, hyper)

        split = jax.device_put(batch, meshes.batch_sharding(mesh))
        text = jax.jit(gathers_first, out_shardings=(placed, None)).lower(state, split, hyper).compile().as_text()
    assert largest_gather(text) >= L * D * F


@pytest.mark.parametrize(
    ('kv_heads', 'heads', 'ways', 'expected'), [(1, 8, 2, 2), (2, 8, 4, 4), (3, 6, 2, 6), (4, 8, 4, 4), (1, 6, 4, 1)]
)
def test_heads_of_keys_are_repeated_as_far_as_devices_need_them(kv_heads, heads, ways, expected):
    """The last have 6 query heads that 4 devices do not split."""
    mesh_config = Mesh(tensor=ways, data=1)
    k_BKSH = jnp.arange(2.0 * kv_heads * 3).reshape(1, kv_heads, 3, 2)
    with sharding.placed(meshes.make_mesh(mesh_config, jax.devices()[:ways]), mesh_config):
        found = each_device.enough_heads(k_BKSH, heads)
    assert found.shape[1] == expected
    of_queries = [np.repeat(x, heads // x.shape[1], axis=1) for x in (found, k_BKSH)]
    assert np.array_equal(*of_queries)


# ---------------------------------------------------------------------------------------------------- the ring
def attention_inputs(rows, queries, keys, heads=4, kv_heads=2, size=8):
    draws = jax.random.split(jax.random.key(0), 6)
    return {
        'q': jax.random.normal(draws[0], (rows, heads, queries, size)),
        'k': jax.random.normal(draws[1], (rows, kv_heads, keys, size)),
        'v': jax.random.normal(draws[2], (rows, kv_heads, keys, size + 2)),
        'bias_BNTS': jax.random.normal(draws[3], (1, heads, queries, keys)),
        'sink_N': jax.random.normal(draws[4], (heads,)),
    }, jax.random.normal(draws[5], (rows, heads, queries, size + 2))


@pytest.mark.slow
@pytest.mark.parametrize('queries, keys', [(32, 32), (13, 9)])
@pytest.mark.proof_cases('13-9')
def test_the_ring_is_the_reference_with_all_its_gradients(queries, keys):
    """Grouped heads, values of another size, bias, cap, sink; a row without keys, a query that sees nothing; lengths
    that do not divide."""
    inputs, cotangent = attention_inputs(2, queries, keys)
    mask = np.tril(np.ones((queries, keys), bool), 1)[None].repeat(2, 0)
    mask[1, :, keys // 2 :], mask[1, 5] = False, False

    def value(kernel, inputs):
        options = kernels.ScoreOptions(0.3, inputs['bias_BNTS'], 5.0, inputs['sink_N'])
        out = kernel(*(inputs[name] for name in 'qkv'), mask, options)
        return (out * cotangent).sum(), out

    def both(kernel):
        return jax.jit(jax.grad(functools.partial(value, kernel), has_aux=True))(inputs)

    wanted = both(kernels.reference)
    for mesh in (Mesh(data=2, context=4), Mesh(data=1, context=8)):
        with sharding.placed(meshes.make_mesh(mesh), mesh):
            found = jax.device_get(both(ring_attention.ring))
        for part in (0, 1):
            assert relative(found[part], wanted[part]) < 1e-6
        for name in inputs:
            assert relative(found[0][name], wanted[0][name]) < 1e-5, name


def test_a_zigzag_gives_every_device_as_many_blocks():
    count, length = 4, 32
    order = ring_attention.zigzag(length, count)
    assert sorted(order.tolist()) == list(range(length))
    busy = {}
    for name, columns in (('in order', np.arange(length)), ('zigzag', order)):
        mask = columns[:, None] >= columns[None, :]
        blocks = mask.reshape(2 * count, length // (2 * count), 2 * count, -1).any((1, 3))
        busy[name] = blocks.reshape(count, -1).sum(1).tolist()
    assert busy == {'in order': [3, 7, 11, 15], 'zigzag': [9, 9, 9, 9]}  # of 16 each


def test_a_balanced_batch_holds_the_same_tokens_in_another_order():
    mesh = Mesh(data=2, context=4)
    batch = make_batch('encoder_decoder', 0)
    batch |= {f'encoder_{name}': batch[name] for name in ('inputs', 'positions')}  # a source as long as its target
    batch['segment_weights'] = batch['inputs'] + 0.5  # of as many segments as tokens
    with sharding.placed(meshes.make_mesh(mesh), mesh):
        moved = jax.device_get(ring_attention.balance({name: x for name, x in batch.items() if name != 'positions'})[0])
    assert np.array_equal(moved['positions'][0], ring_attention.zigzag(T, 4))
    for name, x in batch.items():
        if name.startswith('encoder_') or name == 'segment_weights':
            assert np.array_equal(moved[name], x)
        elif name != 'positions':
            assert np.array_equal(np.take_along_axis(moved[name], np.argsort(moved['positions'], 1), 1), x)


@pytest.mark.proof
def test_dropout_in_the_ring_is_one_draw_forward_and_backward():
    """The output is linear in the values, so that <cotangent, out> = <values, their gradient> where both passes draw
    alike. Its mean over draws is the output without dropout, and its variance at a rate of a half the sum of the
    squared p v."""
    inputs, cotangent = attention_inputs(2, 16, 16)
    mask, mesh = np.tril(np.ones((2, 16, 16), bool)), Mesh(data=2, context=4)

    def out(v, key, rate=0.5):
        options = kernels.ScoreOptions(0.3, dropout_rate=rate, dropout_key=key)
        return ring_attention.ring(inputs['q'], inputs['k'], v, mask, options)

    with sharding.placed(meshes.make_mesh(mesh), mesh):
        pull = jax.jit(lambda v, key: (out(v, key), jax.grad(lambda v: (out(v, key) * cotangent).sum())(v)))
        draws = [jax.device_get(pull(inputs['v'], key)) for key in jax.random.split(jax.random.key(1), 100)]
        whole = jax.device_get(jax.jit(functools.partial(out, rate=None))(inputs['v'], None))
        ones = np.broadcast_to(np.eye(16, dtype=np.float32)[:, None, None, :, None], (16, *np.shape(inputs['v'])))
        kept = np.stack([jax.device_get(pull(one, jax.random.key(2))[0])[..., 0] != 0 for one in ones], -1)  # BNTS
    for value, gradient in draws[:3]:
        assert float((value * cotangent).sum()) == pytest.approx(float((inputs['v'] * gradient).sum()), rel=1e-4)
    assert not np.array_equal(draws[0][0], draws[1][0])
    for t, later in itertools.combinations(range(4, 16), 2):
        assert not np.array_equal(kept[:, :, t, : t + 1], kept[:, :, later, : t + 1]), (t, later)
    blocks = np.moveaxis(kept.reshape(*kept.shape[:2], 8, 2, 8, 2), (2, 4), (0, 1))  # of two queries and two keys
    seen = [blocks[queries, keys].tobytes() for queries, keys in zip(*np.tril_indices(8, -1), strict=True)]
    assert len(set(seen)) == len(seen)
    grouped = kernels.probabilities(inputs['q'], inputs['k'], mask, kernels.ScoreOptions(0.3))
    variance = np.einsum('bkgts,bksu->bkgtu', np.square(grouped), np.square(inputs['v'])).reshape(whole.shape)
    error = (np.mean([value for value, _ in draws], 0) - whole) / np.sqrt(variance / len(draws))
    assert np.abs(error).max() < 6 and np.mean(np.square(error)) == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize('name, model', [
    pytest.param('context', {'position': 'relative'}, marks=pytest.mark.proof),
    ('context', {'position': 'alibi', 'attention_pattern': ('local', 'global'), 'window': 4}),
    pytest.param('fsdp x context', {'attention_sink': 'learned', 'attention_softcap': 10.0}, marks=pytest.mark.proof),
])  # fmt: skip
@pytest.mark.proof_cases('context-model1')
def test_packed_rows_and_every_bias_go_round(name, model):
    losses, gradients, _, _ = trained('decoder', 'one', packed=True, **model)
    others, other_gradients, _, _ = trained('decoder', name, packed=True, **model)
    assert np.allclose(others, losses, rtol=1e-6, atol=0)
    assert relative(other_gradients, gradients) <= 1e-5


# ---------------------------------------------------------------------------------------------------- the rules
@pytest.mark.parametrize('override, message', [
    ('mpl=tensor', "no logical name 'mpl'; did you mean 'mlp'"),
    ('mlp=tenser', "no axis 'tenser'; did you mean 'tensor'"),
    ('mlp', "mesh.overrides: 'mlp': write NAME=AXIS"),
])  # fmt: skip
def test_an_override_that_names_nothing_is_refused(override, message):
    with pytest.raises(UserError, match=message):
        sharding.make_rules(Mesh(overrides=(override,)))


def test_an_override_splits_what_the_rules_do_not():
    rules = dict(sharding.make_rules(Mesh(overrides=('mlp=fsdp+tensor', 'embed=none'))))
    assert rules == {**dict(sharding.RULES['fsdp_tp']), 'mlp': ('fsdp', 'tensor'), 'embed': None}
