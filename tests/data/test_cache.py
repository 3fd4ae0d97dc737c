"""The cache of tokens: made once, whole or not at all, whatever happens to the process, the disk or the data."""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import pickle
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from lives import HANG
from places import ROOT
from tformer.config import Config, Data, Model, Train, hashing
from tformer.data import cache, ragged
from tformer.data.batches import pipeline
from tformer.data.examples import example_formats
from tformer.data.sources.records import Split
from tformer.data.tokenizers import bytes_and_characters, tokenizers
from tformer.errors import UserError

RECORDS = [{'source': f'a b {i}', 'target': f'{i} b a' * (i % 4)} for i in range(300)]


def config(place: pathlib.Path, **data: object) -> Config:
    made = Data(**{'tokenizer': 'byte', 'length': 32, 'batching': 'pack', 'cache_dir': str(place), **data})
    return Config(model=Model(family='encoder_decoder'), data=made, train=Train(objective='seq2seq', batch_size=4))


def batches(cfg: Config, records: object) -> pipeline.Batches:
    tokens = tokenizers.Tokenizers(bytes_and_characters.Byte(), bytes_and_characters.Byte())
    return pipeline.Batches(cfg, tokens, 'train', training=True, records=records)


def unreadable() -> tuple[list[dict[str, str]], int]:
    raise AssertionError('the records were read')


def entries(place: pathlib.Path) -> list[str]:
    return sorted(path.name for path in place.iterdir() if path.is_dir())


def test_what_is_in_the_cache_is_what_was_tokenised_and_no_record_is_read_again(tmp_path: pathlib.Path) -> None:
    cfg = config(tmp_path)
    plain = batches(cfg, RECORDS)
    assert not tmp_path.exists() or not entries(tmp_path)
    made = batches(cfg, Split('one', lambda: (RECORDS, 3)))
    assert len(entries(tmp_path)) == 2 and made.summary == plain.summary.replace(
        'examples', 'examples (3 skipped as bad)'
    )
    found = batches(cfg, Split('one', unreadable))
    assert found.summary == made.summary and found.fingerprint == made.fingerprint
    sent = pickle.loads(pickle.dumps(found))
    assert isinstance(sent.parts[0].examples.columns['tokens'].flat.base, np.memmap)
    for step in (0, 5, 1000):
        for other in (made, found, sent):
            for name, values in plain.batch(step).items():
                np.testing.assert_array_equal(other.batch(step)[name], values, err_msg=name)


def test_other_data_tokenizers_and_limits_have_other_entries(tmp_path: pathlib.Path) -> None:
    cfg = config(tmp_path)
    split = Split('one', lambda: (RECORDS, 0))
    batches(cfg, split)
    counts = [len(entries(tmp_path))]
    for change, more in (({'length': 40}, 1), ({'batching': 'pad'}, 0), ({'overlong': 'truncate'}, 0)):
        batches(dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, **change)), split)
        counts.append(len(entries(tmp_path)))
        assert counts[-1] - counts[-2] == more, change
    with pytest.raises(AssertionError, match='were read'):
        batches(cfg, Split('two', unreadable))
    char = bytes_and_characters.Char.train(['ab 0123456789'])
    with pytest.raises(AssertionError, match='were read'):
        example_formats.make(cfg, tokenizers.Tokenizers(char, char), Split('one', unreadable), 'train', True)
    assert len(entries(tmp_path)) == counts[-1] and not list(tmp_path.glob('*.partial'))


