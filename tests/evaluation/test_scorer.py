"""What evaluation makes of a model's probabilities, on three tokens and by hand."""

import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tformer import checks
from tformer import config as config_lib
from tformer.config import Config, Train
from tformer.distributed import meshes
from tformer.evaluation import scorer

BYTES = np.array([0, 1, 2, 4])  # of the tokens; their bits are 1, 2, 3, 3


class Halves(nn.Module):
    """Every token has the probabilities 1/2, 1/4, 1/8, 1/8."""

    def __call__(self, batch, rates=None):
        logits = jnp.log(jnp.asarray([0.5, 0.25, 0.125, 0.125]))
        return jnp.broadcast_to(logits[None, None], (*batch['inputs'].shape, 4))


class Batches:
    """Two batches of unequal weight."""

    steps_per_epoch = 2

    def batch(self, number):
        targets, weights = (([[1, 3, 2], [0, 0, 3]], [[1, 1, 0], [0, 0, 0]]), ([[0, 2, 2]], [[1, 1, 0]]))[number]
        found = {'targets': np.array(targets, np.int32), 'weights': np.array(weights, np.float32)}
        return {**found, 'inputs': found['targets']}


def score(limit=None, lossless=True, **train):
    cfg = checks.resolve(Config(train=Train(num_steps=1, **train)), vocab_size=4)
    mesh = meshes.make_mesh(config_lib.Mesh(data=1), jax.devices()[:1])
    tokenizers = types.SimpleNamespace(target=types.SimpleNamespace(lossless=lossless, byte_lengths=BYTES))
    return scorer.make_scorer(Halves(), cfg, mesh)({}, Batches(), limit, tokenizers)


def test_bits_per_byte_are_the_bits_of_all_targets_over_their_bytes():
    """Targets that count: 1 and 3 with 2 + 3 bits and 1 + 4 bytes; then 0 and 2 with 1 + 3 bits and 0 + 2 bytes."""
    found = score()
    assert found['bits_per_byte'] == pytest.approx(9 / 7, rel=1e-6)
    assert found['nll'] == pytest.approx(9 / 4 * np.log(2), rel=1e-6)
    assert found['perplexity'] == pytest.approx(2 ** (9 / 4), rel=1e-5)
    assert found['accuracy'] == 1 / 4
    assert score(limit=1)['bits_per_byte'] == pytest.approx(5 / 5, rel=1e-6)


class Slow(Halves):
    """The same, after products that take a while."""

    def __call__(self, batch, rates=None):
        ones = jnp.ones((300, 300)) * batch['inputs'].sum()
        kept = jax.lax.fori_loop(0, 40, lambda _, x: x @ ones / 300, ones).mean()
        return super().__call__(batch) + 0 * kept


def test_on_several_devices_of_a_cpu_a_batch_begins_when_the_one_before_has_ended(monkeypatch):
    """Hundreds of programs that wait for each other's threads in collectives never end."""
    ended, real = [], scorer.jit

    def jit(function, **options):
        made, last = real(function, **options), []

        def step(*given):
            ended.extend(x.is_ready() for x in jax.tree.leaves(last))
            last[:] = [made(*given)]
            return last[0]

        return step

    monkeypatch.setattr(scorer, 'jit', jit)
    cfg = checks.resolve(Config(train=Train(num_steps=1)), vocab_size=4)
    mesh = meshes.make_mesh(config_lib.Mesh(data=1, tensor=2), jax.devices()[:2])
    tokenizers = types.SimpleNamespace(target=types.SimpleNamespace(lossless=True, byte_lengths=BYTES))
    scorer.make_scorer(Slow(), cfg, mesh)({}, Batches(), None, tokenizers)
    assert ended and all(ended)


def test_where_no_target_counts_no_score_is_a_number(monkeypatch):
    batch = Batches.batch
    monkeypatch.setattr(Batches, 'batch', lambda self, n: {**batch(self, n), 'weights': 0 * batch(self, n)['weights']})
    found = score()
    assert math.isnan(found['bits_per_byte']) and math.isnan(found['nll'])


def test_evaluation_is_without_label_smoothing_and_z_loss():
    found = score(label_smoothing=0.3, z_loss=0.5)
    assert found['loss'] == found['nll'] == pytest.approx(9 / 4 * np.log(2), rel=1e-6)


def test_a_tokenizer_that_loses_text_has_no_bits_per_byte():
    assert 'bits_per_byte' not in score(lossless=False)


def test_scores_of_tags_are_named_by_the_tags():
    stated = Config(train=Train(objective='token_classification', num_steps=1))
    entities, plain = (scorer.score_names(stated, labels) for labels in (('O', 'B-X', 'I-X'), ('NOUN', 'VERB')))
    assert 'valid/entity_f1' in entities and not {'valid/tag_accuracy', 'valid/tag_f1_macro'} & {*entities}
    assert {'valid/tag_accuracy', 'valid/tag_f1_macro'} <= {*plain} and 'valid/entity_f1' not in plain


def test_scores_while_training_name_those_of_generated_text_where_it_is_generated():
    stated = Config(train=Train(objective='causal_lm', num_steps=1))
    stated = config_lib.override(stated, {'evaluate.metrics': ('chrf', 'exact_match')})
    names = scorer.score_names(stated)
    assert {'valid/loss', 'valid/bits_per_byte'} <= {*names}
    more = scorer.score_names(config_lib.override(stated, {'evaluate.examples_while_training': 2}))
    assert more == (*names, 'valid/chrf', 'valid/exact_match')


def test_rows_that_complete_a_batch_have_no_score():
    """Numbers 1, 2 and 4, predicted as 1, 2 and 5, and classes a, b, b, predicted as a, a, b; then an empty row."""
    batch = {'labels': np.array([1.0, 2, 4, 0]), 'label_weights': np.array([1.0, 1, 1, 0])}
    numbers = scorer.judge_numbers([scorer.Predicted(0, batch, np.array([1.0, 2, 5, 9]))], None, None)
    assert numbers['mean_squared_error'] == pytest.approx(1 / 3)
    assert numbers['pearson'] == pytest.approx(np.corrcoef([1, 2, 4], [1, 2, 5])[0, 1])
    batch = {**batch, 'labels': np.array([0, 1, 1, 0])}
    batches, tokenizers = types.SimpleNamespace(config=Config()), types.SimpleNamespace(labels=('a', 'b'))
    classes = scorer.judge_classes([scorer.Predicted(0, batch, np.array([0, 0, 1, 1]))], batches, tokenizers)
    assert classes['f1_micro'] == pytest.approx(2 / 3)
