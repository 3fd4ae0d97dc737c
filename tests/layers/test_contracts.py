"""What every model must do, whatever its choices: each legal pair of entries of all tables, in each family.

A case carries one level of every choice, and the cases together every legal pair (tests/helpers/covering.py).
A case compiles two programs: one that returns logits and gradients, and one that decodes.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import covering
from comparing import assert_near, differs, with_gradients
from tformer import checks, config
from tformer.config import Config, Model, tasks
from tformer.distributed import meshes, sharding
from tformer.layers import dropout as dropout_lib
from tformer.layers import masks
from tformer.layers import outputs as outputs_lib
from tformer.layers.dropout import DropoutRates
from tformer.layers.initializers import INITIALIZERS
from tformer.layers.kernels import ScoreOptions, probabilities
from tformer.layers.resolved import resolve_model
from tformer.model import FAMILIES, build
from tformer.objectives import OBJECTIVES
from tformer.optim.hyperparameters import Hyperparameters
from tformer.training.state import initial_variables

V, T, S = covering.VOCABULARY, covering.T, 6
METHODS = {
    'encoder': '__call__',
    'decoder': '__call__',
    'encoder_decoder': '__call__',
    'classifier': outputs_lib.HEADS['class'].method,
    'prefix_decoder': '__call__',
}
HEADS = {  # of the same stream; each family's in one program
    'encoder': ('class', 'number', 'tags', 'spans', 'sentences', 'detection'),
    'decoder': ('class', 'number', 'tags', 'spans'),
    'encoder_decoder': ('class', 'number', 'tags', 'spans'),
}
ROWS = covering.load()
FIELDS = [covering.fields(row) for row in ROWS]
FIELDS += [{**covering.fields({'task': list(METHODS).index('decoder')}), **level} for level in covering.ALONE]
TASKS = [list(METHODS)[row['task']] for row in ROWS] + ['decoder'] * len(covering.ALONE)
NAMES = [f'{task}-{number}' for number, task in enumerate(TASKS)]
ONCE = [*(NAMES[number] for number in covering.cover_once(ROWS)), *NAMES[len(ROWS) :]]  # each level in at least one
FEW = [next(name for name in ONCE if name.startswith(f'{task}-')) for task in METHODS]
SEQUENCES = [name for name in NAMES if not name.startswith('classifier')]


def cases(names, quick=ONCE):
    """Runs a test on these cases; conftest.py puts the tests of a case together, so its programs are compiled once."""
    params = [pytest.param(name, marks=() if name in quick else pytest.mark.proof, id=name) for name in names]
    return pytest.mark.parametrize('case', params, indirect=True)


def make_config(task, **fields):
    fixed = covering.fields({'task': list(METHODS).index(task)})
    return Model(**{**fixed, 'encoder_vocab_size': V if task == 'encoder_decoder' else None, **fields})


def sides(task):
    return {'': T, 'encoder_': S} if task == 'encoder_decoder' else {'': T}


def make_batch(task, seed=0):
    """Rows: 0 is full, 1 ends in padding, 2 holds two packed examples (one, for the classifier) and padding.

    The prefix is the first two tokens of every example.
    """
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
    if task in ('encoder', 'classifier'):
        batch['token_types'] = rng.integers(0, 2, (3, T), np.int32)
    return with_prefix(task, batch)


def with_prefix(task, batch):
    return {**batch, 'prefix': batch['positions'] < 2} if task == 'prefix_decoder' else batch


def changed(batch, name, where):
    """The batch with other tokens where `where` is true."""
    tokens = batch[name]
    return {**batch, name: np.where(where, tokens % (V - 1) + 1, tokens)}


NEUTRAL = {
    'scale': (1, 0.1),
    'bias': (0, 0.1),
    'gain': (1, 0.1),
    'sink': (0, 1),
    'mean': (0, 0.1),
    'variance': (1, 0.1),
}


def make_variables(shapes, cfg):
    """Random variables, vectors away from their neutral start, so that every one of them shows.

    Smaller ones where no norm keeps the stream from growing: in a large stream a small change is rounded away. Most
    units of a head's transform are above 0: of a single one that relu leaves, a norm takes the size away.
    """
    rng, bounded = np.random.default_rng(1), cfg.norm is not None and cfg.norm_placement != 'rezero'
    width = covering.TINY['emb_dim'] * (1 if bounded else 4)

    def draw(path, leaf):
        neutral, spread = NEUTRAL.get(path[-1].key, (0, width**-0.5))
        if path[-1].key == 'bias' and path[-2].key.startswith('transform') and cfg.transform_activation == 'relu':
            neutral = 2
        return jnp.asarray(neutral + spread * rng.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


class Case:
    def __init__(self, task, cfg):
        self.task, self.cfg = task, resolve_model(cfg)
        self.model, self.method, self.batch = build(self.cfg), METHODS[task], make_batch(task)
        init = functools.partial(self.model.init, method=self.method)
        shapes = sharding.unboxed(jax.eval_shape(init, jax.random.key(0), self.batch))
        shapes = {name: shapes[name] for name in ('params', 'statistics') if name in shapes}
        variables = make_variables(shapes, self.cfg)
        self.params, self.statistics = variables.pop('params'), variables
        self.forward, self.probe = jax.jit(self.apply), jax.jit(with_gradients(self.apply))
        shape = jax.eval_shape(self.apply, self.params, self.batch)
        real = self.batch['positions'] >= 0 if len(shape.shape) == 3 else np.ones((3, 1), bool)[:, 0]
        noise = np.random.default_rng(2).standard_normal(shape.shape)
        self.cotangent = np.where(real[..., None], noise, 0).astype(np.float32)

    def variables(self, params):
        return {'params': params, **self.statistics}

    def apply(self, params, batch):
        return self.model.apply(self.variables(params), batch, DropoutRates(), method=self.method)

    def logits(self, batch):
        return np.asarray(self.probe(self.params, batch, self.cotangent)[0])

    @functools.cached_property
    def both(self):
        return jax.device_get(self.probe(self.params, self.batch, self.cotangent))


@functools.cache
def make_case(task, **fields):
    return Case(task, make_config(task, **fields))


@functools.lru_cache(maxsize=10)  # a process has room for some hundreds of programs
def numbered(name):
    return Case(name.split('-')[0], Model(**FIELDS[NAMES.index(name)]))


@pytest.fixture
def case(request):
    return numbered(request.param)


# Sums in another order differ by 2^-23 or so each; a design without residuals carries that through a dozen of them.
ANOTHER_ORDER = 1e-5


# --------------------------------------------------------------------------------------- the covering design
@pytest.mark.proof
def test_the_cases_carry_every_legal_pair_of_every_entry_of_every_table():
    held = {pair for row in ROWS for pair in itertools.combinations(row.items(), 2)}
    assert covering.legal_pairs() <= held
    assert {name for pair in covering.legal_pairs() for name in pair} == set(covering.NAMES)
    tables = {name.removeprefix('model.') for name in checks.TABLES if name.startswith('model.')}
    elsewhere = {'recurrence', 'recurrent_attention'}  # tests/layers/test_recurrent.py
    elsewhere |= {'pooler_activation'}  # tests/layers/test_poolings.py
    elsewhere |= {'transform_activation'}  # tests/layers/test_plain_transformer.py
    elsewhere |= {'family', 'initializer', 'dtype', 'param_dtype', 'remat', 'rope_scaling', 'expert_dispatch'}
    assert tables - elsewhere <= {field for levels in covering.FACTORS.values() for level in levels for field in level}
    assert {row['family'] for row in covering.FACTORS['task']} == set(FAMILIES)
    others = {'tokens', 'choice', 'vectors', 'comparison'}  # the latter: tests/layers/test_several_texts.py
    assert others.union(*HEADS.values()) == outputs_lib.HEADS.keys() == tasks.HEADS.keys()
    for name, head in outputs_lib.HEADS.items():
        facts = tasks.HEADS[name]
        assert head.modules.keys() == ({'head'} if name == 'tokens' else {*facts.per_row, *facts.per_token})


# ------------------------------------------------------------------------------------------------- contracts
def faint(case):
    """Whether nothing in a design keeps influences large: they may vanish with the depth, or be rounded away."""
    return case.cfg.norm_placement in ('no_residual', 'rezero') or case.cfg.norm in (None, 'batchnorm', 'dyt')


@pytest.mark.slow
@cases(NAMES)
def test_logits_are_finite_float32(case):
    logits = case.both[0]
    last = {'classifier': (3, 5)}.get(case.task, (3, T, V))
    assert logits.dtype == np.float32 and logits.shape == last and np.isfinite(logits).all()
    assert np.std(logits) > (0 if faint(case) else 1e-3)


def floor(case):
    """What a gradient must be above."""
    return 0 if faint(case) else 1e-5


def reached(case, seen):
    """Whether all of those who may see a change do; faint ones may be lost in float32, their gradients are not."""
    return faint(case) or seen.all()


def unseen(case, path):
    """Whether the design takes a parameter's effect away again."""
    cfg, names = case.cfg, [key.key for key in path]
    # A bias on all keys moves all scores of a query alike, which softmax does not see (but for rotation, caps, sinks).
    after = cfg.position == 'rope' or cfg.attention_softcap or cfg.attention_sink
    key_bias = names[-2:] in (['key', 'bias'], ['key_norm', 'bias']) and not after
    # A norm of the output takes away what a router of one expert multiplies it by,
    router = names[-2] == 'router' and cfg.experts_per_token == 1 and cfg.norm_placement == 'sandwich'
    # and a norm of the queries the length that ScaleNorm gave to what only they read.
    length = cfg.norm == 'scalenorm' and cfg.qk_norm is not None and names[-2:] == ['cross_norm', 'gain']
    if cfg.norm_placement == 'sandwich' and not cfg.attention_projections:
        length |= cfg.norm == 'scalenorm' and names[-1] == 'gain'
    # A feed-forward layer of ReLUs without biases passes a length on, and a norm behind it takes the length away.
    before = {'sandwich': ['mlp_norm'], 'post': ['cross_norm' if 'decoder' in names else 'attention_norm']}
    if cfg.norm == 'scalenorm' and cfg.activation == 'relu' and not cfg.mlp_bias and names[-1] == 'gain':
        length |= names[-2] in before.get(cfg.norm_placement, [])
    # So does the last norm with a stream whose parts all grow alike, as they do where each sum is normed.
    if cfg.norm == 'scalenorm' and cfg.norm_placement == 'deepnorm' and cfg.final_norm:
        length |= names[-1] == 'gain'
    return key_bias or router or length