def flip(file: pathlib.Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def extend(file: pathlib.Path) -> None:
    file.write_bytes(file.read_bytes() + bytes(8))


def swap(file: pathlib.Path) -> None:
    others = sorted({*file.parent.iterdir()} - {file, file.with_name('manifest.json')})
    other = next((each for each in others if each.stat().st_size == file.stat().st_size), others[0])
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(mine)


def directory(file: pathlib.Path) -> None:
    file.unlink()
    file.mkdir()


FILES = {
    'flipped': flip, 'extended': extend, 'swapped': swap, 'removed': os.unlink, 'a directory': directory,
    'cut': lambda file: os.truncate(file, file.stat().st_size - 8), 'emptied': lambda file: os.truncate(file, 0),
}  # fmt: skip
VALUES = [None, -8, 8, 1e308, 1 << 70, '', '|O8', '<u8', [], [-1, 'x'], {'a': 1}]


def places(tree: object, at: tuple = ()) -> Iterator[tuple]:
    """The path of every value of a JSON tree."""
    if at:
        yield at
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from places(value, (*at, key))


def mutations(manifest: dict) -> Iterator[tuple[str, dict]]:
    """Manifests with a value replaced or removed, which have their old digest or, as a forger's, one that fits."""
    for place, value in itertools.product(places(manifest), (KeyError, *VALUES)):
        tree = changed = json.loads(json.dumps(manifest))
        for key in place[:-1]:
            tree = tree[key]
        if value is KeyError:
            del tree[place[-1]]
        else:
            tree[place[-1]] = value
        if value in (KeyError, 8, '|O8') or place == ('digest',):
            yield f'{place}={value}', changed
        if place[0] not in ('digest', 'facts'):  # numbers of records that fit are as good as ours
            signed = {key: value for key, value in changed.items() if key != 'digest'}
            yield f'{place}={value}, signed', {**signed, 'digest': hashing.digest_json(signed)}


@pytest.fixture(scope='module')
def cached(tmp_path_factory):
    """A cache with one entry of columns and one of packed rows, and the function that opens it, which are arrays."""
    home = tmp_path_factory.mktemp('cached')
    cfg = config(home)

    def opened() -> list[np.ndarray]:
        made = batches(cfg, Split('one', lambda: (RECORDS[:12], 3)))
        part = made.parts[0]
        ragged = (*part.examples.columns.values(), part.rows)
        return [*(array for each in ragged for array in (each.flat, each.offsets)), np.array(part.examples.num_skipped)]

    expected = [array.copy() for array in opened()]
    return home, opened, expected


def assert_made_again(cached, entry: pathlib.Path, what: str, capsys, allowed: bool = False) -> None:
    _, opened, expected = cached
    found = opened()
    for mine, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, right, err_msg=what)
    said = capsys.readouterr().err.splitlines()
    lines = [line for line in said if line.startswith(f'the token cache makes a damaged entry again: {entry}: ')]
    assert said == lines and len(lines) == (0 if allowed and not lines else 1), (what, said)


def test_a_file_of_an_entry_that_changed_is_found_said_and_made_again(cached, capsys) -> None:
    home, opened, _ = cached
    opened()
    files = [path for name in entries(home) for path in sorted((home / name).iterdir())]
    assert len(files) == 8
    for file in files:
        for name, damage in FILES.items():
            if name == 'cut' and file.stat().st_size < 8:
                continue
            damage(file)
            assert_made_again(cached, file.parent, f'{file.name} {name}', capsys)


def test_an_entry_that_is_no_directory_is_made_again(cached, capsys) -> None:
    home, opened, _ = cached
    opened()
    for entry in (home / name for name in entries(home)):
        for replace in (lambda path: path.write_text('x'), lambda path: path.symlink_to('nowhere'), os.mkdir):
            shutil.rmtree(entry)
            replace(entry)
            assert_made_again(cached, entry, 'another kind of file', capsys)


@pytest.mark.slow
def test_a_manifest_with_any_value_changed_never_gives_other_data_and_never_a_crash(
    cached, capsys, monkeypatch
) -> None:
    home, opened, _ = cached
    opened()
    monkeypatch.setattr(os, 'fsync', lambda file: None)  # hundreds of entries are made
    count = 0
    for name in entries(home):
        file = home / name / 'manifest.json'
        original = file.read_text()
        assert set(json.loads(original)) == {'dtypes', 'bytes', 'crc32', 'facts', 'digest'}
        for what, changed in mutations(json.loads(original)):
            file.write_text(json.dumps(changed))
            assert_made_again(cached, file.parent, what, capsys, allowed='signed' in what)
            file.write_text(original)
            count += 1
        for text in ('', 'null', '[]', '3', '"x"', '[' * 100_000, '\0', '{' + original, original[:-20]):
            file.write_text(text)
            assert_made_again(cached, file.parent, text[:20], capsys)
    assert count > 300


