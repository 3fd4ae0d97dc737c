"""Which checkpoints are the best, are kept and are averaged: on directories without arrays."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tformer.distributed import processes
from tformer.errors import UserError
from tformer.evaluation import metrics
from tformer.training import checkpoint, checkpoint_writer, digests


def made(workdir, merits):
    """Writes checkpoints without arrays, {step: score or None}."""
    for step, merit in merits.items():
        file = checkpoint.directory(workdir, step) / 'run' / 'metadata'
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({'merit': merit}))
        digests.write(checkpoint.directory(workdir, step))


def writer(workdir, monkeypatch, keep_last, keep_every=None):
    """Returns a writer that has nothing to write."""
    monkeypatch.setattr(checkpoint_writer.CheckpointWriter, 'finish', lambda self: None)
    return checkpoint_writer.CheckpointWriter(workdir, keep_last, keep_every)


def test_more_of_a_score_is_better_whatever_the_metric():
    assert checkpoint.score('valid/loss', 2.0) == -2
    assert checkpoint.score('valid/accuracy', 0.5) == 0.5
    assert checkpoint.score('valid/loss', math.nan) == checkpoint.score('valid/accuracy', math.nan) == -math.inf


def test_the_best_is_the_first_of_the_highest_score_and_without_scores_the_latest(tmp_path):
    made(tmp_path / 'a', {10: -3.0, 20: -1.0, 30: -1.0, 40: None})
    made(tmp_path / 'b', {10: None, 20: None})
    assert checkpoint.best(tmp_path / 'a') == 20
    assert checkpoint.best(tmp_path / 'b') == 20
    assert checkpoint.best(tmp_path / 'c') is None


def test_a_score_that_is_noted_later_counts(tmp_path, monkeypatch):
    made(tmp_path, {10: -3.0, 20: None})
    writer(tmp_path, monkeypatch, 2).note_score(20, -2.0)
    assert checkpoint.scores(tmp_path) == {10: -3, 20: -2}
    assert checkpoint.best(tmp_path) == 20


@pytest.mark.parametrize(
    ('keep_last', 'keep_every', 'kept'),
    [
        (1, None, [20, 60]),
        (2, None, [20, 50, 60]),
        (3, None, [20, 40, 50, 60]),
        (2, 30, [20, 30, 50, 60]),
        (1, 20, [20, 40, 60]),
    ],
)
def test_the_last_the_best_and_each_so_many_steps_are_kept(tmp_path, monkeypatch, keep_last, keep_every, kept):
    made(tmp_path, {10: -5.0, 20: -1.0, 30: -4.0, 40: -3.0, 50: -2.0, 60: -2.5})
    writer(tmp_path, monkeypatch, keep_last, keep_every).wait()
    assert checkpoint.steps(tmp_path) == kept


def test_an_average_is_of_the_newest_checkpoints_that_are_kept_in_order(tmp_path, monkeypatch):
    made(tmp_path, {10: None, 30: None, 40: None, 50: None})
    weights = {step: {'w': np.array([float(step), 2.0 * step], np.float32)} for step in (10, 30, 40, 50)}
    monkeypatch.setattr(checkpoint, '_variables', lambda workdir, step, shardings=None: weights[step])
    monkeypatch.setattr(processes, 'same_number', lambda number: number())
    mean, newest = checkpoint.load_average(tmp_path, 2, keep_last=3)
    assert newest == 50
    np.testing.assert_array_equal(mean['w'], [45, 90])
    mean, _ = checkpoint.load_average(tmp_path, 3, keep_last=3)
    np.testing.assert_array_equal(mean['w'], [40, 80])
    with pytest.raises(UserError, match=r'--average=4: the newest 3 checkpoints are kept'):
        checkpoint.load_average(tmp_path, 4, keep_last=3)
    for step, value in {30: 256, 40: 1, 50: 1}.items():  # to bfloat16, 256 + 1 is 256
        weights[step] = {'w': jnp.array([value], jnp.bfloat16)}
    mean, _ = checkpoint.load_average(tmp_path, 3, keep_last=3)
    assert mean['w'].tolist() == [86] and mean['w'].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ('name', 'lower'),
    [
        ('test/loss', True), ('test/loss_at_64', True), ('valid/bits_per_byte', True), ('test/perplexity', True),
        ('train/aux_loss', True), ('test/word_error_rate', True), ('test/mean_squared_error', True),
        ('valid/detection_loss', True), ('valid/sentence_loss', True), ('valid/nll', True),
        ('valid/accuracy', False), ('test/bleu', False), ('test/pearson', False), ('valid/f1_macro', False),
        ('valid/accuracy_at_64', False), ('test/exact_match', False),
    ],
)  # fmt: skip
def test_less_of_losses_and_errors_is_better_at_any_length_and_more_of_all_else(name, lower):
    assert metrics.lower_is_better(name) is lower


def test_a_workdir_without_checkpoints_has_no_parameters(tmp_path):
    with pytest.raises(UserError, match=rf'^{tmp_path} has no checkpoints$'):
        checkpoint.load_variables(tmp_path)


def test_where_the_best_checkpoint_is_gone_the_best_one_left_is_told(tmp_path, monkeypatch, capsys):
    made(tmp_path, {10: -3.0, 20: -2.0, 30: -4.0})
    monkeypatch.setattr(checkpoint, '_variables', lambda workdir, step, shardings: {'step': step})
    said = f'{tmp_path}: its best checkpoint, of score -1, is gone; the best one left is that of step 20\n'
    for best, line in ((-1.0, said), (-2.0, ''), (None, '')):
        newest = checkpoint.directory(tmp_path, 30) / 'run' / 'metadata'
        newest.write_text(json.dumps({'merit': -4.0, 'best': {'merit': best}}))
        digests.write(checkpoint.directory(tmp_path, 30))
        assert checkpoint.load_variables(tmp_path) == ({'step': 20}, 20)
        assert capsys.readouterr().err == line
        assert checkpoint.load_variables(tmp_path, 'latest') == ({'step': 30}, 30)
        assert capsys.readouterr().err == ''


def test_metadata_that_are_no_object_are_named(tmp_path):
    made(tmp_path, {10: None})
    file = checkpoint.directory(tmp_path, 10) / 'run' / 'metadata'
    for content in ('{"merit"', '7'):
        file.write_text(content)
        digests.write(checkpoint.directory(tmp_path, 10))
        with pytest.raises(UserError, match=rf'^{file} cannot be read: '):
            checkpoint.read_metadata(tmp_path, 10)


def test_of_a_run_that_deletes_its_checkpoints_meanwhile_one_that_is_left_is_read(tmp_path, monkeypatch, capsys):
    made(tmp_path, {10: -1.0, 20: -2.0, 30: -3.0})
    look, read = checkpoint.read_metadata, digests.find_corruption

    def deleted_on_the_way(workdir, step):
        if step == 10:
            checkpoint.delete(workdir, step)
        return look(workdir, step)

    def deleted_before_it_is_checked(place, *_, **__):
        if place.name == '20' and not __:
            checkpoint.delete(tmp_path, 20)
        return read(place, *_, **__)

    monkeypatch.setattr(checkpoint, 'read_metadata', deleted_on_the_way)
    monkeypatch.setattr(checkpoint.digests, 'find_corruption', deleted_before_it_is_checked)
    monkeypatch.setattr(checkpoint, '_shapes', lambda workdir, step: {'kernel': jax.ShapeDtypeStruct((2,), 'float32')})
    monkeypatch.setattr(checkpoint, '_read', lambda workdir, step, target: {'variables': {'step': step}})
    assert checkpoint.load_variables(tmp_path) == ({'step': 30}, 30)
    assert f'{tmp_path}: its run has deleted checkpoint 20 meanwhile' in capsys.readouterr().err
