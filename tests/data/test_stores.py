"""Workdirs on object stores: what a kill leaves there is a state that a run resumes from, and one process owns it."""

import functools
import itertools
import json
import pathlib
import shutil
import signal

import pytest

import emulated
import halting
from emulated import files, write
from resuming import STEPS, arguments, arrays, begin, end
from tformer import __main__ as command_line
from tformer.data import places, remote, stores
from tformer.errors import UserError
from tformer.training import checkpoint, workdir
from whole_runs import numbers, scores


@pytest.fixture
def store() -> stores.Store:
    return emulated.memory()


def save(place: pathlib.Path, step: int) -> None:
    """Writes a row, then the checkpoint of a step, and removes the one before."""
    write(place, metrics=''.join(f'{i}\n' for i in range(1, step + 1)), digests=str(step))
    for name in ('variables/x', 'run/metadata', 'digests.json'):
        write(place / 'checkpoints' / str(step), **{name: f'{name} of {step}'})
    shutil.rmtree(place / 'checkpoints' / str(step - 1), ignore_errors=True)


def test_only_what_lasts_is_copied_and_what_is_gone_here_goes_there(store, tmp_path):
    copy = stores.Copy(store, tmp_path / 'here', owns=True)
    save(tmp_path / 'here', 1)
    lasting = files(tmp_path / 'here')
    passing = (
        'lock',
        'a/lock',
        'config.json.0f.tmp',
        'checkpoints/2.orbax-checkpoint-tmp/x',
        'checkpoints/1.deleted/x',
    )
    write(tmp_path / 'here', **dict.fromkeys(passing, 'passing'))
    copy.push()
    assert sorted(store.names()) == sorted(lasting)
    save(tmp_path / 'here', 2)
    copy.push()
    stores.Copy(store, tmp_path / 'there', owns=False)
    assert files(tmp_path / 'there') == {n: x for n, x in files(tmp_path / 'here').items() if n not in passing}
    assert not any('checkpoints/1/' in name for name in store.names())


def test_who_does_not_own_a_directory_deletes_nothing_in_it(store, tmp_path):
    store.write('result.json', b'old')
    store.write('other.json', b'kept')
    copy = stores.Copy(store, tmp_path, owns=False)
    (tmp_path / 'other.json').unlink()
    write(tmp_path, **{'result.json': 'longer'})
    copy.push()
    assert (store.read('result.json')[0], store.read('other.json')[0]) == (b'longer', b'kept')


def test_a_kill_between_any_two_objects_leaves_a_checkpoint_with_its_rows(store, tmp_path, monkeypatch):
    real, seen = store.write, set()
    for last in itertools.count():
        for name in store.names():
            real(name, None)
        place, calls = tmp_path / f'here {last}', iter(range(last))
        copy = stores.Copy(store, place, owns=True)

        def counted(*given, calls=calls):
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return real(*given)

        monkeypatch.setattr(store, 'write', counted)
        try:
            for step in (1, 2, 3):
                save(place, step)
                copy.push()
            break
        except KeyboardInterrupt:
            monkeypatch.setattr(store, 'write', real)
        stores.Copy(store, tmp_path / f'there {last}', owns=True)
        found = files(tmp_path / f'there {last}')
        steps = {int(name.split('/')[1]) for name in found if name.startswith('checkpoints/')}
        for step in steps:
            assert {n for n in found if n.startswith(f'checkpoints/{step}/')} == {
                f'checkpoints/{step}/{name}' for name in ('variables/x', 'run/metadata', 'digests.json')
            }
            assert len(found['metrics'].splitlines()) >= step
        seen.add(max(steps, default=0))
    assert seen == {0, 1, 2, 3}


def complete(store: stores.Store) -> set[int]:
    """The steps whose checkpoints are whole on a store."""
    found = {name: int(name.split('/')[1]) for name in store.names() if name.startswith('checkpoints/')}
    return {step for step in found.values() if [*found.values()].count(step) == 3}


@pytest.mark.parametrize('faster', [1, 2, 3])
def test_checkpoints_that_replace_each_other_while_they_are_written_leave_one(store, tmp_path, monkeypatch, faster):
    """So many are saved, and the one before each is removed, between two objects or two directories that are listed."""
    walk = stores.os.walk
    copy, real, steps = stores.Copy(store, tmp_path, owns=True), store.write, itertools.count(2)
    save(tmp_path, 1)
    copy.push()

    def hurried(*given):
        found = real(*given)
        assert complete(store)
        save_more()
        return found

    def walking(*given, **named):
        for each in walk(*given, **named):
            yield each
            save_more()

    def save_more():
        for step in itertools.islice(steps, faster):
            save(tmp_path, step)

    monkeypatch.setattr(store, 'write', hurried)
    monkeypatch.setattr(stores.os, 'walk', walking)
    save(tmp_path, next(steps))
    for _ in range(5):
        copy.push()
    monkeypatch.undo()
    copy.push()
    assert complete(store) == {next(steps) - 1} and not any('/1/' in name for name in store.names())


