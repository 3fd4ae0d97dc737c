"""What a training step holds in memory: by the compiler's own account, and the same numbers come out."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from starting import make_start
from tformer import checks
from tformer.config import Config, Data, Decode, Mesh, Model, Optimizer, Train, override
from tformer.config.tasks import TASKS
from tformer.distributed import meshes, sharding
from tformer.errors import UserError
from tformer.evaluation import scorer
from tformer.layers import logits
from tformer.layers.heads import token_statistics
from tformer.layers.logits import num_chunks
from tformer.model import Family, build
from tformer.objectives import OBJECTIVES, loss_chunk
from tformer.optim.hyperparameters import Hyperparameters
from tformer.optim.optimizers import make_optimizer
from tformer.optim.precision import master_params, stochastic_round, with_bfloat16_moments, with_master_params
from tformer.training import checkpoint, checkpoint_writer
from tformer.training.dummy_batch import random_batch
from tformer.training.state import begin, evaluation_params, logical_names, make_init
from tformer.training.step import make_gradient, make_train_step

MIB = 2**20
FAMILY = {'masked_lm': 'encoder', 'seq2seq': 'encoder_decoder', 'span_corruption': 'encoder_decoder'}
TINY = {'emb_dim': 16, 'mlp_dim': 32, 'num_heads': 2, 'dropout_rate': 0.0}


def make_config(objective='causal_lm', rows=4, length=8, vocab_size=40, model=None, optimizer=None, **train):
    family = FAMILY.get(objective, 'decoder')
    layers = {f'num_{stack}_layers': 1 for stack in ('encoder', 'decoder') if stack in family}
    run = Config(
        model=Model(**{'family': family, 'max_len': length, **layers, **TINY, **(model or {})}),
        data=Data(length=length),
        optimizer=Optimizer(**{'warmup_steps': 0, 'schedule': 'constant', **(optimizer or {})}),
        train=Train(objective=objective, num_steps=100, batch_size=rows, **train),
        decode=Decode(max_len=length),
    )
    run = checks.resolve(run, vocab_size=vocab_size, encoder_vocab_size=vocab_size)
    checks.check_here(run)
    return run


class Trainer:
    """What a config's step is made of; `compiled`: the step, the state donated, for arrays of a shape alone."""

    def __init__(self, run):
        self.run, self.hyper, self.batch = run, Hyperparameters.of(run), random_batch(run)
        self.model, self.objective = build(run.model), OBJECTIVES[run.train.objective]
        self.optimizer = make_optimizer(run, logical_names(self.model, self.objective, self.batch))
        self.step = make_train_step(self.model, self.objective, self.optimizer, run)
        self.init = make_init(self.model, self.objective, self.optimizer)

    def start(self):
        return sharding.unboxed(self.init(self.hyper, self.batch))

    def compiled(self):
        state = jax.eval_shape(self.start)
        return jax.jit(self.step, donate_argnums=0).lower(state, self.batch, self.hyper).compile()


def peak(compiled):
    """MiB that a program needs besides its arguments and results."""
    return compiled.memory_analysis().temp_size_in_bytes / MIB


# ----------------------------------------------------------------------------------------------- logits in chunks
@pytest.mark.slow
def test_a_step_holds_the_logits_of_one_chunk():
    """All logits are 500 MiB; the step needs 1142 MiB with all, 158 with 64 of 512 positions at a time."""
    sizes = {'rows': 8, 'length': 512, 'vocab_size': 32_000, 'model': {'num_heads': 1, 'num_decoder_layers': 1}}
    found = {chunk: peak(Trainer(make_config(**sizes, loss_chunk=chunk)).compiled()) for chunk in (None, 64)}
    every = 8 * 512 * 32_000 * 4 / MIB
    assert found[None] > 2 * every and found[64] < 0.35 * every


