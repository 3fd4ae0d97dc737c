"""Fine-tuning: rates that fall with the depth, parameters that stay, low-rank adapters, what is loaded from where."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import toy_data
from places import ROOT
from small_decoding import LATENT
from tformer import checks, config
from tformer.config import Config, Data, Decode, Model, Train, tasks
from tformer.distributed import sharding
from tformer.errors import UserError
from tformer.layers.dropout import DropoutRates
from tformer.layers.linear import ADAPTERS, LORA_TARGETS, Dense, merge_lora
from tformer.layers.resolved import resolve_model
from tformer.model import build
from tformer.objectives import OBJECTIVES
from tformer.optim import freezing
from tformer.optim.hyperparameters import Hyperparameters
from tformer.optim.optimizers import lr_multipliers, make_optimizer
from tformer.training import checkpoint, checkpoint_writer, pretrained
from tformer.training import loop as train_lib
from tformer.training.dummy_batch import random_batch
from tformer.training.state import TrainState, begin, evaluation_params, initial_variables, logical_names
from tformer.training.step import make_train_step

FAMILY = {
    'causal_lm': 'decoder',
    'masked_lm': 'encoder',
    'seq2seq': 'encoder_decoder',
    'classification': 'encoder',
    'contrastive': 'encoder',
    'token_classification': 'encoder',
    'question_answering': 'encoder',
    'replaced_token': 'encoder',
}
TINY = Model(
    vocab_size=11, emb_dim=8, mlp_dim=12, num_heads=2, max_len=8, dropout_rate=0.0, position='learned',
)  # fmt: skip
DEPTHS = {
    'encoder': {'num_encoder_layers': 3},
    'decoder': {'num_decoder_layers': 2},
    'encoder_decoder': {'num_encoder_layers': 3, 'num_decoder_layers': 2},
}
STEADY = config.Optimizer(schedule='constant', warmup_steps=0, learning_rate=0.01)


def make_config(objective, optimizer=STEADY, microbatches=1, **model):
    classes = {'num_classes': 3} if objective in ('classification', 'token_classification') else {}
    classes |= {'pooler': True} if objective == 'classification' else {}
    family = FAMILY[objective]
    cfg = Config(
        model=dataclasses.replace(TINY, **{'family': family, **DEPTHS[family], **classes, **model}),
        data=Data(length=6),
        optimizer=optimizer,
        train=Train(objective=objective, batch_size=4, num_steps=9, microbatches=microbatches),
        decode=Decode(max_len=8),
    )
    cfg = checks.resolve(cfg, vocab_size=11, encoder_vocab_size=11 if objective == 'seq2seq' else None)
    checks.check_here(cfg)
    return cfg


class Trainer:
    """A config's model, its optimizer and its step, not yet jitted; parameters are away from their neutral start."""

    def __init__(self, cfg):
        self.cfg, self.hyper, self.batch = cfg, Hyperparameters.of(cfg), random_batch(cfg)
        self.model, self.objective = build(cfg.model), OBJECTIVES[cfg.train.objective]
        self.names = logical_names(self.model, self.objective, self.batch)
        self.optimizer = make_optimizer(cfg, self.names)
        self.step = make_train_step(self.model, self.objective, self.optimizer, cfg)

    def variables(self):
        start = functools.partial(initial_variables, self.model, self.objective, self.hyper, self.batch)
        shapes, rng = sharding.unboxed(jax.eval_shape(start)), np.random.default_rng(0)
        return jax.tree.map(lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape), x.dtype), shapes)

    def start(self):
        found = self.variables()
        return begin(self.optimizer, self.hyper, found['params'], found.get('statistics', {}))

    def logits(self, params):
        apply = functools.partial(self.model.apply, method=self.objective.method)
        return np.asarray(jax.jit(apply)({'params': params}, self.batch, DropoutRates()))


