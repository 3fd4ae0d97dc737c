"""Workdirs on object stores of several processes: what is sent, what follows, and what a kill of one of them leaves."""

import functools
import json
import pathlib
import shutil
import signal

import pytest

import emulated
import halting
from emulated import files, write
from resuming import STEPS, arguments, arrays, begin, end
from tformer.data import store_copies, store_lease, stores
from tformer.errors import UserError
from tformer.training import checkpoint, copies
from whole_runs import numbers, scores

ITEMS = checkpoint.ARRAYS
SAVED = '2.orbax-checkpoint-tmp'


@pytest.fixture
def store() -> stores.Store:
    return emulated.memory()


def save(place: pathlib.Path, step: int) -> None:
    """Writes the checkpoint of a step, and removes the one before."""
    for name in ('variables/x', 'run/metadata', 'digests.json'):
        write(place / 'checkpoints' / str(step), **{name: f'{name} of {step}'})
    shutil.rmtree(place / 'checkpoints' / str(step - 1), ignore_errors=True)


def test_a_copy_follows_and_has_the_arrays_that_it_asks_for(store, tmp_path):
    first, here, there = store_copies.Copy(store, tmp_path / 'here', owns=True), tmp_path / 'here', tmp_path / 'there'
    save(here, 1)
    write(here, result='1', profile__0='mine')
    first.push()
    other = store_copies.Copy(store, there, owns=False, arrays=False)
    assert files(there) == {name: x for name, x in files(here).items() if '/variables/' not in name}
    write(there, profile__1='part')
    other.push()
    write(there, profile__1='the whole')
    save(here, 2)
    write(here, result='2')
    first.push()
    other.pull(2)
    other.push()
    assert files(there) == {**files(here), 'profile/1': 'the whole'}
    assert store.read('profile/1')[0] == b'the whole'


def test_the_first_process_receives_what_the_others_send_in_its_own_life(store, tmp_path, monkeypatch):
    number, places = 0, [tmp_path / 'first', tmp_path / 'second']
    monkeypatch.setattr(copies.processes, 'first', lambda: number == 0)
    monkeypatch.setattr(copies.jax, 'process_count', lambda: 2)
    monkeypatch.setattr(copies.jax, 'process_index', lambda: number)
    monkeypatch.setattr(copies, '_boxes', {str(place): '77.partial' for place in places})
    made = {str(place): store_copies.Copy(store, place, owns=place == places[0]) for place in places}
    monkeypatch.setattr(store_copies, 'COPIES', made)
    store.write(f'76.partial/{SAVED}/training/of_a_dead_life', b'old')
    saved = [place / 'checkpoints' / SAVED for place in places]
    write(saved[0], **{'training/metadata': 'of the first', 'training/0': '0'})
    copies.Sending(saved[0], ITEMS).result()
    number = 1
    sending = copies.Sending(saved[1], ITEMS)
    assert {path.parent.name for path in saved[1].rglob('array_metadatas')} == {
        f'{x}.orbax-checkpoint-tmp' for x in ITEMS
    }
    write(saved[1], **{'training/1': '1', 'training/d/1': '11'})
    sending.result()
    assert not saved[1].exists()
    for copy in made.values():
        copy.push()
    assert all(name.startswith(('76.partial/', '77.partial/')) for name in store.names())  # nothing counts yet
    number = 0
    copies.receive(saved[0])
    here = {'training/metadata': 'of the first', 'training/0': '0', 'training/1': '1', 'training/d/1': '11'}
    assert files(saved[0]) == here
    assert store.names() == [f'76.partial/{SAVED}/training/of_a_dead_life']
    with pytest.raises(
        UserError, match=r'^s3://bucket/run/77\.partial/2\..*/1, which another process has sent, is gone$'
    ):
        copies.receive(saved[0])


@pytest.fixture(scope='module')
def emulator():
    """The environment of a server of S3 on loopback, with a bucket."""
    with emulated.s3() as environment:
        yield environment


@pytest.mark.signals
@pytest.mark.proof
@pytest.mark.parametrize(('moment', 'call', 'number'), [('a step', 5, 1), ('an object', 25, 1), ('a save', 3, 0)])
def test_processes_with_copies_of_their_own_are_killed_and_resume(
    tmp_path, emulator, monkeypatch, unbroken, moment, call, number
):
    """The first process dies when it has received the arrays of all, the other one also while it sends them."""
    for name, value in emulator.items():
        monkeypatch.setenv(name, value)
    command, whole = unbroken
    url, soon = f's3://some-bucket/together/{number}{call}', functools.partial(halting.store_soon, emulator)
    lives = begin(tmp_path, command, url, 2, before=functools.partial(soon, moment, call, number), victim=None)
    assert lives[number].wait() == -signal.SIGKILL, lives[number].said[-3000:]
    assert lives[1 - number].wait() != 0
    store = stores.Store(url)
    assert any(name.endswith(store_copies.DIGESTS) and '/' in name for name in store.names())
    assert f'checkpoints/{STEPS}/{store_copies.DIGESTS}' not in store.names()
    lives = begin(tmp_path, command, url, 2, before=soon, victim=None)
    lives[0].wait_for(lambda: 'resumed at step' in lives[0].said)
    second = begin(tmp_path, command, url, 2, before=soon, victim=None)
    codes = [life.wait() for life in second]  # the first ones may have ended before these looked
    end(lives)
    assert 'resumed at step' in lives[0].said
    assert codes == [0, 0] or (codes[0] == 2 and f'tformer: {url} is in use by process' in second[0].said)
    with store_copies.local(url, owns=False) as place:
        assert checkpoint.steps(whole) == checkpoint.steps(pathlib.Path(place))
        assert arrays(whole, STEPS) == arrays(pathlib.Path(place), STEPS)
        assert numbers(whole) == numbers(pathlib.Path(place)) and scores(whole) == scores(pathlib.Path(place))
    assert not any(name == store_lease.LEASE or '.partial/' in name for name in store.names())
    end(begin(tmp_path, ['evaluate', '--split=valid'], url, 2, before=soon, victim=None))
    assert {'test', 'valid'} < json.loads(store.read('result.json')[0]).keys()


@pytest.fixture(scope='module')
def unbroken(tmp_path_factory):
    """The command of a run whose parameters two processes share, and the workdir of one on a local disk."""
    place = tmp_path_factory.mktemp('unbroken')
    command = arguments(place, 'decoder', '--config.mesh.data=1', '--config.mesh.fsdp=2')
    end(begin(place, command, place / 'run', 2))
    return command, place / 'run'