def test_offsets_of_any_values_are_refused_before_they_are_used() -> None:
    flat = np.arange(5, dtype=np.int32)
    ragged.check(flat, np.array([0, 2, 2, 5]), np.int32)
    for offsets in ([], [0], [1, 5], [0, 6], [0, 4], [0, 3, 2, 5], [0, -1, 5], [0, 1 << 62, 5], [0, -(1 << 63), 5]):
        with pytest.raises(ValueError, match='do not divide 5 numbers into rows'):
            ragged.check(flat, np.array(offsets, np.int64), np.int32)
    for other in (flat.astype(np.uint16), flat.astype(np.float32)):
        with pytest.raises(ValueError, match='not int32 and int64'):
            ragged.check(other, np.array([0, 5]), np.int32)


def test_a_mistake_in_the_data_leaves_nothing(tmp_path: pathlib.Path) -> None:
    def read() -> tuple[list[dict[str, str]], int]:
        raise UserError('line 7: bad')

    with pytest.raises(UserError, match='line 7: bad'):
        batches(config(tmp_path), Split('one', read))
    assert not entries(tmp_path)


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: pathlib.Path) -> None:
    (tmp_path / 'file').write_text('')
    with pytest.raises(UserError, match=r'data.cache_dir\): Not a directory') as error:
        batches(config(tmp_path / 'file' / 'cache'), Split('one', lambda: (RECORDS, 0)))
    assert '\n' not in str(error.value)


@contextlib.contextmanager
def small_disk(place: pathlib.Path) -> Iterator[pathlib.Path]:
    place.mkdir()
    mounted = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=64k', 'tmpfs', str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip('mounting is refused here')
    try:
        yield place
    finally:
        subprocess.run(['umount', '-l', str(place)], check=True)


def test_a_full_disk_is_one_line_and_the_cache_works_when_there_is_room(tmp_path: pathlib.Path) -> None:
    many = [{'source': 'x' * 30, 'target': 'y' * 30}] * 5000
    with small_disk(tmp_path / 'disk') as place:
        with pytest.raises(UserError, match='No space left on device') as error:
            batches(config(place), Split('many', lambda: (many, 0)))
        assert str(place) in str(error.value) and '\n' not in str(error.value)
        assert not entries(place)
        batches(config(place), Split('one', lambda: (RECORDS, 0)))
        assert len(entries(place)) == 2


