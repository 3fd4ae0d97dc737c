"""When a training that is asked to stop has anything left to do."""

import types

import jax.numpy as jnp
import pytest

from tformer.errors import Stopped
from tformer.training import loop, skipping
from tformer.training.wall_time import Clock


def outcome(step: int, evaluated: bool, late: str | None) -> str:
    """What comes of a group that goes on from `step` of 4 and is asked to stop at once, or by a signal at its end."""
    done: list[object] = []
    state = types.SimpleNamespace(guard=skipping.init_guard(None))
    params = {'kernel': jnp.zeros((2, 3))}
    member = types.SimpleNamespace(
        config='config', directory=types.SimpleNamespace(), data=None, end=lambda *of: done.append(of)
    )
    member.data, member.account = types.SimpleNamespace(tokenizers='tokens'), None
    member.metrics = types.SimpleNamespace(begin=lambda: None)
    group = types.SimpleNamespace(
        active=[member],
        num_steps=4,
        checkpoint_step=step or None,
        program=types.SimpleNamespace(abstract=types.SimpleNamespace(params=params)),
        start=lambda: (state, None),
        batches=lambda step: iter(()),
        is_evaluated=lambda step: evaluated,
        is_out_of_patience=lambda: False,
        save=lambda step, state, requested: done.append((step, requested)),
        state_of=lambda state, member: state,
        clock=Clock(),
        drop_failed=lambda members: None,
    )
    try:
        stop = types.SimpleNamespace(reason=lambda step: 'limit', signalled=lambda step: late)
        (trained,) = loop.train_group(group, stop, None)
    except Stopped as stopped:
        assert done == [(step, True), (4, 0)] if late else done == [(step, True)]
        return str(stopped)
    assert done == [(step, True), (4, 0)] and (trained.step, trained.num_parameters) == (4, 6)
    return 'finished'


@pytest.mark.parametrize(
    ('step', 'evaluated', 'late', 'wanted'),
    [
        (0, False, None, 'limit: stopped before the first step'),
        (3, True, None, 'limit: stopped after step 3 of 4, which is saved'),
        (4, False, None, 'limit: stopped after step 4 of 4, which is saved'),
        (4, True, None, 'finished'),
        (4, True, 'SIGTERM', 'SIGTERM: trained to step 4, which is saved, and not scored yet'),
    ],
)
def test_a_run_that_has_made_and_evaluated_its_last_step_is_finished_and_any_other_stops(
    monkeypatch, step, evaluated, late, wanted
):
    monkeypatch.setattr(loop.checkpoint, 'best', lambda directory: 2)
    assert outcome(step, evaluated, late) == wanted


def test_a_step_begins_when_the_mesh_lets_it(monkeypatch):
    """Three steps, each of which goes through `meshes.in_turn` before the next begins."""
    done: list[object] = []
    member = types.SimpleNamespace(
        config='config', directory=None, end=lambda *of: None, should_report=lambda step: False
    )
    member.metrics, member.account = types.SimpleNamespace(begin=lambda: None), None
    member.data = types.SimpleNamespace(tokenizers='tokens')

    def step(state, batch, hyper):
        done.append(f'step of {batch}')
        return state, {'loss': batch}

    def in_turn(mesh, found):
        done.append(f'{mesh} has ended {found[1]["loss"]}')
        return found

    state = types.SimpleNamespace(guard=skipping.init_guard(None))
    params = {'kernel': jnp.zeros((2, 3))}
    group = types.SimpleNamespace(
        active=[member],
        num_steps=3,
        checkpoint_step=None,
        program=types.SimpleNamespace(abstract=types.SimpleNamespace(params=params), mesh='the mesh'),
        start=lambda: (state, None),
        batches=lambda step: iter(range(3)),
        should_evaluate=lambda step: False,
        is_out_of_patience=lambda: False,
        is_computing=lambda: False,
        is_compiled=lambda batch: True,
        add_metrics=lambda metrics: None,
        step=step,
        save=lambda step, state, requested: None,
        state_of=lambda state, member: state,
        clock=Clock(),
        drop_failed=lambda members: None,
    )
    monkeypatch.setattr(loop.checkpoint, 'best', lambda directory: 2)
    monkeypatch.setattr(loop.meshes, 'in_turn', in_turn)
    loop.train_group(group, types.SimpleNamespace(reason=lambda step: None, signalled=lambda step: None), None)
    assert done == [line for n in range(3) for line in (f'step of {n}', f'the mesh has ended {n}')]
