"""Workdirs on object stores: what a kill leaves there is a state that a run resumes from, and one process owns it."""

import functools
import itertools
import json
import pathlib
import shutil
import signal
import types

import pytest

import emulated
import halting
from emulated import files, write
from resuming import STEPS, arguments, arrays, begin, end
from tformer import __main__ as command_line
from tformer import checks
from tformer.commands import failures
from tformer.data import places, remote, store_copies, store_lease, stores
from tformer.errors import Stopped, Unsaved, UserError
from tformer.training import checkpoint, workdir
from whole_runs import ROOT, numbers, scores


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
    copy = store_copies.Copy(store, tmp_path / 'here', owns=True)
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
    store_copies.Copy(store, tmp_path / 'there', owns=False)
    assert files(tmp_path / 'there') == {n: x for n, x in files(tmp_path / 'here').items() if n not in passing}
    assert not any('checkpoints/1/' in name for name in store.names())


def test_who_does_not_own_a_directory_deletes_nothing_in_it(store, tmp_path):
    store.write('result.json', b'old')
    store.write('other.json', b'kept')
    copy = store_copies.Copy(store, tmp_path, owns=False)
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
        copy = store_copies.Copy(store, place, owns=True)

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
        store_copies.Copy(store, tmp_path / f'there {last}', owns=True)
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
    walk = store_copies.os.walk
    copy, real, steps = store_copies.Copy(store, tmp_path, owns=True), store.write, itertools.count(2)
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
    monkeypatch.setattr(store_copies.os, 'walk', walking)
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

    monkeypatch.setattr(store_lease.time, 'sleep', sleep)
    monkeypatch.setattr(store_lease.os, '_exit', lambda code: pytest.fail(f'exit {code}'))
    alive = True
    first = store_lease.Lease(store)
    assert now == [store_lease.SETTLE_SECONDS]
    with pytest.raises(UserError, match=r'^s3://bucket/run is in use by process \d+ on [^ ]+$'):
        store_lease.Lease(store)
    alive = False
    second = store_lease.Lease(store)
    second.beat()
    with pytest.raises(pytest.fail.Exception, match='exit 1'):
        first.beat()
    first.end()
    assert store.read(store_lease.LEASE)[0] is not None
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
        lambda: stores.require_local('s3://b/x'),
    ):
        with pytest.raises(
            UserError, match=r'^s3://b/x is a URL, and this takes a path of this machine: copy it from the store first$'
        ):
            use()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ('given', 'why'),
    [
        ('s3a://b/x', r'^s3a://b/x is a URL of s3a; workdirs may be on s3:// and gs://, or here$'),
        ('https://b/x', '^https://b/x is a URL of https; '),
        ('S3:/b/x', r'^S3:/b/x names no bucket: write s3://b/x$'),
        ('gs://', '^gs:// names no bucket: write gs://BUCKET/PATH$'),
    ],
)
def test_an_address_that_is_no_store_is_one_line_and_makes_no_directory(tmp_path, monkeypatch, given, why):
    monkeypatch.chdir(tmp_path)
    for command in (('train', '--config=x'), ('sweep', '--config=x'), ('evaluate',)):
        with pytest.raises(UserError, match=why):
            command_line.main(['tformer', *command, f'--workdir={given}'])
    with pytest.raises(UserError, match=why):
        command_line.main(['tformer', 'report', given])
    for command in ('report', 'train'):
        with pytest.raises(UserError, match=' is a URL, and this takes a path of this machine'):
            command_line.main(['tformer', command, 'here', 's3://b/x'])
    assert not [*tmp_path.iterdir()]


def test_addresses():
    assert stores.address('runs/a') is stores.address('') is stores.address('C:/runs') is None
    assert stores.address('S3://Bucket/A') == 's3://Bucket/A' and stores.address('gs://b') == 'gs://b'


@pytest.mark.parametrize('field', ['data.cache_dir', 'data.tokenizer_from', 'train.teacher', 'train.init_from'])
def test_what_must_be_here_is_no_url(field):
    task = {'train.objective': 'causal_lm_distilled'} if field == 'train.teacher' else {}
    with pytest.raises(UserError, match=rf'^{field}=s3://b/x is a URL, and this takes a path of this machine'):
        checks.check(checks.load(f'{ROOT}/configs/lm_stdlib.py:smoke', {field: 's3://b/x', **task}))


def test_workers_elsewhere_need_a_directory_that_all_share():
    with pytest.raises(UserError, match=r'^--workdir=s3://b/x: workers of --executor=slurm need one that all share$'):
        command_line.main(['tformer', 'sweep', '--config=x', '--workdir=s3://b/x', '--executor=slurm'])


# ------------------------------------------------------------------------------------------- a store that fails


