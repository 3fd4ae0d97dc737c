"""What the runs of one loop do together: one that is due is enough to evaluate, and all must be done to end."""

import contextlib
import types

import pytest

from tformer.training.members import Group
from tformer.training.wall_time import Clock


def member(evaluated: int, out_of_patience: bool, error: str | None = None, **means: float) -> types.SimpleNamespace:
    """A run with an evaluation due after step 8."""
    found = types.SimpleNamespace(evaluated=evaluated, error=error, metrics=types.SimpleNamespace())
    found.metrics.paused = contextlib.nullcontext
    found.account = types.SimpleNamespace(clock=Clock())
    found.should_evaluate = lambda step: step == 8 and found.evaluated < step
    found.is_out_of_patience = lambda: out_of_patience
    found.report = lambda step: means
    found.calls = []
    found.evaluate = lambda step, state: found.calls.append(step) or {'valid/loss': float(evaluated)}
    return found


def group(*members: types.SimpleNamespace) -> Group:
    return Group(None, members, None)  # type: ignore[arg-type]


def test_one_run_that_is_due_is_enough_and_all_must_be_evaluated() -> None:
    assert group(member(8, False), member(4, False)).should_evaluate(8)
    assert not group(member(8, False), member(4, False)).is_evaluated(8)
    assert not group(member(8, False), member(8, False)).should_evaluate(8)
    assert group(member(8, False), member(9, False)).is_evaluated(8)


def test_a_loop_ends_where_every_run_is_out_of_patience() -> None:
    assert not group(member(0, True), member(0, False)).is_out_of_patience()
    assert group(member(0, True), member(0, True)).is_out_of_patience()


def test_a_run_that_failed_counts_no_more() -> None:
    failed = member(0, False, 'a mistake')
    together = group(member(8, True), failed)
    assert failed not in together.active and together.is_out_of_patience() and together.is_evaluated(8)


def test_runs_that_are_evaluated_already_are_left_and_scores_are_told_from_the_least_to_the_most() -> None:
    members = [member(8, False), member(2, False), member(1, False)]
    stop = types.SimpleNamespace(interruptible=contextlib.nullcontext)
    found = group(*members).evaluate(8, None, stop)  # type: ignore[arg-type]
    assert [each.calls for each in members] == [[], [8], [8]]
    assert found == {'valid/loss': '1 to 2'}


def test_a_mean_is_of_the_runs_that_report_the_number() -> None:
    reports = group(member(0, False, loss=1.0, skipped=4.0), member(0, False, loss=4.0))
    assert reports.report(8) == pytest.approx({'loss': 2.5, 'skipped': 4.0})