@pytest.mark.slow
@cases(NAMES)
def test_gradients_reach_every_parameter(case):
    for path, grad in jax.tree_util.tree_leaves_with_path(case.both[1]):
        assert np.isfinite(grad).all()
        assert np.max(np.abs(grad)) > floor(case) or unseen(case, path), jax.tree_util.keystr(path)


@cases(NAMES)
def test_gradients_reach_every_layer(case):
    for path, grad in jax.tree_util.tree_leaves_with_path(case.both[1]):
        if 'layers' in [key.key for key in path] and path[-1].key == 'kernel' and case.cfg.layer_sharing is None:
            every = all(np.max(np.abs(layer)) > floor(case) for layer in grad)
            assert every or unseen(case, path), jax.tree_util.keystr(path)


@cases(NAMES)
def test_a_token_is_seen_by_those_who_may_and_no_other(case):
    for t in (0, 3, T - 1):
        where = np.zeros((3, T), bool)
        where[0, t] = True
        seen = differs(case.logits(changed(case.batch, 'inputs', where)), case.both[0])
        assert not seen[1:].any()
        if case.task == 'classifier':
            assert seen[0] or case.cfg.pooling == 'max' or faint(case)
        elif case.task == 'encoder' or (case.task == 'prefix_decoder' and t < 2):
            assert reached(case, seen[0])
        else:
            assert not seen[0, :t].any() and reached(case, seen[0, t:])


