"""Train N = train k, die at any instant, resume, train the rest: bit for bit; and what a run says when it stops."""

import functools
import pathlib
import signal
from collections.abc import Callable

import jax
import numpy as np
import pytest

import halting
import soak
from resuming import LOADED, STEPS, arguments, arrays, begin, end
from tformer.data.batches import mixture, pipeline
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.training import checkpoint, digests
from tformer.training import workdir as workdir_lib
from whole_runs import numbers, scores

MESHES = {'one device': (1, 1, ()), 'fsdp': (1, 8, ('--config.mesh.fsdp=8', '--config.mesh.data=1')), 'two': (2, 1, ())}

# family, mesh -> which process dies at which of `halting.MOMENTS`, when it comes for which time
CELLS = {
    ('encoder', 'one device'): (0, 'an evaluation', 1),
    ('encoder', 'fsdp'): (0, 'a save', 5),
    ('decoder', 'one device'): (0, 'a line', 3),
    ('decoder', 'fsdp'): (0, 'a step', 5),
    ('decoder', 'two'): (0, 'a save', 5),
    ('encoder_decoder', 'one device'): (0, 'a save', 6),
    ('encoder_decoder', 'fsdp'): (0, 'a deletion', 2),
    ('encoder_decoder', 'two'): (1, 'the copy of the arrays', 6),
}
QUICK = {('decoder', 'one device')}
FIELDS = {  # of a cell alone
    ('encoder', 'one device'): ('optimizer.name=schedule_free', 'optimizer.ema_decay=None'),
    ('encoder_decoder', 'one device'): ('optimizer.name=muon', 'model.kv_latent_dim=16', 'model.query_latent_dim=8'),
}


def next_batch(workdir: pathlib.Path) -> dict[str, bytes]:
    config = workdir_lib.load_config(workdir)
    records = mixture.load(config, 'train')
    batches = pipeline.Batches(config, Tokenizers.load(workdir), 'train', training=True, records=records)
    return {name: array.tobytes() for name, array in batches.batch(STEPS).items()}


def assert_same(one: pathlib.Path, other: pathlib.Path) -> None:
    assert max(checkpoint.steps(one)) == max(checkpoint.steps(other)) == STEPS
    first, second = arrays(one, STEPS), arrays(other, STEPS)
    assert first.keys() == second.keys() and len(first) > 20
    assert [name for name in first if first[name] != second[name]] == []
    assert numbers(one) == numbers(other)
    facts = [checkpoint.read_metadata(workdir, STEPS) for workdir in (one, other)]
    assert all(fact.pop('wall_time') for fact in facts)
    assert facts[0] == facts[1] and facts[0]['versions']['jax'] == jax.__version__
    assert next_batch(one) == next_batch(other)
    assert scores(one) == scores(other)


@pytest.fixture(scope='module')
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[list[str], pathlib.Path]]:
    """Returns, for a family and a mesh, (the command of a run, the workdir of one that was left in peace)."""

    @functools.cache
    def made(family: str, mesh: str) -> tuple[list[str], pathlib.Path]:
        processes, devices, fields = MESHES[mesh]
        place = tmp_path_factory.mktemp('whole')
        own = (f'--config.{field}' for field in FIELDS.get((family, mesh), ()))
        command = arguments(place, family, *LOADED, *fields, *own)
        end(begin(place, command, place / 'run', processes, devices))
        return command, place / 'run'

    return made


# Whichever it waits for first when the other process is gone: a step, a save, or a sign of life.
LEFT_ALONE = ('another process of the run', 'a checkpoint could not be written', 'another task died')