def flat(tree):
    return {
        '.'.join(key.key for key in path if hasattr(key, 'key')): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def factors(objective, model=None, **fields):
    cfg = make_config(objective, dataclasses.replace(STEADY, **fields), **(model or {}))
    return lr_multipliers(cfg, Trainer(cfg).names)


# ------------------------------------------------------------------------------------------- rates by the depth
def test_the_rate_falls_from_the_heads_to_the_embeddings_in_each_stack():
    found = flat(factors('seq2seq', layer_decay=0.5, model={'tied_embeddings': None}))
    assert found['head.logits.kernel'] == found['encoder.stack.norm.scale'] == found['decoder.stack.norm.bias'] == 1
    assert found['encoder.stack.layers.attention.query.kernel'].tolist() == [[[[1 / 8]]], [[[1 / 4]]], [[[1 / 2]]]]
    assert found['encoder.stack.layers.mlp_norm.scale'].tolist() == [[1 / 8], [1 / 4], [1 / 2]]
    assert found['decoder.stack.layers.cross_attention.out.kernel'].tolist() == [[[[1 / 4]]], [[[1 / 2]]]]
    assert found['encoder.input_embedding.positions.table'] == found['encoder_embed.table'] == 1 / 16
    assert found['decoder.input_embedding.positions.table'] == found['embed.table'] == 1 / 8
    # One table at the bottom of both stacks counts the layers of the deeper one.
    assert flat(factors('seq2seq', layer_decay=0.5, model={'tied_embeddings': 'all'}))['embed.table'] == 1 / 16
    assert all(np.all(x == 1) for x in flat(factors('seq2seq', layer_decay=1.0)).values())
    assert all(np.all(x == 1) for x in flat(factors('seq2seq')).values())


def test_a_shared_block_is_one_layer_and_biases_of_the_whole_stack_stand_at_its_foot():
    model = {'position': 'relative', 'layer_sharing': 'all'}
    found = flat(factors('classification', layer_decay=0.5, model=model))
    assert found['class_head.classes.kernel'] == found['pooler.dense.bias'] == found['encoder.stack.norm.scale'] == 1
    assert found['encoder.stack.layers.mlp.in_0.kernel'] == 1 / 2
    assert found['embed.table'] == found['encoder.bias.table'] == 1 / 4


def test_the_layers_of_a_generator_are_a_head():
    fields = {'layer_decay': 0.5, 'frozen_layers': 2}
    run = Trainer(make_config('replaced_token', dataclasses.replace(STEADY, **fields)))
    found, trained = flat(lr_multipliers(run.cfg, run.names)), flat(freezing.trainable_mask(run.cfg, run.names))
    heads = {path for path in found if path.startswith(('generator.', 'detection_head.'))}
    assert 'generator.encoder.stack.layers.mlp.out.kernel' in heads
    assert all(found[path] == 1 and trained[path] for path in heads)
    assert found['encoder.stack.layers.mlp.out.bias'].ravel().tolist() == [1 / 8, 1 / 4, 1 / 2]
    assert trained['encoder.stack.layers.mlp.out.bias'].ravel().tolist() == [False, False, True]


def test_the_decay_multiplies_other_factors():
    model = {'parametrization': 'mup', 'base_emb_dim': 4, 'lora_rank': 2}
    found = flat(
        factors('causal_lm', layer_decay=0.5, lr_multipliers=('mlp=3', 'decoder.input_embedding=5'), model=model)
    )
    assert found['decoder.stack.layers.mlp.out.kernel'].ravel().tolist() == [3 / 8, 3 / 4]
    assert found['decoder.stack.layers.mlp.out.bias'].ravel().tolist() == [3 / 4, 3 / 2]
    assert found['decoder.input_embedding.positions.table'] == 5 / 8
    # The first kernel of an adapter widens with the model, the second does not.
    assert found['decoder.stack.layers.attention.query.lora_a.kernel'].ravel().tolist() == [1 / 8, 1 / 4]
    assert found['decoder.stack.layers.attention.query.lora_b.kernel'].ravel().tolist() == [1 / 4, 1 / 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    'name', ['adamw', 'muon', *(pytest.param(name, marks=pytest.mark.proof) for name in ('adafactor', 'schedule_free'))]
)
def test_the_decay_reaches_the_update_of_each_layer(name):
    """One operation after another: two programs may fuse them otherwise."""
    updates = []
    for decay in (None, 0.5):
        run = Trainer(make_config('causal_lm', dataclasses.replace(STEADY, name=name, layer_decay=decay)))
        params = run.variables()['params']
        grads = jax.tree.map(jnp.cos, params)
        state = run.optimizer.init(params)
        update, _ = run.optimizer.update(grads, state, params, learning_rate=1.0, weight_decay=0.1)
        updates.append(flat(update))
    plain, decayed = updates
    for path, update in decayed.items():
        factor = np.asarray([0.25, 0.5]).reshape(2, *[1] * (update.ndim - 1)) if '.layers.' in path else 1 / 8
        factor = 1 if path.startswith('decoder.stack.norm') else factor
        np.testing.assert_allclose(update, factor * plain[path], rtol=1e-6, err_msg=path)


# ---------------------------------------------------------------------------------------------------- freezing
def moments(state):
    """The parameters that the optimizer keeps something of."""
    kept = tuple(f'.{path}' for path in flat(state.opt_state))
    return {path for path in flat(state.params) if any(name.endswith(f'.{path}') for name in kept)}


DECAYED = {'weight_decay': 0.1, 'decayed_roles': ('kernel', 'table', 'bias', 'scale')}
SURE = {
    'adamw': {'ema_decay': 0.5},
    'schedule_free': {},
    'muon': {'ema_decay': 0.9, 'clip_value': 0.1},
    'adafactor': {},
}


@pytest.mark.slow
@pytest.mark.parametrize('name', SURE)
@pytest.mark.proof_cases('muon', 'schedule_free')
def test_what_is_frozen_stays_bit_for_bit(name):
    frozen = {'frozen': ('decoder.stack.layers.mlp', 'norm'), 'frozen_layers': 1, 'layer_decay': 0.9}
    optimizer = dataclasses.replace(STEADY, name=name, **frozen, **DECAYED, **SURE[name])
    run = Trainer(make_config('causal_lm', optimizer, microbatches=2))
    params, step = run.variables()['params'], jax.jit(run.step)
    params['embed']['table'] = params['embed']['table'].at[0].set(-0.0)
    state, before = begin(run.optimizer, run.hyper, params, {}), flat(params)
    for _ in range(3):
        state, _ = step(state, run.batch, run.hyper)
    whole = {
        path for path in before if 'mlp.' in path or 'embed' in path or 'input_embedding' in path or '.norm.' in path
    }
    kept = set(before) - whole
    assert len(whole) == 8 and kept and all('.layers.' in path for path in kept)
    assert kept == moments(state)
    for found in (flat(state.params), flat(evaluation_params(state))):
        for path in whole:
            assert found[path].tobytes() == before[path].tobytes(), path
        for path in kept:
            assert found[path][0].tobytes() == before[path][0].tobytes(), path
            assert np.all(found[path][1] != before[path][1]), path


def test_the_update_of_what_is_frozen_leaves_even_the_sign_of_a_zero():
    params = {'kept': jnp.asarray([-0.0, 0.0, 1.0]), 'trained': jnp.ones(3)}
    optimizer = freezing.freeze(optax.trace(0.9), {'kept': False, 'trained': True})
    updates, state = optimizer.update(params, optimizer.init(params), params)
    after = optax.apply_updates(params, updates)
    assert np.signbit(after['kept']).tolist() == [True, False, False] and after['kept'][2] == 1
    assert set(flat(state)) == {'trained'} and np.all(after['trained'] == 2)


def test_all_layers_frozen_are_arrays_frozen_whole():
    run = Trainer(make_config('classification', dataclasses.replace(STEADY, frozen_layers=3)))
    assert {path.split('.')[0] for path in moments(run.start())} == {'pooler', 'class_head', 'encoder'}
    assert {path for path in moments(run.start()) if 'encoder' in path} == {
        'encoder.stack.norm.scale',
        'encoder.stack.norm.bias',
    }
    shared = Trainer(make_config('classification', dataclasses.replace(STEADY, frozen_layers=1), layer_sharing='all'))
    assert moments(shared.start()) == moments(run.start())


def test_each_stack_freezes_its_own_lowest_layers():
    run = Trainer(make_config('seq2seq', dataclasses.replace(STEADY, frozen_layers=2)))
    found = freezing.trainable_mask(run.cfg, run.names)
    assert found['encoder']['stack']['layers']['mlp']['in_0']['kernel'].ravel().tolist() == [False, False, True]
    assert not any(np.any(part) for part in flat(found['decoder']['stack']['layers']).values())
    assert not found['embed']['table'] and not found['encoder']['input_embedding']['positions']['table']
    assert found['decoder']['stack']['norm']['scale'] is True


def test_a_partly_frozen_array_counts_with_its_trained_layers_alone():
    trained = {'table': False, 'head': True, 'layers': np.array([False, False, True]).reshape(3, 1)}
    params = {'table': np.zeros((9, 4)), 'head': np.zeros(5), 'layers': np.zeros((3, 7))}
    assert freezing.count_trainable(trained, params) == 5 + 7


def test_the_norm_that_clips_is_of_what_is_trained():
    plain = dataclasses.replace(STEADY, name='sgd', momentum=0.0, learning_rate=1.0, clip_norm=None)
    clipped = dataclasses.replace(plain, clip_norm=1e-3, frozen=('mlp', 'embed'), frozen_layers=1)
    run, frozen = (Trainer(make_config('causal_lm', optimizer)) for optimizer in (plain, clipped))
    start, held = run.start(), frozen.start()
    after, _ = jax.jit(run.step)(start, run.batch, run.hyper)
    gradient = flat(jax.tree.map(jnp.subtract, start.params, after.params))
    moved, numbers = jax.jit(frozen.step)(held, frozen.batch, frozen.hyper)
    trained = flat(freezing.trainable_mask(frozen.cfg, frozen.names))
    parts = {path: part * gradient[path] for path, part in trained.items()}
    norm = np.sqrt(sum(np.sum(np.square(part, dtype=np.float64)) for part in parts.values()))
    whole = np.sqrt(sum(np.sum(np.square(part, dtype=np.float64)) for part in gradient.values()))
    assert whole > 1.5 * norm and float(numbers['grad_norm']) == pytest.approx(norm, rel=1e-4)
    for path, step in flat(jax.tree.map(jnp.subtract, held.params, moved.params)).items():
        np.testing.assert_allclose(step, parts[path] * 1e-3 / norm, atol=1e-7)


def test_beside_adapters_the_norm_of_the_gradient_is_of_what_is_trained():
    plain = dataclasses.replace(STEADY, name='sgd', momentum=0.0, learning_rate=1.0, clip_norm=None)
    run = Trainer(make_config('causal_lm', plain, lora_rank=2, lora_targets=ALL))
    start = run.start()
    after, numbers = jax.jit(run.step)(start, run.batch, run.hyper)
    moved = flat(jax.tree.map(jnp.subtract, start.params, after.params)).values()
    norm = np.sqrt(sum(np.sum(np.square(step, dtype=np.float64)) for step in moved))
    assert float(numbers['grad_norm']) == pytest.approx(norm, rel=1e-4)


def test_no_gradient_is_computed_through_what_is_frozen_whole():
    def loops(**fields):
        run = Trainer(make_config('classification', dataclasses.replace(STEADY, **fields)))
        program = jax.make_jaxpr(run.step)(run.start(), run.batch, run.hyper)
        return sum(eqn.primitive.name == 'scan' for eqn in program.jaxpr.eqns)

    assert loops() == 2  # over the layers, and back
    assert loops(frozen=('encoder', 'embed')) == loops(frozen_layers=3) == 1


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        (
            {'frozen': ('encodr',)},
            "optimizer.frozen: 'encodr' is not in the path of any parameter; did you mean 'encoder'",
        ),
        ({'frozen': ('mlp.in_9',)}, "optimizer.frozen: 'mlp.in_9' is not in the path of any parameter"),
        ({'frozen': ('mlp.in',)}, "optimizer.frozen: 'mlp.in' is not in the path of any parameter"),
        ({'frozen': ('encoder', 'embed', 'pooler', 'class_head')}, 'leave nothing to train'),
        ({'frozen_layers': 4}, 'optimizer.frozen_layers=4 is more than the encoder has: 3'),
        ({'frozen_layers': -1}, 'optimizer.frozen_layers=-1 must not be negative'),
        ({'layer_decay': 1.5}, 'optimizer.layer_decay=1.5 must be at most 1'),
        ({'layer_decay': 0.0}, 'optimizer.layer_decay=0.0 must be positive'),
    ],
)
def test_what_cannot_be_frozen_or_decayed_is_one_line(fields, message):
    with pytest.raises(UserError) as error:
        Trainer(make_config('classification', dataclasses.replace(STEADY, **fields)))
    assert message in str(error.value) and '\n' not in str(error.value)