@cases([name for name in NAMES if name.startswith('encoder_decoder')])
def test_an_encoder_token_is_seen_by_the_whole_decoder(case):
    for s in (0, S - 1):
        where = np.zeros((3, S), bool)
        where[0, s] = True
        seen = differs(case.logits(changed(case.batch, 'encoder_inputs', where)), case.both[0])
        assert reached(case, seen[0]) and not seen[1:].any()


@cases(NAMES)
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


@cases(SEQUENCES)
def test_padding_at_another_place_changes_nothing(case):
    batch = {name: np.concatenate([x[:1], np.roll(x[1:2], 3, axis=1), x[2:]]) for name, x in case.batch.items()}
    assert_near(case.logits(batch)[1, 3:], case.both[0][1, :-3], ANOTHER_ORDER)


@cases(SEQUENCES)
def test_packed_examples_are_each_as_alone(case):
    empty = {'inputs': 0, 'positions': -1, 'segment_ids': 0, 'prefix': False, 'token_types': 0}
    for segment in (1, 2):
        batch = dict(case.batch)
        for name, x in case.batch.items():
            prefix = 'encoder_' if name.startswith('encoder_') else ''
            inside = case.batch[f'{prefix}segment_ids'][2] == segment
            row = np.full_like(x[2], empty[name.removeprefix(prefix)])
            row[: inside.sum()] = x[2, inside]
            batch[name] = np.concatenate([x[:2], row[None]])
        place = case.batch['segment_ids'][2] == segment
        alone = case.logits(batch)[2, : place.sum()]
        assert_near(case.both[0][2, place], alone, ANOTHER_ORDER)


@cases(SEQUENCES)
def test_packed_examples_do_not_see_each_other(case):
    segments = case.batch['segment_ids'][2]
    for prefix in sides(case.task):
        for segment in (1, 2):
            where = np.zeros_like(case.batch[f'{prefix}inputs'], bool)
            where[2] = case.batch[f'{prefix}segment_ids'][2] == segment
            seen = differs(case.logits(changed(case.batch, f'{prefix}inputs', where)), case.both[0])
            assert reached(case, seen[2, segments == segment]) and not seen[2, segments == 3 - segment].any()


@pytest.mark.slow
@cases(ONCE, FEW[1:2])
def test_eager_is_jit_and_what_a_batch_leaves_out_is_derived(case):
    """Row 1 without its padding, its positions and its segments, in eager mode, against the compiled full row."""
    short = {}
    for prefix, length in sides(case.task).items():
        short[f'{prefix}inputs'] = case.batch[f'{prefix}inputs'][1:2, : length - 3]
    for name in {'prefix', 'token_types'} & set(case.batch):
        short[name] = case.batch[name][1:2, : T - 3]
    with jax.disable_jit():
        found = case.apply(case.params, short)[0]
    assert_near(found, case.both[0][1] if case.task == 'classifier' else case.both[0][1, :-3], 1e-5)


