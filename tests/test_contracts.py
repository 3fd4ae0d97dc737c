"""What every model must do, whatever its choices: each entry of each table, in each family that accepts it.

A case carries one value of every choice; the cases of a task together carry them all. A case compiles two programs:
one that returns logits and gradients, and one that decodes.
"""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tformer import choices, sharding
from tformer.config import Config, Model, resolve_model
from tformer.hyper import Hyper
from tformer.layers import dropout as dropout_lib
from tformer.layers.attention import attention_probabilities
from tformer.layers.dropout import Rates
from tformer.layers.initializers import INITIALIZERS
from tformer.model import FAMILIES, build
from tformer.objectives import OBJECTIVES
from tformer.optimizers import make_optimizer
from tformer.state import make_init

V, T, S = 17, 8, 6
TINY = {
    'vocab_size': V,
    'encoder_vocab_size': V,
    'emb_dim': 16,
    'mlp_dim': 24,
    'num_heads': 4,
    'num_encoder_layers': 2,
    'num_decoder_layers': 2,
    'max_len': 16,
    'num_classes': 5,
    'dropout_rate': 0.0,
}
ELSEWHERE = ('family', 'initializer', 'dtype', 'param_dtype')  # tables that have tests of their own below
CHOICES = {
    **{
        field.removeprefix('model.'): tuple(table)
        for field, table in choices.TABLES.items()
        if field.startswith('model.') and field.removeprefix('model.') not in ELSEWHERE
    },
    'num_kv_heads': (None, 2, 1),
    'final_norm': (None, True, False),
    'attention_bias': (False, True),
    'mlp_bias': (False, True),
    'output_bias': (False, True),
    'mlm_transform': (False, True),
    'scan_layers': (False, True),
}
METHODS = {'encoder': '__call__', 'decoder': '__call__', 'encoder_decoder': '__call__', 'classifier': 'classify'}
NAMES = [(task, index) for task in METHODS for index in range(max(map(len, CHOICES.values())))]


def make_config(task, **fields):
    family = 'encoder' if task == 'classifier' else task
    return Model(**{**TINY, 'family': family, **fields})


@functools.cache
def drawn(task):
    """The cases of a task: every column is a choice's values, repeated to the length of the longest, shuffled."""
    columns = {}
    for name, values in CHOICES.items():
        if name == 'tied_embeddings' and task != 'encoder_decoder':
            values = tuple(value for value in values if value != 'inputs')
        rows = [values[i % len(values)] for i in range(max(map(len, CHOICES.values())))]
        random.Random(f'{task} {name}').shuffle(rows)
        columns[name] = rows
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def sides(task):
    return {'': T, 'encoder_': S} if task == 'encoder_decoder' else {'': T}


