"""What a run notes while it trains: what is due, how long a score has stood, means without skipped steps."""

import types

import jax
import pytest

from tformer import config as config_lib
from tformer.errors import UserError
from tformer.training import loop, recorder, setup
from tformer.training.recorder import MetricAccumulator, RunRecorder, is_due

UNTIMED = types.SimpleNamespace(write=lambda: None, seconds=dict)


def test_what_is_due_at_each_so_many_steps_is_due_at_the_last_too():
    assert [step for step in range(12) if is_due(step, 4, 10)] == [4, 8, 10]
    assert [step for step in range(12) if is_due(step, None, 10)] == [10]


def test_patience_counts_evaluations_without_a_higher_score(monkeypatch):
    monkeypatch.setattr(recorder, 'evaluation_variables', lambda state: {})
    losses, written = iter([3.0, 2.0, 2.0, 2.5, 1.0]), []
    run = RunRecorder.__new__(RunRecorder)
    train = types.SimpleNamespace(best_metric='valid/loss', eval_batches=None, patience=2)
    config = types.SimpleNamespace(train=train, evaluate=types.SimpleNamespace(examples_while_training=0))
    run.data = types.SimpleNamespace(config=config, valid=None, tokenizers=None)
    run._score, run._generated = (lambda *_: {'loss': next(losses)}), None
    run._best, run.stale, run.evaluated, run.account = None, 0, 0, UNTIMED
    run._writer = types.SimpleNamespace(write=lambda step, found: written.append((step, found)))
    seen = []
    for step in range(1, 6):
        run.evaluate(step, None)
        seen.append((run._best, run.stale, run.is_out_of_patience(), run._unsaved_score))
    assert seen == [(-3, 0, False, -3), (-2, 0, False, -2), (-2, 1, False, -2), (-2, 2, True, -2.5), (-1, 0, False, -1)]
    assert written == [(step, {'valid/loss': loss}) for step, loss in enumerate([3, 2, 2, 2.5, 1], start=1)]


def step_of(loss: float, weight: float, skipped: int, rate: float) -> dict:
    scores = {'loss': (loss * weight, weight), 'accuracy': (weight, weight)}
    more = {'grad_norm': loss, 'learning_rate': rate, 'skipped': skipped, 'tokens': 10, 'flops': 5.0}
    return {'scores': scores, **more}


def test_skipped_steps_are_counted_and_enter_no_mean():
    metrics = MetricAccumulator({}, 100, 50.0)
    for given in (
        step_of(1.0, 3.0, 0, 0.1),
        step_of(99.0, 4.0, 1, 0.2),
        step_of(99.0, 4.0, 2, 0.3),
        step_of(5.0, 1.0, 0, 0.4),
    ):
        metrics.add(given)
    found, in_a_row = metrics.summary()
    assert found['train/loss'] == pytest.approx((3 * 1 + 1 * 5) / 4)  # by the weights of the steps
    assert found['train/grad_norm'] == pytest.approx(3)
    assert found['train/skipped'] == 2
    assert found['train/learning_rate'] == 0.4
    assert 'train/accuracy' not in found
    assert (in_a_row, metrics.tokens, metrics.flops) == (0, 140, 70)


def test_a_snapshot_goes_on_as_if_there_was_no_break():
    whole, first = MetricAccumulator({}, 0, 0.0), MetricAccumulator({}, 0, 0.0)
    parts = [step_of(1.0, 3.0, 0, 0.1), step_of(5.0, 1.0, 0, 0.4)]
    first.add(parts[0])
    rest = MetricAccumulator(**first.snapshot())
    rest.add(parts[1])
    for part in parts:
        whole.add(part)
    found = [{**each.summary()[0], 'train/tokens_per_second': 0} for each in (whole, rest)]
    assert found[0] == found[1]
    assert (rest.tokens, rest.flops) == (20, 10)