def test_a_shared_block_has_one_layer_to_freeze():
    with pytest.raises(UserError, match=r'frozen_layers=2 is more than the decoder has: 1, shared'):
        make_config('causal_lm', dataclasses.replace(STEADY, frozen_layers=2), layer_sharing='all')


# ---------------------------------------------------------------------------------------------------- adapters
ALL = tuple(LORA_TARGETS)


def without_adapters(params):
    kept = {name: part for name, part in params.items() if name not in ADAPTERS}
    return {name: without_adapters(part) if isinstance(part, dict) else part for name, part in kept.items()}


@pytest.mark.parametrize(
    ('equation', 'role', 'shape', 'names', 'path'),
    [
        ('BTD,DNH->BNTH', 'query', (4, 2, 3), ('embed', 'heads', 'head_dim'), 'btd,dr,rnh->bnth'),
        ('BNTV,NVD->BTD', 'attention_out', (2, 3, 4), ('heads', 'head_dim', 'embed'), 'bntv,nvr,rd->btd'),
        ('BTF,FD->BTD', 'mlp_out', (3, 4), ('mlp', 'embed'), 'btf,fr,rd->btd'),
    ],
)
def test_an_adapter_adds_its_two_products_times_alpha_over_rank(equation, role, shape, names, path):
    cfg = resolve_model(dataclasses.replace(TINY, lora_rank=5, lora_alpha=2.0, lora_targets=ALL))
    layer, rng = Dense(cfg, equation, shape, names, role=role), np.random.default_rng(0)
    x = rng.standard_normal({'BTD': (2, 6, 4), 'BNTV': (2, 2, 6, 3), 'BTF': (2, 6, 3)}[equation.split(',')[0]])
    first = layer.init(jax.random.key(0), x)['params']
    assert np.std(sharding.unboxed(first)['lora_a']['kernel']) > 0.1
    assert not sharding.unboxed(first)['lora_b']['kernel'].any()
    params = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape), sharding.unboxed(first))
    w, a, b = params['kernel'], params['lora_a']['kernel'], params['lora_b']['kernel']
    expected = np.einsum(equation, x, w) + 2 / 5 * np.einsum(path, x, a, b)
    np.testing.assert_allclose(layer.apply({'params': params}, x), expected, rtol=1e-4, atol=1e-4)
    other = Dense(dataclasses.replace(cfg, lora_targets=('key',)), equation, shape, names, role=role)
    assert set(other.init(jax.random.key(0), x)['params']) == {'kernel'}