UNTIED = {'tied_embeddings': None, 'output_softcap': 5.0, 'output_bias': True}
BERT = {'mlm_transform': True, 'output_bias': True, 'embedding_factor_dim': 8, 'norm': 'layernorm'}
CHUNKED = [
    ('causal_lm', {}, {}),
    ('causal_lm', UNTIED, {'label_smoothing': 0.1, 'z_loss': 1e-3}),
    ('masked_lm', BERT, {'label_smoothing': 0.1}),
    ('seq2seq', {'tied_embeddings': 'output', 'output_scale': 'rsqrt_dim'}, {'z_loss': 1e-3}),
]


@pytest.mark.slow
@pytest.mark.parametrize(('objective', 'model', 'train'), CHUNKED)
@pytest.mark.proof_cases('masked_lm-model2-train2', 'causal_lm-model1-train1')
def test_chunks_have_the_scores_and_gradients_of_the_whole(objective, model, train):
    """Chunks of 3 of 8 positions: the last has one that does not exist."""
    trainer = Trainer(make_config(objective, model=model, **train))
    weights = np.array([[1.0] * 8, [1.0] * 5 + [0.0] * 3, [0.5] * 8, [0.0] * 8], np.float32)
    batch, hyper = trainer.batch | {'weights': weights}, trainer.hyper

    def loss(params, batch, chunk):
        method = trainer.objective.method_for(chunk)
        outputs = trainer.model.apply({'params': params}, batch, hyper.dropout_rates, method=method)
        scores = trainer.objective.scores(outputs, batch, hyper.label_smoothing, hyper.z_loss)
        return scores['loss'][0], scores

    @jax.jit
    def both():
        params = trainer.start().params
        best = jnp.argmax(trainer.model.apply({'params': params}, batch), -1)
        some = batch | {'targets': jnp.where(jnp.arange(8)[None] % 2 == 0, best, batch['targets'])}
        return [jax.grad(functools.partial(loss, chunk=chunk), has_aux=True)(params, some) for chunk in (None, 3)]

    (grads, scores), (found, chunked) = both()
    assert scores['nll'][1] == 17 and scores['accuracy'][0] > 0
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), chunked, scores)
    scale = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(grads))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6 * scale), found, grads)


@pytest.mark.slow
@pytest.mark.parametrize('narrow', ['param_dtype', 'dtype'])
def test_gradients_of_many_narrow_chunks_add_up_in_float32(narrow):
    """The output kernel's, of 256 chunks of one position each: the sum is rounded once."""
    model = {narrow: 'bfloat16', 'tied_embeddings': None}
    trainer = Trainer(make_config(length=256, model=model))

    def loss(params, chunk):
        outputs = trainer.model.apply({'params': params}, trainer.batch, method=trainer.objective.method_for(chunk))
        return trainer.objective.scores(outputs, trainer.batch)['loss'][0]

    @jax.jit
    def both():
        params = trainer.start().params
        params['head']['logits']['kernel'] *= 0
        return [jax.grad(loss)(params, chunk)['head']['logits']['kernel'].astype(jnp.float32) for chunk in (None, 1)]

    whole, found = both()
    assert jnp.linalg.norm(whole - found) < 0.003 * jnp.linalg.norm(whole)


@pytest.mark.parametrize('objective', OBJECTIVES)
def test_chunks_are_refused_where_logits_are_not_all_that_is_scored(objective):
    family = TASKS[objective].families[0]
    teacher = 'runs/teacher' if TASKS[objective].teacher else None
    train = Train(objective=objective, num_steps=1, loss_chunk=4, teacher=teacher)
    run = Config(model=Model(family=family, vocab_size=40, num_classes=3), train=train)
    if OBJECTIVES[objective].method == '__call__':
        checks.check_here(run)
        return
    with pytest.raises(UserError, match=r'train\.loss_chunk=4 has no effect here'):
        checks.settle(run, ['train.loss_chunk'])