def test_a_resumed_run_takes_up_all_that_its_checkpoint_noted(monkeypatch):
    interval = {'sums': {'loss': [8.0, 4.0]}, 'tokens': 70, 'flops': 35.0}
    noted = {
        'best': {'merit': -2.5, 'stale': 3},
        'interval': interval,
        'evaluated': 6,
        'history': {'rows': 9},
        'wall_time': {'steps': 7.5},
    }
    monkeypatch.setattr(recorder.checkpoint, 'read_metadata', lambda directory, step: noted if step == 8 else {})
    monkeypatch.setattr(recorder.setup, 'checkpoint_metadata', lambda data: {})
    monkeypatch.setattr(recorder.setup, 'peak_flops', lambda config: None)
    monkeypatch.setattr(recorder.checkpoint_writer, 'CheckpointWriter', lambda *given: given)
    monkeypatch.setattr(recorder.writers, 'MetricWriter', lambda *given: given)
    monkeypatch.setattr(recorder.wall_time, 'Account', lambda *given: given[1:])
    train = types.SimpleNamespace(num_steps=20, keep_last=1, keep_every=5, checkpoint_every=8, patience=4)
    data = types.SimpleNamespace(config=types.SimpleNamespace(train=train))
    run = RunRecorder(data, 'home', None, None, 8)
    assert (run._best, run.stale, run.evaluated, run._saved) == (-2.5, 3, 6, 8)
    assert not run.is_out_of_patience() and not run.should_save(8, requested=True) and run.should_save(16, False)
    assert run.metrics.snapshot() == {**interval, 'sums': {'loss': (8.0, 4.0)}}
    assert run._writer == ('home', 8, 6, {'rows': 9}, data.config) and run.account == ('home', {'steps': 7.5}, 8)
    assert (run.checkpoints, RunRecorder(data, 'home', None, None, 8, index=0).checkpoints) == (
        ('home', 1, 5), ('home', 2, 5)  # of several runs one may have a checkpoint more
    )  # fmt: skip


def test_tokens_per_second_are_of_the_time_since_the_last_report_without_pauses(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(recorder.time, 'monotonic', lambda: now[0])
    metrics, rates = MetricAccumulator({}, 0, 0.0), []
    for trained, paused in ((4.0, 50.0), (2.0, 0.0), (5.0, 7.0)):
        metrics.add(step_of(1.0, 3.0, 0, 0.1))
        now[0] += trained - 1
        with metrics.paused():
            now[0] += paused
        now[0] += 1
        rates.append(metrics.summary()[0]['train/tokens_per_second'])
    assert rates == [10 / 4, 10 / 2, 10 / 5]


def test_utilization_is_the_share_of_the_peak_that_the_model_needs(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(recorder.time, 'monotonic', lambda: now[0])
    metrics = MetricAccumulator({}, 0, 70.0)
    for made, seconds in ((3, 4.0), (1, 2.0)):
        for _ in range(made):
            metrics.add(step_of(1.0, 3.0, 0, 0.1))  # of 5 operations
        now[0] += seconds
        assert metrics.summary(peak=10.0)[0]['train/mfu'] == 5 * made / (10 * seconds)
    metrics.add(step_of(1.0, 3.0, 0, 0.1))
    now[0] += 1
    assert 'train/mfu' not in metrics.summary()[0]


def test_the_peak_of_a_run_is_that_of_all_its_devices(monkeypatch):
    asked = config_lib.override(config_lib.Config(), {'mesh.data': 4, 'model.dtype': 'bfloat16'})
    assert setup.peak_flops(asked) is None
    monkeypatch.setattr(setup.devices, 'KINDS', {jax.devices()[0].device_kind: 'v5e'})
    assert setup.peak_flops(asked) == 4 * 197e12


def test_scores_of_generated_text_are_of_the_first_examples(monkeypatch):
    monkeypatch.setattr(recorder, 'evaluation_variables', lambda state: 'variables')
    run, written, asked = RunRecorder.__new__(RunRecorder), [], []
    train = types.SimpleNamespace(best_metric='valid/chrf', eval_batches=None, patience=None)
    config = types.SimpleNamespace(train=train, evaluate=types.SimpleNamespace(examples_while_training=3))
    run._best, run.stale, run.evaluated, run.account = None, 0, 0, UNTIMED
    run._score, run._generated = (lambda *_: {'loss': 2.0}), lambda *given: asked.append(given) or {'chrf': 40.0}
    run._writer = types.SimpleNamespace(write=lambda step, found: written.append((step, found)))
    for records in ('abcde', 'ab'):
        valid = types.SimpleNamespace(records=records)
        run.data = types.SimpleNamespace(config=config, valid=valid, tokenizers='tokenizers')
        assert run.evaluate(7, None) == {'valid/loss': 2.0, 'valid/chrf': 40.0}
    given = (config, 'variables', 'tokenizers')
    assert asked == [(*given, ['a', 'b', 'c']), (*given, ['a', 'b'])]
    assert written == 2 * [(7, {'valid/loss': 2.0, 'valid/chrf': 40.0})] and run._best == 40


def test_examples_while_training_are_of_one_process(monkeypatch, tmp_path):
    monkeypatch.setattr(loop.jax, 'process_count', lambda: 2)
    stated = config_lib.override(config_lib.Config(), {'evaluate.examples_while_training': 2})
    with pytest.raises(UserError, match=r'^evaluate\.examples_while_training needs a single process; evaluate the fin'):
        loop.train(stated, tmp_path / 'run')
    assert not (tmp_path / 'run').exists()
