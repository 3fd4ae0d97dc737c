"""Prepared sets: the same bytes whoever makes them, nothing lost, damage noticed, and the batches of hosts."""

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lives import HANG
from places import ROOT
from tformer.config import Config, Data, Model, Train
from tformer.data import cache
from tformer.data.batches import pipeline
from tformer.data.inspection import duplicates
from tformer.data.prepared import cleaning, job, near, prepare, shards, stages
from tformer.data.sources import passages, sources, tables, text_reader
from tformer.data.sources.records import SPLITS
from tformer.data.sources.rows import Rows
from tformer.data.tokenizers.tokenizers import Tokenizers, train_tokenizers
from tformer.errors import NoSplitError, UserError

pyarrow = pytest.importorskip('pyarrow', reason="pip install -e '.[parquet]'")
parquet = pytest.importorskip('pyarrow.parquet')
feather = pytest.importorskip('pyarrow.feather')

RANDOM = random.Random(0)
WORDS = [''.join(RANDOM.choices('abcdefghijklm naïveß', k=RANDOM.randint(2, 9))).replace(' ', '') for _ in range(2000)]


def texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [' '.join(rng.choices(WORDS, k=rng.randint(1, 120))) + f' {seed}.{i}' for i in range(count)]


def write(file: Path, rows: list[str]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(''.join(json.dumps({'text': row}) + '\n' for row in rows))
    return str(file)


def config(place: Path, *paths: str, **data: object) -> Config:
    own = Data(path=paths, tokenizer='byte', cache_dir=str(place / 'cache'), length=48)
    train = Train(objective='causal_lm', batch_size=8)
    return Config(model=Model(family='decoder'), data=dataclasses.replace(own, **data), train=train)


def made(cfg: Config, place: Path, engine: prepare.Engine = prepare.here, say: prepare.Say = lambda line: None) -> str:
    return prepare.write(cfg, train_tokenizers(cfg, []), str(place), engine, say)


def content(place: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(place.iterdir())}


def read(place: Path, tokens: Tokenizers, split: str) -> list[str]:
    """Returns the texts of a split, in the order of the set."""
    found = sources.load(Data(path=(str(place),)), 'causal_lm', split)
    documents = found.contents.of_tokenizer(tokens.target)
    return [tokens.target.decode([*row[:130].tolist(), *row[130:].tolist()]) for row in documents]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many parts, runs, shards, shares and records of few texts."""
    for module, name, value in (
        (job, 'PART', 9000), (job, 'RECORDS', 70), (stages, 'RUN', 3000), (stages, 'SHARD', 7000),
        (stages, 'LINKED', 60), (shards, 'LONGEST', 100), (stages, '_AT_ONCE', 7),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)


def with_copies(count: int) -> list[str]:
    """Texts of which some come again, exactly, with other spaces and case, or with another end."""
    rows = texts(count)
    again = [*rows[:20], *(f'  {row}\n' for row in rows[10:15]), *(row.upper() for row in rows[15:18])]
    long = [row for row in rows if len(row.split()) > 80][:12]
    rows += again + [row + ' and more' for row in long]
    random.Random(1).shuffle(rows)
    return rows


@pytest.mark.slow
@pytest.mark.usefixtures('small')
@pytest.mark.parametrize('deduplicate', [None, 'exact', 'near', 'minhash'])
def test_a_set_holds_every_text_once_and_does_not_depend_on_files_or_order(tmp_path: Path, deduplicate) -> None:
    if deduplicate == 'minhash':
        pytest.importorskip('rensa')
    rows = with_copies(150)
    one = config(tmp_path, write(tmp_path / 'one.jsonl', rows), deduplicate=deduplicate)
    said = made(one, tmp_path / 'set')
    parts = [rows[120:], rows[:40], rows[40:120][::-1]]
    several = [write(tmp_path / 'parts' / f'{i}.jsonl', part) for i, part in enumerate(parts)]
    made(dataclasses.replace(one, data=dataclasses.replace(one.data, path=tuple(several))), tmp_path / 'other')
    arrays = [{name: data for name, data in content(tmp_path / place).items() if name != shards.INDEX}
              for place in ('set', 'other')]  # fmt: skip
    assert arrays[0] == arrays[1] and len([name for name in arrays[0] if name.startswith('train-')]) > 3

    tokens = train_tokenizers(one, [])
    found = {split: read(tmp_path / 'set', tokens, split) for split in SPLITS}
    everything = collections.Counter(row for split in SPLITS for row in found[split])
    index = shards.read_index(tmp_path / 'set')
    if deduplicate is None:
        assert everything == collections.Counter(rows) and 'duplicate' not in said
        for split in SPLITS:  # as of the files themselves
            assert sorted(found[split]) == sorted(r['text'] for r in sources.load(one.data, 'causal_lm', split))
        assert found['train'] != sorted(found['train']) != [row for row in rows if row in found['train']]
        return
    alike = 'near' if deduplicate == 'near' else 'exact'
    records = [{'text': row} for row in rows]
    again = len(duplicates.within(duplicates.read(records, ('text',), print).hashes[alike, 'text']))
    assert set(everything) <= set(rows) and set(everything.values()) == {1}
    assert index['counts']['exact'] == again and f'{again:,} duplicates' in said
    assert len(rows) - again - index['counts']['near'] == sum(everything.values())
    assert (index['counts']['near'] > 8) == (deduplicate == 'minhash')


@pytest.mark.usefixtures('small')
def test_a_text_of_several_splits_stays_in_the_test_split_then_in_valid(tmp_path: Path) -> None:
    rows = texts(60)
    for split, own in (('train', rows), ('valid', rows[:20] + rows[:5]), ('test', rows[10:30])):
        write(tmp_path / 'files' / f'{split}.jsonl', own)
    cfg = config(tmp_path, str(tmp_path / 'files'), deduplicate='exact')
    made(cfg, tmp_path / 'set')
    found = {split: set(read(tmp_path / 'set', train_tokenizers(cfg, []), split)) for split in SPLITS}
    assert found == {'test': set(rows[10:30]), 'valid': set(rows[:10]), 'train': set(rows[30:])}


def test_the_copies_of_a_text_are_not_held_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, 'RUN', 50_000)
    peaks: list[int] = []
    kept = stages._kept

    def measured(*given: Any) -> Any:
        tracemalloc.start()
        try:
            found = kept(*given)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        return found

    monkeypatch.setattr(stages, '_kept', measured)
    rows = ['x' * 2000] * 1500 + texts(50)  # 3 MB of one text
    said = made(config(tmp_path, write(tmp_path / 'a.jsonl', rows), deduplicate='exact'), tmp_path / 'set')
    assert 'of 1,550 texts, 1,499 duplicates' in said and 0 < max(peaks) < 1_000_000


KILLED = """
import sys
from halting import die, once
from tformer.config import from_dict
from tformer.data import cache
from tformer.data.prepared import job, prepare, stages
from tformer.data.tokenizers.tokenizers import train_tokenizers
import json
config = from_dict(json.loads(sys.argv[1]))
job.PART, stages.RUN, stages.SHARD, stages.LINKED = 9000, 3000, 7000, 60
moments = {'entry': (cache.Writer, 'close'), 'shard': (prepare, '_link'), 'index': (prepare.atomic, 'write')}
once(*moments[sys.argv[3]], int(sys.argv[4]), die)
prepare.write(config, train_tokenizers(config, []), sys.argv[2], prepare.here)
"""


@pytest.mark.slow
@pytest.mark.signals
@pytest.mark.proof_cases('entry-1', 'entry-6', 'shard-2')
@pytest.mark.parametrize(('where', 'call'), [('entry', 1), ('entry', 6), ('entry', 12), ('shard', 2), ('index', 6)])
def test_a_killed_preparation_goes_on(tmp_path: Path, where: str, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in ((job, 'PART', 9000), (stages, 'RUN', 3000), (stages, 'SHARD', 7000)):
        monkeypatch.setattr(module, name, value)
    cfg = config(tmp_path, write(tmp_path / 'a.jsonl', texts(150)), deduplicate='exact')
    made(cfg, tmp_path / 'whole')
    script = [
        sys.executable,
        '-c',
        KILLED,
        json.dumps(dataclasses.asdict(cfg)),
        str(tmp_path / 'set'),
        where,
        str(call),
    ]
    paths = os.pathsep.join([str(ROOT), str(ROOT / 'tests' / 'helpers')])
    done = subprocess.run(script, env={**os.environ, 'PYTHONPATH': paths}, capture_output=True, timeout=HANG)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not shards.is_set(str(tmp_path / 'set'))
    entries = list((tmp_path / 'set' / job.WORK).glob('*/manifest.json'))
    assert len(entries) == call - 1 or where != 'entry'
    if entries:  # a byte of one has changed since
        damaged = next(file for file in sorted(entries[0].parent.iterdir()) if file.stat().st_size)
        flip(damaged, damaged.stat().st_size // 2)
    again: list[Path] = []
    close = cache.Writer.close
    monkeypatch.setattr(cache.Writer, 'close', lambda writer: (again.append(writer._place), close(writer))[1])
    made(cfg, tmp_path / 'set')
    index = shards.read_index(tmp_path / 'set')
    total = len(job.plan(cfg, train_tokenizers(cfg, [])).parts) + len([n for n in index['files'] if '-of-' in n])
    assert len(again) == total - len(entries) + bool(entries)
    assert content(tmp_path / 'set') == content(tmp_path / 'whole')


def flip(file: Path, place: int) -> None:
    stored = bytearray(file.read_bytes())
    stored[place] ^= 1 << place % 8
    file.unlink()
    file.write_bytes(stored)


@pytest.mark.slow
@pytest.mark.usefixtures('small')
def test_any_byte_flipped_is_noticed_and_no_other_token_is_read(tmp_path: Path) -> None:
    cfg = config(tmp_path, write(tmp_path / 'a.jsonl', texts(40)))
    made(cfg, tmp_path / 'set')
    tokens = train_tokenizers(cfg, [])
    right, whole = read(tmp_path / 'set', tokens, 'train'), content(tmp_path / 'set')
    rng = np.random.default_rng(0)
    noticed = 0
    for name in (name for name in whole if not name.startswith('tokenizer')):
        used = np.flatnonzero(np.frombuffer(whole[name], np.uint8))  # most of a shard is padding
        for place in {0, len(whole[name]) - 1, *rng.choice(used, min(len(used), 25), replace=False).tolist()}:
            flip(tmp_path / 'set' / name, place)
            shards._reader.cache_clear()
            shards._opened.cache_clear()
            try:
                assert not list(shards.faults(tmp_path / 'set', shards.read_index(tmp_path / 'set'), whole=True))
                pytest.fail(f'byte {place} of {name} is not noticed')
            except (UserError, AssertionError):
                pass
            try:
                assert read(tmp_path / 'set', tokens, 'train') == right
            except UserError as error:
                noticed += 1
                assert 'tformer prepare' in str(error) or 'cannot be read' in str(error)
            (tmp_path / 'set' / name).write_bytes(whole[name])
    assert noticed > 50
    name = next(name for name in whole if name.startswith('train-'))
    flip(tmp_path / 'set' / name, 70)
    said: list[str] = []
    assert 'is written' in made(cfg, tmp_path / 'set', say=said.append)
    assert name in said[0] and content(tmp_path / 'set') == whole
    assert 'is already written' in made(cfg, tmp_path / 'set')


@pytest.mark.usefixtures('small')
def test_a_damaged_index_and_a_lost_tokenizer_are_written_again(tmp_path: Path) -> None:
    cfg = config(tmp_path, write(tmp_path / 'a.jsonl', texts(40)))
    made(cfg, tmp_path / 'set')
    whole = content(tmp_path / 'set')
    for name, damaged, message, end in (
        (shards.INDEX, whole[shards.INDEX][:50], 'is made again: its prepared.json is damaged', 'is written'),
        (shards.INDEX, whole[shards.INDEX].replace(b'1', b'2', 1), 'prepared.json is damaged', 'is written'),
        ('tokenizer.json', None, 'its tokenizer is written again', 'is already written'),
        ('tokenizer.json', b'{', 'its tokenizer is written again', 'is already written'),
    ):
        (tmp_path / 'set' / name).unlink()
        if damaged is not None:
            (tmp_path / 'set' / name).write_bytes(damaged)
        said: list[str] = []
        assert end in made(cfg, tmp_path / 'set', say=said.append)
        assert message in said[0] and content(tmp_path / 'set') == whole


def test_one_process_writes_a_set_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(tmp_path, write(tmp_path / 'a.jsonl', texts(40)))

    def engine(place: str, *rest: Any) -> None:
        with pytest.raises(UserError, match=r'^--output=.*set is in use by process \d+ on '):
            made(cfg, tmp_path / 'set')
        prepare.here(place, *rest)

    made(cfg, tmp_path / 'set', engine)
    assert 'is already written' in made(cfg, tmp_path / 'set')

    @contextlib.contextmanager
    def late(*_: object) -> Iterator[None]:
        (tmp_path / 'other' / shards.INDEX).write_text('of another process')
        yield

    monkeypatch.setattr(prepare.locks, 'alone', late)
    with pytest.raises(UserError, match='another process has written it meanwhile'):
        made(cfg, tmp_path / 'other')


def test_a_set_without_a_text_for_training_is_not_written(tmp_path: Path) -> None:
    path = write(tmp_path / 'a.jsonl', [f'short {i}' for i in range(20)])
    for cfg, message in (
        (config(tmp_path, path, cleaning=('gopher',)), 'training: of 20 texts, 20 left out by cleaning$'),
        (config(tmp_path, path, cleaning=('gopher',), deduplicate='minhash'), 'of 20 texts, 20 left out by cleaning$'),
        (config(tmp_path, path, test_path=(path,), valid_path=(path,), deduplicate='exact'),
         'training: of 60 texts, 40 duplicates, 20 in other splits$'),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            made(cfg, tmp_path / 'set')
        assert [file.name for file in (tmp_path / 'set').glob('*') if '-of-' in file.name or 'prep' in file.name] == []


def test_hosts_open_only_the_shards_of_their_rows_and_make_the_batches_of_one(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(stages, 'SHARD', 2500)
    monkeypatch.setattr(shards, 'LONGEST', 30)
    cfg = config(tmp_path, write(tmp_path / 'a.jsonl', texts(300)))
    made(cfg, tmp_path / 'set')
    data = dataclasses.replace(cfg.data, path=(str(tmp_path / 'set'),), batching='pack')
    cfg = dataclasses.replace(cfg, data=data)
    batches = pipeline.Batches(cfg, train_tokenizers(cfg, []), 'train', training=True)
    split = sources.load(data, 'causal_lm', 'train').contents.documents.shards
    assert len(split._files) > 20
    opened: list[str] = []
    reader = shards._reader.__wrapped__
    monkeypatch.setattr(shards, '_reader', lambda file, *rest: (opened.append(Path(file).name), reader(file, *rest))[1])
    for step in (0, 3, 100):
        whole = batches.batch(step)
        for hosts in (2, 4):
            shares = []
            for host in range(hosts):
                opened.clear()
                shares.append(batches.batch(step, (host, hosts)))
                rows = batches.segments(step)[host * 8 // hosts : (host + 1) * 8 // hosts]
                part = batches.parts[0].examples
                needed = set()
                for _, record, example in (segment for row in rows for segment in row):
                    _, start, stop = part.spans[example]
                    first = split._records[record] + max(start - 1, 0) // shards.LONGEST
                    last = split._records[record] + (min(stop, split.lengths[record]) - 1) // shards.LONGEST
                    needed |= {split._files[np.searchsorted(split._ends, at, side='right')] for at in (first, last)}
                assert set(opened) == needed and len(needed) < len(split._files)
            for name, array in whole.items():
                assert np.array_equal(np.concatenate([share[name] for share in shares]), array)


def test_a_worker_process_is_sent_where_the_shards_are_and_makes_the_same_batches(tmp_path: Path) -> None:
    cfg = config(tmp_path, write(tmp_path / 'a.jsonl', texts(150)))
    made(cfg, tmp_path / 'set')
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, path=(str(tmp_path / 'set'),), batching='pack'))
    batches = pipeline.Batches(cfg, train_tokenizers(cfg, []), 'train', training=True)
    sent = pickle.dumps(batches)
    tokens = (tmp_path / 'set' / 'train-00000-of-00001.array_record').read_bytes()
    assert len(sent) < len(tokens) and tokens[:1000] not in sent
    shards._opened.cache_clear()
    there = pickle.loads(sent)
    for step in (0, 7):
        assert all(np.array_equal(there.batch(step)[name], array) for name, array in batches.batch(step).items())


def test_the_weights_of_a_mixture_hold_for_prepared_sets(tmp_path: Path) -> None:
    for name, count in (('a', 90), ('b', 30)):
        rows = [f'{name} {i:05d}' for i in range(count)]
        made(config(tmp_path, write(tmp_path / f'{name}.jsonl', rows)), tmp_path / name)
    parts = tuple(f'path={tmp_path / name} weight={weight}' for name, weight in (('a', 1), ('b', 3)))
    cfg = config(tmp_path, mixture=parts)
    tokens = train_tokenizers(cfg, [])
    batches = pipeline.Batches(cfg, tokens, 'train', training=True)
    read_: collections.Counter[str] = collections.Counter()
    for step in range(40):
        read_.update(tokens.target.decode(row.tolist()).strip()[0] for row in batches.batch(step)['inputs'])
    assert read_ == {'a': 80, 'b': 240}


@pytest.mark.usefixtures('small')
def test_a_source_that_is_no_file_is_prepared_and_cleaned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [f'a{i} b  \r\n\n\n\n\x07c' if i % 10 else ' \r\n' for i in range(200)]
    own = {'train': [*rows, 'of training']}  # the splits have the same texts but for one
    row = sources.Source(lambda *of: (f'rows {of[2]}', lambda: ([{'text': row} for row in own.get(of[2], rows)], 0)))
    monkeypatch.setitem(sources.SOURCES, 'rows', row)
    cfg = config(tmp_path, source='rows', cleaning=('controls', 'spaces'), deduplicate='exact')
    assert len(job.plan(cfg, train_tokenizers(cfg, [])).parts) == 9
    said = made(cfg, tmp_path / 'set')
    assert 'of 601 texts, 60 left out by cleaning, 360 duplicates' in said
    found = read(tmp_path / 'set', train_tokenizers(cfg, []), 'test')
    assert sorted(found) == sorted(f'a{i} b\n\nc' for i in range(200) if i % 10)
    assert read(tmp_path / 'set', train_tokenizers(cfg, []), 'train') == ['of training']
    with pytest.raises(NoSplitError):
        read(tmp_path / 'set', train_tokenizers(cfg, []), 'valid')


def test_texts_of_other_rules_than_gophers_are_left_out() -> None:
    good = 'the cat and the dog have a house with a door that opens to the garden of the old neighbour ' * 4
    for text, stays in (
        (good, True),
        (good[:80], False),  # few words
        (good.replace('the', 'le').replace('and', 'et').replace('with', 'x').replace('that', 'y')
         .replace('have', 'z').replace('to', 't').replace('of', 'f'), False),  # no stop words
        ('\n'.join(f'- {good[:90]}' for _ in range(5)), False),  # bullets
        ('\n'.join(f'{good[:90]}...' for _ in range(5)), False),  # ellipses
        (good + '# ' * 20, False),
        (good + '1 2 3 ' * 20, False),
        (good.replace(' ', 'xxxxxxxxxx '), False),
    ):  # fmt: skip
        assert bool(cleaning.clean(text, ('gopher',))) == stays


def test_the_parts_of_a_file_have_its_lines_and_their_numbers(tmp_path: Path) -> None:
    file = tmp_path / 'a.txt'
    for content_ in (b'\xef\xbb\xbfone\n\ntwo\r\nthree', b'\n\n\n', b'a' * 30 + b'\nb\n', b'a\nb\nc\xff\n'):
        file.write_bytes(content_)
        found, size = text_reader.find(file), len(content_)
        for count in (1, 2, 3, 7):
            edges = [size * i // count for i in range(count + 1)]
            texts_: list[text_reader.Text] = [text_reader.Text(found, 'skip')]
            before = text_reader.state(file)
            pieces = [text_reader.Part(found, 'skip', *edge, before) for edge in itertools.pairwise(edges)]
            whole = [(texts_[0].where(number), line) for number, line in texts_[0]]
            assert [(part.where(number), line) for part in pieces for number, line in part] == whole
            assert sum(part.skipped for part in pieces) == texts_[0].skipped
    part = text_reader.Part(found, 'skip', 0, 4, before)
    file.write_bytes(content_ + b'd\n')
    with pytest.raises(UserError, match='changed while it was being read'):
        list(part)


@pytest.mark.parametrize('name', ['a.parquet', 'a.feather', 'a.arrow'])
def test_the_parts_of_a_table_have_its_rows_and_their_numbers(tmp_path: Path, name: str) -> None:
    rows = [{'text': f'text {i}'.encode() + (b'\xff' if i % 13 == 5 else b'')} for i in range(200)]
    file = write_table(tmp_path / name, pyarrow.Table.from_pylist(rows), 30)
    found, before, kind = text_reader.find(file), text_reader.state(file), file.suffix
    sizes = tables.group_sizes(file, kind)
    assert len(sizes) == 7 and min(sizes[:-1]) > sizes[-1] > 0

    def read_of(part: Rows) -> list[tuple[str, str]]:
        own = tables.TABLES[kind](part, {'text': True})
        return [(part.where(number), values['text']) for number, values in own]

    whole = Rows(found, 'skip')
    expected = read_of(whole)
    assert whole.skipped == 15 and len(expected) == 185
    for edges in ([0, 7], [0, 1, 7], [0, 2, 3, 6, 7]):
        parts = [tables.RowGroups(found, 'skip', *edge, before) for edge in itertools.pairwise(edges)]
        assert [row for part in parts for row in read_of(part)] == expected
        assert sum(part.skipped for part in parts) == 15
    part = tables.RowGroups(found, 'skip', 0, 1, before)
    os.utime(file, ns=(0, 0))
    with pytest.raises(UserError, match='changed while it was being read'):
        read_of(part)


def write_table(file: Path, table: Any, rows: int) -> Path:
    if file.suffix == '.parquet':
        parquet.write_table(table, file, row_group_size=rows)
    elif file.suffix == '.feather':
        feather.write_feather(table, str(file), chunksize=rows)
    else:
        with pyarrow.OSFile(str(file), 'wb') as out, pyarrow.ipc.new_stream(out, table.schema) as stream:
            stream.write_table(table, max_chunksize=rows)
    return file


@pytest.mark.usefixtures('small')
@pytest.mark.parametrize('name', ['train.parquet', 'train.arrow'])
def test_the_set_of_a_table_is_that_of_its_texts_whatever_its_groups(tmp_path: Path, name: str) -> None:
    rows = texts(300)
    expected = made_of(tmp_path / 'lines', write(tmp_path / 'lines' / 'train.jsonl', rows))
    table = pyarrow.table({'text': rows})
    for size in (300, 20):
        place = tmp_path / str(size)
        place.mkdir()
        file = write_table(place / name, table, size)
        cfg = config(place, str(file))
        parts = job.plan(cfg, train_tokenizers(cfg, [])).parts
        assert (len(parts) > 3) == (size == 20)
        shards_ = {name: own for name, own in made_of(place, str(file)).items() if 'record' in name}
        assert shards_ == {name: own for name, own in expected.items() if 'record' in name}


def made_of(place: Path, path: str) -> dict[str, bytes]:
    made(config(place, path), place / 'set')
    return content(place / 'set')


@pytest.mark.usefixtures('small')
def test_a_long_text_is_prepared_in_passages_and_no_line_is_lost(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(passages, 'LENGTH', 2000)
    lines = [f'{text}\n' for text in texts(300)]
    file = tmp_path / 'long.txt'
    file.write_text(''.join(lines))
    place = tmp_path / 'set'
    cfg = config(tmp_path, str(file))
    made(cfg, place)
    tokens = Tokenizers.load(place)
    found = {split: read(place, tokens, split) for split in ('train', 'valid', 'test')}
    held = [line for split in found for text in found[split] for line in text.splitlines(keepends=True)]
    assert sorted(held) == sorted(lines)
    assert all(len(text) < 4000 for text in found['train']) and len(found['train']) > 10
    whole = file.read_text()
    assert ''.join(sorted(found['test'], key=whole.index)) == whole[-sum(map(len, found['test'])) :]
    assert 0.01 * len(whole) < sum(map(len, found['test'])) < 0.05 * len(whole)


def test_the_share_of_words_decides_what_is_near() -> None:
    pytest.importorskip('rensa')
    rng = random.Random(3)
    found = collections.Counter()
    for share in (0.95, 0.3):
        for _ in range(60):
            row = rng.choices(WORDS, k=200)
            other = row[: int(200 * share)] + rng.choices(WORDS, k=200 - int(200 * share))
            hashes = near.bands([' '.join(row), ' '.join(other)])
            found[share] += bool((hashes[:, 0] == hashes[:, 1]).any())
    assert found[0.95] >= 57 and found[0.3] <= 3
    assert near._shingles('ab cd 日本語') == ['ab cd 日 本 語'] and near._shingles('!') == ['!']
    pairs = np.array([[b'0b', b'2a'], [b'2c', b'2d'], [b'2a', b'1z']], near.NODE)
    assert near.left_out(pairs).tolist() == [b'1z', b'2a', b'2d']


def test_mistakes(tmp_path: Path) -> None:
    path = write(tmp_path / 'a.jsonl', texts(20))
    cfg = config(tmp_path, path, valid_path=(path,), test_path=(path,))
    made(cfg, tmp_path / 'set')
    there = str(tmp_path / 'set')
    for name in ('a.bin', 'a.bin.gz'):
        (tmp_path / name).write_bytes(bytes(64))
    for change, message in (
        ({'data': {'cleaning': ('spaces',)}}, 'set holds a set of other texts, settings or tokens: delete it'),
        ({'data': {'path': (there,), 'valid_path': (), 'test_path': ()}}, 'set is a prepared set already'),
        ({'data': {'path': (str(tmp_path / 'a.bin'),)}}, 'a.bin holds tokens already'),
        ({'data': {'path': (str(tmp_path / 'a.bin.gz'),)}}, 'a.bin.gz holds tokens already'),
        ({'data': {'mixture': (f'path={path}',)}}, '--output prepares one source'),
        ({'data': {'train_examples': 3}}, '--output prepares all texts: leave out data.train_examples'),
        ({'train': {'objective': 'seq2seq'}}, 'train.objective=seq2seq is none'),
        ({'data': {'path': ('nowhere',)}}, 'nowhere does not exist'),
    ):
        sections = {name: dataclasses.replace(getattr(cfg, name), **fields) for name, fields in change.items()}
        with pytest.raises(UserError, match=message) as error:
            made(dataclasses.replace(cfg, **sections), tmp_path / 'set')
        assert '\n' not in str(error.value)
    for fields, objective, message in (
        ({'path': (there, path)}, 'causal_lm', 'a prepared set is the only one'),
        ({'path': (there,), 'columns': ('a',)}, 'causal_lm', 'has no effect on a prepared set'),
        ({'path': (there,)}, 'seq2seq', 'has only tokens and seq2seq needs source and target'),
    ):
        with pytest.raises(UserError, match=message):
            sources.load(Data(**fields), objective, 'train')
    only = config(tmp_path, str(tmp_path / 'only'))
    write(tmp_path / 'only' / 'train.jsonl', texts(5))
    made(only, tmp_path / 'lone')
    with pytest.raises(NoSplitError, match='lone has no split valid'):
        sources.load(Data(path=(str(tmp_path / 'lone'),)), 'causal_lm', 'valid')
    other = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, sentinels=3, path=(there,)))
    with pytest.raises(UserError, match=f'another tokenizer than this run: set data.tokenizer_from={there}'):
        pipeline.Batches(other, train_tokenizers(other, []), 'train', training=True)
    sample = sources.load(Data(path=(there,)), 'causal_lm', 'train').sample(5, (0,))
    assert len(sample.contents.of_tokenizer(train_tokenizers(cfg, []).target)) == 5 and sample[0]['text']


def test_of_sets_with_two_tokenizers_the_one_that_does_not_lend_its_own_is_to_be_prepared_again(tmp_path: Path) -> None:
    write(tmp_path / 'texts' / 'train.jsonl', texts(5))
    for name, sentinels in (('one', 0), ('other', 3)):
        made(config(tmp_path, str(tmp_path / 'texts'), sentinels=sentinels), tmp_path / name)
    paths = [str(tmp_path / name) for name in ('one', 'other')]
    for sentinels, (lender, changed) in ((0, paths), (3, paths[::-1])):
        mixture = tuple(f'path={path}' for path in paths)
        mixed = config(tmp_path, sentinels=sentinels, mixture=mixture, tokenizer_from=lender)
        line = f'{changed} has tokens of another tokenizer than this run: '
        with pytest.raises(UserError, match=f'{line}prepare it again with --config.data.tokenizer_from={lender}$'):
            pipeline.Batches(mixed, train_tokenizers(mixed, []), 'train', training=True)


def test_a_full_disk_is_of_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: cache.Writer, name: str, values: np.ndarray) -> None:
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(cache.Writer, 'append', full)
    with pytest.raises(UserError, match=r'set/unfinished \(--output\): No space left on device$'):
        made(config(tmp_path, write(tmp_path / 'a.jsonl', texts(20))), tmp_path / 'set')


def test_progress_is_told_with_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0, *(100 + 30 * i for i in range(40))])
    monkeypatch.setattr(prepare.time, 'monotonic', lambda: next(clock))
    said: list[str] = []

    def done() -> Iterator[None]:
        yield from [None] * 20

    prepare._report('write', 40, done(), said.append)
    assert said[-1] == '20 of 40 shards written, 10 min left' and len(said) == 20


def test_a_record_with_another_checksum_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(tmp_path, write(tmp_path / 'a.jsonl', texts(40)))
    with monkeypatch.context() as patched:
        patched.setattr(shards, '_checksum', lambda content, number: bytes(4))
        made(cfg, tmp_path / 'set')
    with pytest.raises(UserError, match='array_record has changed since it was written: `tformer prepare` makes it'):
        read(tmp_path / 'set', train_tokenizers(cfg, []), 'train')


def test_checksums_tell_records_apart() -> None:
    assert shards._checksum(b'ab', 1) != shards._checksum(b'ab', 2) != zlib.crc32(b'ab').to_bytes(4, 'little')