@pytest.mark.slow
@cases([name for name in NAMES if 'decoder' in name])
def test_decoding_in_chunks_is_the_full_forward(case):
    batch = {key: x for key, x in case.batch.items() if 'segment' not in key}
    batch['positions'] = batch['positions'].copy()
    batch['positions'][2] = [-1, -1, 0, 1, 2, 3, 4, 5]
    batch = with_prefix(case.task, batch)
    ones = {f'{prefix}segment_ids': np.ones_like(batch[f'{prefix}inputs']) for prefix in sides(case.task)}
    expected = case.logits({**batch, **ones})

    def decode(params, batch):
        def extend(cache, chunk):
            logits, cache = case.model.apply(
                case.variables(params), chunk['inputs'], chunk['positions'], cache, chunk.get('prefix'), method='extend'
            )
            return cache, logits

        cache = case.model.apply(case.variables(params), batch, T + 2, method='start')
        names = [name for name in ('inputs', 'positions', 'prefix') if name in batch]
        chunks = {name: jnp.moveaxis(batch[name].reshape(3, -1, 2), 1, 0) for name in names}
        cache, logits = jax.lax.scan(extend, cache, chunks)
        return jnp.moveaxis(logits, 0, 1).reshape(3, T, V), cache

    found, cache = jax.jit(decode)(case.params, batch)
    real = batch['positions'] >= 0
    assert_near(found[real], expected[real], 2e-5)
    assert cache.index == T and (cache.positions_BS[:, T:] == -1).all()


@pytest.mark.slow
@cases(ONCE, FEW[:3])
def test_every_choice_has_its_bfloat16(case):
    rounded = Case(case.task, dataclasses.replace(case.cfg, dtype='bfloat16'))
    logits, grads = jax.device_get(rounded.probe(case.params, case.batch, case.cotangent))
    assert np.isfinite(logits).all() and all(np.isfinite(grad).all() for grad in jax.tree.leaves(grads))
    errors = np.max(np.abs(logits - case.both[0]), -1) / np.max(np.abs(case.both[0]))
    # The largest seen is half of it; but a router that is near a tie may send a token to another expert.
    assert np.sum(errors >= 0.1) <= (case.cfg.num_experts is not None)


@pytest.mark.slow
@cases(ONCE, FEW[:3])
@pytest.mark.proof_cases('encoder_decoder-1')
def test_every_choice_is_the_same_on_eight_devices(case):
    """Two ways each of data, of parameters, and of heads and columns; a fourth row that does not count."""
    mesh, rules = meshes.make_mesh(config.Mesh(data=2, fsdp=2, tensor=2)), sharding.RULES['fsdp_tp']
    batch = {name: np.concatenate([x, x[:1]]) for name, x in case.batch.items()}
    cotangent = np.concatenate([case.cotangent, 0 * case.cotangent[:1]])
    boxed = jax.eval_shape(functools.partial(case.model.init, method=case.method), jax.random.key(0), case.batch)
    params = jax.device_put(case.params, sharding.tree_shardings(boxed['params'], mesh, rules))
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        placed = jax.device_put((batch, cotangent), meshes.batch_sharding(mesh))
        logits, grads = jax.device_get(jax.jit(with_gradients(case.apply))(params, *placed))
    assert_near(logits[:3], case.both[0], ANOTHER_ORDER)
    jax.tree.map(lambda a, b: assert_near(a, b, ANOTHER_ORDER), grads, case.both[1])


# ---------------------------------------------------------------------------------------------------- heads
class Heads:
    """All heads of a family on one batch, a full row and one that ends in padding: outputs and gradients."""

    def __init__(self, family):
        cfg = resolve_model(make_config(family, num_classes=5, pooling='last', pooler=True, mlm_transform=True))
        self.model, self.family = build(cfg), family
        self.batch = {n: x[:2] for n, x in make_batch(family).items() if 'segment' not in n}
        self.batch['weights'] = (np.arange(T)[None] % 4 == 1).astype(np.float32) * (self.batch['positions'] >= 0)
        init = functools.partial(self.model.init, method=self.every)
        shapes = sharding.unboxed(jax.eval_shape(init, jax.random.key(0), self.batch))['params']
        self.params = make_variables(shapes, cfg)
        self.run = jax.jit(self._run)
        self.outputs, self.grads = jax.device_get(self.run(self.params, self.batch))

    def every(self, model, batch):
        outputs = {name: outputs_lib.HEADS[name].method(model, batch, DropoutRates()) for name in HEADS[self.family]}
        for name, parts in {'sentences': ('unmask', 'pairs'), 'detection': ('unmask_small', 'drawn', 'detect')}.items():
            outputs |= dict(zip(parts, outputs.pop(name), strict=True)) if name in outputs else {}
        return outputs

    def _run(self, params, batch):
        def scored(params):
            outputs = self.model.apply({'params': params}, batch, method=self.every)
            real = {2: batch['positions'] >= 0}
            total = 0.0
            for name, x in outputs.items():
                if name != 'drawn':
                    noise = jax.random.normal(jax.random.key(len(name)), x.shape)
                    per_token = x.shape[:2] == real[2].shape
                    shown = real[2].reshape(2, T, *[1] * (x.ndim - 2)) if per_token else True
                    total += jnp.sum(jnp.where(shown, x * noise, 0))
            return total, outputs

        grads, outputs = jax.grad(scored, has_aux=True)(params)
        return outputs, grads