def test_a_directory_is_owned_by_one_process_that_lives(store, monkeypatch):
    now = [0.0]
    first = None

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if alive and first is not None:
            first.beat()

    monkeypatch.setattr(stores.time, 'sleep', sleep)
    monkeypatch.setattr(stores.os, '_exit', lambda code: pytest.fail(f'exit {code}'))
    alive = True
    first = stores.Lease(store)
    assert now == [stores.SETTLE_SECONDS]
    with pytest.raises(UserError, match=r'^s3://bucket/run is in use by process \d+ on [^ ]+$'):
        stores.Lease(store)
    alive = False
    second = stores.Lease(store)
    second.beat()
    with pytest.raises(pytest.fail.Exception, match='exit 1'):
        first.beat()
    first.end()
    assert store.read(stores.LEASE)[0] is not None
    second.end()
    assert store.names() == []


def test_a_store_that_fails_is_one_line(monkeypatch):
    monkeypatch.setenv('AWS_ENDPOINT_URL', 'http://127.0.0.1:1')
    monkeypatch.setenv('AWS_ACCESS_KEY_ID', 'x')
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', 'x')
    with pytest.raises(UserError, match=r'^s3://some-bucket/run: .*onnect'):
        stores.Store('s3://some-bucket/run')
    with pytest.raises(UserError, match=r'^s3://b: .*Invalid S3 bucket name'):
        stores.Store('s3://b')
    with pytest.raises(UserError, match='--workdir=gs://some-bucket/run: several processes need a directory that all'):
        command_line.main(['tformer', 'generate', '--workdir=gs://some-bucket/run', '--coordinator=x:1'])


def test_a_url_that_became_a_path_makes_no_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for use in (
        workdir.lock(pathlib.Path('s3://b/x')).__enter__,
        lambda: workdir.read_config(pathlib.Path('s3://b/x')),
    ):
        with pytest.raises(
            UserError, match=r"^s3://b/x is on a store: with tformer\.data\.stores\.local\('s3://b/x', owns"
        ):
            use()
    assert not [*tmp_path.iterdir()]


# ------------------------------------------------------------------------------------------- an emulator of S3


@pytest.fixture(scope='module')
def emulator():
    """The environment of a server of S3 on loopback, with a bucket."""
    with emulated.s3() as environment:
        yield environment


@pytest.mark.signals
@pytest.mark.slow
def test_a_run_on_a_store_that_is_killed_and_resumed_is_the_local_one(tmp_path, emulator, monkeypatch, capsys):
    for name, value in emulator.items():
        monkeypatch.setenv(name, value)
    url, soon = 's3://some-bucket/runs/one', functools.partial(halting.store_soon, emulator)
    command = arguments(tmp_path, 'decoder', '--config.evaluate.samples=0')
    end(begin(tmp_path, command, tmp_path / 'whole'))
    (life,) = begin(tmp_path, command, url, before=functools.partial(soon, 'a step', 5))
    assert life.wait() == -signal.SIGKILL, life.said[-3000:]
    assert any(name.endswith(stores.DIGESTS) for name in stores.Store(url).names())
    (life,) = begin(tmp_path, command, url, before=soon)
    life.wait_for(lambda: 'resumed at step' in life.said)
    (second,) = begin(tmp_path, command, url, before=soon)
    code = second.wait()  # the first may have ended before the second looked
    end([life])
    assert code == 0 or (code == 2 and f'tformer: {url} is in use by process' in second.said)
    with stores.local(url, owns=False) as place:
        one, other = tmp_path / 'whole', pathlib.Path(place)
        assert checkpoint.steps(one) == checkpoint.steps(other)
        assert arrays(one, STEPS) == arrays(other, STEPS) and numbers(one) == numbers(other)
        assert scores(one) == scores(other)
    assert stores.LEASE not in stores.Store(url).names()
    command_line.main(['tformer', 'evaluate', f'--workdir={url}', '--split=valid'])
    assert {'test', 'valid'} < json.loads(stores.Store(url).read('result.json')[0]).keys()
    command_line.main(['tformer', 'generate', f'--workdir={url}', '--config.decode.max_len=8', 'a'])
    command_line.main(['tformer', 'report', 's3://some-bucket/runs'])
    assert {'report.md', 'report.html'} <= {*stores.Store('s3://some-bucket/runs').names()}


def test_the_emulator_holds_files_of_data_and_says_what_is_missing(tmp_path, emulator, monkeypatch):
    for name, value in emulator.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r'^s3://no-such-bucket/run: .*bucket does not exist'):
        stores.Store('s3://no-such-bucket/run')
    store = stores.Store('s3://some-bucket/data')
    for name in ('train.tsv', 'valid.tsv', 'more/train.tsv'):
        store.write(name, name.encode())
    monkeypatch.setattr(places, 'PIECE', 4)
    fetched = functools.partial(remote.fetched, directory=tmp_path)
    assert fetched('local') == 'local'
    with pytest.raises(UserError, match=r'^s3://some-bucket/data/no\.tsv does not exist$'):
        fetched('s3://some-bucket/data/no.tsv')
    for path in ('s3://some-bucket/data', 's3://some-bucket/data/'):
        place = pathlib.Path(fetched(path))
        assert files(place) == {name: name for name in ('train.tsv', 'valid.tsv', 'more/train.tsv')}
    assert pathlib.Path(fetched('s3://some-bucket/data/train.tsv')).read_text() == 'train.tsv'
    pattern = pathlib.Path(fetched('s3://some-bucket/data/*.tsv'))
    assert [path.name for path in sorted(pattern.parent.glob(pattern.name))] == ['train.tsv', 'valid.tsv']
