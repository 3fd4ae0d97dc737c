"""The train step: exact accumulation, one result on any mesh, traced hyper-parameters, a fixed loss curve."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec

from comparing import relative
from small_training import BY_SEQUENCE, FAMILY, Trainer, make_batch, make_config
from starting import make_start
from tformer import checks, config, objectives
from tformer.config import Config, Train
from tformer.distributed import meshes, sharding
from tformer.errors import UserError
from tformer.layers import class_scores
from tformer.layers.dropout import DropoutRates
from tformer.optim import optimizers, schedules
from tformer.optim.hyperparameters import Hyperparameters
from tformer.optim.optimizers import make_optimizer
from tformer.training.setup import row_multiple
from tformer.training.state import begin, make_init, step_key
from tformer.training.step import in_microbatches, make_loss, make_train_step

ONE_OF_EACH_FAMILY = [
    pytest.param(name, marks=() if name in ('causal_lm', 'masked_lm', 'seq2seq') else pytest.mark.proof)
    for name in FAMILY
]
STEADY = config.Optimizer(schedule='constant', warmup_steps=0)


def keep_gradients():
    """An optimizer whose state is the gradient that it was given."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda grads, state, params=None: (grads, grads)
    )


@functools.cache
def steady():
    """(trainer, state, jitted step) of a decoder with dropout at a constant rate."""
    trainer = Trainer(make_config('causal_lm', optimizer=STEADY))
    return trainer, jax.jit(trainer.start)(), jax.jit(trainer.step)


# ---------------------------------------------------------------------------------------------- accumulation
@pytest.mark.slow
@pytest.mark.parametrize('objective', ONE_OF_EACH_FAMILY)
@pytest.mark.proof_cases('seq2seq')
def test_gradients_of_microbatches_are_those_of_the_batch(objective):
    batch = make_batch(objective)
    smoothing = {} if objective in BY_SEQUENCE else {'label_smoothing': 0.1, 'z_loss': 0.01}
    cfg = make_config(objective, model={'dropout_rate': 0.0}, train=smoothing)
    trainer = Trainer(cfg, keep_gradients())
    state = trainer.decided(jax.jit(trainer.start)())
    parts = {}
    for number in (1, 2, 4) if objective in ('causal_lm', 'masked_lm_nsp') else (1, 4):
        split = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, microbatches=number))
        after, numbers = jax.jit(Trainer(split, keep_gradients()).step)(state, batch, trainer.hyper)
        parts[number] = after.opt_state, numbers, after.params
    weights = batch['label_weights' if objective in BY_SEQUENCE else 'weights']
    per_part = weights.reshape(-1, 4, *weights.shape[1:]).sum((0, *range(2, weights.ndim + 1)))
    assert objective in BY_SEQUENCE or len(set(per_part.tolist())) > 1
    whole, numbers, params = parts.pop(1)
    assert optax.tree.norm(whole) > 0.01
    for gradients, others, stepped in parts.values():
        assert relative(gradients, whole) < 1e-6
        assert relative(stepped, params) < 1e-6
        assert numbers['scores']['loss'][1] == weights.sum()
        for name, (total, weight) in numbers['scores'].items():
            assert weight == others['scores'][name][1]
            assert float(others['scores'][name][0]) == pytest.approx(float(total), rel=1e-6)
        assert float(others['grad_norm']) == pytest.approx(float(numbers['grad_norm']), rel=1e-6)


def test_the_gradient_is_that_of_the_sum_divided_once_by_the_weight():
    batch = make_batch('causal_lm')
    trainer = Trainer(make_config('causal_lm', model={'dropout_rate': 0.0}), keep_gradients())

    @jax.jit
    def compare(hyper):
        state = trainer.start()

        def mean(params):
            losses = class_scores.cross_entropy(
                trainer.model.apply({'params': params}, batch, DropoutRates()), batch['targets']
            )
            return jnp.sum(losses * batch['weights']) / jnp.sum(batch['weights'])

        return jax.value_and_grad(mean)(state.params), trainer.step(state, batch, hyper)

    (mean, expected), (after, numbers) = compare(trainer.hyper)
    total, weight = numbers['scores']['loss']
    assert float(total / weight) == pytest.approx(float(mean), rel=1e-6)
    assert relative(after.opt_state, expected) < 1e-6
    assert float(numbers['grad_norm']) == pytest.approx(float(optax.tree.norm(expected)), rel=1e-5)
    assert after.step == 1