@pytest.mark.signals
@pytest.mark.parametrize(
    ('family', 'mesh'),
    [
        pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.proof, id=f'{cell[0]}-{cell[1]}')
        for cell in CELLS
    ],
)
def test_a_run_that_is_killed_and_resumed_is_the_unbroken_one(tmp_path, whole, family: str, mesh: str) -> None:
    (processes, devices, _), (victim, moment, call) = MESHES[mesh], CELLS[family, mesh]
    (command, unbroken), parts = whole(family, mesh), tmp_path / 'parts'
    before = functools.partial(halting.die_at, moment, call)
    lives = begin(tmp_path, command, parts, processes, devices, before, victim)
    assert lives[victim].wait() == -signal.SIGKILL, lives[victim].said[-3000:]
    assert 0 < max(checkpoint.steps(parts)) < STEPS
    for life in lives:  # the others end by themselves
        assert life.wait() != 0
        assert life is lives[victim] or any(reason in life.said for reason in LEFT_ALONE), life.said
    end(begin(tmp_path, command, parts, processes, devices))
    assert_same(unbroken, parts)


@pytest.mark.proof
@pytest.mark.signals
def test_on_other_devices_the_rows_are_the_same_and_the_loss_is_near(tmp_path: pathlib.Path) -> None:
    """Some steps on one device, the rest on eight, and the other way round; without the optimizer's state it is far."""
    command = [*arguments(tmp_path, 'decoder', *LOADED, '--config.train.log_every=1'), '--config.mesh.data=-1']
    end(begin(tmp_path, command, tmp_path / 'whole'))
    losses = {}
    for name, devices in (('wide', (1, 8)), ('narrow', (8, 1))):
        workdir = tmp_path / name
        (life,) = begin(tmp_path, command, workdir, 1, devices[0], functools.partial(halting.die_at, 'a step', 5))
        assert life.wait() == -signal.SIGKILL
        kept = max(checkpoint.steps(workdir))
        (life,) = begin(tmp_path, command, workdir, 1, devices[1])
        end([life])
        assert f'resumed at step {kept}' in life.said
        losses[name] = [row['train/loss'] for row in numbers(workdir) if 'train/loss' in row]
        assert next_batch(workdir) == next_batch(tmp_path / 'whole')
    unbroken = [row['train/loss'] for row in numbers(tmp_path / 'whole') if 'train/loss' in row]
    assert len(unbroken) == STEPS
    for found in losses.values():
        np.testing.assert_allclose(found, unbroken, rtol=1e-5)


def endless(place: pathlib.Path, *fields: str) -> list[str]:
    """The command of a run that only a signal or a limit ends."""
    command = arguments(place, 'decoder', *fields)
    command = [x.replace('eval_every=4', 'eval_every=1000000') for x in command]
    return [x.replace(f'num_steps={STEPS}', 'num_steps=1000000') for x in command]


@pytest.mark.signals
@pytest.mark.parametrize(('number', 'every'), [(signal.SIGTERM, 1_000_000), (signal.SIGINT, 1)])
@pytest.mark.proof_cases('15-1000000')
def test_a_signal_saves_and_ends_with_75_and_a_second_one_ends_at_once(tmp_path: pathlib.Path, number, every) -> None:
    command, workdir = endless(tmp_path, f'--config.train.checkpoint_every={every}'), tmp_path / 'run'
    (life,) = begin(tmp_path, command, workdir)
    life.wait_for(lambda: 'step 6/' in life.said)
    life.signal(number)
    assert life.wait() == 75, life.said[-2000:]
    step = max(checkpoint.steps(workdir))
    assert every == 1 or checkpoint.steps(workdir) == [step]
    assert f'{number.name}: stopped after step {step:,} of 1,000,000, which is saved' in life.said
    assert 'Traceback' not in life.said and step >= 6

    asked = tmp_path / 'asked'  # the save that the signal asks for would never end
    (again,) = begin(tmp_path, command, workdir, before=functools.partial(halting.halt_requested_save, asked))
    again.wait_for(lambda: f'step {step - step % 3 + 6:,}/' in again.said)
    assert f'resumed at step {step}' in again.said
    again.signal(number)
    again.wait_for(asked.exists)
    again.signal(number)
    assert again.wait() == 128 + number and 'send it again to exit immediately' in again.said
    assert max(checkpoint.steps(workdir)) >= step