def test_chunks_are_refused_where_the_head_has_statistics_of_the_whole_batch():
    with pytest.raises(UserError, match=r'train.loss_chunk=4: model.norm=batchnorm'):
        make_config('masked_lm', model={'norm': 'batchnorm', 'mlm_transform': True}, loss_chunk=4)
    make_config('masked_lm', model={'norm': 'batchnorm'}, loss_chunk=4)


@pytest.mark.parametrize(
    ('vocab_size', 'length', 'chunk'),
    [
        (50_257, 1024, 'auto'),  # GPT-2
        (32_128, 512, None),  # T5: 62.75 MiB
        (2**14, 1024, None),
        (2**14, 1025, 'auto'),
    ],
)
def test_without_a_number_logits_are_held_whole_where_those_of_a_row_are_at_most_64_mib(vocab_size, length, chunk):
    run = Config(model=Model(vocab_size=vocab_size), data=Data(length=length))
    assert loss_chunk(run) == chunk
    assert loss_chunk(dataclasses.replace(run, train=Train(loss_chunk=None))) is None
    assert loss_chunk(dataclasses.replace(run, train=Train(loss_chunk=7))) == 7
    assert loss_chunk(dataclasses.replace(run, train=Train(objective='classification'))) is None
    for norm, found in (('batchnorm', None), ('layernorm', chunk)):
        model = Model(family='encoder', vocab_size=vocab_size, norm=norm, mlm_transform=True)
        assert loss_chunk(dataclasses.replace(run, model=model, train=Train(objective='masked_lm'))) == found


@pytest.mark.parametrize(
    ('rows', 'length', 'vocab_size', 'chunks'),
    [
        (64, 1024, 50_257, 4),  # GPT-2: 333 positions of a row are 64 MiB
        (8, 1024, 50_257, 4),
        (7, 1024, 50_257, 2),  # of 7 rows 293 positions are 2,048 tokens
        (1, 1024, 50_257, 1),
        (4, 4096, 32_000, 8),  # Llama 2
        (2, 4096, 32_000, 4),
        (1, 8192, 128_256, 4),  # Llama 3: 130 positions are 64 MiB
        (1, 1025, 2**25, 1),
        (4096, 1025, 2**14, 2),
        (4096, 2, 2**25, 2),
    ],
)
def test_without_a_number_a_device_holds_logits_of_at_least_2048_tokens(rows, length, vocab_size, chunks):
    assert num_chunks(rows, length, vocab_size) == chunks


@pytest.mark.slow
def test_each_device_has_as_many_chunks_as_its_own_tokens_ask_for(monkeypatch):
    """One device with 4 rows of 64 tokens takes 8 of each at once; of two that share one row each takes its half."""
    seen, sizes = [], {'AUTO_LOGITS': 2**10, 'AUTO_TOKENS': 32}
    monkeypatch.setattr('tformer.objectives.AUTO_LOGITS', sizes['AUTO_LOGITS'])
    for name, size in sizes.items():
        monkeypatch.setattr(logits, name, size)
    monkeypatch.setattr(logits, 'num_chunks', lambda *sizes: seen.append(num_chunks(*sizes)) or seen[-1])
    found = []
    for mesh in (Mesh(data=1), Mesh(data=4, context=2)):
        trainer = Trainer(make_config(length=64, vocab_size=512))
        made = meshes.make_mesh(mesh, jax.devices()[: mesh.data * mesh.context])
        with jax.set_mesh(made), nn.logical_axis_rules(sharding.RULES['fsdp_tp']):
            placed = jax.device_put(trainer.batch, meshes.batch_sharding(made))
            found.append(jax.jit(trainer.step)(jax.jit(trainer.start)(), placed, trainer.hyper)[1]['scores']['loss'][0])
    assert list(dict.fromkeys(seen)) == [8, 1]
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_devices_gather_the_kernel_of_logits_in_the_dtype_of_activations():
    """And so exchange the sums of its gradient."""
    trainer = Trainer(
        make_config(rows=8, length=64, model={'dtype': 'bfloat16', 'tied_embeddings': None}, loss_chunk=8)
    )
    mesh = meshes.make_mesh(Mesh(data=2, fsdp=4))
    with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES['fsdp_tp']):
        state = jax.eval_shape(trainer.start)
        step = jax.make_jaxpr(trainer.step)(state, trainer.batch, trainer.hyper)
    found = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == 'shard_map':
                found.extend(x.aval.dtype for x in equation.invars if x.aval.shape == (16, 40))
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                walk(inner)

    walk(step.jaxpr)
    assert set(found) == {jnp.bfloat16.dtype}