FAMILIES_WITH_HEADS = [pytest.param(name, marks=() if name == 'encoder' else pytest.mark.proof) for name in HEADS]


@functools.cache
def heads(family):
    return Heads(family)


@pytest.mark.slow
@pytest.mark.parametrize('family', FAMILIES_WITH_HEADS)
def test_heads_have_their_shapes_and_gradients_reach_them(family):
    made = heads(family)
    wanted = {'class': (2, 5), 'number': (2,), 'tags': (2, T, 5), 'spans': (2, T, 2)}
    if family == 'encoder':
        wanted |= {'unmask': (2, T, V), 'pairs': (2, 2), 'unmask_small': (2, T, V), 'drawn': (2, T), 'detect': (2, T)}
    assert {name: x.shape for name, x in made.outputs.items()} == wanted
    for name, x in made.outputs.items():
        assert x.dtype == (np.int32 if name == 'drawn' else np.float32) and np.isfinite(x).all()
    for path, grad in jax.tree_util.tree_leaves_with_path(made.grads):
        assert np.max(np.abs(grad)) > 1e-5, jax.tree_util.keystr(path)


@pytest.mark.slow
@pytest.mark.parametrize('family', FAMILIES_WITH_HEADS)
def test_heads_see_what_their_stack_sees_and_no_padding(family):
    made = heads(family)
    for t in (0, 3, T - 1):
        where = np.zeros((2, T), bool)
        where[0, t] = True
        others = jax.device_get(made.run(made.params, changed(made.batch, 'inputs', where)))[0]
        for name, x in others.items():
            seen = differs(x[..., None], made.outputs[name][..., None]).reshape(*x.shape[:2], -1).any(-1)
            assert not seen[1].any()
            if name == 'drawn':  # what is not hidden stays, and what is drawn may
                assert seen[0, t] or made.batch['weights'][0, t]
            elif name in ('class', 'number', 'pairs'):
                assert seen[0].any()
            elif family == 'encoder':
                assert seen[0].all()
            else:
                assert not seen[0, :t].any() and seen[0, t:].all()
    for side in sides(family):
        padding = made.batch[f'{side}positions'] < 0
        others = jax.device_get(made.run(made.params, changed(made.batch, f'{side}inputs', padding)))[0]
        for name, x in others.items():
            moved = differs(x[..., None], made.outputs[name][..., None]).reshape(*x.shape[:2], -1).any(-1)
            real = made.batch['positions'] >= 0
            assert padding.any() and not (moved[real] if moved.shape == real.shape else moved).any()


@pytest.mark.slow
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


def test_a_window_is_as_wide_as_it_says_on_both_sides():
    """Two layers that see `window` positions each carry a change 2 (window - 1) positions on, and no further."""
    window = 3
    for task, left in (('decoder', 0), ('encoder', 2 * (window - 1))):
        for kernel in ('reference', 'chunked'):
            case = make_case(task, attention_pattern=('local',), window=window, attention_kernel=kernel)
            where = np.zeros((3, T), bool)
            where[0, 3] = True
            plain, other = (
                case.forward(case.params, each) for each in (case.batch, changed(case.batch, 'inputs', where))
            )
            seen = differs(np.asarray(other), np.asarray(plain))[0]
            assert seen.tolist() == [3 - left <= t <= 3 + 2 * (window - 1) for t in range(T)]


def test_a_window_of_w_shows_w_positions_to_a_decoder_and_one_less_to_each_side_in_an_encoder():
    positions = jnp.arange(20)[None]
    for window, causal in itertools.product((1, 2, 5), (False, True)):
        mask = masks.attention_mask(positions, positions, causal=causal)
        seen = np.flatnonzero((mask & masks.within_window(positions, positions, window))[0, 10]) - 10
        assert seen.tolist() == list(range(1 - window, 1 if causal else window))


# ------------------------------------------------------------------------------------------------- execution
EXECUTION = [('decoder', False, None), ('decoder', True, 'full')]
EXECUTION += [
    pytest.param(*execution, marks=pytest.mark.proof)
    for execution in [
        *itertools.product(['decoder'], (False, True), checks.TABLES['model.remat']),
        ('encoder_decoder', False, 'dots'),
    ]
    if execution not in (*EXECUTION, ('decoder', True, None))
]