FAMILIES = [
    ('seq2seq', {'scan_layers': False, 'lora_alpha': 5.0}),
    ('classification', {'attention_bias': ('query', 'value'), 'activation': 'swiglu'}),
    ('causal_lm', {'layer_sharing': 'all', 'num_kv_heads': 1}),
    ('causal_lm', {**LATENT, 'lora_targets': ('query', 'out', *ALL[4:])}),
]


@pytest.mark.parametrize(
    ('objective', 'fields'), [FAMILIES[0], *(pytest.param(*each, marks=pytest.mark.proof) for each in FAMILIES[1:])]
)
@pytest.mark.proof_cases('seq2seq-fields0')
def test_adapters_begin_as_the_base_train_alone_and_merge_into_it(objective, fields):
    optimizer = dataclasses.replace(STEADY, **DECAYED)
    run = Trainer(make_config(objective, optimizer, **{'lora_rank': 2, 'lora_targets': ALL, **fields}))
    fields = {**fields, 'lora_alpha': Model.lora_alpha, 'lora_targets': Model.lora_targets}
    base = Trainer(make_config(objective, **fields))
    state = run.start()
    params = jax.tree_util.tree_map_with_path(lambda p, x: 0 * x if 'lora_b' in str(p) else x, state.params)
    assert np.array_equal(run.logits(params), base.logits(without_adapters(params)))
    jax.tree.map(np.testing.assert_array_equal, merge_lora(params, 16.0), without_adapters(params))

    before, step = flat(state.params), jax.jit(run.step)
    trained = {path for path in before if 'lora_' in path or path.split('.')[0] in tasks.head_parameters()}
    stacks = {'classification': 1, 'causal_lm': 1, 'seq2seq': 3}[objective]  # of attentions
    mlps = {'classification': 3, 'causal_lm': 2, 'seq2seq': 4}[objective]
    of_attention = 3 if 'kv_latent_dim' in fields else 4  # of both kernels of queries, and out
    assert len([path for path in before if 'lora_' in path]) == 2 * (of_attention * stacks + mlps)
    assert moments(state) == trained
    for _ in range(2):
        state, _ = step(state, run.batch, run.hyper)
    after = flat(state.params)
    assert {path for path in before if before[path].tobytes() != after[path].tobytes()} == trained

    merged = merge_lora(state.params, run.cfg.model.lora_alpha)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), base.variables()['params'])
    assert jax.tree.map(lambda x: (x.shape, x.dtype), merged) == shapes
    expected, plain = run.logits(state.params), base.logits(without_adapters(state.params))
    np.testing.assert_allclose(base.logits(merged), expected, rtol=1e-4, atol=1e-5)
    assert np.abs(plain - expected).max() > 1e-2