@pytest.fixture
def failing(monkeypatch):
    """Gives (a store that is opened as any URL, whether it fails now); nothing waits."""
    made, fails = emulated.memory(), [False]
    real = stores.Store._result

    def result(self, *given, **named):
        if fails[0]:
            raise stores.Unreachable(f'{self.url}: ABORTED: no route')
        return real(self, *given, **named)

    now = [0.0]
    monkeypatch.setattr(stores.Store, '_result', result)
    monkeypatch.setattr(stores, 'Store', lambda url: made)
    monkeypatch.setattr(store_lease, 'SETTLE_SECONDS', 0)
    clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(stores, 'time', clock)
    return made, fails


def test_a_store_that_is_away_at_the_start_may_answer_the_same_command_later(failing):
    """So the exit code is not that of a mistake."""
    failing[1][0] = True
    with pytest.raises(UserError, match='ABORTED: no route') as raised, store_copies.local('s3://b/run', owns=False):
        pass
    assert failures.explain(raised.value)[0] == 1 and failures.explain(UserError('a mistake'))[0] == 2


@pytest.mark.parametrize('ended', [None, Stopped, UserError])
def test_a_command_whose_files_the_store_does_not_take_has_not_done_them(failing, capsys, ended):
    """Also one that was stopped and has saved here what it had: the machine may be gone. The files stay."""
    _, fails = failing
    with pytest.raises(UserError if ended is UserError else Unsaved) as raised:  # noqa: SIM117
        with store_copies.local('s3://bucket/run', owns=True) as place:
            write(pathlib.Path(place), result='1')
            fails[0] = True
            if ended is not None:
                raise ended(f'{place}/x is amiss')
    line = f's3://bucket/run: ABORTED: no route; what could not be written is in {place}'
    said = capsys.readouterr().err
    if ended is UserError:
        assert str(raised.value) == 's3://bucket/run/x is amiss' and f'tformer: {line}\n' in said
    else:
        assert str(raised.value) == line and failures.explain(raised.value) == (1, line)
    assert said.startswith('tformer: s3://bucket/run: ABORTED: no route; asking again for 300 s\n')
    assert files(pathlib.Path(place)) == {'result': '1'} and not store_copies.COPIES
    shutil.rmtree(place)


def test_a_store_that_answers_again_has_all_at_the_end(failing, monkeypatch):
    store, fails = failing
    monkeypatch.setattr(stores.time, 'sleep', lambda seconds: fails.__setitem__(0, False))
    with store_copies.local('s3://bucket/run', owns=True) as place:
        write(pathlib.Path(place), result='1')
        fails[0] = True
    assert store.read('result')[0] == b'1' and not pathlib.Path(place).exists()


def test_an_outage_is_told_once_and_its_end(failing, tmp_path, capsys):
    store, fails = failing
    push = store_copies._Pushing(store_copies.Copy(store, tmp_path, owns=True), tmp_path)
    for fails[0] in (True, True, False, False):
        write(tmp_path, result=str(len(capsys.readouterr().err)))
        push()
    write(tmp_path, result='more')
    for fails[0] in (True, True, False, False):
        push()
    assert capsys.readouterr().err.splitlines() == [
        f'tformer: s3://bucket/run: ABORTED: no route; asking again every 5 s, until then all is in {tmp_path} alone',
        'tformer: s3://bucket/run takes what is written again',
    ]


def test_what_a_store_refuses_is_not_asked_again(monkeypatch):
    monkeypatch.setattr(stores, 'time', types.SimpleNamespace(monotonic=lambda: 0.0))
    with pytest.raises(Unsaved, match=r'^no such bucket$'):
        stores.insist(lambda: exec("raise stores.StoreError('no such bucket')"))


def test_a_checkpoint_that_is_deleted_while_it_is_written_is_written_whole(store, tmp_path, monkeypatch):
    """A store so slow that a newer checkpoint replaces the one that is written, each time, has some all the same."""
    copy, real, steps = store_copies.Copy(store, tmp_path, owns=True), store.write, itertools.count(2)
    save(tmp_path, 1)

    def slowly(*given):
        save(tmp_path, next(steps))
        return real(*given)

    monkeypatch.setattr(store, 'write', slowly)
    for _ in range(3):
        before = next(steps)
        save(tmp_path, before)
        shutil.rmtree(tmp_path / 'checkpoints')
        save(tmp_path, before)
        copy.push()
        assert before in complete(store)
    assert not (tmp_path / store_copies.SENDING).exists()