def make_batch(task, seed=0):
    """Rows: 0 is full, 1 ends in padding, 2 holds two packed examples (one, for the classifier) and padding."""
    rng, batch = np.random.default_rng(seed), {}
    for prefix, length in sides(task).items():
        lengths = [(length,), (length - 3,), (length // 2 - 1, length // 2) if task != 'classifier' else (length - 1,)]
        batch[f'{prefix}inputs'] = rng.integers(1, V, (3, length), np.int32)
        batch[f'{prefix}positions'] = np.full((3, length), -1, np.int32)
        batch[f'{prefix}segment_ids'] = np.zeros((3, length), np.int32)
        for row, parts in enumerate(lengths):
            begin = 0
            for segment, part in enumerate(parts, start=1):
                batch[f'{prefix}positions'][row, begin : begin + part] = np.arange(part)
                batch[f'{prefix}segment_ids'][row, begin : begin + part] = segment
                begin += part
    return batch


def changed(batch, name, where):
    """The batch with other tokens where `where` is true."""
    tokens = batch[name]
    return {**batch, name: np.where(where, tokens % (V - 1) + 1, tokens)}


def make_params(shapes):
    """Random parameters, vectors away from their neutral start, so that every one of them shows."""
    rng = np.random.default_rng(1)

    def draw(path, leaf):
        neutral, spread = {'scale': (1, 0.1), 'bias': (0, 0.1)}.get(path[-1].key, (0, TINY['emb_dim'] ** -0.5))
        return jnp.asarray(neutral + spread * rng.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


class Case:
    def __init__(self, task, **fields):
        self.task, self.cfg = task, resolve_model(make_config(task, **fields))
        self.model, self.method, self.batch = build(self.cfg), METHODS[task], make_batch(task)
        init = functools.partial(self.model.init, method=self.method)
        self.params = make_params(sharding.unboxed(jax.eval_shape(init, jax.random.key(0), self.batch)['params']))
        self.forward, self.probe = jax.jit(self.apply), jax.jit(self._probe)
        shape = jax.eval_shape(self.apply, self.params, self.batch)
        real = self.batch['positions'] >= 0 if len(shape.shape) == 3 else np.ones((3, 1), bool)[:, 0]
        noise = np.random.default_rng(2).standard_normal(shape.shape)
        self.cotangent = np.where(real[..., None], noise, 0).astype(np.float32)

    def apply(self, params, batch):
        return self.model.apply({'params': params}, batch, Rates(), method=self.method)

    def _probe(self, params, batch, cotangent):
        def scored(params):
            logits = self.apply(params, batch)
            return jnp.sum(logits * cotangent), logits

        grads, logits = jax.grad(scored, has_aux=True)(params)
        return logits, grads

    def logits(self, batch):
        return np.asarray(self.probe(self.params, batch, self.cotangent)[0])

    @functools.cached_property
    def both(self):
        return jax.device_get(self.probe(self.params, self.batch, self.cotangent))


@functools.cache
def make_case(task, index=None, **fields):
    return Case(task, **({} if index is None else drawn(task)[index]), **fields)


@pytest.fixture(scope='module', params=NAMES, ids=lambda name: f'{name[0]}-{name[1]}')
def case(request):
    return make_case(*request.param)


def assert_near(found, expected, tolerance):
    """Differences are measured by the largest of the expected numbers, or 1."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    assert np.max(np.abs(found - expected), initial=0) <= tolerance * max(1, np.max(np.abs(expected), initial=0))


def differs(a, b):
    """Which vectors of the last axis are not bit for bit the same."""
    return np.any(a != b, axis=-1)


# --------------------------------------------------------------------------------------- the covering design
def test_the_cases_carry_every_entry_of_every_table():
    for task in METHODS:
        for name, values in CHOICES.items():
            seen = {case[name] for case in drawn(task)}
            assert seen == set(values) - ({'inputs'} if task != 'encoder_decoder' else set())
    assert {'encoder' if task == 'classifier' else task for task in METHODS} == set(FAMILIES)
    assert {objective.method for objective in OBJECTIVES.values()} == set(METHODS.values())


# ------------------------------------------------------------------------------------------------- contracts
def test_logits_are_finite_float32(case):
    logits = case.both[0]
    last = {'classifier': (3, TINY['num_classes'])}.get(case.task, (3, T, V))
    assert logits.dtype == np.float32 and logits.shape == last and np.isfinite(logits).all()
    assert np.std(logits) > 1e-3


def test_gradients_reach_every_parameter(case):
    for path, grad in jax.tree_util.tree_leaves_with_path(case.both[1]):
        # A bias on all keys moves all scores of a query alike, which softmax does not see: its gradient is 0 but for
        # rotation, which comes after the bias.
        key_bias = [key.key for key in path[-2:]] == ['key', 'bias']
        assert np.isfinite(grad).all()
        assert np.max(np.abs(grad)) > 1e-5 or key_bias, jax.tree_util.keystr(path)


def test_gradients_reach_every_layer(case):
    for path, grad in jax.tree_util.tree_leaves_with_path(case.both[1]):
        if 'layers' in [key.key for key in path] and path[-1].key == 'kernel':
            assert all(np.max(np.abs(layer)) > 1e-5 for layer in grad), jax.tree_util.keystr(path)


def test_a_token_is_seen_by_those_who_may_and_no_other(case):
    for t in (0, 3, T - 1):
        where = np.zeros((3, T), bool)
        where[0, t] = True
        seen = differs(case.logits(changed(case.batch, 'inputs', where)), case.both[0])
        assert not seen[1:].any()
        if case.task == 'classifier':
            assert seen[0]
        elif case.task == 'encoder':
            assert seen[0].all()
        else:
            assert not seen[0, :t].any() and seen[0, t:].all()


def test_an_encoder_token_is_seen_by_the_whole_decoder(case):
    if case.task == 'encoder_decoder':
        for s in (0, S - 1):
            where = np.zeros((3, S), bool)
            where[0, s] = True
            seen = differs(case.logits(changed(case.batch, 'encoder_inputs', where)), case.both[0])
            assert seen[0].all() and not seen[1:].any()


def test_tokens_of_padding_change_nothing(case):
    """With segments, and without, where the position alone tells padding."""
    real = case.batch['positions'] >= 0
    ones = {f'{prefix}segment_ids': np.ones_like(case.batch[f'{prefix}inputs']) for prefix in sides(case.task)}
    for batch in (case.batch, {**case.batch, **ones}):
        expected = case.logits(batch)
        for prefix in sides(case.task):
            padding = batch[f'{prefix}positions'] < 0
            assert padding.any()
            moved = differs(case.logits(changed(batch, f'{prefix}inputs', padding)), expected)
            assert not (moved if case.task == 'classifier' else moved[real]).any()


def test_padding_at_another_place_changes_nothing(case):
    if case.task == 'classifier':  # [CLS] stands first
        return
    batch = {name: np.concatenate([x[:1], np.roll(x[1:2], 3, axis=1), x[2:]]) for name, x in case.batch.items()}
    assert_near(case.logits(batch)[1, 3:], case.both[0][1, :-3], 1e-6)


def test_packed_examples_are_each_as_alone(case):
    if case.task == 'classifier':
        return
    for segment in (1, 2):
        batch, place = dict(case.batch), None
        for prefix in sides(case.task):
            inside = case.batch[f'{prefix}segment_ids'][2] == segment
            place = inside if prefix == '' else place
            for name, empty in (('inputs', 0), ('positions', -1), ('segment_ids', 0)):
                row = np.full_like(case.batch[f'{prefix}{name}'][2], empty)
                row[: inside.sum()] = case.batch[f'{prefix}{name}'][2, inside]
                batch[f'{prefix}{name}'] = np.concatenate([case.batch[f'{prefix}{name}'][:2], row[None]])
        alone = case.logits(batch)[2, : place.sum()]
        assert_near(case.both[0][2, place], alone, 1e-6)


def test_packed_examples_do_not_see_each_other(case):
    if case.task == 'classifier':
        return
    segments = case.batch['segment_ids'][2]
    for prefix in sides(case.task):
        for segment in (1, 2):
            where = np.zeros_like(case.batch[f'{prefix}inputs'], bool)
            where[2] = case.batch[f'{prefix}segment_ids'][2] == segment
            seen = differs(case.logits(changed(case.batch, f'{prefix}inputs', where)), case.both[0])
            assert seen[2, segments == segment].all() and not seen[2, segments == 3 - segment].any()


def test_eager_is_jit_and_what_a_batch_leaves_out_is_derived(case):
    """Row 1 without its padding, its positions and its segments, in eager mode, against the compiled full row."""
    short = {}
    for prefix, length in sides(case.task).items():
        short[f'{prefix}inputs'] = case.batch[f'{prefix}inputs'][1:2, : length - 3]
    with jax.disable_jit():
        found = case.apply(case.params, short)[0]
    assert_near(found, case.both[0][1] if case.task == 'classifier' else case.both[0][1, :-3], 1e-5)


@pytest.mark.parametrize('name', [name for name in NAMES if 'decoder' in name[0].split('_')], ids=str)
def test_decoding_in_chunks_is_the_full_forward(name):
    case = make_case(*name)
    batch = {key: x for key, x in case.batch.items() if 'segment' not in key}
    batch['positions'] = batch['positions'].copy()
    batch['positions'][2] = [-1, -1, 0, 1, 2, 3, 4, 5]
    ones = {f'{prefix}segment_ids': np.ones_like(batch[f'{prefix}inputs']) for prefix in sides(case.task)}
    expected = case.logits({**batch, **ones})

    def decode(params, batch):
        def extend(cache, chunk):
            logits, cache = case.model.apply({'params': params}, *chunk, cache, method='extend')
            return cache, logits

        cache = case.model.apply({'params': params}, batch, T + 2, method='start')
        chunks = [jnp.moveaxis(batch[name].reshape(3, -1, 2), 1, 0) for name in ('inputs', 'positions')]
        cache, logits = jax.lax.scan(extend, cache, tuple(chunks))
        return jnp.moveaxis(logits, 0, 1).reshape(3, T, V), cache

    found, cache = jax.jit(decode)(case.params, batch)
    real = batch['positions'] >= 0
    assert_near(found[real], expected[real], 2e-5)
    assert cache.index == T and (cache.positions_BS[:, T:] == -1).all()


@pytest.mark.parametrize('task', ['decoder', 'encoder_decoder'])
def test_chunks_of_any_size_decode_alike(task):
    case = make_case(task, position='rope', scan_layers=True)
    extend = jax.jit(lambda *args: case.model.apply({'params': case.params}, *args, method='extend'))
    start = jax.jit(lambda batch: case.model.apply({'params': case.params}, batch, T, method='start'))
    batch = {key: x for key, x in case.batch.items() if 'segment' not in key}
    batch['positions'] = np.broadcast_to(np.arange(T, dtype=np.int32), (3, T))
    ones = {f'{prefix}segment_ids': np.ones_like(batch[f'{prefix}inputs']) for prefix in sides(task)}
    expected = case.forward(case.params, {**batch, **ones})
    for sizes in ((T,), (5, 1, 1, 1)):
        cache, begin, found = start(batch), 0, []
        for size in sizes:
            piece = slice(begin, begin + size)
            logits, cache = extend(batch['inputs'][:, piece], batch['positions'][:, piece], cache)
            found.append(logits)
            begin += size
        assert_near(np.concatenate(found, 1), expected, 2e-5)


# ------------------------------------------------------------------------------------------------- execution
EXECUTION = [(scan, remat) for scan in CHOICES['scan_layers'] for remat in CHOICES['remat']]


@pytest.mark.parametrize('task, executions', [('decoder', EXECUTION), ('encoder_decoder', [(False, 'dots')])])
def test_scan_and_remat_change_neither_logits_nor_gradients(task, executions):
    same = {'norm_placement': 'post', 'activation': 'gelu'}
    plain = make_case(task, scan_layers=True, remat=None, **same)
    for scan_layers, remat in executions:
        other = make_case(task, scan_layers=scan_layers, remat=remat, **same)
        logits, grads = other.probe(plain.params, plain.batch, plain.cotangent)
        assert_near(logits, plain.both[0], 1e-5)
        assert jax.tree.structure(grads) == jax.tree.structure(plain.both[1])
        for found, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(plain.both[1]), strict=True):
            assert_near(found, expected, 1e-5)


# Each rounding to bfloat16 is off by at most 2^-9; a sub-layer makes about four on its way into the residual stream.
BFLOAT16 = 2**-9 * 4


@pytest.mark.parametrize('task', METHODS)
def test_bfloat16_is_close_to_float32(task):
    exact = make_case(task, activation='gelu')
    rounded = make_case(task, activation='gelu', dtype='bfloat16')
    layers = 2 if task != 'encoder_decoder' else 4
    expected, logits = exact.forward(exact.params, exact.batch), rounded.forward(exact.params, exact.batch)
    assert logits.dtype == np.float32
    error = np.max(np.abs(logits - expected)) / np.max(np.abs(expected))
    assert 2**-12 < error < BFLOAT16 * (2 * layers) ** 0.5


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, 'eqns') or hasattr(x, 'jaxpr')):
            inner = getattr(value, 'jaxpr', value)
            if hasattr(inner, 'eqns'):
                yield from equations(inner)


@pytest.mark.parametrize('task', METHODS)
def test_bfloat16_multiplies_matrices_and_leaves_softmax_and_norms_to_float32(task):
    case = make_case(task, activation='relu', dtype='bfloat16', param_dtype='bfloat16')
    program = jax.make_jaxpr(case.apply)(case.params, case.batch).jaxpr
    seen = set()
    for eqn in equations(program):
        seen.add(eqn.primitive.name)
        if eqn.primitive.name in ('exp', 'rsqrt', 'sin', 'cos', 'div', 'reduce_max'):
            assert eqn.outvars[0].aval.dtype == jnp.float32, eqn
        if eqn.primitive.name == 'dot_general':
            assert {var.aval.dtype for var in eqn.invars} == {jnp.dtype('bfloat16')}, eqn
    assert {'exp', 'rsqrt', 'dot_general'} <= seen
    kernels = [x for path, x in jax.tree_util.tree_leaves_with_path(case.params) if path[-1].key in ('kernel', 'table')]
    assert {x.dtype for x in kernels} == {jnp.dtype('bfloat16')}


def test_scores_and_logits_of_bfloat16_are_not_rounded_to_it():
    """A product of two bfloat16 numbers is exact in float32, and so is the factor 1/2 of heads of four."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 4, 8, 4)), jnp.bfloat16) for _ in range(2))
    mask = jnp.ones((1, 8, 8), bool)
    exact = attention_probabilities(q.astype(jnp.float32), k.astype(jnp.float32), mask)
    assert_near(attention_probabilities(q, k, mask), exact, 1e-6)
    for tied in ('output', None):
        case = make_case('decoder', dtype='bfloat16', tied_embeddings=tied)
        logits = case.forward(case.params, case.batch)
        assert not np.array_equal(logits, logits.astype(jnp.bfloat16).astype(jnp.float32))


# ------------------------------------------------------------------------------------------------ parameters
def shapes(task, **fields):
    model, batch = build(make_config(task, **fields)), make_batch(task)
    init = functools.partial(model.init, method=METHODS[task])
    return jax.eval_shape(init, jax.random.key(0), batch)['params']


def count(task, **fields):
    return sum(x.size for x in jax.tree.leaves(sharding.unboxed(shapes(task, **fields))))


def test_tied_embeddings_share_the_tables_that_they_name():
    table = V * TINY['emb_dim']
    for task in ('encoder', 'decoder'):
        once = count(task, tied_embeddings='all')
        assert count(task, tied_embeddings='output') == once
        assert count(task, tied_embeddings=None) == once + table
    tables = {'all': 1, 'inputs': 2, 'output': 2, None: 3}
    assert set(tables) == set(choices.TABLES['model.tied_embeddings'])
    rest = count('encoder_decoder', tied_embeddings='all') - table
    for tied, number in tables.items():
        assert count('encoder_decoder', tied_embeddings=tied) == rest + number * table
    for tied in ('output', None):
        apart = count('encoder_decoder', tied_embeddings=tied, encoder_vocab_size=V + 3)
        assert apart == rest + tables[tied] * table + 3 * TINY['emb_dim']
    assert 'encoder_embed' not in shapes('encoder_decoder', tied_embeddings='inputs')
    assert 'logits' not in shapes('encoder_decoder', tied_embeddings='output').get('head', {})


def test_a_block_has_the_parameters_that_the_formulas_give():
    D, F, N, K, H = 16, 24, 4, 2, 4
    attention = D * N * H * 2 + D * K * H * 2
    attention_bias = N * H + 2 * K * H + D
    expected = V * D + 2 * (attention + 2 * D * F + F + D + 2 * 2 * D) + 2 * D
    base = {'num_kv_heads': K, 'tied_embeddings': 'all'}
    assert count('decoder', **base) == expected
    assert count('decoder', **base, attention_bias=True) == expected + 2 * attention_bias
    assert count('decoder', **base, mlp_bias=False) == expected - 2 * (F + D)
    assert count('decoder', **base, activation='swiglu') == expected + 2 * (D * F + F)
    assert count('decoder', **base, norm='rmsnorm') == expected - 5 * D
    assert count('decoder', **base, norm=None) == expected - 5 * 2 * D
    assert count('decoder', **base, norm_placement='post') == expected - 2 * D
    assert count('decoder', **base, final_norm=False) == expected - 2 * D
    assert count('decoder', **base, position='learned') == expected + TINY['max_len'] * D
    assert count('decoder', **base, output_bias=True) == expected + V
    assert count('decoder', **base, mlm_transform=True) == expected + D * D + D + 2 * D
    gated = count('decoder', **base, activation='swiglu', mlm_transform=True)
    assert gated == expected + 2 * (D * F + F) + 2 * (D * D + D) + 2 * D
    assert count('decoder', **base, scan_layers=False) == expected
    assert count('classifier', **base) == expected + (D + 1) * TINY['num_classes']


def logical_names(task, **fields):
    boxes = jax.tree.leaves(shapes(task, **fields), is_leaf=lambda x: hasattr(x, 'names'))
    assert all(hasattr(box, 'names') and len(box.names) == box.value.ndim for box in boxes)
    return {name for box in boxes for name in box.names}


def test_every_logical_axis_has_a_rule_and_every_parameter_axis_is_used():
    used = set()
    for task, index in NAMES:
        used |= logical_names(task, **drawn(task)[index])
    assert used == set(sharding.PARAMETER_AXES)
    for rules in sharding.RULES.values():
        assert sorted(name for name, _ in rules) == sorted(sharding.NAMES)
        for _, axes in rules:
            assert {axes} if isinstance(axes, str) else set(axes or ()) <= set(sharding.AXES)


def test_a_misspelt_axis_raises_and_names_the_nearest():
    with pytest.raises(ValueError, match="'embedd'; did you mean 'embed'"):
        sharding.partitioned(jax.nn.initializers.zeros, 'vocab', 'embedd')
    with pytest.raises(ValueError, match="'act_embed'"):
        sharding.partitioned(jax.nn.initializers.zeros, 'act_embed')
    with pytest.raises(ValueError, match="'lenght'; did you mean 'length'"):
        sharding.constrain(jnp.zeros((2, 3)), 'batch', 'lenght')
    with pytest.raises(ValueError, match="'embed'"):
        sharding.constrain(jnp.zeros((2, 3)), 'batch', 'embed')


def start(task, objective, **fields):
    """Initial parameters as a function of `init_scale`."""
    cfg = Config(model=resolve_model(make_config(task, **fields)))
    init = make_init(build(cfg.model), OBJECTIVES[objective], make_optimizer(cfg.optimizer))

    @jax.jit
    def params(scale):
        hyper = Hyper.of(cfg).replace(init_scale=scale)
        return sharding.unboxed(init(hyper, make_batch(task)).params)

    return params


@pytest.mark.parametrize('initializer', INITIALIZERS)
def test_the_initial_scale_is_a_factor_on_random_values_only(initializer):
    biases = {'attention_bias': True, 'output_bias': True, 'mlm_transform': True, 'tied_embeddings': None}
    params = start('encoder_decoder', 'seq2seq', initializer=initializer, position='learned', **biases)
    one, half, none = (jax.tree_util.tree_leaves_with_path(params(scale)) for scale in (1.0, 0.5, 0.0))
    kinds = set()
    for (path, a), (_, b), (_, c) in zip(one, half, none, strict=True):
        kind = path[-1].key
        kinds.add(kind)
        if kind in ('kernel', 'table'):
            assert np.std(a) > 0 and np.array_equal(b, 0.5 * a) and not c.any()
        else:
            assert np.array_equal(a, b) and np.array_equal(a, c) and np.unique(a) == {'scale': 1, 'bias': 0}[kind]
    assert kinds == {'kernel', 'table', 'scale', 'bias'}


CUT = 0.02 * 0.87963  # of a normal cut off at two standard deviations

# Fan-in and fan-out are those of the whole projection: D -> N * H, and back.
STANDARD_DEVIATIONS = {
    'xavier': lambda fan_in, fan_out: (2 / (fan_in + fan_out)) ** 0.5,
    'lecun': lambda fan_in, fan_out: fan_in**-0.5,
    'truncated_normal': lambda fan_in, fan_out: CUT,
}


def test_initial_kernels_have_the_spread_that_their_name_says():
    assert set(STANDARD_DEVIATIONS) == set(INITIALIZERS)
    D, N, H = 64, 4, 32
    axes = {(D, N, H): ([0], [1, 2], D, N * H), (N, H, D): ([0, 1], [2], N * H, D), (D, 256): ([0], [1], D, 256)}
    for name, init in INITIALIZERS.items():
        for shape, (in_axis, out_axis, fan_in, fan_out) in axes.items():
            found = np.std(init.kernel(in_axis, out_axis)(jax.random.key(0), shape, jnp.float32))
            # 8192 samples at least: the standard error of a standard deviation is below 0.8 %.
            assert found == pytest.approx(STANDARD_DEVIATIONS[name](fan_in, fan_out), rel=0.04)
        table = np.std(init.embedding(D)(jax.random.key(0), (200, D), jnp.float32))
        assert table == pytest.approx(CUT if name == 'truncated_normal' else D**-0.5, rel=0.04)


# --------------------------------------------------------------------------------------------------- dropout
def test_dropout_keeps_the_mean_and_a_key_has_one_mask():
    x = jnp.ones((64, 1001))
    key = jax.random.key(0)
    for rate in (0.1, 0.5):
        y = np.asarray(dropout_lib.dropout(x, rate, key))
        kept = y != 0
        spread = (rate * (1 - rate) / y.size) ** 0.5
        assert abs(kept.mean() - (1 - rate)) < 4 * spread
        assert np.allclose(y[kept], 1 / (1 - rate), rtol=2**-15)
        assert abs(y.mean() - 1) < 4 * spread / (1 - rate)
        assert np.array_equal(y, dropout_lib.dropout(x, rate, key))
        assert not np.array_equal(y, dropout_lib.dropout(x, rate, jax.random.key(1)))
        columns = kept.reshape(64, -1)[:, :1000].reshape(64, 500, 2)
        assert abs(np.corrcoef(columns[..., 0].ravel(), columns[..., 1].ravel())[0, 1]) < 4 / 32_000**0.5
    assert dropout_lib.dropout(x, None, key) is x
    assert np.array_equal(jax.jit(dropout_lib.dropout)(x, 0.0, key), x)


@pytest.mark.parametrize('task', METHODS)
def test_dropout_is_on_where_there_is_a_key_and_a_rate(task):
    case = make_case(task, activation='gelu')
    traces = []

    @jax.jit
    def apply(rates, key):
        traces.append(rates)
        return case.model.apply({'params': case.params}, case.batch, rates, rngs={'dropout': key}, method=case.method)

    off = jax.jit(lambda rates: case.model.apply({'params': case.params}, case.batch, rates, method=case.method))
    key, other, plain = jax.random.key(0), jax.random.key(1), case.forward(case.params, case.batch)
    assert_near(off(Rates(0.5, 0.5, 0.5)), plain, 1e-6)
    assert_near(apply(Rates(0.0, 0.0, 0.0), key), plain, 1e-6)
    for name in ('residual', 'attention', 'activation'):
        rates = Rates(0.0, 0.0, 0.0).replace(**{name: 0.3})
        found = apply(rates, key)
        assert np.isfinite(found).all() and np.array_equal(found, apply(rates, key))
        assert np.max(np.abs(found - plain)) > 1e-2 and np.max(np.abs(found - apply(rates, other))) > 1e-2
    assert len(traces) == 1


def test_the_rates_of_the_config_are_those_thatapply():
    case = make_case('decoder', dropout_rate=0.2, attention_dropout_rate=0.1, activation_dropout_rate=0.3)
    apply = functools.partial(
        case.model.apply, {'params': case.params}, case.batch, rngs={'dropout': jax.random.key(0)}
    )
    stated, given, off = jax.jit(lambda: (apply(), apply(Rates(0.2, 0.1, 0.3)), apply(Rates())))()
    assert np.array_equal(stated, given) and not np.array_equal(stated, off)
    assert Rates.of(make_config('decoder')) == Rates()


def test_layers_drop_out_by_masks_of_their_own():
    case = make_case('decoder', norm=None, position=None, tied_embeddings=None)
    params = jax.tree.map(jnp.zeros_like, case.params)
    params['decoder']['stack']['layers']['mlp']['out']['bias'] += 1.0  # all that a layer adds to the stream
    params['head']['logits']['kernel'] += jnp.eye(16, V)
    rngs = {'dropout': jax.random.key(0)}
    apply = jax.jit(lambda: case.model.apply({'params': params}, case.batch, Rates(residual=0.5), rngs=rngs))
    values, counts = np.unique(apply()[..., :16], return_counts=True)
    assert values.tolist() == [0, 2, 4]
    assert np.allclose(counts / counts.sum(), [0.25, 0.5, 0.25], atol=4 * (0.25 / counts.sum()) ** 0.5)