def test_a_file_that_may_not_grow_is_one_line_and_the_cache_works_when_it_may(tmp_path: pathlib.Path) -> None:
    """As a full disk, by the system's limit of a file's size, which needs no rights."""
    many = [{'source': 'x' * 30, 'target': 'y' * 30}] * 5000
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, before[1]))
    try:
        with pytest.raises(UserError, match='File too large') as error:
            batches(config(tmp_path), Split('many', lambda: (many, 0)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(tmp_path) in str(error.value) and '\n' not in str(error.value)
    assert not entries(tmp_path)
    batches(config(tmp_path), Split('many', lambda: (many, 0)))
    assert len(entries(tmp_path)) == 2


def test_a_write_that_fails_is_one_line(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: cache.Writer, name: str, values: np.ndarray) -> None:
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(cache.Writer, 'append', full)
    with pytest.raises(UserError, match='No space left on device'):
        batches(config(tmp_path), Split('one', lambda: (RECORDS, 0)))
    assert not entries(tmp_path)


SCRIPT = """
import json, sys
from pathlib import Path
import numpy as np
from tformer.data import cache
made = []

def make(writer):
    made.append(1)
    for number in range(10):
        writer.append('numbers', np.arange(number * 100, number * 100 + 100))
        if number == 4:
            print('wrote', flush=True)
            sys.stdin.readline()

found, _ = cache.arrays(Path(sys.argv[1]), {'key': 1}, make)
print(json.dumps([len(made), found['numbers'].tolist()]))
"""


def process(place: pathlib.Path, before: str = '') -> subprocess.Popen[str]:
    """Writes an entry; half-way it says so, and waits for a line or the end of its input."""
    command = [sys.executable, '-c', before + SCRIPT, str(place)]
    pipes = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.PIPE)
    return subprocess.Popen(command, text=True, cwd=ROOT, **pipes)


def half_way(place: pathlib.Path, before: str = '') -> subprocess.Popen[str]:
    begun = process(place, before)
    assert begun.stdout is not None and begun.stdout.readline() == 'wrote\n', begun.communicate()
    return begun


def test_of_two_processes_one_writes_and_the_other_waits(tmp_path: pathlib.Path) -> None:
    first, second = half_way(tmp_path), process(tmp_path)
    assert second.stderr is not None and 'another process is writing' in second.stderr.readline()
    ended = [one.communicate(timeout=HANG) for one in (first, second)]
    assert [json.loads(out.splitlines()[-1]) for out, _ in ended] == [[1, list(range(1000))], [0, list(range(1000))]]
    assert [err for _, err in ended] == ['', '']


@pytest.mark.signals
def test_a_killed_process_leaves_nothing_that_is_taken_for_whole(tmp_path: pathlib.Path) -> None:
    killed = half_way(tmp_path)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert any(path.suffix == '.partial' for path in tmp_path.iterdir())
    out, err = process(tmp_path).communicate(timeout=HANG)
    assert json.loads(out.splitlines()[-1]) == [1, list(range(1000))] and err == ''
    assert not list(tmp_path.glob('*.partial'))


UNLOCKED = {
    'without effect': 'import fcntl; fcntl.flock = lambda *_: None',
    'refused': 'import fcntl, os\ndef refuse(*_): raise OSError(95, os.strerror(95))\nfcntl.flock = refuse',
}


@pytest.mark.parametrize('locks', UNLOCKED)
def test_where_locks_reach_no_other_process_each_writes_its_own_and_one_is_kept(tmp_path, locks: str) -> None:
    slow = half_way(tmp_path, UNLOCKED[locks])
    ended = [one.communicate(timeout=HANG) for one in (process(tmp_path, UNLOCKED[locks]), slow)]
    assert [json.loads(out.splitlines()[-1]) for out, _ in ended] == [[1, list(range(1000))]] * 2
    assert [err for _, err in ended] == ['', '']
    (entry,) = entries(tmp_path)
    assert cache._fault(tmp_path / entry, lambda *_: None) is None
    assert json.loads(process(tmp_path).communicate(timeout=HANG)[0]) == [0, list(range(1000))]


def test_what_another_host_or_a_process_that_runs_is_writing_stays(tmp_path: pathlib.Path) -> None:
    gone = subprocess.Popen([sys.executable, '-c', ''])
    gone.wait()
    made = cache.entry(tmp_path, {'key': 1}, lambda writer: None)
    ours, dead, running, other = (
        made.with_name(f'{made.name}.{host}.{number}.00ff.partial')
        for host, number in (
            (socket.gethostname(), os.getpid()),
            (socket.gethostname(), gone.pid),
            (socket.gethostname(), 1),
            (f'{socket.gethostname()}.other', gone.pid),
        )
    )
    for left in (ours, dead, running, other):
        left.mkdir()
        (left / 'numbers').write_bytes(b'123')
    (made / 'manifest.json').unlink()
    assert cache.entry(tmp_path, {'key': 1}, lambda writer: None) == made
    assert set(entries(tmp_path)) == {made.name, ours.name, running.name, other.name}