def test_of_several_checkpoints_the_newest_is_whole_first(store, tmp_path, monkeypatch):
    order = []
    for step in (9, 10, 8):
        write(tmp_path / 'run' / 'checkpoints' / str(step), variables__x='x', digests='{}')
        write(tmp_path / 'run' / 'checkpoints' / str(step), **{'digests.json': '{}'})
    write(tmp_path, zz='row')
    copy, real = store_copies.Copy(store, tmp_path, owns=True), store.write
    monkeypatch.setattr(store, 'write', lambda name, *rest: order.append(name) or real(name, *rest))
    copy.push()
    assert [name.split('/')[2] for name in order if name.endswith('digests.json')] == ['10', '9', '8']
    assert order[0] == 'zz' and order[3] == 'run/checkpoints/10/digests.json'


def test_what_a_newer_checkpoint_on_the_store_has_replaced_is_not_sent(store, tmp_path, monkeypatch):
    copy, real, sent = store_copies.Copy(store, tmp_path, owns=True), store.write, []
    for step in (1, 2):
        write(tmp_path / 'checkpoints' / str(step), **{'digests.json': '{}', 'variables__x': 'x'})

    def slowly(name, *rest):
        sent.append(name)
        if name == 'checkpoints/2/digests.json':
            shutil.rmtree(tmp_path / 'checkpoints' / '1')
        return real(name, *rest)

    monkeypatch.setattr(store, 'write', slowly)
    copy.push()
    assert sent == ['checkpoints/2/variables/x', 'checkpoints/2/digests.json']


def test_a_process_that_leaves_deletes_nothing_on_the_store_and_keeps_what_it_could_not_write(failing, monkeypatch):
    """Its threads may go on for a while, and its own directory come and go."""
    store, fails = failing
    store.write('config.json', b'{}')
    monkeypatch.setattr(store_lease.os, '_exit', lambda code: pytest.fail(f'exit {code}'))
    with store_copies.local('s3://bucket/run', owns=True) as place:
        copy = store_copies.COPIES[place]
        write(pathlib.Path(place), result='1')
        store_copies.leave()
        assert not pathlib.Path(place).exists()
        copy.lease.beat()
        pathlib.Path(place).mkdir()
        copy.push()
        assert sorted(store.names()) == ['config.json', 'result']
    with store_copies.local('s3://bucket/run', owns=True) as place:
        write(pathlib.Path(place), result='2')
        fails[0] = True
        store_copies.leave()
        fails[0] = False
    assert store.read('result')[0] == b'1' and not pathlib.Path(place).exists()


def test_a_checkpoint_that_goes_while_it_is_fetched_is_not_there(store, tmp_path, monkeypatch):
    place = tmp_path / 'here'
    save(place, 1)
    save(place, 2)
    write(place, rows='row')
    store_copies.Copy(store, tmp_path / 'here', owns=True).push()
    real = store.read

    def hurried(name, *rest):
        if name.endswith('variables/x'):
            for other in [each for each in store.names() if 'checkpoints' in each]:
                store.write(other, None)
        return real(name, *rest)

    monkeypatch.setattr(store, 'read', hurried)
    store_copies.Copy(store, tmp_path / 'there', owns=False)
    assert files(tmp_path / 'there') == {'rows': 'row', 'metrics': '1\n2\n', 'digests': '2'}


def test_nothing_is_written_once_another_process_may_own_the_directory(store, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(store_lease, 'SETTLE_SECONDS', 0)
    monkeypatch.setattr(store_lease, 'time', types.SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: None))
    copy = store_copies.Copy(store, tmp_path, owns=True)
    copy.lease = store_lease.Lease(store)
    monkeypatch.setattr(copy.lease, 'beat', lambda: None)  # whose answer never comes
    write(tmp_path, result='1')
    now[0] = store_lease.LEASE_SECONDS + 1
    with pytest.raises(stores.Unreachable, match='no answer for as long as a lease lasts'):
        copy.push()
    assert store.names() == [store_lease.LEASE]


# ------------------------------------------------------------------------------------------- who writes the same file


def test_what_others_have_written_meanwhile_is_added_to_and_not_replaced(store, tmp_path, monkeypatch):
    """As two evaluations of a run and its training do."""
    places = [tmp_path / 'train', tmp_path / 'one', tmp_path / 'other']
    made = [store_copies.Copy(store, place, owns=place == places[0]) for place in places]
    monkeypatch.setattr(store_copies, 'COPIES', dict(zip(map(str, places), made, strict=True)))

    def add(place):
        file = place / 'run' / 'result.json'
        before = json.loads(file.read_text()) if file.exists() else {}
        write(place / 'run', **{'result.json': json.dumps({**before, place.name: 1})})
        if place == places[1] and 'other' not in before:  # between what one reads and what it writes
            store_copies.revise(places[2] / 'run', lambda: add(places[2]), ['result.json'])

    for place in (places[1], places[0]):
        store_copies.revise(place / 'run', functools.partial(add, place), ['result.json', 'not there'])
    for copy in made:
        copy.push()
    assert json.loads(store.read('run/result.json')[0]) == {'other': 1, 'one': 1, 'train': 1}