@pytest.mark.parametrize(
    ('objective', 'heads'),
    [
        ('classification', {'pooler', 'class_head'}),
        ('token_classification', {'tag_head'}),
        ('question_answering', {'span_head'}),
        ('replaced_token', {'generator', 'detection_head'}),
    ],
)
def test_beside_adapters_the_heads_of_tasks_alone_are_trained(objective, heads):
    run = Trainer(make_config(objective, STEADY, lora_rank=2, lora_targets=('query',)))
    trained = {path for path, part in flat(freezing.trainable_mask(run.cfg, run.names)).items() if part.all()}
    query = 'encoder.stack.layers.attention.query'
    adapters = {f'{query}.lora_{which}.kernel' for which in 'ab'}
    assert adapters < trained and {path.split('.')[0] for path in trained - adapters} == heads


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'lora_targets': ()}, 'model.lora_targets is empty'),
        ({'lora_targets': ('query', 'quary')}, "model.lora_targets='quary' is unknown; did you mean 'query'"),
        ({'num_experts': 2, 'lora_targets': ('query', 'mlp_in')}, "'mlp_in' fits no layer: experts"),
        ({'attention_projections': False}, "'query' fits no layer: model.attention_projections is False"),
        ({'lora_rank': 0}, 'model.lora_rank=0 must be positive'),
    ],
)
def test_adapters_that_fit_no_layer_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        make_config('causal_lm', **{'lora_rank': 2, **fields})


