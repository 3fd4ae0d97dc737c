"""Losses of texts that are compared: by an independent formula, on a mesh as on one device, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from tformer import checks
from tformer.config import Config, Data, Mesh, Model, Train, override
from tformer.distributed import meshes
from tformer.errors import UserError
from tformer.objectives import choice_scores, contrastive_scores, cosine_scores
from tformer.training.program import make_program

ENCODER = {'model.family': 'encoder', 'train.num_steps': 1, 'train.objective': 'contrastive'}


def compared(rows: int, seed: int = 0, number: int = 3) -> tuple[jax.Array, dict]:
    """Logits of rows of `number` texts, of which some are alike, some are missing, and one row is empty."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 3 * rows, (rows, number))  # of a few texts, so that some are the same
    real = rng.random((rows, number)) < 0.8
    real[:, :2] = True
    real[-1] = False
    batch = {
        'segment_keys': np.stack([keys, 0 * keys], -1).astype(np.int32),
        'segment_weights': real.astype(np.float32),
        'label_weights': real[:, 0].astype(np.float32),
    }
    return jnp.asarray(rng.standard_normal((rows, rows * (number - 1))), jnp.float32), batch


@pytest.mark.parametrize('seed', range(4))
def test_the_loss_is_that_of_the_right_text_among_all_others_of_the_batch(seed):
    logits, batch = compared(7, seed)
    keys, real = batch['segment_keys'][..., 0], batch['segment_weights'] > 0
    loss = right = left_out = 0
    for row in range(6):
        own = 2 * row
        others = [
            column for column in range(14)
            if real[column // 2, 1 + column % 2] and keys[column // 2, 1 + column % 2] not in keys[row, :2]
        ]  # fmt: skip
        left_out += 13 - len(others)
        some = np.asarray(logits, np.float64)[row, [own, *others]]
        loss += scipy.special.logsumexp(some) - some[0]
        right += some.argmax() == 0
    assert left_out > 6 * 2  # besides the texts of the empty row
    found = contrastive_scores((None, logits), batch)
    assert found.keys() == {'loss', 'accuracy'} and all(float(weight) == 6 for _, weight in found.values())
    assert float(found['loss'][0]) == pytest.approx(loss, rel=1e-5) and found['accuracy'][0] == right


def test_choices_that_a_row_lacks_are_not_chosen():
    logits = np.array([[1.0, 2, 9], [3, 1, 0], [5, 0, 0]])
    batch = {
        'segment_weights': jnp.array([[1.0, 1, 0], [1, 1, 1], [0, 0, 0]]),
        'labels': jnp.array([1, 1, 0]),
        'label_weights': jnp.array([1.0, 1, 0]),
    }
    found = choice_scores(jnp.asarray(logits, jnp.float32), batch)
    wanted = scipy.special.logsumexp(logits[0, :2]) - 2 + scipy.special.logsumexp(logits[1]) - 1
    assert float(found['loss'][0]) == pytest.approx(wanted, rel=1e-5) and found['loss'][1] == 2
    assert found['accuracy'][0] == 1


def test_cosines_are_held_to_their_labels_by_squares():
    vectors = jnp.array([[[1.0, 0], [0.6, 0.8]], [[0, 1.0], [0, -1]], [[0, 0], [0, 0]]])
    batch = {'labels': jnp.array([0.5, 0.0, 0]), 'label_weights': jnp.array([1.0, 1, 0])}
    total, weight = cosine_scores(vectors, batch)['loss']
    assert float(total) == pytest.approx(0.1**2 + 1) and weight == 2


def batch_of(rows: int = 8, length: int = 8) -> dict:
    """Two texts a row, of random tokens; the fourth row's second text is also the first row's."""
    rng = np.random.default_rng(0)
    second = np.arange(length) >= length // 2
    tokens = rng.integers(5, 17, (rows, length)).astype(np.int32)
    tokens[3, second] = tokens[0, second]
    halves = tokens.reshape(rows, 2, -1)
    return {
        'inputs': tokens,
        'positions': np.tile((np.arange(length) - second * (length // 2)).astype(np.int32), (rows, 1)),
        'segment_ids': np.tile((1 + second).astype(np.int32), (rows, 1)),
        'segment_weights': np.ones((rows, 2), np.float32),
        'segment_keys': np.ascontiguousarray(halves[..., :2]),
        'label_weights': np.ones(rows, np.float32),
    }


@pytest.mark.slow
def test_a_mesh_compares_with_the_texts_of_all_its_devices():
    """Rows over four devices: the loss and the gradient's norm are those of one device."""
    model = Model(family='encoder', vocab_size=17, emb_dim=16, mlp_dim=24, num_heads=2, num_encoder_layers=1,
                  max_len=8, dropout_rate=0.0)  # fmt: skip
    config = Config(model, Data(length=8), train=Train(objective='contrastive', num_steps=1, batch_size=8))
    found = []
    for mesh in (Mesh(data=1), Mesh(data=2, fsdp=2)):
        each = checks.resolve(dataclasses.replace(config, mesh=mesh), vocab_size=17)
        devices = jax.devices()[: max(mesh.data, 1) * mesh.fsdp]
        program = make_program(each, batch_of(), meshes.make_mesh(mesh, devices))
        _, metrics = program.train_step(program.init(), batch_of())
        found.append([float(metrics['scores']['loss'][0]), float(metrics['grad_norm'])])
    np.testing.assert_allclose(found[1], found[0], rtol=2e-5)
    assert found[0][0] / 8 > np.log(8) and found[0][1] > 0.1  # untrained, and at a temperature of 0.05


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'train.microbatches': 2}, 'train.objective=contrastive compares each row with the whole batch: '),
        (
            {'train.objective': 'simcse', 'model.dropout_rate': 0.0},
            'which only dropout tells apart: model.dropout_rate',
        ),
        ({'model.family': 'encoder_decoder'}, 'needs model.family=encoder or decoder, not encoder_decoder'),
        ({'model.pooler': True}, 'model.pooler=True has no effect here: it applies where train.objective is '),
        ({'model.head_dropout_rate': 0.1}, 'model.head_dropout_rate=0.1 has no effect here'),
        (
            {'train.objective': 'cosine_similarity', 'model.similarity_temperature': 0.1},
            'model.similarity_temperature=0.1 has no effect here: it applies where train.objective is contrastive or ',
        ),
        ({'model.similarity_temperature': 0.0}, 'model.similarity_temperature=0.0 must be positive'),
        ({'data.label_range': (0.0, 5.0)}, 'it applies where train.objective is regression or cosine_similarity'),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    stated = {**ENCODER, **changes}
    with pytest.raises(UserError) as error:
        checks.check(checks.settle(override(Config(), stated), stated))
    assert message in str(error.value) and '\n' not in str(error.value)


def test_microbatches_of_pairs_with_labels_are_exact():
    checks.check(override(Config(), {**ENCODER, 'train.objective': 'cosine_similarity', 'train.microbatches': 2}))