def test_a_copy_that_does_not_own_the_directory_leaves_what_has_changed_there(store, tmp_path, capsys):
    store.write('report.md', b'old')
    copy = store_copies.Copy(store, tmp_path, owns=False)
    for name in ('report.md', 'made'):
        store.write(name, b'of another')
    write(tmp_path, **{'report.md': 'mine', 'new': 'mine', 'made': 'mine'})
    copy.push()
    assert [store.read(name)[0] for name in ('report.md', 'new', 'made')] == [b'of another', b'mine', b'of another']
    assert sorted(capsys.readouterr().err.splitlines()) == [
        f'tformer: s3://bucket/run/{name} stays as another process has written it meanwhile'
        for name in ('made', 'report.md')
    ]


# ------------------------------------------------------------------------------------------- an emulator of S3


@pytest.fixture(scope='module')
def emulator():
    """The environment of a server of S3 on loopback, with a bucket."""
    with emulated.s3() as environment:
        yield environment


@pytest.mark.signals
@pytest.mark.proof
def test_a_run_on_a_store_that_is_killed_and_resumed_is_the_local_one(tmp_path, emulator, monkeypatch, capsys):
    for name, value in emulator.items():
        monkeypatch.setenv(name, value)
    url, soon = 's3://some-bucket/runs/one', functools.partial(halting.store_soon, emulator)
    command = arguments(tmp_path, 'decoder', '--config.evaluate.samples=0')
    end(begin(tmp_path, command, tmp_path / 'whole'))
    (life,) = begin(tmp_path, command, url, before=functools.partial(soon, 'a step', 5))
    assert life.wait() == -signal.SIGKILL, life.said[-3000:]
    assert any(name.endswith(store_copies.DIGESTS) for name in stores.Store(url).names())
    (life,) = begin(tmp_path, command, url, before=soon)
    life.wait_for(lambda: 'resumed at step' in life.said)
    (second,) = begin(tmp_path, command, url, before=soon)
    code = second.wait()  # the first may have ended before the second looked
    end([life])
    assert code == 0 or (code == 2 and f'tformer: {url} is in use by process' in second.said)
    with store_copies.local(url, owns=False) as place:
        one, other = tmp_path / 'whole', pathlib.Path(place)
        assert checkpoint.steps(one) == checkpoint.steps(other)
        assert arrays(one, STEPS) == arrays(other, STEPS) and numbers(one) == numbers(other)
        assert scores(one) == scores(other)
    assert store_lease.LEASE not in stores.Store(url).names()
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
    store.write('more', b'a file beside a directory of its name')
    pattern = pathlib.Path(fetched('s3://some-bucket/data/*.tsv'))
    assert [path.name for path in sorted(pattern.parent.glob('**/*'))] == ['train.tsv', 'valid.tsv']


@pytest.mark.parametrize(
    ('pattern', 'matched'),
    [
        ('train-*.txt', 'train-0.txt'),
        ('*/train-*.txt', 'old/train-1.txt'),
        ('**/train-*.txt', 'train-0.txt old/train-1.txt old/er/train-2.txt'),
        ('ol[d]', 'old/train-1.txt old/er/train-2.txt old/model.bin'),
        ('old/model.*', 'old/model.bin'),
    ],
)
def test_of_a_pattern_only_what_it_matches_is_wanted(monkeypatch, pattern, matched):
    names = ['train-0.txt', 'old/train-1.txt', 'old/er/train-2.txt', 'old/model.bin']
    below = pattern.split('/')[0] + '/' if pattern.startswith('old/') else ''
    opened = types.SimpleNamespace(
        url=f's3://b/data/{below}'.rstrip('/'),
        names=lambda: [name.removeprefix(below) for name in names if name.startswith(below)],
    )
    monkeypatch.setattr(places.stores, 'Store', lambda url: opened)
    found = places._OnStore(f's3://b/data/{pattern}').names()
    assert [f'{below}{name}' for name in found] == matched.split()


def test_a_store_that_does_not_answer_is_read_again(monkeypatch, tmp_path):
    asked = []

    def unreachable(url):
        asked.append(url)
        raise stores.Unreachable(f'{url}: ABORTED: no route')

    monkeypatch.setattr(places.stores, 'Store', unreachable)
    monkeypatch.setattr(remote, 'PAUSE', 0)
    with pytest.raises(UserError, match=r'^s3://b/x cannot be fetched: ABORTED: no route \(5 times\)$'):
        remote.fetched('s3://b/x', tmp_path)
    assert len(asked) == 5
