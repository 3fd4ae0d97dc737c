"""Programs that a thread compiles ahead: the run finds them, waits for them, and hears what went wrong with them."""

import collections
import threading
import types

import jax
import numpy as np
import pytest

from tformer.distributed import compilation_cache
from tformer.training import compiling, loop
from tformer.training.compiling import Ahead
from whole_runs import load


@pytest.fixture
def ahead(monkeypatch):
    monkeypatch.setattr(compilation_cache, 'cores', lambda: 2)
    made = Ahead()
    yield made
    made.close()


def test_a_program_that_is_being_compiled_is_waited_for_and_one_that_waits_is_left_to_its_caller(ahead) -> None:
    begun, go_on, done, told = threading.Event(), threading.Event(), [], []
    ahead.tell = lambda done, of: told.append((done, of))
    ahead.add(('train', 1), lambda: (begun.set(), go_on.wait(5), done.append(1)))
    ahead.add(('train', 2), lambda: done.append(2))
    begun.wait()
    ahead.wait(('train', 2))
    assert done == []
    go_on.set()
    ahead.wait(('train', 1))
    ahead.wait(('train', 1))  # nothing comes any more
    ahead.wait(('train', 3))
    ahead.add(('valid', 3), lambda: done.append(3))
    ahead.close()
    assert done in ([1], [1, 3])  # never the one that was left
    assert told in ([(1, 2)], [(1, 3)], [(1, 2), (2, 3)], [(1, 3), (2, 3)])


def test_what_goes_wrong_in_the_thread_is_raised_where_the_program_is_needed(ahead) -> None:
    def fails() -> None:
        raise ValueError('no such kernel')

    ahead.add(('valid', 1), fails)
    while not ahead._coming['valid', 1].done():
        pass
    ahead.wait_for_all('train')
    with pytest.raises(ValueError, match='no such kernel'):
        ahead.wait_for_all('valid')


def test_on_one_core_and_for_several_processes_nothing_is_compiled_ahead(monkeypatch) -> None:
    for cores, processes in ((1, 1), (2, 2)):
        monkeypatch.setattr(compilation_cache, 'cores', lambda cores=cores: cores)
        monkeypatch.setattr(jax, 'process_count', lambda processes=processes: processes)
        ahead = Ahead()
        ahead.add(('train', 1), lambda: pytest.fail('compiled'))
        ahead.wait(('train', 1))
        ahead.close()


def test_keys_tell_kinds_and_shapes_apart() -> None:
    batch = {'inputs': np.zeros((2, 3)), 'positions': np.zeros((2, 3))}
    other = {**batch, 'positions': np.zeros((2, 4))}
    keys = [compiling.shapes(kind, each) for kind in ('train', 'valid') for each in (batch, other)]
    assert len(set(keys)) == 4 and keys[0] == compiling.shapes('train', {x: jax.numpy.asarray(batch[x]) for x in batch})


@pytest.mark.proof
def test_each_program_is_traced_once_and_the_step_and_evaluations_by_the_thread(tmp_path, monkeypatch) -> None:
    """And the numbers are those of a run without the thread."""
    found = {}
    for cores in (1, 2):
        monkeypatch.setattr(compilation_cache, 'cores', lambda cores=cores: cores)
        jax.clear_caches()
        seen = collections.Counter()

        def note(event, start_time, end_time, fun_name='', seen=seen, **_):
            if event.endswith('backend_compile_duration') and 'step' in fun_name:
                seen[threading.current_thread().name.startswith('compiling')] += 1

        jax.monitoring.register_event_time_span_listener(note)
        wanted = load('lm_stdlib.py:smoke', tmp_path, train__num_steps='4', mesh__data='1', train__log_every='1')
        trained = loop.train(wanted, tmp_path / str(cores))
        jax.monitoring.unregister_event_time_span_listener(note)
        assert trained.step == 4 and (tmp_path / str(cores) / 'metrics.jsonl').exists()
        rows = (tmp_path / str(cores) / 'metrics.jsonl').read_text()
        found[cores] = [line.split('"train/tokens_per_second"')[0] for line in rows.splitlines()], seen
    assert found[1][0] == found[2][0]
    assert found[1][1] == {False: 2} and found[2][1] == {True: 2}, found


def test_the_time_of_compiling_a_step_is_not_one_of_steps() -> None:
    from tformer.training.members import Group
    from tformer.training.wall_time import Clock

    paused, clock = [], Clock()
    member = types.SimpleNamespace(error=None, account=types.SimpleNamespace(clock=clock))

    class Pause:
        def __enter__(self):
            paused.append('in')

        def __exit__(self, *_):
            paused.append('out')

    member.metrics = types.SimpleNamespace(paused=Pause)
    jitted = jax.jit(lambda state, batch, hyper: (state + batch['inputs'].sum() * hyper, {}))
    program = types.SimpleNamespace(jitted_step=jitted, taught=())
    group = Group(program, [member], None)  # type: ignore[arg-type]
    batch = {'inputs': np.ones((2, 3), np.float32)}
    assert not group.is_compiled(batch)
    group.compile_step(np.float32(1), batch, 2.0)
    assert group.is_compiled(batch) and not group.is_compiled({'inputs': np.ones((2, 4), np.float32)})
    assert paused == ['in', 'out'] and clock.seconds()['compiling'] > 0 == clock.seconds()['steps']
    group.ahead.close()
