"""Train N = train k, die at any instant, resume, train the rest: bit for bit; and what a run says when it stops."""

import pathlib
import random
import signal
import time

import jax
import numpy as np
import pytest

from lives import Life
from resuming import FAMILIES, LOADED, STEPS, arguments, arrays, begin, end
from tformer.data.batches import mixture, pipeline
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.training import checkpoint, digests
from tformer.training import workdir as workdir_lib
from whole_runs import numbers

MESHES = {'one device': (1, 1, ()), 'fsdp': (1, 8, ('--config.mesh.fsdp=8', '--config.mesh.data=1')), 'two': (2, 2, ())}

QUICK = ('decoder', 'fsdp'), ('encoder_decoder', 'one device')


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
    assert facts[0] == facts[1] and facts[0]['versions']['jax'] == jax.__version__
    assert next_batch(one) == next_batch(other)


@pytest.mark.parametrize(
    ('family', 'mesh'),
    [
        pytest.param(family, mesh, marks=() if (family, mesh) in QUICK else pytest.mark.slow, id=f'{family}-{mesh}')
        for family in FAMILIES
        for mesh in MESHES
    ],
)
def test_resume(tmp_path: pathlib.Path, family: str, mesh: str) -> None:
    processes, devices, fields = MESHES[mesh]
    if mesh == 'one device' and family != 'decoder':
        pytest.skip('in the other meshes')
    command = arguments(tmp_path, family, *LOADED, *fields)
    end(begin(tmp_path, command, tmp_path / 'whole', processes, devices))

    instants, parts = random.Random(f'{family} {mesh}'), tmp_path / 'parts'
    for _ in range(2 if processes * devices == 1 else 1):
        begun = max(checkpoint.steps(parts), default=0)
        lives = begin(tmp_path, command, parts, processes, devices)
        lives[0].wait_for(lambda: max(checkpoint.steps(parts), default=0) > begun)  # noqa: B023
        time.sleep(instants.uniform(0, 0.2))
        victim = instants.choice(lives)
        victim.kill()
        for life in lives:
            assert life.wait(90) != 0  # the others end by themselves
            assert life is victim or 'another process of the run' in life.said or 'another task died' in life.said
    end(begin(tmp_path, command, parts, processes, devices))
    assert_same(tmp_path / 'whole', parts)


@pytest.mark.slow
def test_on_other_devices_the_rows_are_the_same_and_the_loss_is_near(tmp_path: pathlib.Path) -> None:
    """Four steps on one device, the rest on eight, and the other way round; without the optimizer's state it is far."""
    command = [*arguments(tmp_path, 'decoder', *LOADED, '--config.train.log_every=1'), '--config.mesh.data=-1']
    end(begin(tmp_path, command, tmp_path / 'whole', 1, 1))
    losses = {}
    for name, devices in (('wide', (1, 8)), ('narrow', (8, 1))):
        workdir = tmp_path / name
        (life,) = begin(tmp_path, command, workdir, 1, devices[0])
        life.wait_for(lambda: max(checkpoint.steps(workdir), default=0) >= 2)  # noqa: B023
        life.kill()
        kept = max(checkpoint.steps(workdir))
        (life,) = begin(tmp_path, command, workdir, 1, devices[1])
        end([life])
        assert kept == STEPS or f'resumed at step {kept}' in life.said
        losses[name] = [row['train/loss'] for row in numbers(workdir) if 'train/loss' in row]
        assert next_batch(workdir) == next_batch(tmp_path / 'whole')
    whole = [row['train/loss'] for row in numbers(tmp_path / 'whole') if 'train/loss' in row]
    assert len(whole) == STEPS
    for found in losses.values():
        np.testing.assert_allclose(found, whole, rtol=1e-5)


