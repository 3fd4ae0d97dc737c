"""Optimizers against optax's own, schedules at their landmarks, averages, and what the step carries besides."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from tformer import checks, config
from tformer.checks import resolve
from tformer.config import Config, Data, Model, Train
from tformer.errors import UserError
from tformer.layers.dropout import DropoutRates
from tformer.layers.resolved import resolve_model
from tformer.model import build
from tformer.objectives import OBJECTIVES, Objective, token_scores
from tformer.optim import schedules
from tformer.optim.adafactor import adafactor
from tformer.optim.hyperparameters import Hyperparameters
from tformer.optim.optimizers import OPTIMIZERS, lr_multipliers, make_optimizer
from tformer.optim.parameters import is_hidden
from tformer.training import checkpoint, checkpoint_writer
from tformer.training.dummy_batch import random_batch
from tformer.training.state import TrainState, begin, evaluation_params, evaluation_variables, logical_names
from tformer.training.step import make_train_step, moving_average

RATE, DECAY, STEPS = 0.01, 0.1, 5
NAMES = {'dense': {'kernel': P('embed', 'mlp'), 'bias': P('mlp')}}
BASE = config.Optimizer(
    learning_rate=RATE, weight_decay=DECAY, decayed_roles=('kernel', 'bias'), clip_norm=None, epsilon=1e-8
)


def make_tree(seed, names=NAMES, size=3):
    """Random arrays: axis i of each has size + i elements."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda axes: jnp.asarray(rng.normal(size=[size + i for i in range(len(axes))])), names)


def walk(optimizer, params, grads, rates=None, **extra):
    """Returns [(params, state)] after each update."""
    state, found = optimizer.init(params), []
    update = jax.jit(optimizer.update)
    for i, grad in enumerate(grads):
        more = extra if rates is None else {**extra, 'learning_rate': rates[i]}
        updates, state = update(grad, state, params, **more)
        params = optax.apply_updates(params, updates)
        found.append((params, state))
    return found


def ours(cfg, names=NAMES, model=None):
    return make_optimizer(Config(optimizer=cfg, model=model or Model()), names)