# ------------------------------------------------------------------------------------ from another run's workdir
class Loader:
    """Saves a model as a run would and loads it into another."""

    def __init__(self, place):
        self.place, self.count = place, 0

    def save(self, objective, **model):
        self.count += 1
        workdir = self.place / str(self.count)
        found = Trainer(make_config(objective, **model)).variables()
        state = TrainState(jnp.asarray(7), found['params'], {}, None, found.get('statistics', {}))
        saved = checkpoint_writer.CheckpointWriter(workdir)
        saved.save(state, {}, 0.0)
        saved.wait()
        return str(workdir), found

    def load(self, source, objective, excepted=(), **model):
        run = Trainer(make_config(objective, **model))
        initial = jax.tree.map(lambda x: jnp.full_like(x, 9.0), run.variables())
        placed = jax.tree.map(lambda x: x.sharding, initial)
        vocabulary = objective not in ('classification', 'contrastive')
        return pretrained.load(source, initial, placed, excepted, vocabulary)


@pytest.fixture
def loader(tmp_path):
    return Loader(tmp_path)


def fresh_parts(found):
    return {path for path, x in flat(found).items() if np.all(x == 9.0)}


def test_vectors_of_texts_need_no_head_of_the_model_that_they_start_from(loader, capsys):
    for lender, left in (('masked_lm', 'head'), ('classification', 'class_head, pooler')):
        source, _ = loader.save(lender, **({'mlm_transform': True} if lender == 'masked_lm' else {}))
        assert not fresh_parts(loader.load(source, 'contrastive'))
        assert capsys.readouterr().out.endswith(f'  loaded: embed, encoder\n  fresh: none\n  left: {left}\n')


