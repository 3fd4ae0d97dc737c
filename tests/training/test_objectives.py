"""Losses and predictions by hand, two losses in one number, and ELECTRA's generator."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from tformer import checks, config
from tformer.config import Config, Data, Model, Train
from tformer.data.batches import pipeline
from tformer.data.tokenizers import tokenizers
from tformer.distributed import meshes, sharding
from tformer.evaluation import scorer
from tformer.layers.dropout import DropoutRates
from tformer.layers.outputs import best_spans, candidates, sentence_classes
from tformer.layers.replaced_tokens import detect, narrowed
from tformer.layers.resolved import resolve_model
from tformer.model import build
from tformer.objectives import (
    OBJECTIVES,
    class_scores,
    detection_scores,
    number_scores,
    sentence_scores,
    span_scores,
)

B, T, V = 4, 6, 11


def stream(seed=0):
    return np.random.default_rng(seed)


def means(scores):
    """The mean of each (sum, weight) pair, as numbers."""
    return {name: float(total) / float(weight) for name, (total, weight) in scores.items()}


def nll(logits, targets):
    """Of each target, in float64, by scipy."""
    logprobs = scipy.special.log_softmax(np.asarray(logits, np.float64), -1)
    return -np.take_along_axis(logprobs, targets[..., None], -1)[..., 0]


# ------------------------------------------------------------------------------------------------ numbers by hand
def test_smoothing_and_z_loss_are_added_to_what_is_trained_alone():
    logits = 3 * stream().standard_normal((B, V)).astype(np.float32)
    targets, weights = np.array([0, 3, 10, 3]), np.array([1.0, 2.0, 0.0, 0.5], np.float32)
    plain, normalizer = nll(logits, targets), scipy.special.logsumexp(logits.astype(np.float64), -1)
    smooth = -scipy.special.log_softmax(logits.astype(np.float64), -1).mean(-1)
    right = (logits.argmax(-1) == targets).astype(float)
    for smoothing, z_loss in itertools.product((None, 0.2), (None, 0.03)):
        per_example = (1 - (smoothing or 0)) * plain + (smoothing or 0) * smooth + (z_loss or 0) * normalizer**2
        expected = {'loss': per_example, 'nll': plain, 'accuracy': right}
        found = class_scores(jnp.asarray(logits), jnp.asarray(targets), jnp.asarray(weights), smoothing, z_loss)
        assert set(found) == set(expected)
        for name, (total, weight) in found.items():
            assert float(total) == pytest.approx(np.sum(expected[name] * weights), rel=1e-5) and weight == 3.5


def test_squared_errors_by_hand():
    batch = {'labels': jnp.array([1.0, -2.0, 5.0]), 'label_weights': jnp.array([1.0, 1.0, 0.0])}
    total, weight = number_scores(jnp.array([1.5, 1.0, 0.0]), batch)['loss']
    assert (float(total), float(weight)) == (0.25 + 9.0, 2.0)


def answers(seed=0, rows=B, length=9):
    """A batch of questions and contexts of unequal lengths, the last row empty; logits; their candidates."""
    rng = stream(seed)
    place, size = np.arange(length)[None], rng.integers(5, length + 1, (rows, 1))
    weights = ((place == 0) | ((place >= 3) & (place < size - 1))).astype(np.float32)
    weights[-1] = 0
    labels = np.array([[rng.choice(np.flatnonzero(row)) if row.any() else 0 for _ in range(2)] for row in weights])
    batch = {'weights': weights, 'labels': np.sort(labels, 1).astype(np.int32)}
    batch['label_weights'] = weights.any(1).astype(np.float32)
    return jax.tree.map(jnp.asarray, batch), jnp.asarray(3 * rng.standard_normal((rows, length, 2)), jnp.float32)


@pytest.mark.parametrize('z_loss', [None, 0.01])
def test_an_answer_is_scored_among_its_candidates(z_loss):
    batch, logits = answers()
    found, expected = span_scores(logits, batch, None, z_loss), {'loss': 0.0, 'nll': 0.0, 'accuracy': 0.0}
    for row in range(B - 1):
        may = np.flatnonzero(batch['weights'][row])
        right = True
        for side in (0, 1):
            some = np.asarray(logits)[row, may, side].astype(np.float64)
            target = np.flatnonzero(may == int(batch['labels'][row, side]))
            mine = nll(some[None], target)[0]
            expected['nll'] += mine / 2
            expected['loss'] += mine / 2 + (z_loss or 0) * scipy.special.logsumexp(some) ** 2 / 2
            right &= some.argmax() == target[0]
        expected['accuracy'] += right
    for name, (total, weight) in found.items():
        assert float(total) == pytest.approx(expected[name], rel=1e-5) and weight == B - 1
    gradient = jax.grad(lambda x: span_scores(x, batch, None, z_loss)['loss'][0])(logits)
    assert np.isfinite(gradient).all() and not np.asarray(gradient)[np.asarray(batch['weights']) == 0].any()


@pytest.mark.parametrize('longest', [1, 2, 30])
def test_the_best_answer_is_the_best_of_all(longest):
    for seed in range(20):
        batch, logits = answers(seed)
        batch = {**batch, 'weights': batch['weights'].at[0, 1:].set(0)}  # no context: no answer
        first, last, score, none = map(np.asarray, best_spans(logits, batch, longest))
        found = np.asarray(logits, np.float64)
        np.testing.assert_allclose(none, found[:, 0].sum(1), rtol=1e-6)
        for row, may in enumerate(np.asarray(candidates(batch))):
            places = [p for p in np.flatnonzero(may) if p > 0]
            spans = [(a, b) for a in places for b in places if a <= b < a + longest]
            best = max(spans, key=lambda span: found[row, span[0], 0] + found[row, span[1], 1], default=None)
            if best is None:
                assert (first[row], last[row], score[row]) == (0, 0, -np.inf)
            else:
                assert (first[row], last[row]) == best
                assert score[row] == pytest.approx(found[row, best[0], 0] + found[row, best[1], 1], rel=1e-6)


# ---------------------------------------------------------------------------------------------------- two losses
def masked_batch(rows=B, seed=0):
    """Rows of unequal lengths, some tokens hidden, the last row empty."""
    rng = stream(seed)
    lengths = np.append(rng.integers(2, T + 1, rows - 1), 0)
    real = np.arange(T)[None] < lengths[:, None]
    return {
        'inputs': np.where(real, rng.integers(5, V, (rows, T)), 0).astype(np.int32),
        'positions': np.where(real, np.arange(T)[None], -1).astype(np.int32),
        'targets': np.where(real, rng.integers(5, V, (rows, T)), 0).astype(np.int32),
        'weights': (real * (rng.random((rows, T)) < 0.5)).astype(np.float32),
        'labels': rng.integers(0, 2, rows).astype(np.int32),
        'label_weights': (lengths > 0).astype(np.float32),
    }


def padded(batch):
    """The same rows with more padding, at their end and below them."""

    def more(name, x):
        fill = -1 if name == 'positions' else 0
        return np.pad(x, [(0, 3), (0, 2)][: x.ndim], constant_values=fill)

    return {name: more(name, x) for name, x in batch.items()}


@pytest.mark.slow
@pytest.mark.parametrize('name', ['masked_lm_nsp', 'masked_lm_sop'])
@pytest.mark.parametrize('weight', [0.0, 1.0, 2.5])
def test_the_loss_is_one_mean_plus_the_weight_times_the_other(name, weight):
    objective, batch, rng = OBJECTIVES[name], masked_batch(), stream(1)
    tokens = rng.standard_normal((B, T, V)).astype(np.float32)
    pairs = rng.standard_normal((B, 2)).astype(np.float32)
    hidden, real = batch['weights'] > 0, batch['label_weights'] > 0
    first = nll(tokens, batch['targets'])[hidden]
    smooth = 0.9 * first - 0.1 * scipy.special.log_softmax(tokens.astype(float), -1).mean(-1)[hidden]
    second = nll(pairs, batch['labels'])[real]
    right = (pairs.argmax(-1) == batch['labels'])[real]
    wide = np.pad(tokens, [(0, 3), (0, 2), (0, 0)]), np.pad(pairs, [(0, 3), (0, 0)])
    for outputs, some in (((tokens, pairs), batch), (wide, padded(batch))):
        some = objective.weigh(jax.tree.map(jnp.asarray, some), weight)
        outputs = jax.tree.map(jnp.asarray, outputs)
        found = means(sentence_scores(outputs, some, None, None))
        assert found['loss'] == pytest.approx(first.mean() + weight * second.mean(), rel=1e-5)
        assert found['nll'] == pytest.approx(first.mean(), rel=1e-5)
        assert found['sentence_loss'] == pytest.approx(second.mean(), rel=1e-5)
        assert found['sentence_accuracy'] == pytest.approx(right.mean())
        smoothed = means(sentence_scores(outputs, some, 0.1, None))  # of the tokens alone
        assert smoothed['loss'] == pytest.approx(smooth.mean() + weight * second.mean(), rel=1e-5)
        np.testing.assert_array_equal(sentence_classes(outputs, some, 0)[:B], pairs.argmax(-1))


@pytest.mark.parametrize('weight', [0.0, 1.0, 50.0])
def test_every_token_is_judged_and_one_that_was_drawn_right_was_not_replaced(weight):
    objective, batch, rng = OBJECTIVES['replaced_token'], masked_batch(), stream(2)
    logits = rng.standard_normal((B, T, V)).astype(np.float32)
    detected = rng.standard_normal((B, T)).astype(np.float32)
    hidden, real = batch['weights'] > 0, batch['positions'] >= 0
    tokens = np.where(hidden, rng.integers(5, V, (B, T)), batch['inputs']).astype(np.int32)
    row, place = np.argwhere(hidden)[0]
    tokens[row, place] = batch['targets'][row, place]  # drawn right
    replaced = hidden & (tokens != batch['targets'])
    assert 0 < replaced.sum() < hidden.sum() < real.sum()
    probability = scipy.special.expit(detected.astype(float))
    second = -np.log(np.where(replaced, probability, 1 - probability))[real]
    first = nll(logits, batch['targets'])[hidden]

    def widen(x):
        return np.pad(x, [(0, 3), (0, 2), (0, 0)][: x.ndim])

    outputs = logits, tokens, detected
    for made, some in ((outputs, batch), (tuple(map(widen, outputs)), padded(batch))):
        some = objective.weigh(jax.tree.map(jnp.asarray, some), weight)
        found = means(detection_scores(jax.tree.map(jnp.asarray, made), some))
        assert found['loss'] == pytest.approx(first.mean() + weight * second.mean(), rel=1e-5)
        assert found['nll'] == pytest.approx(first.mean(), rel=1e-5)
        assert found['detection_loss'] == pytest.approx(second.mean(), rel=1e-5)
        assert found['detection_accuracy'] == pytest.approx(((detected > 0) == replaced)[real].mean())
        assert found['replaced'] == pytest.approx(replaced[real].mean())


def test_the_second_loss_has_the_weight_of_its_paper_by_default():
    assert {name: o.second_weight for name, o in OBJECTIVES.items() if o.second is not None} == {
        'masked_lm_nsp': 1.0,
        'masked_lm_sop': 1.0,
        'replaced_token': 50.0,
    }


def test_a_batch_of_padding_alone_has_no_loss():
    empty = jax.tree.map(jnp.asarray, {**masked_batch(), 'positions': np.full((B, T), -1, np.int32)})
    empty = {**empty, 'weights': 0 * empty['weights'], 'label_weights': 0 * empty['label_weights']}
    logits = jnp.ones((B, T, V))
    outputs = {'masked_lm_nsp': (logits, jnp.ones((B, 2))), 'replaced_token': (logits, empty['inputs'], logits[..., 0])}
    for name, made in outputs.items():
        objective = OBJECTIVES[name]
        assert all(float(total) == 0 for total, _ in objective.scores(made, objective.weigh(empty, 1.0)).values())


# --------------------------------------------------------------------------------------- evaluation, whole batches
TEXTS = ('abc. de fg. hi. ' * 3, 'b. aa. c', 'x yz. ', 'fed. cba. ' * 2, 'z. y. x. w. v')


@functools.cache
def scored(objective, rows):
    """(config, scores twice) of a few records in batches of `rows`, by a model without training."""
    cfg = Config(
        model=Model('encoder', emb_dim=16, mlp_dim=16, num_heads=4, num_encoder_layers=1, max_len=32),
        data=Data(tokenizer='byte', length=24, num_buckets=1),
        train=Train(objective=objective, batch_size=rows, num_steps=1, second_loss_weight=3.0),
        mesh=config.Mesh(data=1),
    )
    records = [{'text': text} for text in TEXTS]
    tokens = tokenizers.train_tokenizers(cfg, records)
    batches = pipeline.Batches(cfg, tokens, 'valid', training=False, records=records)
    cfg = checks.resolve(cfg, vocab_size=tokens.target.vocab_size)
    model = build(cfg.model)
    variables = jax.jit(functools.partial(model.init, method=OBJECTIVES[objective].method))(
        jax.random.key(0), batches.batch(0)
    )
    mesh = meshes.make_mesh(cfg.mesh, jax.devices()[:1])
    score = scorer.make_scorer(model, cfg, mesh)
    found, again = (score(sharding.unboxed(variables), batches, None, tokens) for _ in range(2))
    return cfg, found, again


@pytest.mark.slow
@pytest.mark.parametrize('objective', ['masked_lm_nsp', 'replaced_token'])
def test_evaluation_is_deterministic_and_of_the_split_not_of_its_batches(objective):
    cfg, found, again = scored(objective, 2)
    assert found == again and {f'valid/{name}' for name in found} >= set(scorer.score_names(cfg))
    judged = {'sentence_f1_micro', 'sentence_matthews'}
    assert {f'valid/{name}' for name in found if name not in judged} <= set(scorer.score_names(cfg))
    second = found[OBJECTIVES[objective].second]
    assert found['loss'] == pytest.approx(found['nll'] + 3 * second, rel=1e-6) and second > 0
    if objective == 'masked_lm_nsp':  # what is drawn is of a batch, too
        _, other, _ = scored(objective, 8)
        assert {name: found[name] for name in ('loss', 'nll', 'sentence_loss', 'sentence_accuracy')} == pytest.approx(
            {name: other[name] for name in ('loss', 'nll', 'sentence_loss', 'sentence_accuracy')}, rel=1e-5
        )


# ------------------------------------------------------------------------------------------- generator and detector
WIDE = Model('encoder', vocab_size=V, emb_dim=32, mlp_dim=48, num_heads=4, num_encoder_layers=2, max_len=8)


@functools.cache
def electra():
    """(parameters, a batch, run(key) -> detect's outputs, the gradients of the detector's loss and of both)."""
    model, objective = build(WIDE), OBJECTIVES['replaced_token']
    batch = jax.tree.map(jnp.asarray, masked_batch())
    params = sharding.unboxed(jax.jit(functools.partial(model.init, method=detect))(jax.random.key(0), batch))

    @jax.jit
    def run(params, key):
        def losses(params):
            rngs = {'sample': key}
            outputs = model.apply(params, batch, DropoutRates(), rngs=rngs, method=detect)
            scores = objective.scores(outputs, objective.weigh(batch, 50.0))
            return (scores['detection_loss'][0], scores['loss'][0]), outputs

        _, pull, outputs = jax.vjp(losses, params, has_aux=True)
        (detector,), (whole,) = pull((1.0, 0.0)), pull((0.0, 1.0))
        return outputs, detector['params'], whole['params']

    return params['params'], batch, functools.partial(run, params)


def norms(tree):
    return np.array([np.abs(leaf).max() for leaf in jax.tree.leaves(tree)])


@pytest.mark.slow
def test_the_generator_learns_nothing_from_the_detector():
    _, _, run = electra()
    _, detector, whole = jax.device_get(run(jax.random.key(0)))
    assert not norms(detector['generator']).any() and (norms(whole['generator']) > 0).all()
    assert (norms(detector['encoder']) > 0).mean() > 0.9 and (norms(detector['detection_head']) > 0).all()
    assert np.abs(detector['embed']['table']).max() > 0  # shared: the detector reads by it


def test_the_generator_is_as_narrow_as_it_says_and_reads_the_same_embeddings():
    params, _, _ = electra()
    assert set(params) == {'embed', 'encoder', 'generator', 'detection_head'}
    tables = [path for path, x in jax.tree_util.tree_leaves_with_path(params) if V in x.shape]
    assert [jax.tree_util.keystr(path) for path in tables] == ["['embed']['table']"]
    assert params['embed']['table'].shape == (V, 32)
    layers = {name: params[name]['stack']['layers'] for name in ('encoder',)}
    layers['generator'] = params['generator']['encoder']['stack']['layers']
    sizes = {
        name: (
            x['attention']['query']['kernel'].shape,
            x['mlp']['in_0' if 'in_0' in x['mlp'] else 'in']['kernel'].shape,
        )
        for name, x in layers.items()
    }
    assert sizes == {'encoder': ((2, 32, 4, 8), (2, 32, 48)), 'generator': ((2, 8, 1, 8), (2, 8, 12))}


@pytest.mark.parametrize(
    'fraction, sizes', [(0.25, (1, 8, 12)), (0.5, (2, 16, 24)), (0.1, (1, 8, 12)), (1, (4, 32, 48))]
)
def test_the_generators_sizes(fraction, sizes):
    small = narrowed(resolve_model(dataclasses.replace(WIDE, generator_fraction=fraction)))
    assert (small.num_heads, small.emb_dim, small.mlp_dim) == sizes
    assert small.embedding_factor_dim == 32 and small.num_encoder_layers == 2


def test_heads_of_any_generator_share_keys_evenly():
    for heads, fraction in itertools.product((1, 2, 4, 6, 8, 12), (0.1, 0.25, 0.375, 0.5, 0.8, 1.0)):
        for kv_heads in (k for k in range(1, heads + 1) if heads % k == 0):
            wide = Model('encoder', num_heads=heads, num_kv_heads=kv_heads, emb_dim=24, generator_fraction=fraction)
            small = narrowed(resolve_model(wide))
            assert small.num_heads % small.num_kv_heads == 0 and small.num_kv_heads <= kv_heads
            assert small.emb_dim * heads == 24 * small.num_heads and small.num_heads / small.num_kv_heads >= 1


def test_tokens_are_drawn_where_something_is_hidden_and_by_the_key():
    _, batch, run = electra()
    drawn = [np.asarray(run(jax.random.key(seed))[0][1]) for seed in (0, 0, 1)]
    hidden = np.asarray(batch['weights']) > 0
    assert all((tokens == batch['inputs'])[~hidden].all() for tokens in drawn)
    assert (drawn[0] == drawn[1]).all() and (drawn[0] != drawn[2])[hidden].any()
    assert drawn[0].dtype == np.int32 and drawn[0].min() >= 0 and drawn[0].max() < V


def test_what_is_drawn_follows_the_generators_probabilities():
    model = build(WIDE)
    batch = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x[:1]), 3000, 0), masked_batch(seed=3))
    place = int(np.flatnonzero(np.asarray(batch['weights'][0]))[0])
    variables = jax.jit(functools.partial(model.init, method=detect))(jax.random.key(0), batch)
    apply = jax.jit(lambda v, b: model.apply(v, b, DropoutRates(), rngs={'sample': jax.random.key(5)}, method=detect))
    logits, tokens, _ = apply(sharding.unboxed(variables), batch)
    wanted = 3000 * scipy.special.softmax(np.asarray(logits[0, place], np.float64))
    seen = np.bincount(np.asarray(tokens[:, place]), minlength=V)
    assert np.sum((seen - wanted) ** 2 / wanted) < 29.6  # chi-square, 10 degrees of freedom, p = 0.001