def close(a, b, tolerance=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


def path_name(path):
    return '.'.join(key.key for key in path)


# --------------------------------------------------------------------------------------------- against optax
OPTAX = {
    'adafactor': lambda cfg: optax.chain(
        optax.adafactor(1.0), optax.scale(-1), optax.add_decayed_weights(DECAY), optax.scale_by_learning_rate(RATE)
    ),
    'muon': lambda cfg: optax.partition(
        {
            'kernel': optax.chain(
                optax.trace(cfg.momentum, nesterov=True),  # 1 / (1 - momentum) times as long, in the same direction
                optax.contrib.muon(RATE, beta=0.0, nesterov=False, weight_decay=DECAY, consistent_rms=0.2),
            ),
            'bias': optax.adamw(RATE, cfg.beta1, cfg.beta2, cfg.epsilon, weight_decay=DECAY),
        },
        {'dense': {'kernel': 'kernel', 'bias': 'bias'}},
    ),
    'schedule_free': lambda cfg: optax.contrib.schedule_free_adamw(
        RATE, b1=cfg.beta1, b2=cfg.beta2, eps=cfg.epsilon, weight_decay=DECAY
    ),
}


def written_down(name, cfg, x, grads, decay):
    """The array x after each step by the paper's formula."""
    m, v = np.zeros_like(x), np.zeros_like(x)
    for step, g in enumerate(grads, start=1):
        if name == 'sgd':  # Polyak 1964
            m = cfg.momentum * m + g
            direction = m
        elif name == 'lion':  # Chen et al. 2023, algorithm 2
            direction = np.sign(cfg.beta1 * m + (1 - cfg.beta1) * g)
            m = cfg.beta2 * m + (1 - cfg.beta2) * g
        else:  # Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2
            m, v = cfg.beta1 * m + (1 - cfg.beta1) * g, cfg.beta2 * v + (1 - cfg.beta2) * g**2
            direction = m / (1 - cfg.beta1**step) / (np.sqrt(v / (1 - cfg.beta2**step)) + cfg.epsilon)
        x = x - RATE * (direction + decay * x)
        yield x


FORMULAS = 'sgd', 'adam', 'adamw', 'lion'


def test_every_optimizer_is_compared_with_its_formula_or_with_optax():
    assert sorted([*FORMULAS, *OPTAX]) == sorted(OPTIMIZERS)


@pytest.mark.parametrize('name', FORMULAS)
def test_an_optimizer_is_its_papers_formula(name):
    cfg = dataclasses.replace(BASE, name=name, momentum=0.8, beta1=0.7, beta2=0.9, epsilon=0.05)
    decay = 0.0 if name == 'adam' else DECAY
    params, grads = make_tree(0), [make_tree(seed) for seed in range(1, STEPS + 1)]
    found = walk(ours(cfg), params, grads, learning_rate=RATE, weight_decay=decay)
    for role in ('kernel', 'bias'):
        mine = [np.float64(grad['dense'][role]) for grad in grads]
        expected = written_down(name, cfg, np.float64(params['dense'][role]), mine, decay)
        for (after, _), x in zip(found, expected, strict=True):
            close(after['dense'][role], x, 1e-5)


@pytest.mark.parametrize('name', OPTAX)
def test_an_optimizer_is_optaxs(name):
    cfg, decay = dataclasses.replace(BASE, name=name), DECAY
    params, grads = make_tree(0), [make_tree(seed) for seed in range(1, STEPS + 1)]
    found = walk(ours(cfg), params, grads, learning_rate=RATE, weight_decay=decay)
    expected = walk(OPTAX[name](cfg), params, grads)
    for (mine, _), (theirs, _) in zip(found, expected, strict=True):
        close(mine, theirs)
    assert np.abs(found[-1][0]['dense']['kernel'] - params['dense']['kernel']).max() > 1e-3


def test_factored_adafactor_is_optaxs_for_each_matrix_of_a_stack_whatever_its_axes():
    names = {'kernel': P('layers', 'embed', 'heads', 'head_dim')}
    params, grads = make_tree(0, names), [make_tree(seed, names) for seed in range(1, STEPS + 1)]

    def matrix(tree, layer):
        return {'kernel': tree['kernel'][layer].reshape(4, 5 * 6)}

    mine = walk(adafactor(names, smallest=2), params, grads)
    assert [x.shape for x in mine[0][1].moments['kernel']] == [(3, 4), (3, 30)]
    theirs = optax.chain(optax.adafactor(1.0, min_dim_size_to_factor=2), optax.scale(-1))
    for layer in range(3):
        alone = walk(theirs, matrix(params, layer), [matrix(grad, layer) for grad in grads])
        for (stacked, _), (single, _) in zip(mine, alone, strict=True):
            close(matrix(stacked, layer), single, 1e-5)


def test_adafactor_by_hand():
    """Shazeer & Stern 2018, algorithm 4: moments decay by 1 - t^-0.8, steps are clipped to an rms of 1 and scaled by
    the parameter's rms, at least 1e-3; of a parameter of zeros the first step is 1e-3 of the gradient's signs."""
    grads = [np.array([[3.0, -0.1], [0.02, 1.0]]), np.array([[3.0, 8.0], [-0.5, 1.0]])]
    names, zeros = {'kernel': P('embed', 'mlp')}, {'kernel': jnp.zeros((2, 2))}
    optimizer = adafactor(names)
    first, state = optimizer.update({'kernel': jnp.float32(grads[0])}, optimizer.init(zeros), zeros)
    np.testing.assert_allclose(first['kernel'], 1e-3 * np.sign(grads[0]), rtol=1e-5)
    second, _ = optimizer.update({'kernel': jnp.float32(grads[1])}, state, {'kernel': jnp.full((2, 2), 0.5)})
    decay = 1 - 2**-0.8
    direction = grads[1] / np.sqrt(decay * grads[0] ** 2 + (1 - decay) * grads[1] ** 2)
    rms = np.sqrt(np.mean(direction**2))
    assert rms > 1
    np.testing.assert_allclose(second['kernel'], 0.5 * direction / rms, rtol=1e-5)


def test_adafactor_keeps_rows_and_columns_where_both_are_many():
    names = {'kernel': P('embed', 'mlp'), 'table': P('vocab', 'embed'), 'scale': P('layers', 'norm')}
    shapes = {'kernel': (128, 256), 'table': (200, 64), 'scale': (200, 300)}
    state = jax.eval_shape(adafactor(names).init, {k: jax.ShapeDtypeStruct(v, 'float32') for k, v in shapes.items()})
    assert [x.shape for x in state.moments['kernel']] == [(1, 128), (1, 256)]
    assert state.moments['table'].shape == (200, 64) and state.moments['scale'].shape == (200, 300)


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_every_optimizer_learns_a_regression_by_one_program_for_all_rates(name):
    """From data that a linear map explains; the loss of what is evaluated falls to a tenth."""
    cfg = dataclasses.replace(BASE, name=name, momentum=0.9, beta2=0.98)
    rng = np.random.default_rng(0)
    x, true = jnp.asarray(rng.normal(size=(64, 3))), jnp.asarray(rng.normal(size=(3, 4)))
    optimizer, traces = ours(cfg), []

    def loss(params):
        error = x @ (params['dense']['kernel'] - true)
        return jnp.mean(jnp.square(error)) + jnp.sum(jnp.square(params['dense']['bias'] - 1))

    @jax.jit
    def train(rate, decay):
        traces.append(rate)
        params = jax.tree.map(lambda p: 0.1 * p, make_tree(0))
        state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

        def step(state, _):
            grads = jax.grad(loss)(state.params)
            updates, inner = optimizer.update(
                grads, state.opt_state, state.params, learning_rate=rate, weight_decay=decay
            )
            return state.replace(params=optax.apply_updates(state.params, updates), opt_state=inner), None

        end = jax.lax.scan(step, state, None, length=300)[0]
        return loss(params), loss(evaluation_params(end)), end.params

    first, last, params = train(0.02, 0.0)
    assert last < first / 10
    _, other, moved = train(0.01, 0.1)
    assert other < first and len(traces) == 1
    assert not np.allclose(params['dense']['kernel'], moved['dense']['kernel'], atol=1e-4)


# ------------------------------------------------------------------------------------------------- schedules
def rates(schedule, steps, num_steps=100, emb_dim=64, **fields):
    cfg = config.Optimizer(schedule=schedule, **fields)
    hyper = Hyperparameters.of(Config(optimizer=cfg))
    return [float(schedules.learning_rate(schedule, hyper, t, num_steps=num_steps, emb_dim=emb_dim)) for t in steps]


def test_noam_peaks_at_the_warmup_between_a_line_and_an_inverse_root():
    found = rates('noam', [1, 5, 10, 40], learning_rate=2.0, warmup_steps=10)
    expected = [2 / 8 * 10**-1.5, 2 / 8 * 5 * 10**-1.5, 2 / 8 * 10**-0.5, 2 / 8 * 40**-0.5]
    assert np.allclose(found, expected, rtol=1e-6) and max(found) == found[2]


def test_inverse_sqrt_stays_at_the_peak_then_falls_as_the_root():
    found = rates('inverse_sqrt', [1, 9, 16, 64, 144], learning_rate=2.0, warmup_steps=16)
    assert np.allclose(found, [2, 2, 2, 1, 2 / 3], rtol=1e-6)


def test_wsd_warms_up_stays_and_decays():
    fields = {'learning_rate': 2.0, 'warmup_steps': 10, 'decay_fraction': 0.2, 'final_fraction': 0.1}
    found = rates('wsd', [1, 5, 10, 50, 80, 90, 100, 120], **fields)
    assert np.allclose(found, [0.2, 1, 2, 2, 2, 1.1, 0.2, 0.2], rtol=1e-6)
    assert np.allclose(rates('wsd', [99, 100], learning_rate=2.0, warmup_steps=0, decay_fraction=0.0), 2.0)
    whole = {'learning_rate': 2.0, 'warmup_steps': 10, 'decay_fraction': 0.95, 'final_fraction': 0.1}
    assert np.allclose(rates('wsd', range(1, 101), **whole), rates('linear', range(1, 101), **whole), rtol=1e-6)


# ---------------------------------------------------------------------------------------- what an array is
@functools.cache
def model_names(objective='seq2seq', family='encoder_decoder', **fields):
    cfg = Model(family=family, vocab_size=11, encoder_vocab_size=9, emb_dim=16, mlp_dim=24, num_heads=2, max_len=16)
    more = {'tied_embeddings': None, 'position': 'learned', 'mlm_transform': True, 'output_bias': True}
    cfg = dataclasses.replace(cfg, num_encoder_layers=1, num_decoder_layers=1, num_classes=3, **{**more, **fields})
    run = Config(model=resolve_model(cfg), data=Data(length=8), train=Train(objective=objective, batch_size=2))
    return logical_names(build(run.model), OBJECTIVES[objective], random_batch(run))


def test_muon_takes_the_kernels_of_hidden_layers_alone():
    names = model_names()
    params = jax.tree.map(lambda axes: jnp.zeros([2] * len(axes)), names)
    state = ours(dataclasses.replace(BASE, name='muon'), names).init(params)
    states = [s for s in jax.tree.leaves(state, is_leaf=lambda s: hasattr(s, 'mu')) if hasattr(s, 'mu')]
    taken = {type(s).__name__: {path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(s.mu)} for s in states}
    muon, adam = taken['MuonState'], taken['ScaleByAdamState']
    assert muon | adam == {path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(names)} and not muon & adam
    parts = ('attention.query', 'attention.key', 'attention.value', 'attention.out', 'mlp.in_0', 'mlp.out')
    assert {f'{side}.stack.layers.{part}.kernel' for side in ('encoder', 'decoder') for part in parts} <= muon
    assert 'head.transform_0.kernel' in muon and 'head.logits.kernel' in adam
    assert all(name.endswith('.kernel') for name in muon)
    assert [name for name in adam if name.endswith('kernel')] == ['head.logits.kernel']
    classes = jax.tree_util.tree_leaves_with_path(model_names('classification', 'encoder'))
    assert [is_hidden(p[-1].key, axes) for p, axes in classes if 'class_head' in path_name(p)] == [False, False]
    factorised = model_names('masked_lm', 'encoder', tied_embeddings='inputs', embedding_factor_dim=4)
    hidden = {path_name(p): is_hidden(p[-1].key, axes) for p, axes in jax.tree_util.tree_leaves_with_path(factorised)}
    assert not hidden['encoder.input_embedding.projection.kernel'] and hidden['encoder.stack.layers.mlp.out.kernel']


@pytest.mark.parametrize(
    ('axes', 'shape', 'matrices'),
    [
        (('layers', 'embed', 'heads', 'head_dim'), (3, 16, 2, 6), (3, 16, 12)),
        (('layers', 'heads', 'head_dim', 'embed'), (3, 2, 6, 16), (3, 12, 16)),
        (('layers', 'experts', 'embed', 'mlp'), (2, 3, 16, 24), (6, 16, 24)),
    ],
)
def test_muon_steps_orthogonally_in_every_layer_and_expert(axes, shape, matrices):
    names, rng = {'kernel': P(*axes)}, np.random.default_rng(0)
    grad = {'kernel': jnp.asarray(rng.normal(size=shape), jnp.float32)}
    optimizer = ours(dataclasses.replace(BASE, name='muon'), names)
    updates, _ = jax.jit(optimizer.update)(grad, optimizer.init(grad), grad, learning_rate=1.0, weight_decay=0.0)
    update = updates['kernel'].reshape(matrices)
    assert np.sqrt(np.mean(np.square(update), (1, 2))) == pytest.approx(0.2, rel=0.2)
    values = np.linalg.svd(update / (0.2 * max(matrices[1:]) ** 0.5), compute_uv=False)
    assert values.min() > 0.6 and values.max() < 1.3
    before = np.linalg.svd(grad['kernel'].reshape(matrices), compute_uv=False)
    assert np.all(before.max(-1) / before.min(-1) > 4)


def test_muon_by_hand():
    """Of a diagonal matrix the iteration changes each singular value by itself."""
    cfg = dataclasses.replace(BASE, name='muon', momentum=0.5, decayed_roles=())
    grads = [{'kernel': jnp.diag(jnp.asarray(g))} for g in ([3.0, 4.0], [-3.0, 4.0])]
    (first, _), (second, _) = walk(
        ours(cfg, {'kernel': P('embed', 'mlp')}), {'kernel': jnp.zeros((2, 2))}, grads, learning_rate=1, weight_decay=0
    )
    # m = (1.5, 2), then (-0.75, 3); (g + m) / 2 = (2.25, 3) = 3.75 (0.6, 0.8), then (-1.875, 3.5)
    for step, direction in (
        (first['kernel'], np.array([0.6, 0.8])),
        (second['kernel'] - first['kernel'], np.array([-1.875, 3.5]) / np.hypot(1.875, 3.5)),
    ):
        for _ in range(5):  # Jordan et al. 2024
            direction = 3.4445 * direction - 4.7750 * direction**3 + 2.0315 * direction**5
        close(step, -0.2 * 2**0.5 * np.diag(direction), 1e-5)


def small_factors(**fields):
    names = {'encoder': {'table': P('vocab', 'embed'), 'kernel': P('embed', 'mlp')}, 'decoder': {'bias': P('mlp')}}
    return lr_multipliers(Config(optimizer=dataclasses.replace(BASE, **fields)), names)


def test_rate_factors_multiply_and_reach_the_update():
    found = small_factors(lr_multipliers=('encoder=.1', 'table=5E-1', 'bias=0.3e+1'))
    assert found == {'encoder': {'table': pytest.approx(0.05), 'kernel': 0.1}, 'decoder': {'bias': 3.0}}
    params, grads = make_tree(0), make_tree(1)
    plain = ours(dataclasses.replace(BASE, name='sgd'))
    slow = ours(dataclasses.replace(BASE, name='sgd', lr_multipliers=('kernel=0.25',)))
    steps = [o.update(grads, o.init(params), params, learning_rate=1.0, weight_decay=0.1)[0] for o in (plain, slow)]
    close(steps[1]['dense']['kernel'], 0.25 * steps[0]['dense']['kernel'])
    close(steps[1]['dense']['bias'], steps[0]['dense']['bias'])


@pytest.mark.parametrize(
    ('entry', 'message'),
    [
        ('encodr=0.1', "'encodr' is not in the path of any parameter; did you mean 'encoder'"),
        ('encoder', "'encoder' is not NAME=FACTOR"),
        ('encoder=slow', 'is not NAME=FACTOR'),
        ('encoder=-1', 'is not NAME=FACTOR'),
        ('encoder=.', 'is not NAME=FACTOR'),
        ('=1', 'is not NAME=FACTOR'),
    ],
)
def test_rate_factors_that_fit_nothing_are_refused(entry, message):
    with pytest.raises(UserError, match=message):
        small_factors(lr_multipliers=(entry,))


@pytest.mark.parametrize('decayed', [('kernel',), ('bias',), ()])
def test_weight_decay_reaches_the_roles_that_are_named(decayed):
    optimizer = ours(dataclasses.replace(BASE, decayed_roles=decayed))
    params = make_tree(0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    steps, _ = optimizer.update(zeros, optimizer.init(params), params, learning_rate=0.5, weight_decay=0.1)
    for role, param in params['dense'].items():
        close(steps['dense'][role], -0.05 * param * (role in decayed))


def test_clip_value_bounds_each_number_before_clip_norm_bounds_the_norm():
    cfg = dataclasses.replace(BASE, name='sgd', momentum=0.0, clip_value=1.0, clip_norm=1.0)
    grad = {'kernel': jnp.asarray([3.0, -4.0]), 'bias': jnp.asarray([0.5])}
    optimizer = ours(cfg, {'kernel': P('embed'), 'bias': P('mlp')})
    steps, _ = optimizer.update(grad, optimizer.init(grad), grad, learning_rate=1.0, weight_decay=0.0)
    close(steps, {'kernel': np.asarray([-1.0, 1.0]) / 1.5, 'bias': np.asarray([-0.5]) / 1.5})


def test_mup_divides_the_rate_of_hidden_matrices_by_the_width():
    names = model_names()
    mup = dataclasses.replace(Model(), emb_dim=64, parametrization='mup', base_emb_dim=16)
    for name, factor in (('adamw', 0.25), ('lion', 0.25), ('schedule_free', 0.25), ('adafactor', 0.5)):
        cfg = Config(model=mup, optimizer=config.Optimizer(name=name, lr_multipliers=('encoder=2',)))
        for path, found in jax.tree_util.tree_leaves_with_path(lr_multipliers(cfg, names)):
            name = path_name(path)
            hidden = name.endswith('kernel') and 'logits' not in name
            assert found == (factor if hidden else 1) * (2 if name.startswith('encoder.') else 1)
    adapter = {
        'query': {'lora_a': {'kernel': P('embed', 'lora')}, 'lora_b': {'kernel': P('lora', 'heads', 'head_dim')}}
    }
    found = lr_multipliers(Config(model=mup, optimizer=config.Optimizer(name='adamw')), adapter)['query']
    assert found == {'lora_a': {'kernel': 0.25}, 'lora_b': {'kernel': 1}}  # the rank does not grow with the width
    for name in ('sgd', 'muon'):
        cfg = Config(model=mup, optimizer=config.Optimizer(name=name), train=Train(num_steps=1))
        with pytest.raises(UserError, match=f'no rates for optimizer.name={name}; valid: adam, adamw'):
            checks.check(cfg)


def test_schedule_free_averages_alone_and_needs_its_average():
    for fields in ({'ema_decay': 0.9}, {'beta1': 0.0}):
        cfg = Config(optimizer=config.Optimizer(name='schedule_free', **fields), train=Train(num_steps=1))
        with pytest.raises(UserError, match='schedule_free averages by itself'):
            checks.check(cfg)


# -------------------------------------------------------------------------------------------------- averages
def weighted(weights, *values):
    return np.average(values, 0, weights)


def test_schedule_free_evaluates_the_mean_of_its_steps_weighted_by_the_squared_rate():
    cfg = dataclasses.replace(BASE, name='schedule_free', decayed_roles=('kernel',))
    params, grads = make_tree(0), [make_tree(seed) for seed in range(1, 9)]
    steps = np.asarray([0.01, 0.02, 0.03, 0.04, 0.04, 0.04, 0.02, 0.01])
    found = walk(ours(cfg), params, grads, rates=steps, weight_decay=DECAY)
    sequence = []
    for number, (y, opt_state) in enumerate(found, start=1):
        (free,) = [s for s in jax.tree.leaves(opt_state, is_leaf=lambda s: hasattr(s, 'z')) if hasattr(s, 'z')]
        sequence.append(free.z)
        mean = jax.tree.map(functools.partial(weighted, steps[:number] ** 2), *sequence)
        x = evaluation_params(TrainState(jnp.asarray(number), y, opt_state))
        close(x, mean, 1e-5)
        close(y, jax.tree.map(lambda x, z: 0.9 * x + 0.1 * z, mean, free.z), 1e-5)


def test_schedule_free_by_hand():
    """With gradients of 1 and -1 every step is the rate; c is 1, then 4 / 5, then 4 / 9, whatever beta2 is."""
    cfg = dataclasses.replace(BASE, name='schedule_free', beta1=0.9, beta2=0.98, epsilon=0.0, decayed_roles=())
    grads = [{'kernel': jnp.asarray([[g]])} for g in (1.0, 1.0, -1.0)]
    optimizer = ours(cfg, {'kernel': P('embed', 'mlp')})
    found = walk(optimizer, {'kernel': jnp.zeros((1, 1))}, grads, rates=[0.1, 0.2, 0.2], weight_decay=0.0)
    z = [-0.1, -0.3, -0.1]
    x = [-0.1, 0.2 * -0.1 + 0.8 * -0.3, 5 / 9 * -0.26 + 4 / 9 * -0.1]
    for number, (y, state) in enumerate(found):
        average = evaluation_params(TrainState(jnp.asarray(number + 1), y, state))
        assert float(y['kernel'][0, 0]) == pytest.approx(0.1 * z[number] + 0.9 * x[number], abs=1e-6)
        assert float(average['kernel'][0, 0]) == pytest.approx(x[number], abs=1e-6)


def test_the_moving_average_is_numpys_and_starts_from_what_it_has_seen():
    seen = [np.random.default_rng(seed).normal(size=3).astype(np.float32) for seed in range(60)]
    average, expected, decays = {'kernel': jnp.asarray(seen[0])}, seen[0].astype(np.float64), []
    for step, value in enumerate(seen[1:], start=1):
        average = moving_average(average, {'kernel': jnp.asarray(value)}, 0.8, jnp.asarray(step))
        decays.append(min(0.8, (1 + step) / (10 + step)))
        expected = decays[-1] * expected + (1 - decays[-1]) * value
        close(average['kernel'], expected)
    assert decays[0] == 2 / 11 and decays[-1] == 0.8
    assert moving_average(None, {'kernel': jnp.ones(3)}, None, jnp.asarray(1)) is None


# ------------------------------------------------------------------------------- what the step carries besides
class Counting(nn.Module):
    """Logits of a kernel, the running mean of the inputs added to them; sows a loss for each of two layers."""

    sown: bool = True

    @nn.compact
    def __call__(self, batch, rates=None):
        kernel = self.param('kernel', nn.initializers.ones, (5, 4))
        mean = self.variable('statistics', 'mean', jnp.zeros, ())
        if self.is_mutable_collection('statistics') and not self.is_initializing():
            mean.value = 0.5 * mean.value + 0.5 * jnp.mean(batch['inputs'].astype(jnp.float32))
        if self.sown:
            self.sow('losses', 'norm', 0.1 * jnp.sum(jnp.square(kernel), 1)[:2])
        return jax.nn.one_hot(batch['inputs'], 5) @ kernel + mean.value * jnp.arange(4.0)[None, None]


@functools.cache
def counting(microbatches=1, sown=True, ema_decay=None, name='sgd'):
    """(jitted step, initial state, batch, hyper) of the module above."""
    model, objective = Counting(sown), Objective(token_scores)
    cfg = dataclasses.replace(BASE, name=name, schedule='constant', warmup_steps=0, weight_decay=0.0)
    train = Train(num_steps=9, microbatches=microbatches)
    run = resolve(Config(optimizer=dataclasses.replace(cfg, ema_decay=ema_decay), train=train), vocab_size=5)
    rng = np.random.default_rng(0)
    batch = {'inputs': rng.integers(0, 5, (4, 3)), 'targets': rng.integers(0, 4, (4, 3)), 'weights': np.ones((4, 3))}
    batch['weights'][0, 0] = 0
    variables = model.init(jax.random.key(0), batch)
    optimizer, hyper = (
        make_optimizer(run, {'kernel': P('embed', 'mlp')}),
        Hyperparameters.of(run).replace(dropout_rates=DropoutRates()),
    )
    state = begin(optimizer, hyper, variables['params'], variables['statistics'])
    return jax.jit(make_train_step(model, objective, optimizer, run)), state, batch, hyper


def test_sown_losses_are_added_to_the_mean_loss_and_statistics_are_carried():
    step, state, batch, hyper = counting()
    after, numbers = step(state, batch, hyper)
    mean = np.mean(batch['inputs'])
    assert float(after.statistics['mean']) == pytest.approx(mean / 2, rel=1e-6)
    assert float(step(after, batch, hyper)[0].statistics['mean']) == pytest.approx(mean * 3 / 4, rel=1e-6)

    def loss(params):
        logits = jax.nn.one_hot(batch['inputs'], 5) @ params['kernel'] + mean / 2 * jnp.arange(4.0)[None, None]
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch['targets'][..., None], -1)[..., 0]
        sown = 0.1 * jnp.sum(jnp.square(params['kernel'][:2]))
        return -jnp.sum(picked * batch['weights']) / 11 + sown, sown

    (_, sown), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    close(after.params, jax.tree.map(lambda p, g: p - RATE * g, state.params, grads))
    total, weight = numbers['scores']['aux_loss']
    assert weight == 11 and float(total / weight) == pytest.approx(float(sown), rel=1e-6)
    assert 'aux_loss' not in counting(sown=False)[0](state, batch, hyper)[1]['scores']


@pytest.mark.parametrize('sown', [True, False])
def test_statistics_and_sown_losses_are_refused_in_parts(sown):
    step, state, batch, hyper = counting(microbatches=2, sown=sown)
    with pytest.raises(AssertionError, match='need microbatches=1'):
        step(state, batch, hyper)


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'ema'), [('sgd', None), ('adamw', 0.9), ('schedule_free', None), ('adafactor', 0.5)])
def test_a_checkpoint_restores_all_bit_for_bit_and_gives_what_is_evaluated(tmp_path, name, ema):
    step, start, batch, hyper = counting(ema_decay=ema, name=name)
    saved, states = checkpoint_writer.CheckpointWriter(tmp_path, keep_last=3), [start]
    for number in range(1, 5):
        states.append(step(states[-1], batch, hyper)[0])
        saved.save(states[-1], {'number': number}, -float(number))
    end = states[-1]
    saved.wait()
    assert checkpoint.steps(tmp_path) == [1, 2, 3, 4] and checkpoint.latest_valid(tmp_path) == 4
    restored, run = checkpoint.restore(tmp_path, 4, start), checkpoint.read_metadata(tmp_path, 4)
    assert run['number'] == 4 and jax.tree.structure(restored) == jax.tree.structure(end)
    jax.tree.map(np.testing.assert_array_equal, restored, end)
    latest, step = checkpoint.load_variables(tmp_path, 'latest')
    params = latest['params']
    jax.tree.map(np.testing.assert_array_equal, params, evaluation_params(end))
    assert step == 4 and np.array_equal(params['kernel'], end.params['kernel']) == (name == 'sgd')
    found, best = checkpoint.load_variables(tmp_path)
    assert best == 1
    jax.tree.map(np.testing.assert_array_equal, found, evaluation_variables(states[1]))

    mean, newest = checkpoint.load_average(tmp_path, 3, keep_last=3)
    close(mean, jax.tree.map(lambda *x: np.mean(x, 0), *map(evaluation_variables, states[2:])))
    assert newest == 4
    for count in (4, 0):
        message = f'--average={count}: the newest 3 checkpoints are kept .train.keep_last=3'
        with pytest.raises(UserError, match=message):
            checkpoint.load_average(tmp_path, count, keep_last=3)