def test_a_second_run_in_a_workdir_is_told_who_is_in_it(tmp_path: pathlib.Path) -> None:
    command, loads = arguments(tmp_path, 'decoder'), tmp_path / 'loads'
    before = functools.partial(halting.halt, loads, 'training.setup', 'load_data')
    (life,) = begin(tmp_path, command, tmp_path / 'run', before=before)
    life.wait_for(loads.exists)
    (refused,) = begin(tmp_path, command, tmp_path / 'run')
    assert refused.wait() == 2 and f'{tmp_path}/run is in use by process {life.pid} on ' in refused.said
    life.kill()


@pytest.mark.signals
def test_before_the_first_step_a_signal_ends_the_run_with_nothing_saved(tmp_path: pathlib.Path) -> None:
    command, loads = arguments(tmp_path, 'decoder'), tmp_path / 'loads'
    before = functools.partial(halting.halt, loads, 'training.setup', 'load_data')
    (life,) = begin(tmp_path, command, tmp_path / 'run', before=before)
    life.wait_for(loads.exists)
    life.signal(signal.SIGTERM)
    assert life.wait() == 75 and checkpoint.steps(tmp_path / 'run') == []
    assert 'received SIGTERM: exiting; there is nothing to save' in life.said and 'Traceback' not in life.said


@pytest.mark.proof
def test_a_time_limit_saves_and_ends_with_75(tmp_path: pathlib.Path) -> None:
    command, run = endless(tmp_path, '--config.train.max_minutes=1'), tmp_path / 'run'
    for steps, said in ((0, 'before the first step'), (2, 'after step 2 of 1,000,000, which is saved')):
        (life,) = begin(tmp_path, command, run, before=functools.partial(halting.late_after, steps))
        assert life.wait() == 75, life.said[-2000:]
        assert f'train.max_minutes=1.0: stopped {said}\n' in life.said
        assert max(checkpoint.steps(run), default=0) == steps
    assert digests.find_corruption(checkpoint.directory(run, 2)) is None


@pytest.mark.signals
@pytest.mark.proof
def test_several_processes_stop_after_the_same_step(tmp_path: pathlib.Path) -> None:
    """A notice to one of them reaches all; what they save together a single process goes on from."""
    command, run = endless(tmp_path, '--config.train.checkpoint_every=1000000'), tmp_path / 'run'
    lives = begin(tmp_path, command, run, 2)
    lives[0].wait_for(lambda: 'step 6/' in lives[0].said)
    lives[1].signal(signal.SIGTERM)
    assert [life.wait() for life in lives] == [75, 75], [life.said[-1500:] for life in lives]
    (step,) = checkpoint.steps(run)
    assert all(f'SIGTERM: stopped after step {step:,} of' in life.said for life in lives)
    (alone,) = begin(tmp_path, command, run, before=functools.partial(halting.die_at, 'a step', 1))
    assert alone.wait() == -signal.SIGKILL and f'resumed at step {step}' in alone.said


@pytest.mark.proof
@pytest.mark.signals
def test_a_process_that_stands_still_ends_the_others(tmp_path: pathlib.Path) -> None:
    command, run = endless(tmp_path), tmp_path / 'run'
    lives = begin(tmp_path, command, run, 2, before=functools.partial(halting.stall_at, 1, 4), victim=None)
    assert lives[0].wait() not in (0, 75)
    assert 'another process of the run' in lives[0].said or 'heartbeat' in lives[0].said, lives[0].said[-2000:]
    assert lives[1].kill() == -signal.SIGKILL and max(checkpoint.steps(run)) in (2, 3)


@pytest.mark.proof
@pytest.mark.signals
def test_a_few_kills_at_random_instants(tmp_path: pathlib.Path) -> None:
    assert 'bit for bit' in soak.soak(tmp_path, kills=2, seed=0)