@pytest.mark.slow
def test_heads_come_and_go_without_being_named(loader, capsys):
    source, before = loader.save('masked_lm', mlm_transform=True, output_bias=True)
    found = loader.load(source, 'classification')
    assert capsys.readouterr().out == (
        f'{source} step 7: 16 arrays\n  loaded: embed, encoder\n  fresh: class_head, pooler\n  left: head\n'
    )
    assert {path.split('.')[1] for path in fresh_parts(found)} == {'class_head', 'pooler'}
    for part in ('embed', 'encoder'):
        jax.tree.map(np.testing.assert_array_equal, found['params'][part], before['params'][part])

    source, _ = loader.save('masked_lm', mlm_transform=True, task_transform=True, output_bias=True)
    found = loader.load(source, 'classification', task_transform=True)  # before its classes stands the same transform
    assert {path.split('.')[1] for path in fresh_parts(found)} == {'class_head', 'pooler'} and 'head' in found['params']
    source, _ = loader.save('classification')
    assert fresh_parts(loader.load(source, 'classification')) == set()
    assert {path.split('.')[1] for path in fresh_parts(loader.load(source, 'classification', task_transform=True))} == {
        'head'
    }
    heads = fresh_parts(loader.load(source, 'classification', num_classes=4))
    assert heads == {'params.class_head.classes.kernel', 'params.class_head.classes.bias'}
    assert heads == fresh_parts(loader.load(source, 'classification', excepted=('class_head',)))
    assert fresh_parts(loader.load(source, 'masked_lm')) == set()


REFUSED = [  # (saved, loaded into, what the line says, what makes it pass)
    ({}, {'num_token_types': 2}, 'fresh here: encoder.input_embedding.token_types; name', ('token_types',)),
    (
        {'num_token_types': 2},
        {},
        'left there: encoder.input_embedding.token_types; name',
        ('encoder.input_embedding.token_types',),
    ),
    ({}, {'num_encoder_layers': 4}, 'of another shape: encoder.stack.layers (encoder.stack.layers.', ('layers',)),
    (
        {},
        {'max_len': 10, 'final_norm': False},
        'left there: encoder.stack.norm; of another shape: encoder.input_embedding '
        '(encoder.input_embedding.positions.table has shape '
        '(8, 8) there, (10, 8) here); name',
        ('positions', 'stack.norm'),
    ),
    ({'lora_rank': 2}, {}, 'left there: encoder.stack.layers.attention.query.lora_a, encoder.', ADAPTERS),
    ({'lora_rank': 2}, {'lora_rank': 3}, 'of another shape: encoder.stack.layers.attention.query.lora_a', ADAPTERS),
]