@pytest.mark.slow
@pytest.mark.parametrize('task, scanned, remat', EXECUTION)
def test_scan_and_remat_change_neither_logits_nor_gradients(task, scanned, remat):
    same = {'norm_placement': 'post', 'activation': 'gelu'}
    plain = make_case(task, scan_layers=True, remat=None, **same)
    other = make_case(task, scan_layers=scanned, remat=remat, **same)
    logits, grads = other.probe(plain.params, plain.batch, plain.cotangent)
    assert_near(logits, plain.both[0], 1e-5)
    assert jax.tree.structure(grads) == jax.tree.structure(plain.both[1])
    for found, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(plain.both[1]), strict=True):
        assert_near(found, expected, 1e-5)


# Each rounding to bfloat16 is off by at most 2^-9; a sub-layer makes about four on its way into the residual stream.
BFLOAT16 = 2**-9 * 4


@pytest.mark.slow
@pytest.mark.parametrize('task', METHODS)
def test_bfloat16_is_close_to_float32(task):
    exact = make_case(task, activation='gelu')
    rounded = make_case(task, activation='gelu', dtype='bfloat16')
    layers = 2 if task != 'encoder_decoder' else 4
    expected, logits = exact.forward(exact.params, exact.batch), rounded.forward(exact.params, exact.batch)
    assert logits.dtype == np.float32
    error = np.max(np.abs(logits - expected)) / np.max(np.abs(expected))
    assert 2**-12 < error < BFLOAT16 * (2 * layers) ** 0.5


@pytest.mark.proof
def test_batch_norm_trains_alike_scanned_unrolled_rematerialised_and_on_a_mesh():
    """By the batch's own moments, padding left out, and moves its running ones; decoding changes none."""
    cases = [make_case('decoder', norm='batchnorm', **more) for more in ({}, {'scan_layers': False}, {'remat': 'full'})]
    plain = cases[0]
    batch = {name: np.concatenate([x, x[:1]]) for name, x in plain.batch.items()}
    cotangent = np.concatenate([plain.cotangent, plain.cotangent[1:2]])

    def train(model, params, batch):
        def scored(params):
            logits, moved = model.apply(
                {'params': params, **plain.statistics}, batch, DropoutRates(), mutable=['statistics']
            )
            return jnp.sum(logits * cotangent), (logits, moved)

        grads, (logits, moved) = jax.grad(scored, has_aux=True)(params)
        return logits, grads, moved

    step = jax.jit(train, static_argnums=0)
    logits, _, moved = expected = jax.device_get(step(plain.model, plain.params, batch))
    found = [step(case.model, plain.params, batch) for case in cases[1:]]
    mesh, rules = meshes.make_mesh(config.Mesh(data=2, fsdp=1, tensor=4)), sharding.RULES['tp']
    boxed = jax.eval_shape(plain.model.init, jax.random.key(0), plain.batch)
    params = jax.device_put(plain.params, sharding.tree_shardings(boxed['params'], mesh, rules))
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        placed = jax.device_put(batch, meshes.batch_sharding(mesh))
        found.append(jax.jit(train, static_argnums=0)(plain.model, params, placed))
    for other in found:
        jax.tree.map(lambda a, b: assert_near(a, b, ANOTHER_ORDER), jax.device_get(other), expected)
    real = batch['positions'] >= 0
    again, _, same = jax.device_get(step(plain.model, plain.params, changed(batch, 'inputs', ~real)))
    assert np.array_equal(again[real], logits[real])
    jax.tree.map(np.testing.assert_array_equal, same, moved)
    before = jax.device_get(plain.statistics)
    assert all(np.abs(a - b).max() > 1e-4 for a, b in zip(*map(jax.tree.leaves, (moved, before)), strict=True))
    assert np.abs(logits[:3] - plain.both[0]).max() > 1e-2


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, 'eqns') or hasattr(x, 'jaxpr')):
            inner = getattr(value, 'jaxpr', value)
            if hasattr(inner, 'eqns'):
                yield from equations(inner)


@pytest.mark.slow
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
    exact = probabilities(q.astype(jnp.float32), k.astype(jnp.float32), mask, ScoreOptions(0.5))
    assert_near(probabilities(q, k, mask, ScoreOptions(0.5)), exact, 1e-6)
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


@pytest.mark.slow
def test_tied_embeddings_share_the_tables_that_they_name():
    table = V * covering.TINY['emb_dim']
    for task in ('encoder', 'decoder'):
        once = count(task, tied_embeddings='all')
        assert count(task, tied_embeddings='output') == once
        assert count(task, tied_embeddings=None) == once + table
    tables = {'all': 1, 'inputs': 2, 'output': 2, None: 3}
    assert set(tables) == set(checks.TABLES['model.tied_embeddings'])
    rest = count('encoder_decoder', tied_embeddings='all') - table
    for tied, number in tables.items():
        assert count('encoder_decoder', tied_embeddings=tied) == rest + number * table
    for tied in ('output', None):
        apart = count('encoder_decoder', tied_embeddings=tied, encoder_vocab_size=V + 3)
        assert apart == rest + tables[tied] * table + 3 * covering.TINY['emb_dim']
    assert 'encoder_embed' not in shapes('encoder_decoder', tied_embeddings='inputs')
    assert 'logits' not in shapes('encoder_decoder', tied_embeddings='output').get('head', {})


