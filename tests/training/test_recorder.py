"""What a run notes while it trains: what is due, how long a score has stood, means without skipped steps."""

import types

import pytest

from tformer.training import recorder
from tformer.training.recorder import MetricAccumulator, RunRecorder, is_due


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
    run._best, run.stale, run.evaluated = None, 0, 0
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