def test_a_word_for_the_chunk_is_refused():
    with pytest.raises(UserError, match=r"^config\.train\.loss_chunk='all' is not int \| 'auto' \| None$"):
        override(Config(), {'train.loss_chunk': 'all'})


class OneBatch:
    """As much of a split as scores need."""

    steps_per_epoch = 1

    def __init__(self, batch):
        self._batch = batch

    def batch(self, number):
        return self._batch


def test_evaluation_takes_chunks_too(monkeypatch):
    seen, scores, original = [], [], Family.token_statistics

    def spied(self, batch, dropout_rates=None, *, chunk):
        seen.append(chunk)
        return original(self, batch, dropout_rates, chunk=chunk)

    monkeypatch.setattr(Family, 'token_statistics', spied)
    for chunk in (None, 4):
        trainer = Trainer(make_config('masked_lm', loss_chunk=chunk))
        score = scorer.make_scorer(trainer.model, trainer.run, meshes.make_mesh(Mesh(data=1), jax.devices()[:1]))
        params = jax.jit(trainer.start)().params
        scores.append(score({'params': params}, OneBatch(trainer.batch), None, None))
    assert seen == [None, 4] and scores[0] == pytest.approx(scores[1], rel=1e-6)


# ------------------------------------------------------------------------------------- a vocabulary over devices
COLLECTIVE = re.compile(r'= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(')


def exchanged(compiled):
    """Elements of each array that devices exchange."""
    shapes = [shape for found in COLLECTIVE.findall(compiled.as_text()) for shape in re.findall(r'\[([\d,]*)\]', found)]
    return [math.prod(int(size) for size in shape.split(',') if size) for shape in shapes]


@pytest.mark.slow
def test_logits_stay_on_the_devices_that_have_their_part_of_the_vocabulary():
    """A token's logits are 512 numbers, 64 of them on each of 8 devices. What the devices exchange for it is a vector
    of the stream, 16 numbers, and for the loss and the best class 8: in the table's lookup, loss, smoothing, accuracy
    and their gradients."""
    rows, length, vocab_size = 4, 16, 512
    mesh, rules = meshes.make_mesh(Mesh(data=1, tensor=8)), sharding.RULES['tp']
    found, state = {}, None
    for chunk in (None, 4):
        train = {'label_smoothing': 0.1, 'z_loss': 1e-4, 'loss_chunk': chunk}
        run = make_config(rows=rows, length=length, vocab_size=vocab_size, model={'num_heads': 8}, **train)
        trainer = Trainer(run)
        with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
            if state is None:
                args = trainer.model, trainer.objective, trainer.optimizer, trainer.hyper, trainer.batch
                start, shardings = make_start(*args, mesh, rules)
                state = start(trainer.hyper)
                assert state.params['embed']['table'].sharding.spec[0] == 'tensor'
            step = jax.jit(trainer.step, out_shardings=(shardings, None))
            placed = jax.device_put(trainer.batch, meshes.batch_sharding(mesh))
            step = step.lower(state, placed, trainer.hyper).compile()
        sizes = exchanged(step)
        assert rows * length * 16 in sizes and max(sizes) <= rows * length * 16
        found[chunk] = jax.device_get(step(state, placed, trainer.hyper)[1]['scores'])
    alone = jax.jit(trainer.step)(jax.device_get(state), trainer.batch, trainer.hyper)[1]['scores']
    for scores in found.values():
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), scores, alone)

    @functools.partial(jax.jit, in_shardings=jax.NamedSharding(mesh, jax.P(None, None, 'tensor')))
    def gathering(logits):
        whole = jax.lax.with_sharding_constraint(logits, jax.NamedSharding(mesh, jax.P()))
        return token_statistics(whole, jnp.zeros((rows, length), jnp.int32))

    logits = jnp.zeros((rows, length, vocab_size))
    assert max(exchanged(gathering.lower(logits).compile())) == logits.size