def test_a_block_has_the_parameters_that_the_formulas_give():
    D, F, N, K, H = 16, 24, 4, 2, 4
    attention = D * N * H * 2 + D * K * H * 2
    attention_bias = N * H + 2 * K * H + D
    expected = V * D + 2 * (attention + 2 * D * F + F + D + 2 * 2 * D) + 2 * D
    base = {'num_kv_heads': K, 'tied_embeddings': 'all'}
    assert count('decoder', **base) == expected
    assert count('decoder', **base, attention_bias=('query', 'key', 'value', 'out')) == expected + 2 * attention_bias
    assert count('decoder', **base, mlp_bias=False) == expected - 2 * (F + D)
    assert count('decoder', **base, activation='swiglu') == expected + 2 * (D * F + F)
    assert count('decoder', **base, norm='rmsnorm') == expected - 5 * D
    assert count('decoder', **base, norm=None) == expected - 5 * 2 * D
    assert count('decoder', **base, norm_placement='post') == expected - 2 * D
    assert count('decoder', **base, final_norm=False) == expected - 2 * D
    assert count('decoder', **base, position='learned') == expected + covering.TINY['max_len'] * D
    assert count('decoder', **base, output_bias=True) == expected + V
    assert count('decoder', **base, mlm_transform=True) == expected + D * D + D + 2 * D
    gated = count('decoder', **base, activation='swiglu', mlm_transform=True)
    assert gated == expected + 2 * (D * F + F) + 2 * (D * D + D) + 2 * D
    assert count('decoder', **base, scan_layers=False) == expected
    assert count('classifier', **base) == expected + (D + 1) * 5


def logical_names(task, **fields):
    boxes = jax.tree.leaves(shapes(task, **fields), is_leaf=lambda x: hasattr(x, 'names'))
    assert all(hasattr(box, 'names') and len(box.names) == box.value.ndim for box in boxes)
    return {name for box in boxes for name in box.names}


@pytest.mark.proof
def test_every_logical_axis_has_a_rule_and_every_parameter_axis_is_used():
    used = logical_names('decoder', recurrence='lstm')
    for name in ONCE:
        case = numbered(name)
        used |= logical_names(case.task, **dataclasses.asdict(case.cfg))
    assert used == set(sharding.PARAMETER_AXES)
    for rules in sharding.RULES.values():
        assert sorted(name for name, _ in rules) == sorted(sharding.NAMES)
        for _, axes in rules:
            assert ({axes} if isinstance(axes, str) else set(axes or ())) <= set(meshes.AXES)


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
    model = build(cfg.model)

    @jax.jit
    def params(scale):
        hyper = Hyperparameters.of(cfg).replace(init_scale=scale)
        return sharding.unboxed(initial_variables(model, OBJECTIVES[objective], hyper, make_batch(task))['params'])

    def drawn(scale):
        with jax.default_prng_impl('rbg'):  # whose programs compile in no time
            return params(scale)

    return drawn


@pytest.mark.slow
@pytest.mark.parametrize(
    'initializer', [pytest.param(name, marks=() if name == 'gpt2' else pytest.mark.proof) for name in INITIALIZERS]
)
def test_the_initial_scale_is_a_factor_on_random_values_only(initializer):
    biases = {
        'attention_bias': ('query', 'key', 'value', 'out'),
        'output_bias': True,
        'mlm_transform': True,
        'tied_embeddings': None,
    }
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
BETA = {'encoder': 0.87 * 32 ** (-1 / 16), 'decoder': 24**-0.25}  # Wang et al. 2022, table 1, for N = M = 2
ROLES = {'query': 'query', 'key': 'key', 'value': 'value', 'out': 'out', 'in_0': 'in', 'logits': 'output'}


def expected_deviation(initializer, role, fan_in, fan_out, stack):
    """Standard deviations by the papers; fan-in and fan-out are those of the whole projection: D -> N * H, and back."""
    table = role in ('table', 'positions')
    xavier = fan_in**-0.5 if table else (2 / (fan_in + fan_out)) ** 0.5
    gained = role in ('value', 'out', 'in')
    return {
        'xavier': xavier,
        'lecun': fan_in**-0.5,
        'truncated_normal': CUT,
        'gpt2': 0.02 * ({'encoder': 4, 'decoder': 6}[stack] ** -0.5 if role == 'out' else 1),
        't5': {'table': 1.0, 'query': (fan_in * 32) ** -0.5}.get(role, fan_in**-0.5),
        'deepnorm': xavier * (BETA[stack] if gained else 1),
    }[initializer]