def test_scores_are_sums_and_weights():
    logits = jnp.log(jnp.asarray([[[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]]))
    batch = {'targets': jnp.asarray([[0, 2, 1]]), 'weights': jnp.asarray([[1.0, 2.0, 0.0]])}
    scores = objectives.token_scores(logits, batch, 0.3)
    nll = -np.log(0.7) - 2 * np.log(0.1)
    smooth = [-np.log([0.7, 0.2, 0.1]).mean(), -2 * np.log([0.1, 0.8, 0.1]).mean()]
    expected = {'nll': nll, 'accuracy': 1.0, 'loss': 0.7 * nll + 0.3 * sum(smooth)}
    assert set(scores) == set(expected)
    for name, (total, weight) in scores.items():
        assert float(total) == pytest.approx(expected[name], rel=1e-5) and weight == 3
    nothing = objectives.token_scores(logits, {**batch, 'weights': jnp.zeros((1, 3))}, None)
    assert all(total == 0 and weight == 0 for total, weight in nothing.values())


@pytest.mark.slow
def test_a_batch_of_padding_alone_moves_nothing():
    batch = make_batch('causal_lm')
    batch = {**batch, 'positions': np.full_like(batch['positions'], -1), 'weights': np.zeros_like(batch['weights'])}
    trainer, state, step = steady()
    after, numbers = step(state, batch, trainer.hyper)
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (after.params, state.params)), strict=True))
    assert numbers['grad_norm'] == 0


# --------------------------------------------------------------------------------------------- one step by hand
class Table(nn.Module):
    """Logits of a token are its row of a kernel."""

    @nn.compact
    def __call__(self, batch, rates=None):
        return self.param('kernel', nn.initializers.zeros, (3, 4))[batch['inputs']]


def test_step_n_learns_at_the_rate_of_n_and_averages_with_the_share_of_n():
    """A warm-up of 2 to 0.4 and a line to 0 at 4; the average keeps min(0.3, (1 + n) / (10 + n)) of itself."""
    fields = {'name': 'sgd', 'momentum': 0.0, 'clip_norm': None, 'weight_decay': 0.0, 'ema_decay': 0.3}
    schedule = {'schedule': 'linear', 'learning_rate': 0.4, 'warmup_steps': 2, 'final_fraction': 0.0}
    run = checks.resolve(
        Config(optimizer=config.Optimizer(**fields, **schedule), train=Train(num_steps=4)), vocab_size=4
    )
    batch = {'inputs': np.array([[0, 1, 1]]), 'targets': np.array([[3, 0, 2]]), 'weights': np.array([[0.5, 1.0, 0.0]])}
    batch['positions'] = np.arange(3)[None]
    hyper = Hyperparameters.of(run).replace(dropout_rates=DropoutRates())
    optimizer = make_optimizer(run, {'kernel': PartitionSpec('embed', 'mlp')})
    step = jax.jit(make_train_step(Table(), objectives.Objective(objectives.token_scores), optimizer, run))
    kernel = np.random.default_rng(0).standard_normal((3, 4))
    state, average = begin(optimizer, hyper, {'kernel': jnp.float32(kernel)}, {}), kernel.copy()
    for rate, share in ((0.2, 2 / 11), (0.4, 3 / 12), (0.2, 0.3), (0.0, 0.3)):
        gradient = np.zeros((3, 4))
        for token, target, weight in ((0, 3, 1 / 3), (1, 0, 2 / 3)):
            odds = np.exp(kernel[token]) / np.exp(kernel[token]).sum()
            gradient[token] = weight * (odds - np.eye(4)[target])
        kernel = kernel - rate * gradient
        average = share * average + (1 - share) * kernel
        state, numbers = step(state, batch, hyper)
        assert float(numbers['learning_rate']) == pytest.approx(rate, abs=1e-7)
        assert float(numbers['grad_norm']) == pytest.approx(np.linalg.norm(gradient), rel=1e-5)
        np.testing.assert_allclose(state.params['kernel'], kernel, atol=1e-6)
        np.testing.assert_allclose(state.averages['kernel'], average, atol=1e-6)


