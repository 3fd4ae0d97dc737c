"""Where the wall time goes: every second belongs to one part, and a process that dies loses those since its save."""

import functools
import itertools
import json
import signal
import time
import types

import jax
import pytest

import halting
from resuming import arguments, begin, end
from tformer.commands import train as train_command
from tformer.data.batches import pipeline
from tformer.training import checkpoint, loop, members, recorder, wall_time, writers
from tformer.training.wall_time import PARTS, Account, Clock
from whole_runs import load


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The time, of the monotonic clock and of the system's."""
    clock = [100.0]
    monkeypatch.setattr(wall_time, 'time', types.SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


def some(found: dict[str, float]) -> dict[str, float]:
    return {part: seconds for part, seconds in found.items() if seconds}


def test_each_second_belongs_to_the_innermost_block(now):
    clock = Clock()
    now[0] += 1
    with clock.spending('steps'):
        now[0] += 2
        with clock.spending('saving'):
            now[0] += 4
            assert clock.seconds()['saving'] == 4
        now[0] += 8
    with pytest.raises(KeyError), clock.spending('evaluating'):
        now[0] += 16
        raise KeyError
    now[0] += 32
    assert some(clock.seconds()) == {'steps': 10, 'saving': 4, 'evaluating': 16, 'other': 33}
    assert [*clock.seconds()] == [*PARTS] and sum(clock.seconds().values()) == now[0] - 100


def test_a_wait_that_the_devices_work_through_is_not_one(now):
    clock = Clock()
    with clock.spending('steps'):
        for computing, waited in ((True, 3.0), (False, 5.0)):
            with clock.spending('waiting_for_data', unless=lambda busy=computing: busy):
                now[0] += waited
    assert some(clock.seconds()) == {'steps': 3, 'waiting_for_data': 5}


def test_the_devices_compute_until_the_arrays_of_the_last_step_are_ready():
    metrics = recorder.MetricAccumulator({}, 0, 0.0)
    assert not metrics.is_pending()
    for ready in (True, False):
        metrics.add({'loss': types.SimpleNamespace(is_ready=lambda ready=ready: ready)})
        assert metrics.is_pending() is not ready


def test_compilations_are_moved_out_of_the_part_in_which_they_happen_and_counted_once(now):
    clock = Clock()
    with clock, clock.spending('evaluating'):
        for name, start, stop in (('trace', 101, 103), ('trace', 104, 105), ('trace', 101, 106), ('lower', 106, 109)):
            now[0] = float(stop)
            jax.monitoring.record_event_time_span(f'/jax/core/compile/{name}', float(start), float(stop))
        jax.monitoring.record_event_time_span('/jax/checkpoint/write', 100.0, 109.0)
        now[0] = 120.0
    jax.monitoring.record_event_time_span('/jax/core/compile/trace', 110.0, 120.0)  # outside of the context
    assert some(clock.seconds()) == {'compiling': 8, 'evaluating': 12}


def test_what_jax_compiles_is_seen():
    with Clock() as clock:
        jax.jit(lambda x: x * 3 + 1)(jax.numpy.arange(7.0))
    assert clock.seconds()['compiling'] > 0


def test_lost_seconds_are_those_between_the_checkpoint_and_the_last_sign_of_life(now, tmp_path):
    first = Account(Clock(), tmp_path, None)
    with first.clock.spending('steps'):
        now[0] += 10
        saved = first.seconds()
        now[0] += 5
    first.write()
    now[0] += 7  # until it dies; nobody knows
    second = Account(Clock(), tmp_path, saved)
    now[0] += 2
    assert some(second.seconds()) == {'steps': 10, 'lost_to_restarts': 5, 'other': 2, 'total': 17}
    second.write()
    after = Account(Clock(), tmp_path, second.seconds())  # what the first lost is not lost again
    assert some(after.seconds()) == {'steps': 10, 'lost_to_restarts': 5, 'other': 2, 'total': 17}
    third = Account(Clock(), tmp_path, saved)  # the second got no further
    assert some(third.seconds()) == {'steps': 10, 'lost_to_restarts': 7, 'total': 17}
    third.write()
    anew = Account(Clock(), tmp_path, None)  # as if there was no checkpoint
    assert some(anew.seconds()) == {'lost_to_restarts': 17, 'total': 17}
    (tmp_path / wall_time.FILE).write_text('{"total"')
    assert some(Account(Clock(), tmp_path, saved).seconds()) == {'steps': 10, 'total': 10}
    assert some(Account(Clock(), None, saved).seconds()) == {'steps': 10, 'total': 10}
    assert some(Account(Clock(), None, None).seconds()) == {}


def test_nothing_is_lost_by_a_process_that_ends_after_its_checkpoint(now, tmp_path):
    """What it did after the checkpoint took its seconds, such as writing it, belongs to the run."""
    first = Account(Clock(), tmp_path, None)
    with first.clock.spending('steps'):
        now[0] += 10
    saved = first.seconds()
    with first.clock.spending('saving'):
        now[0] += 5
    first.write(7)
    second = Account(Clock(), tmp_path, saved, 7)
    with second.clock.spending('evaluating'):
        now[0] += 2
    second.write(7)
    with second.clock.spending('steps'):
        now[0] += 4
    second.write()
    third = Account(Clock(), tmp_path, saved, 7)
    assert some(third.seconds()) == {'steps': 10, 'saving': 5, 'evaluating': 2, 'lost_to_restarts': 4, 'total': 21}
    third.write(7)
    fourth = Account(Clock(), tmp_path, saved, 7)
    assert fourth.seconds() == third.seconds()
    earlier = Account(Clock(), tmp_path, {'steps': 3.0}, 5)  # the checkpoint after step 7 was never complete
    assert some(earlier.seconds()) == {'steps': 3, 'lost_to_restarts': 18, 'total': 21}


@pytest.mark.proof
def test_a_run_that_is_paused_and_repeated_loses_nothing(tmp_path):
    config = load('translate.py:smoke', tmp_path, train__num_steps='4', train__eval_every='2', train__log_every='1')
    totals = []
    for until in (2, 2, None, None):
        train_command.train_and_evaluate(config, tmp_path / 'run', until=until)
        found = json.loads((tmp_path / 'run' / wall_time.FILE).read_text())
        assert found['lost_to_restarts'] == 0
        totals.append(found)
    for before, after in itertools.pairwise(totals):
        assert all(before[part] <= after[part] for part in PARTS) and before['total'] < after['total']


@pytest.mark.proof
def test_a_wait_that_the_devices_work_through_is_one_of_steps(tmp_path, monkeypatch):
    """As the training does it: a slow batch, while all steps take for ever."""
    config = load('translate.py:smoke', tmp_path, train__num_steps='3', train__eval_every='3')
    iterate = pipeline.iterate

    def slowly(*given):
        for batch in iterate(*given):
            time.sleep(0.4)
            yield batch

    monkeypatch.setattr(members.pipeline, 'iterate', slowly)
    monkeypatch.setattr(members.Group, 'is_computing', lambda self: True)
    found = loop.train(config, tmp_path / 'run').account.seconds()
    assert found['steps'] > 1.2 and found['waiting_for_data'] == 0


@pytest.mark.signals
@pytest.mark.proof
def test_a_run_that_is_killed_and_resumed_says_what_it_lost(tmp_path):
    run = tmp_path / 'run'
    command = arguments(tmp_path, 'decoder', '--config.train.log_every=1', '--config.train.checkpoint_every=2')
    (life,) = begin(tmp_path, command, run, before=functools.partial(halting.die_at, 'a step', 7))
    assert life.wait() == -signal.SIGKILL
    newest, last = checkpoint.newest_metadata(run), json.loads((run / wall_time.FILE).read_text())
    saved = newest[1]['wall_time']
    assert last['total'] > saved['total'] > saved['steps'] > 0 == saved['lost_to_restarts']
    end(begin(tmp_path, command, run))
    found = writers.seconds(run)
    assert found['lost_to_restarts'] == pytest.approx(last['total'] - saved['total'], abs=1e-2)
    assert found['total'] == pytest.approx(sum(found[part] for part in PARTS), abs=1e-2)
    assert all(found[part] > saved[part] for part in ('steps', 'saving', 'evaluating', 'compiling', 'other'))
    assert found['waiting_for_data'] > 0 and found['total'] > last['total']
    assert [*writers.results(run)] == ['test']