# --------------------------------------------------------------------------------------------- rematerialisation
@pytest.mark.proof
def test_what_the_backward_pass_computes_again_is_not_held():
    """Six layers of width 128 on 4 x 256 tokens: a step needs 79 MiB and by model.remat 52, 47 and 26. Its scores
    and gradients are the same."""
    sizes = {'emb_dim': 128, 'mlp_dim': 512, 'num_heads': 4, 'num_decoder_layers': 6}
    found, grads, start = {}, {}, None
    for remat in (None, 'attention', 'dots', 'full'):
        run = make_config(length=256, vocab_size=512, model={**sizes, 'remat': remat}, optimizer={'name': 'sgd'})
        trainer = Trainer(run)
        start = start or jax.jit(trainer.start)()
        compiled = trainer.compiled()
        found[remat] = peak(compiled)
        after, numbers = compiled(jax.tree.map(jnp.copy, start), trainer.batch, trainer.hyper)
        grads[remat] = [numbers['scores'], numbers['grad_norm'], after.opt_state]
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), grads[remat], grads[None])
    probabilities = 6 * 4 * 4 * 256**2 * 4 / MIB  # of all layers: one array of them is kept, not two
    assert probabilities < found[None] - found['attention'] < 1.5 * probabilities
    assert found[None] < 84 and found['attention'] < 0.7 * found[None] and found['dots'] < 0.52 * 98
    assert found['full'] < 0.72 * found['dots']


# ------------------------------------------------------------------------------------------------ number formats
def walk(run, start, steps=48):
    """(losses, the state after `steps`) of a run on one batch, from given parameters."""
    trainer = Trainer(run)
    state, step, losses = begin(trainer.optimizer, trainer.hyper, start, {}), jax.jit(trainer.step), []
    for _ in range(steps):
        state, numbers = step(state, trainer.batch, trainer.hyper)
        losses.append(float(numbers['scores']['loss'][0] / numbers['scores']['loss'][1]))
    return losses, state


NARROW = {'param_dtype': 'bfloat16'}


def test_master_copies_add_up_what_bfloat16_does_not_see():
    """Steps of 2^-10 from 1: bfloat16 knows 1 - 2^-8 as the next number, and 64 steps later is where it was."""

    class Slope(nn.Module):
        """Logits [B, T, 2] that differ by one number, whose gradient keeps its sign."""

        @nn.compact
        def __call__(self, batch, dropout_rates=None):
            kernel = self.param('kernel', nn.initializers.ones, (1, 1), jnp.bfloat16)
            zero = jnp.zeros((*batch['inputs'].shape, 1))
            return jnp.concatenate([zero, zero + kernel.astype(jnp.float32).reshape(1, 1, 1)], -1)

    def after(steps, **fields):
        sections = {'learning_rate': 2.0**-10, 'name': 'lion', 'weight_decay': 0.0, 'clip_norm': None, **fields}
        run, model, objective = make_config(model=NARROW, optimizer=sections), Slope(), OBJECTIVES['causal_lm']
        batch = random_batch(run) | {'targets': np.zeros((4, 8), np.int32)}
        optimizer, hyper = make_optimizer(run, logical_names(model, objective, batch)), Hyperparameters.of(run)
        state = jax.jit(make_init(model, objective, optimizer))(hyper, batch)
        step = jax.jit(make_train_step(model, objective, optimizer, run))
        for _ in range(steps):
            state, _ = step(state, batch, hyper)
        return state

    still, moved = after(64), after(64, master_dtype='float32', ema_decay=0.5)
    assert still.params['kernel'] == 1.0
    assert moved.params['kernel'] == 1 - 64 * 2.0**-10 and moved.params['kernel'].dtype == jnp.bfloat16
    odd = after(3, master_dtype='float32')
    assert (
        odd.params['kernel'] == 1 - 2.0**-8 and master_params(odd.params, odd.opt_state)['kernel'] == 1 - 3 * 2.0**-10
    )
    # The average is that of the copies: of 64 equal steps at d = 1/2 it is one step behind.
    assert float(moved.averages['kernel'][0, 0]) == pytest.approx(1 - 63 * 2.0**-10, abs=1e-6)