@pytest.mark.slow
@pytest.mark.parametrize('initializer', INITIALIZERS)
def test_initial_values_have_the_spread_that_their_name_says(initializer):
    wide = {'emb_dim': 64, 'mlp_dim': 256, 'head_dim': 32, 'vocab_size': 200, 'encoder_vocab_size': None}
    fields = {**wide, 'position': 'learned', 'max_len': 128, 'tied_embeddings': 'inputs', 'initializer': initializer}
    params = start('encoder_decoder', 'seq2seq', **fields)(1.0)
    seen = set()
    for path, value in jax.tree_util.tree_leaves_with_path(params):
        names = [key.key for key in path]
        if names[-1] not in ('kernel', 'table'):
            continue
        role = ROLES.get(names[-2], 'positions' if 'positions' in names else 'table')
        each = value[0] if 'layers' in names else value
        if names[-1] == 'table':
            fan_in, fan_out = each.shape[::-1]
        else:
            fan_in = 64 if each.shape[0] == 64 else each.size // 64
            fan_out = each.size // fan_in
        stack = 'encoder' if names[0] == 'encoder' else 'decoder'
        # 8192 samples at least: the standard error of a standard deviation is below 0.8 %.
        expected = expected_deviation(initializer, role, fan_in, fan_out, stack)
        assert np.std(each) == pytest.approx(expected, rel=0.04), names
        seen.add(role)
    assert seen == {'query', 'key', 'value', 'out', 'in', 'output', 'table', 'positions'}


@pytest.mark.slow
def test_mup_is_the_standard_parametrization_at_the_base_width_but_for_the_scale_of_attention():
    """Yang et al. 2022, table 8: inside, variances fall with the fan-in; tables and outputs stay as they are."""
    base = start('decoder', 'causal_lm', emb_dim=64, tied_embeddings=None)(1.0)
    mup = {'parametrization': 'mup', 'base_emb_dim': 64, 'tied_embeddings': None, 'initializer': 'truncated_normal'}
    same = start('decoder', 'causal_lm', **{**mup, 'initializer': None}, emb_dim=64)(1.0)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(base), jax.tree.leaves(same), strict=True))
    wide = start('decoder', 'causal_lm', **mup, emb_dim=256, mlp_dim=256)(1.0)
    mlp, embed, head = (wide['decoder']['stack']['layers']['mlp'], wide['embed'], wide['head']['logits'])
    assert np.std(mlp['out']['kernel']) == pytest.approx(CUT / 2, rel=0.02)
    assert np.std(embed['table']) == pytest.approx(CUT, rel=0.04)
    assert np.std(head['kernel']) == pytest.approx(CUT, rel=0.04)


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


@pytest.mark.slow
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
    assert_near(off(DropoutRates(0.5, 0.5, 0.5)), plain, 1e-6)
    assert_near(apply(DropoutRates(0.0, 0.0, 0.0), key), plain, 1e-6)
    for name in ('residual', 'attention', 'activation'):
        rates = DropoutRates(0.0, 0.0, 0.0).replace(**{name: 0.3})
        found = apply(rates, key)
        assert np.isfinite(found).all() and np.array_equal(found, apply(rates, key))
        assert np.max(np.abs(found - plain)) > 1e-2 and np.max(np.abs(found - apply(rates, other))) > 1e-2
    assert len(traces) == 1


def test_the_rates_of_the_config_are_those_thatapply():
    case = make_case('decoder', dropout_rate=0.2, attention_dropout_rate=0.1, activation_dropout_rate=0.3)
    apply = functools.partial(
        case.model.apply, {'params': case.params}, case.batch, rngs={'dropout': jax.random.key(0)}
    )
    stated, given, off = jax.jit(lambda: (apply(), apply(DropoutRates(0.2, 0.1, 0.3)), apply(DropoutRates())))()
    assert np.array_equal(stated, given) and not np.array_equal(stated, off)
    assert DropoutRates.of(make_config('decoder')) == DropoutRates()


def test_layers_drop_out_by_masks_of_their_own():
    case = make_case('decoder', norm=None, position=None, tied_embeddings=None)
    params = jax.tree.map(jnp.zeros_like, case.params)
    params['decoder']['stack']['layers']['mlp']['out']['bias'] += 1.0  # all that a layer adds to the stream
    params['head']['logits']['kernel'] += jnp.eye(16, V)
    rngs = {'dropout': jax.random.key(0)}
    apply = jax.jit(lambda: case.model.apply({'params': params}, case.batch, DropoutRates(residual=0.5), rngs=rngs))
    values, counts = np.unique(apply()[..., :16], return_counts=True)
    assert values.tolist() == [0, 2, 4]
    assert np.allclose(counts / counts.sum(), [0.25, 0.5, 0.25], atol=4 * (0.25 / counts.sum()) ** 0.5)