@pytest.mark.parametrize(('number', 'every'), [(signal.SIGTERM, 1000), (signal.SIGINT, 1)])
def test_a_signal_saves_and_ends_with_75_and_the_run_goes_on(tmp_path: pathlib.Path, number, every) -> None:
    command = arguments(tmp_path, 'decoder', f'--config.train.checkpoint_every={every}')
    command = [x.replace('eval_every=4', 'eval_every=1000') for x in command]
    command = [x.replace(f'num_steps={STEPS}', 'num_steps=100000') for x in command]
    workdir = tmp_path / 'run'
    (life,) = begin(tmp_path, command, workdir, 1, 1)
    life.wait_for(lambda: 'step 6/' in life.said)
    life.signal(number)
    asked = time.monotonic()
    assert life.wait() == 75 and time.monotonic() - asked < 30
    step = max(checkpoint.steps(workdir))
    assert every == 1 or checkpoint.steps(workdir) == [step]
    assert f'{number.name}: stopped after step {step:,} of 100,000, which is saved' in life.said
    assert 'Traceback' not in life.said and step >= 6

    (again,) = begin(tmp_path, command, workdir, 1, 1)
    again.wait_for(lambda: f'resumed at step {step}' in again.said)
    refused = Life(tmp_path, *command, f'--workdir={workdir}')
    assert refused.wait() == 2 and f'{workdir} is in use by process {again.pid} on ' in refused.said
    again.wait_for(lambda: f'step {step - step % 3 + 6}/' in again.said)
    again.signal(signal.SIGSTOP)  # so that it hears both at once
    again.signal(number)
    time.sleep(0.1)
    again.signal(signal.SIGCONT)
    again.wait_for(lambda: f'received {number.name}: saving a checkpoint, then exiting' in again.said)
    again.signal(number)
    assert again.wait() in (75, 128 + number, -number)  # the last: it was about to end


def test_before_the_first_step_a_signal_ends_at_once_and_a_time_limit_saves(tmp_path: pathlib.Path) -> None:
    command = arguments(tmp_path, 'decoder')
    (life,) = begin(tmp_path, command, tmp_path / 'run', 1, 1)
    life.wait_for(lambda: (tmp_path / 'run' / 'lock').exists())
    time.sleep(0.05)
    life.signal(signal.SIGTERM)
    assert life.wait(20) in (75, -signal.SIGTERM) and checkpoint.steps(tmp_path / 'run') == []
    command = [x.replace(f'num_steps={STEPS}', 'num_steps=1000000') for x in command]
    (life,) = begin(tmp_path, [*command, '--config.train.max_minutes=0.05'], tmp_path / 'run', 1, 1)
    assert life.wait() == 75 and 'train.max_minutes=0.05: stopped after step' in life.said
    assert (
        digests.find_corruption(checkpoint.directory(tmp_path / 'run', max(checkpoint.steps(tmp_path / 'run')))) is None
    )


def test_several_processes_stop_after_the_same_step(tmp_path: pathlib.Path) -> None:
    """A notice to one of them reaches all; what they save together a single process goes on from."""
    command = arguments(tmp_path, 'decoder', '--config.train.checkpoint_every=1000', '--config.train.eval_every=1000')
    command = [x.replace(f'num_steps={STEPS}', 'num_steps=100000') for x in command]
    lives = begin(tmp_path, command, tmp_path / 'run', 2, 2)
    lives[0].wait_for(lambda: 'step 6/' in lives[0].said)
    lives[1].signal(signal.SIGTERM)
    assert [life.wait() for life in lives] == [75, 75], [life.said[-1500:] for life in lives]
    (step,) = checkpoint.steps(tmp_path / 'run')
    assert all(f'SIGTERM: stopped after step {step:,} of' in life.said for life in lives)
    (alone,) = begin(tmp_path, command, tmp_path / 'run', 1, 4)
    alone.wait_for(lambda: f'resumed at step {step}' in alone.said)
    assert alone.kill() and f'resumed at step {step}' in alone.said


@pytest.mark.slow
def test_a_few_kills_at_random_instants(tmp_path: pathlib.Path) -> None:
    from soak import soak

    assert 'bit for bit' in soak(tmp_path, kills=2, seed=int(time.time()))