@pytest.mark.parametrize('name', ['adamw', 'schedule_free'])
@pytest.mark.proof
def test_narrow_parameters_with_master_copies_go_where_wide_ones_do(name):
    """In 48 steps, at a rate at which most updates are too small for bfloat16 alone."""
    fields = {'name': name, 'learning_rate': 2e-4}
    narrow = jax.jit(Trainer(make_config(model=NARROW, optimizer=fields)).start)().params
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)

    def way(state):
        moved = jax.tree.map(lambda x, y: np.ravel(x - y), master_params(state.params, state.opt_state), wide)
        return np.concatenate(jax.tree.leaves(moved))

    losses, expected = walk(make_config(optimizer=fields), wide)
    copied = make_config(model=NARROW, optimizer={**fields, 'master_dtype': 'float32', 'moment_dtype': 'bfloat16'})
    found, after = walk(copied, narrow)
    assert np.linalg.norm(way(after) - way(expected)) < 0.05 * np.linalg.norm(way(expected))
    assert losses[-1] < losses[0] - 0.2 and max(np.abs(np.subtract(found, losses))) < 0.02
    masters = master_params(after.params, after.opt_state)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y.astype(x.dtype)), after.params, masters)
    average = evaluation_params(after)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x.dtype, y.dtype), average, after.params)
    if name == 'adamw':
        _, lost = walk(make_config(model=NARROW, optimizer=fields), narrow)
        assert np.linalg.norm(way(lost) - way(expected)) > 0.5 * np.linalg.norm(way(expected))


@pytest.mark.slow
def test_masters_are_of_what_is_trained_alone():
    run = make_config(model={**NARROW, 'lora_rank': 2}, optimizer={'master_dtype': 'float32'})
    trainer = Trainer(run)
    before = jax.jit(trainer.start)()
    copies = before.opt_state
    sizes = [x.size for x in jax.tree.leaves(copies) if x.ndim]
    assert sum(sizes) < 0.1 * 3 * sum(x.size for x in jax.tree.leaves(before.params))
    after, _ = jax.jit(trainer.step)(before, trainer.batch, trainer.hyper)
    table = [state.params['embed']['table'] for state in (before, after)]
    assert np.array_equal(*table)
    assert not np.array_equal(
        *(jnp.concatenate([x.ravel() for x in jax.tree.leaves(s.params)]) for s in (before, after))
    )


def test_master_copies_of_wide_parameters_are_refused():
    with pytest.raises(UserError, match=r'optimizer.master_dtype=float32 has no effect here: .*model.param_dtype'):
        checks.settle(make_config(optimizer={'master_dtype': 'float32'}), ['optimizer.master_dtype'])