@pytest.mark.slow
@pytest.mark.parametrize(('there', 'here', 'message', 'excepted'), REFUSED)
def test_what_is_fresh_or_left_otherwise_must_be_named(loader, there, here, message, excepted):
    source, _ = loader.save('masked_lm', **there)
    with pytest.raises(UserError) as error:
        loader.load(source, 'classification', **here)
    assert f'train.init_from={source} does not fit this model: {message}' in str(error.value)
    assert '\n' not in str(error.value)
    with pytest.raises(UserError, match='does not fit'):
        loader.load(source, 'classification', excepted[:1] if len(excepted) > 1 else ('pooler',), **here)
    loader.load(source, 'classification', excepted, **here)


def test_a_vocabulary_head_is_expected_to_go_only_where_a_tasks_head_comes(loader):
    source, _ = loader.save('causal_lm', tied_embeddings=None)
    with pytest.raises(UserError, match='left there: head; name'):
        loader.load(source, 'causal_lm')
    source, _ = loader.save('causal_lm')
    with pytest.raises(UserError, match='fresh here: head; name'):
        loader.load(source, 'causal_lm', tied_embeddings=None)


def test_an_exception_that_is_nowhere_and_a_source_that_has_nothing_are_refused(loader):
    source, _ = loader.save('masked_lm')
    with pytest.raises(
        UserError, match=r"train.init_except: 'postions' is not in the path of any parameter; did you mean 'positions'"
    ):
        loader.load(source, 'classification', ('postions',))
    with pytest.raises(UserError, match='none of its parameters belong to this model'):
        loader.load(source, 'causal_lm', vocab_size=13)
    cfg = Config(train=Train(num_steps=1, init_except=('positions',)))
    with pytest.raises(UserError, match=r"init_except=\('positions',\) has no effect here: .* train.init_from is set"):
        checks.settle(cfg, ['train.init_except'])


def test_adapters_are_new_or_go_on_and_statistics_come_along(loader):
    source, _ = loader.save('masked_lm')
    fresh = fresh_parts(loader.load(source, 'masked_lm', lora_rank=2))
    assert len(fresh) == 4 and all('lora_' in path for path in fresh)
    source, _ = loader.save('masked_lm', lora_rank=2)
    assert fresh_parts(loader.load(source, 'masked_lm', lora_rank=2)) == set()

    source, before = loader.save('masked_lm', norm='batchnorm')
    found = loader.load(source, 'classification', norm='batchnorm')
    jax.tree.map(np.testing.assert_array_equal, found['statistics'], before['statistics'])
    assert jax.tree.leaves(before['statistics'])


@pytest.mark.proof
def test_a_run_with_adapters_starts_from_a_pretrained_one_and_another_from_it(tmp_path, capsys):
    fields = {'data.path': str(toy_data.labelled(tmp_path / 'data')), 'mesh.data': '1', 'data.tokenizer': 'symbol'}

    def run(recipe, name, **more):
        more = {key.replace('__', '.'): value for key, value in more.items()}
        wanted = config.load(f'{ROOT}/configs/classify.py:{recipe}', {**fields, **more})
        return train_lib.train(wanted, tmp_path / name), capsys.readouterr().out

    lora = {'model__lora_rank': '2', 'optimizer__layer_decay': '0.8', 'optimizer__frozen_layers': '1'}
    run('pretrain,smoke', 'base')
    _, said = run('smoke', 'one', train__init_from=str(tmp_path / 'base'), **lora)
    assert 'fresh: class_head, encoder.stack.layers.attention.query.lora_a, ' in said and ' trainable)' in said
    found, said = run('smoke', 'one', train__init_from=str(tmp_path / 'base'), **lora)  # all is done: restored
    assert 'resumed at step 2' in said and found.step == 2
    _, said = run('smoke', 'two', train__init_from=str(tmp_path / 'one'), **lora)
    assert 'loaded: class_head, embed, encoder\n  fresh: none\n  left: none\n' in said
    base, one = (flat(checkpoint.load_variables(tmp_path / name, 'latest')[0]['params']) for name in ('base', 'one'))
    assert all(base[path].tobytes() == one[path].tobytes() for path in base if path in one)
    assert {path.split('.')[-2] for path in one if path not in base} == {'classes', *ADAPTERS}