@pytest.mark.parametrize('count', [2, 3])
def test_every_microbatch_draws_by_a_key_of_its_own_and_has_every_nth_row(count):
    def gradient(params, statistics, batch, hyper, key):
        """A gradient that says for each row what its microbatch draws."""
        drawn = jnp.zeros(6).at[batch['row']].set(jax.random.uniform(key))
        return drawn, ({'loss': (jnp.float32(len(batch['row'])), jnp.float32(1))}, {})

    step = in_microbatches(gradient, count)
    drawn, (scores, _) = step(None, None, {'row': jnp.arange(6)}, None, jax.random.key(0))
    assert len(set(np.asarray(drawn).tolist())) == count and (drawn > 0).all()
    np.testing.assert_array_equal(drawn, np.tile(drawn[:count], 6 // count))
    assert scores['loss'] == (6, count)
    other, _ = step(None, None, {'row': jnp.arange(6)}, None, jax.random.key(1))
    assert not set(np.asarray(other).tolist()) & set(np.asarray(drawn).tolist())


class Draws(nn.Module):
    """Outputs are one draw of dropout, and one of what a model samples."""

    @nn.compact
    def __call__(self, batch, rates=None):
        return jnp.stack([jax.random.uniform(self.make_rng(name)) for name in ('dropout', 'sample')])


def test_dropout_and_samples_of_a_model_draw_by_keys_of_their_own():
    def scores(outputs, batch, smoothing=None, z_loss=None):
        return {'loss': (jnp.sum(outputs), jnp.float32(1)), 'draws': (outputs, jnp.float32(1))}

    loss = make_loss(Draws(), objectives.Objective(scores), None)
    hyper = Hyperparameters.of(make_config('causal_lm'))
    _, (found, _) = loss({}, {}, {}, hyper, jax.random.key(0))
    assert found['draws'][0][0] != found['draws'][0][1]


# ---------------------------------------------------------------------------------------------------- meshes
MESHES = [config.Mesh(data=2, fsdp=2, tensor=2), config.Mesh(data=8)]


def run_on(cfg, mesh_config, devices, num_steps=3):
    trainer = Trainer(cfg)
    mesh, rules = meshes.make_mesh(mesh_config, devices), sharding.make_rules(mesh_config)
    batches = [make_batch(cfg.train.objective, seed) for seed in range(num_steps)]
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        start, shardings = make_start(
            trainer.model, trainer.objective, trainer.optimizer, trainer.hyper, batches[0], mesh, rules
        )
        state = start(trainer.hyper)
        step = jax.jit(trainer.step, donate_argnums=0, out_shardings=(shardings, None))
        losses = []
        for batch in batches:
            state, numbers = step(state, jax.device_put(batch, meshes.batch_sharding(mesh)), trainer.hyper)
            total, weight = numbers['scores']['loss']
            losses.append(float(total / weight))
    return np.asarray(losses), state


@pytest.mark.parametrize(
    'objective',
    ['causal_lm', *(pytest.param(n, marks=pytest.mark.proof) for n in ('seq2seq', 'masked_lm_nsp', 'replaced_token'))],
)
@pytest.mark.proof_cases('causal_lm')
def test_eight_devices_train_as_one_does(objective):
    """Dropout is on. Sums in another order differ by float32 rounding; plain Adam would divide that by a gradient near
    0 in the first steps, so its epsilon is large enough that a step is a smooth function of the gradient."""
    smooth = config.Optimizer(learning_rate=1e-2, schedule='constant', warmup_steps=0, epsilon=1e-3, weight_decay=0.1)
    cfg = make_config(objective, optimizer=smooth, train={'label_smoothing': 0.1})
    assert cfg.model.dropout_rate > 0 and cfg.optimizer.clip_norm
    losses, state = run_on(cfg, config.Mesh(data=1), jax.devices()[:1])
    assert len(set(losses.tolist())) == 3
    params = jax.device_get(state.params)
    for mesh in MESHES:
        others, other = run_on(cfg, mesh, jax.devices()[:8])
        assert np.allclose(others, losses, rtol=1e-5, atol=0)
        assert relative(jax.device_get(other.params), params) < 1e-5
        ways = {leaf.sharding.num_devices for leaf in jax.tree.leaves(other.params)}
        split = [not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(other.params)]
        assert ways == {8} and any(split) == (mesh.data != 8)


@pytest.mark.proof
@pytest.mark.parametrize('name', ['muon', 'adafactor'])
def test_eight_devices_update_matrices_as_one_does(name):
    """Orthogonal matrices, and means of rows and columns, are of arrays that are split; some devices have no layers."""
    smooth = config.Optimizer(name=name, learning_rate=1e-2, schedule='constant', warmup_steps=0, epsilon=1e-3)
    model = {'emb_dim': 128, 'mlp_dim': 256, 'tied_embeddings': None, 'dropout_rate': 0.0}
    cfg = make_config('causal_lm', model=model, optimizer=dataclasses.replace(smooth, ema_decay=0.5))
    losses, state = run_on(cfg, config.Mesh(data=1), jax.devices()[:1])
    for mesh in (MESHES[0], config.Mesh(data=1, fsdp=8)):
        others, other = run_on(cfg, mesh, jax.devices()[:8])
        assert np.allclose(others, losses, rtol=1e-5, atol=0)
        assert relative(jax.device_get(other.params), jax.device_get(state.params)) < 1e-5
        assert relative(jax.device_get(other.averages), jax.device_get(state.averages)) < 1e-5
        placed = {str(x.sharding.spec) for x in jax.tree.leaves(other.averages)}
        assert placed == {str(x.sharding.spec) for x in jax.tree.leaves(other.params)} and len(placed) > 2
        kernel = other.params['decoder']['stack']['layers']['mlp']['out']['kernel']
        moments = [x for x in jax.tree.leaves(other.opt_state) if x.shape == kernel.shape]
        assert len(moments) == (name == 'muon') and all(x.sharding == kernel.sharding for x in moments)


def test_the_rules_place_parameters_and_their_optimizer_state_alike():
    trainer = Trainer(make_config('causal_lm'))
    batch = make_batch('causal_lm')
    mesh = meshes.make_mesh(config.Mesh(data=2, fsdp=2, tensor=2), jax.devices()[:8])
    init = make_init(trainer.model, trainer.objective, trainer.optimizer)
    placed = sharding.tree_shardings(jax.eval_shape(init, trainer.hyper, batch), mesh, sharding.RULES['fsdp_tp'])
    layers = placed.params['decoder']['stack']['layers']
    assert tuple(layers['attention']['query']['kernel'].spec) == (None, 'fsdp', 'tensor', None)
    assert tuple(layers['mlp']['out']['kernel'].spec) == (None, 'tensor', 'fsdp')
    assert tuple(layers['mlp_norm']['scale'].spec) == (None, None)
    # 17 rows of the table do not divide by 2: that axis stays whole.
    assert tuple(placed.params['embed']['table'].spec) == (None, 'fsdp')
    states = jax.tree.leaves(placed.opt_state, is_leaf=lambda x: hasattr(x, 'mu'))
    (adam,) = [state for state in states if hasattr(state, 'mu')]
    assert adam.mu == placed.params and adam.nu == placed.params


def test_a_mesh_takes_the_devices_that_it_names_or_is_refused():
    for mesh in (config.Mesh(data=-1, tensor=3), config.Mesh(data=16), config.Mesh(data=3, fsdp=3)):
        with pytest.raises(UserError, match='do not fit the 8 devices'):
            meshes.make_mesh(mesh, jax.devices()[:8])
    for mesh, shape in [
        (config.Mesh(tensor=2), {'data': 4, 'tensor': 2}),
        (config.Mesh(data=3, fsdp=2), {'data': 3, 'fsdp': 2}),
        (config.Mesh(data=1, context=4, expert=-1), {'context': 4, 'expert': 2}),
    ]:
        made = meshes.make_mesh(mesh, jax.devices()[:8]).shape
        assert {axis: size for axis, size in made.items() if size > 1} == shape
    assert meshes.batch_ways(meshes.make_mesh(config.Mesh(fsdp=2, tensor=2), jax.devices()[:8])) == 4


# ------------------------------------------------------------------------------------------------- the update
def test_weight_decay_shrinks_kernels_and_tables_only():
    rate, decay = 0.25, 0.5
    cfg = make_config(
        'seq2seq',
        model={
            'position': 'learned',
            'attention_bias': ('query', 'key', 'value', 'out'),
            'output_bias': True,
            'mlm_transform': True,
        },
        optimizer=dataclasses.replace(STEADY, learning_rate=rate, weight_decay=decay),
    )
    params = jax.tree.map(jnp.ones_like, jax.eval_shape(Trainer(cfg).start).params)
    update = optimizers.descend(jax.tree.map(lambda _: 1.0, params), cfg.optimizer.decayed_roles).update
    zeros = jax.tree.map(jnp.zeros_like, params)
    steps, _ = update(zeros, optax.EmptyState(), params, learning_rate=rate, weight_decay=decay)
    after = optax.apply_updates(params, steps)
    seen = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(after):
        seen.add(path[-1].key)
        assert np.all(leaf == (1 - rate * decay if path[-1].key in ('kernel', 'table') else 1))
    assert seen == {'kernel', 'table', 'scale', 'bias'}


def test_clipping_bounds_the_global_norm():
    grads = {'a': jnp.asarray([3.0, 0.0]), 'b': jnp.asarray([[4.0]])}
    for clip, factor in ((1.0, 0.2), (10.0, 1.0), (None, 1.0)):
        cfg = dataclasses.replace(STEADY, clip_norm=clip, beta1=0.0, beta2=0.0, epsilon=1.0)
        optimizer = make_optimizer(Config(optimizer=cfg), jax.tree.map(lambda _: PartitionSpec(), grads))
        updates, _ = optimizer.update(grads, optimizer.init(grads), grads, learning_rate=1.0, weight_decay=0.0)
        # Without averages, Adam's direction is g / (|g| + epsilon).
        for name, g in grads.items():
            assert np.allclose(updates[name], -g * factor / (np.abs(g * factor) + 1), rtol=1e-6)


def test_clipping_reaches_the_step_and_the_norm_is_reported_before_it():
    batch = make_batch('causal_lm')
    clip = 0.01
    # Without averages and with a large epsilon, Adam's direction is g / epsilon: the update is the clipped gradient.
    optimizer = dataclasses.replace(STEADY, learning_rate=1e3, clip_norm=clip, beta1=0.0, beta2=0.0, epsilon=1e3)
    trainer = Trainer(make_config('causal_lm', model={'dropout_rate': 0.0}, optimizer=optimizer))
    state = jax.jit(trainer.start)()
    after, numbers = jax.jit(trainer.step)(state, batch, trainer.hyper)
    moved = optax.tree.norm(jax.tree.map(jnp.subtract, after.params, state.params))
    assert float(moved) == pytest.approx(clip, rel=1e-3)
    assert float(numbers['grad_norm']) > 10 * clip


def test_the_key_of_a_step_is_a_function_of_seed_and_step():
    keys = {(seed, step): step_key(seed, step) for seed in (0, 1, 7) for step in (0, 1, 2)}
    data = {name: tuple(np.asarray(jax.random.key_data(key)).tolist()) for name, key in keys.items()}
    assert len(set(data.values())) == 9
    traced = jax.jit(step_key)(7, 2)
    assert tuple(np.asarray(jax.random.key_data(traced)).tolist()) == data[7, 2]


def test_initial_values_are_those_of_the_seed():
    trainer, state, _ = steady()
    start = jax.jit(trainer.start)
    for seed, same in ((trainer.hyper.seed, True), (trainer.hyper.seed + 1, False)):
        kernel = start(trainer.hyper.replace(seed=seed)).params['embed']['table']
        assert np.array_equal(kernel, state.params['embed']['table']) == same


def test_a_step_depends_on_its_number_and_seed_only_through_the_key():
    trainer, state, step = steady()

    def loss(number, seed):
        hyper = trainer.hyper.replace(seed=seed)
        _, numbers = step(state.replace(step=jnp.asarray(number)), make_batch('causal_lm'), hyper)
        return float(numbers['scores']['loss'][0])

    assert loss(3, 0) == loss(3, 0)
    assert len({loss(3, 0), loss(4, 0), loss(3, 1)}) == 3


# ----------------------------------------------------------------------------------------- traced hyper-parameters
SWEPT = {
    'seed': [0, 1, 2],
    'learning_rate': [1e-2, 3e-2, 1e-3],
    'warmup_steps': [0, 2, 10],
    'final_fraction': [0.1, 0.0, 0.5],
    'decay_fraction': [0.2, 0.5, 0.9],
    'weight_decay': [0.0, 0.1, 1.0],
    'ema_decay': [0.0, 0.05, 0.15],
    'init_scale': [1.0, 0.5, 1.5],
    'label_smoothing': [0.0, 0.1, 0.3],
    'z_loss': [0.0, 0.01, 0.1],
    'second_loss_weight': [1.0, 2.0, 0.0],
    'skip_spikes': [3.0, 4.0, 5.0],
}
DROPOUT = [0.0, 0.1, 0.5]
LATER = ('skip_spikes', 'final_fraction', 'decay_fraction')  # they change nothing in the first steps


def hypers(cfg):
    """Three hypers of arrays, each field of each its own."""
    values = jax.tree.map(jnp.asarray, SWEPT, is_leaf=lambda x: isinstance(x, list))
    rates = jnp.asarray(DROPOUT)
    assert set(values) | {'dropout_rates'} == {field.name for field in dataclasses.fields(Hyperparameters)}
    return Hyperparameters(**values, dropout_rates=DropoutRates(rates, rates / 2, rates))


@pytest.mark.slow
def test_many_hypers_in_one_program_are_each_as_alone():
    trainer = Trainer(make_config('causal_lm', model={'scan_layers': False}))
    traces = []

    def train(hyper):
        traces.append(hyper)
        state, losses = trainer.start(hyper), []

        def one(state, batch):
            state, numbers = trainer.step(state, batch, hyper)
            return state, (numbers['scores']['loss'], numbers['learning_rate'])

        batches = [make_batch('causal_lm', seed) for seed in range(4)]
        state, losses = jax.lax.scan(one, state, jax.tree.map(lambda *x: jnp.stack(x), *batches))
        return (state.params, state.averages), losses

    swept = hypers(trainer.cfg)
    together = jax.device_get(jax.jit(jax.vmap(train))(swept))
    alone = jax.jit(train)
    for index in range(3):
        params, ((totals, weights), rates) = alone(jax.tree.map(lambda x, i=index: x[i], swept))
        mine = jax.tree.map(lambda x, i=index: x[i], together)
        assert relative(mine[0], params) < 1e-5
        assert np.allclose(mine[1][0][0], totals, rtol=1e-5) and np.array_equal(mine[1][0][1], weights)
        assert np.allclose(mine[1][1], rates, rtol=1e-6)
    assert len(traces) == 2


@pytest.mark.slow
@pytest.mark.parametrize('field', [*(name for name in SWEPT if name not in LATER), 'dropout_rate'])
def test_every_hyper_parameter_changes_the_result_through_one_program(field):
    result, baseline = shared_program()
    if field == 'dropout_rate':
        changed = baseline.replace(dropout_rates=DropoutRates(0.5, 0.05, 0.1))
    else:
        changed = baseline.replace(**{field: SWEPT[field][2]})
    assert relative(result(changed), result(baseline)) > 1e-5
    assert relative(result(baseline), result(baseline)) == 0


@functools.cache
def shared_program():
    """Two steps of training as a function of a hyper of plain numbers, compiled once; and a hyper."""
    trainer = Trainer(make_config('masked_lm_nsp'))

    @jax.jit
    def result(hyper):
        batches = jax.tree.map(lambda *x: jnp.stack(x), *(make_batch('masked_lm_nsp', seed) for seed in range(2)))
        step = functools.partial(trainer.step, hyper=hyper)
        state, _ = jax.lax.scan(step, trainer.start(hyper), batches)
        return state.params, state.averages

    return result, Hyperparameters(
        **{name: values[1] for name, values in SWEPT.items()}, dropout_rates=DropoutRates(0.1, 0.05, 0.1)
    )


@pytest.mark.parametrize('schedule', schedules.SCHEDULES)
def test_schedules_accept_traced_numbers(schedule):
    swept = hypers(None)

    def rate(hyper, step):
        return schedules.learning_rate(schedule, hyper, step, num_steps=20, emb_dim=16)

    steps = jnp.arange(1, 25)
    found = jax.jit(jax.vmap(jax.vmap(rate, (None, 0)), (0, None)))(swept, steps)
    assert found.shape == (3, 24) and np.isfinite(found).all() and (found >= 0).all()
    for i in range(3):
        for t in (0, 9, 23):
            numbers = jax.tree.map(lambda x, i=i: x[i].item(), swept)
            assert float(found[i, t]) == pytest.approx(float(rate(numbers, t + 1)), rel=1e-6, abs=1e-12)


# ------------------------------------------------------------------------------------------------- loss curve
# fmt: off
CURVE = [
    3.101978, 3.403475, 3.283459, 3.239039, 2.921837, 3.070916, 2.868990, 3.011523, 2.690068, 2.875038,
    2.665279, 2.775269, 2.652873, 2.757792, 2.636308, 2.674870, 2.623863, 2.823794, 2.621888, 2.656865,
]
# fmt: on


def test_loss_curve():
    """Twenty steps with everything on: dropout, label smoothing, decay, clipping, warm-up, a cosine, two parts."""
    optimizer = config.Optimizer(learning_rate=1e-2, schedule='cosine', warmup_steps=5, weight_decay=0.1, epsilon=1e-3)
    cfg = make_config(
        'causal_lm',
        model={'position': 'rope', 'activation': 'swiglu', 'attention_dropout_rate': 0.1},
        optimizer=optimizer,
        train={'label_smoothing': 0.1, 'microbatches': 2, 'seed': 1},
    )
    trainer = Trainer(cfg)
    state, step, losses = jax.jit(trainer.start)(trainer.hyper), jax.jit(trainer.step), []
    for number in range(20):
        state, numbers = step(state, make_batch('causal_lm', number % 4), trainer.hyper)
        total, weight = numbers['scores']['loss']
        losses.append(round(float(total / weight), 6))
    assert len(losses) == len(CURVE), str(losses)
    assert np.allclose(losses, CURVE, rtol=0, atol=1e-4), str(losses)


def test_a_batch_size_that_devices_and_microbatches_do_not_divide_is_refused(tmp_path):
    mesh = meshes.make_mesh(config.Mesh())
    for rows, microbatches, nearest in ((20, 1, 16), (24, 2, 32), (3, 1, 8)):
        cfg = Config(train=Train(batch_size=rows, microbatches=microbatches))
        with pytest.raises(UserError, match=f'train.batch_size={rows} .* nearest that is: {nearest}$'):
            row_multiple(cfg, None, mesh)
    assert row_multiple(Config(train=Train(batch_size=32, microbatches=2)), None, mesh) is None


def test_rows_of_batches_by_tokens_are_what_the_run_began_with():
    """So that a step's rows stay the same on other devices."""
    eight, one = meshes.make_mesh(config.Mesh()), meshes.make_mesh(config.Mesh(data=1))
    cfg = Config(data=config.Data(batch_tokens=100), train=Train(batch_size=3, num_steps=1))
    assert row_multiple(cfg, None, eight) == 8 and row_multiple(cfg, None, one) == 1
    began = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, row_multiple=4))
    assert row_multiple(cfg, began, one) == 4
    with pytest.raises(UserError, match=r'data.row_multiple=4 is not a multiple of train.microbatches=1 x the 8 ways'):
        row_multiple(cfg, began, eight)