def test_rounding_at_random_keeps_the_mean_and_what_is_exact():
    x = jnp.full((64, 512), 1 + 2.0**-9)  # a quarter of the way from 1 to the next number
    found = stochastic_round(x, jnp.uint32(0)).astype(jnp.float32)
    assert set(np.unique(found)) == {1.0, 1 + 2.0**-7}
    share = np.mean(np.asarray(found) > 1)
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / x.size) ** 0.5
    again = stochastic_round(x, jnp.uint32(1)).astype(jnp.float32)
    assert abs(np.corrcoef(found.ravel(), again.ravel())[0, 1]) < 4 / x.size**0.5
    assert abs(np.corrcoef(found[1:].ravel(), found[:-1].ravel())[0, 1]) < 4 / x.size**0.5
    whole = jnp.asarray([0.0, -0.0, 1.5, -3.0, 2.0**-120, jnp.inf, -jnp.inf])
    assert np.array_equal(stochastic_round(whole, jnp.uint32(7)).astype(jnp.float32), whole)
    assert jnp.isnan(stochastic_round(jnp.asarray([jnp.nan]), jnp.uint32(7))).all()


def test_moments_in_bfloat16_decay():
    """A second moment of 1, then 500 gradients of 0 at beta2 = 0.999: 0.999^500. To the nearest it would stay 1."""
    wide = optax.scale_by_rms(0.999, initial_scale=1.0)
    narrow = with_bfloat16_moments(wide)
    params = jnp.ones((64, 64))
    state = narrow.init(params)

    def body(state, _):
        return narrow.update(jnp.zeros_like(params), state, params)[1], None

    found = jax.jit(lambda state: jax.lax.scan(body, state, None, 500)[0])(state)
    assert jax.tree.leaves(found.base)[-1].dtype == jnp.bfloat16
    mean = float(jnp.mean(jax.tree.leaves(found.base)[-1].astype(jnp.float32)))
    assert mean == pytest.approx(0.999**500, rel=0.01)
    assert jnp.bfloat16(0.999) * jnp.bfloat16(1) == jnp.bfloat16(1)


def test_no_two_moments_and_no_two_steps_are_rounded_by_the_same_draws():
    x = jnp.full((8, 8), 1 + 2.0**-8)  # half way from 1 to the next number
    wide = optax.GradientTransformation(lambda params: params, lambda grads, state, params=None: (grads, grads))
    narrow, given = with_bfloat16_moments(wide), dict.fromkeys('abc', x)
    state, seen = narrow.init(given), []
    for _ in range(4):
        seen += [np.asarray(moment).tobytes() for moment in state.base.values()]
        _, state = narrow.update(given, state)
    assert len(set(seen)) == len(seen) == 12


def test_the_gradient_of_narrow_parameters_is_wide_so_that_parts_of_a_batch_add_up():
    trainer = Trainer(make_config(model=NARROW))
    start = jax.eval_shape(trainer.start)
    gradient = make_gradient(trainer.model, trainer.objective, trainer.run)
    grads, _ = jax.eval_shape(gradient, start.params, {}, trainer.batch, trainer.hyper, jax.random.key(0))
    assert jnp.dtype('bfloat16') in {x.dtype for x in jax.tree.leaves(start.params)}
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype('float32')}


def test_a_decay_is_of_the_master_copy():
    """Of 1 + 2^-9, which bfloat16 rounds to 1, half is left."""
    update = optax.GradientTransformationExtraArgs(
        lambda params: (), lambda grads, state, params, **_: (jax.tree.map(lambda x: -0.5 * x, params), state)
    )
    optimizer, wide = with_master_params(update, 'float32'), {'kernel': jnp.array([1 + 2.0**-9])}
    narrow = {'kernel': wide['kernel'].astype(jnp.bfloat16)}
    _, state = optimizer.update(narrow, optimizer.init(wide), narrow)
    assert narrow['kernel'] == 1 and state.params['kernel'] == 0.5 + 2.0**-10


# ----------------------------------------------------------------------------------------- the state on a mesh
@functools.cache
def narrow_run():
    """(trainer, the state on 8 devices that split the parameters, its compiled step) with all that is narrow."""
    fields = {'master_dtype': 'float32', 'moment_dtype': 'bfloat16'}
    run = make_config(rows=8, model={**NARROW, 'emb_dim': 32}, optimizer=fields)
    trainer = Trainer(dataclasses.replace(run, mesh=Mesh(data=1, fsdp=8)))
    mesh, rules = meshes.make_mesh(trainer.run.mesh), sharding.RULES['fsdp']
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        args = trainer.model, trainer.objective, trainer.optimizer, trainer.hyper, trainer.batch
        start, shardings = make_start(*args, mesh, rules)
        state = start(trainer.hyper)
        placed = jax.device_put(trainer.batch, meshes.batch_sharding(mesh))
        step = jax.jit(trainer.step, donate_argnums=0, out_shardings=(shardings, None))  # as resume.assemble does
        return trainer, state, step.lower(state, placed, trainer.hyper).compile(), placed


def on_one(tree):
    """Bytes of a tree on its first device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.slow
def test_a_device_holds_ten_bytes_for_each_of_its_parameters():
    """2 of the parameter, 4 of its master copy, 2 and 2 of its moments; with float32 alone they are 12."""
    _, state, _, _ = narrow_run()
    masters = master_params(state.params, state.opt_state)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y.astype(x.dtype)), masters, state.params)
    assert jax.tree.map(lambda x: x.sharding, masters) == jax.tree.map(lambda x: x.sharding, state.params)
    table = state.params['embed']['table']
    assert table.sharding.shard_shape(table.shape) == (40, 32 // 8)
    leaves = jax.tree.leaves(state.params)
    narrow, wide = (
        sum(on_one(x) // x.itemsize for x in leaves if x.dtype == dtype) for dtype in ('bfloat16', 'float32')
    )
    kept = on_one((state.params, state.opt_state))
    assert narrow > 900 and 0 <= kept - (10 * narrow + 12 * wide) <= 16  # and the counts of steps
    assert wide == 6 * 32  # of norms, which are float32 always: scales and biases


@pytest.mark.slow
def test_a_donated_state_is_updated_in_place_and_on_eight_devices_as_on_one():
    trainer, state, step, placed = narrow_run()
    bytes_of_state = on_one(state)
    analysis = step.memory_analysis()
    assert analysis.alias_size_in_bytes >= bytes_of_state
    alone, before = jax.device_get((state, master_params(state.params, state.opt_state)))
    copy = jax.tree.map(jnp.copy, state)
    after, _ = step(copy, placed, trainer.hyper)
    assert all(x.is_deleted() for x in jax.tree.leaves(copy))
    expected, _ = jax.jit(trainer.step)(alone, trainer.batch, trainer.hyper)
    moved = [jax.tree.map(jnp.subtract, master_params(x.params, x.opt_state), before) for x in (after, expected)]
    found, wanted = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(tree))]) for tree in moved)
    assert np.linalg.norm(found - wanted) < 0.01 * np.linalg.norm(wanted)


def test_masters_and_narrow_moments_are_restored_bit_for_bit(tmp_path):
    trainer, state, step, placed = narrow_run()
    after, _ = step(jax.tree.map(jnp.copy, state), placed, trainer.hyper)
    saved = checkpoint_writer.CheckpointWriter(tmp_path)
    saved.save(after, {}, None)
    saved.wait()
    restored = checkpoint.restore(tmp_path, 1, state)
    assert jax.tree.structure(restored) == jax.tree.structure(after)
    jax.tree.map(np.testing.assert_array_equal, restored, after)
    assert [x.dtype for x in jax.tree.leaves(restored)] == [x.dtype for x in jax.tree.leaves(after)]
    again = [step(jax.tree.map(jnp.copy, tree), placed, trainer.hyper)[0] for tree in (after, restored)]
    jax.tree.map(np.testing.assert_array_equal, *again)
