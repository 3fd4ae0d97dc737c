"""Binary files and packed text as sources: the same records as from lines of JSON, the same splits, the same errors."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tformer.config.run import Data
from tformer.data.sources import sources, tables
from tformer.errors import UserError

pyarrow = pytest.importorskip('pyarrow', reason="pip install -e '.[parquet]'")
parquet = pytest.importorskip('pyarrow.parquet')
feather = pytest.importorskip('pyarrow.feather')

ROWS = [{'text': f'text {i} ü\n', 'label': f'class {i % 3}', 'other': [i, None]} for i in range(500)]


def load(split: str = 'train', objective: str = 'classification', **data: object) -> list[sources.Record]:
    return list(sources.load(Data(**data), objective, split))


def jsonl(file: Path, rows: list[dict]) -> None:
    file.write_text(''.join(json.dumps(row) + '\n' for row in rows))


def packed(file: Path, rows: list[dict]) -> None:
    with pyarrow.OSFile(str(file), 'wb') as stored, pyarrow.CompressedOutputStream(stored, 'zstd') as out:
        out.write(''.join(json.dumps(row) + '\n' for row in rows).encode())


def parquets(file: Path, rows: list[dict]) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=300, write_page_checksum=True)


def arrow(file: Path, rows: list[dict]) -> None:
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(str(file), table.schema) as stream:
        stream.write_table(table, max_chunksize=300)


def feathers(file: Path, rows: list[dict]) -> None:
    feather.write_feather(pyarrow.Table.from_pylist(rows), str(file), chunksize=300)


def members(file: Path, content: dict[str, bytes], mode: str = 'w') -> None:
    with tarfile.open(file, mode) as tar:
        for name, value in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(value)
            tar.addfile(member, io.BytesIO(value))


def tar(file: Path, rows: list[dict]) -> None:
    members(
        file,
        {
            name: value
            for number, row in enumerate(rows)
            for name, value in (
                (f'a/{number:04}.txt', row['text'].encode()),
                (f'a/{number:04}.png', bytes(range(256))),
                (f'a/{number:04}.cls', row['label'].encode()),
            )
        },
        'w:gz' if file.suffix == '.gz' else 'w',
    )


def tar_of_json(file: Path, rows: list[dict]) -> None:
    members(file, {f'{number}.json': json.dumps(row).encode() for number, row in enumerate(rows)})


def array_record(file: Path, rows: list[dict]) -> None:
    module = pytest.importorskip('array_record.python.array_record_module')
    writer = module.ArrayRecordWriter(str(file), 'group_size:1')
    for row in rows:
        writer.write(json.dumps(row).encode())
    writer.close()


WRITERS: dict[str, Callable[[Path, list[dict]], None]] = {
    'a.jsonl.zst': packed,
    'a.parquet': parquets,
    'a.arrow': arrow,
    'a.feather': feathers,
    'a.tar': tar,
    'a.tar.gz': tar,
    'b.tar': tar_of_json,
    'a.array_record': array_record,
    'a.array_record-00000-of-00001': array_record,
}


@pytest.mark.parametrize('name', WRITERS)
def test_records_and_splits_are_those_of_lines_of_json(tmp_path, name: str) -> None:
    WRITERS[name](tmp_path / name, ROWS)
    jsonl(tmp_path / 'a.jsonl', ROWS)
    for split in sources.SPLITS:
        found, wanted = (load(split, path=(str(tmp_path / file),)) for file in (name, 'a.jsonl'))
        where = [record.pop('where') for record in found]
        assert found == [{key: record[key] for key in ('text', 'label')} for record in wanted] and found
        numbers = [int(record['text'].split()[1]) + 1 for record in found]
        between = ':' if 'jsonl' in name else ' row '
        assert where == [f'{tmp_path / name}{between}{number}' for number in numbers]


@pytest.mark.slow
@pytest.mark.parametrize('name', WRITERS)
def test_a_file_that_is_cut_or_changed_is_one_line(tmp_path, name: str) -> None:
    file = tmp_path / name
    WRITERS[name](file, ROWS[:400])
    whole = file.read_bytes()
    places = [*np.linspace(0, len(whole) - 1, 9, dtype=int).tolist(), len(whole) - 8]  # a stream of Arrow ends in 8
    if '.tar' in name and not name.endswith('.gz'):  # the end of tar is two blocks of zeros or more
        places = [place for place in places if place < len(whole.rstrip(b'\0'))]
    for place in places:
        file.write_bytes(whole[:place])
        for rule in ('stop', 'skip'):
            with pytest.raises(UserError) as error:
                load(path=(str(file),), bad_lines=rule)
            assert str(tmp_path) in str(error.value) and '\n' not in str(error.value)
    file.write_bytes(whole)
    split = sources.load(Data(path=(str(file),)), 'classification', 'train')
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match='changed while it was being read'):
        len(split)


@pytest.mark.parametrize('name', ['a.arrow', 'a.feather', 'a.tar', 'a.tar.gz'])
def test_several_files_in_one_are_refused(tmp_path, name: str) -> None:
    file = tmp_path / name
    WRITERS[name](file, ROWS[:40])
    once = file.read_bytes()
    file.write_bytes(once + once)
    with pytest.raises(UserError, match=rf'{name} has more after its end: is it several'):
        load(path=(str(file),))
    if '.tar' not in name:
        with pytest.raises(UserError, match='has more after its end'):
            tables.group_sizes(file, file.suffix)
    if name == 'a.tar':
        file.write_bytes(once + bytes(1 << 17))
        assert load(path=(str(file),))


BAD = [{'text': 'good', 'label': 'a'}, {'text': None, 'label': 'b'}, {'text': 'good', 'label': 'c'}]


@pytest.mark.parametrize('name', ['a.jsonl.zst', 'a.parquet', 'a.arrow', 'a.feather', 'b.tar', 'a.array_record'])
def test_a_bad_row_is_named_or_skipped_and_counted(tmp_path, name: str) -> None:
    WRITERS[name](tmp_path / name, BAD)
    paths = {'valid_path': (str(tmp_path / name),)}
    between = ':' if 'jsonl' in name else ' row '
    with pytest.raises(UserError, match=rf"{name}{between}2: 'text' is not a string: None$"):
        load('valid', **paths)
    split = sources.load(Data(**paths, bad_lines='skip'), 'classification', 'valid')
    assert [record['label'] for record in split] == ['a', 'c'] and split.skipped == 1


def test_text_that_is_not_utf8_is_a_bad_row(tmp_path) -> None:
    raw = pyarrow.array([b'one', b'\xff', b'three'], pyarrow.binary())
    for name, column in {'binary.parquet': raw, 'string.parquet': raw.view(pyarrow.string())}.items():
        parquet.write_table(pyarrow.table({'text': column}), tmp_path / name)
        with pytest.raises(UserError, match=rf'{name} row 2: not UTF-8: byte 0xff$'):
            load('valid', 'masked_lm', valid_path=(str(tmp_path / name),))
        found = load('valid', 'masked_lm', valid_path=(str(tmp_path / name),), bad_lines='skip')
        assert found == [{'text': 'one'}, {'text': 'three'}]
    members(tmp_path / 'a.tar', {'1.txt': b'one', '2.txt': b'\xff', '3.txt': b'three'})
    with pytest.raises(UserError, match=r'a.tar row 2: not UTF-8: byte 0xff$'):
        load('valid', 'masked_lm', valid_path=(str(tmp_path / 'a.tar'),))


def test_columns_are_chosen_also_inside_of_others(tmp_path) -> None:
    pairs = [{'translation': {'de': f'wort {i}', 'en': f'word {i}', 'fr': f'mot {i}'}, 'id': i} for i in range(3)]
    for name, write in {'a.parquet': parquets, 'a.feather': feathers, 'a.arrow': arrow}.items():
        write(tmp_path / name, pairs)
        columns = {'valid_path': (str(tmp_path / name),), 'columns': ('translation/de', 'translation/en')}
        assert load('valid', 'seq2seq', **columns) == [{'source': f'wort {i}', 'target': f'word {i}'} for i in range(3)]
        for wrong, hint in {'translation/ed': 'valid: de, en, fr', 'translatio': "did you mean 'translation'"}.items():
            with pytest.raises(UserError, match=rf"{name} has no column '{wrong}' \(data.columns\); {hint}"):
                load('valid', 'seq2seq', **{**columns, 'columns': (wrong, 'translation/en')})
        with pytest.raises(UserError, match=rf"{name} has no column 'word' \(data.columns\)"):
            load('valid', 'seq2seq', valid_path=columns['valid_path'], source_template='{word}', target_template='{id}')


ODD = {
    'in a list': ({'a': [[{'b': 'x'}]]}, ('a/element',), r"has no column 'a/element' \(data.columns\)$"),
    'in a list of objects': ({'a': [[{'b': 'x'}]]}, ('a/item/b',), r"has no column 'a/item/b' \(data.columns\)$"),
    'whole numbers': ({'text': [1]}, (), r"row 1: 'text' is not a string: 1$"),
    'no rows': ({'text': []}, (), r'holds no examples$'),
    'nothing but nulls': ({'text': [None]}, (), r"row 1: 'text' is not a string: None$"),
}


@pytest.mark.parametrize('case', ODD)
def test_odd_columns_are_one_line(tmp_path, case: str) -> None:
    content, columns, message = ODD[case]
    table = pyarrow.table(content)
    parquet.write_table(table, tmp_path / 'a.parquet')
    feather.write_feather(table, str(tmp_path / 'a.feather'))
    twice = pyarrow.Table.from_arrays([pyarrow.array(['a'])] * 2, names=['text', 'text'])
    parquet.write_table(twice, tmp_path / 'twice.parquet')
    for name in ('a.parquet', 'a.feather'):
        with pytest.raises(UserError, match=rf'{name} {message}'):
            load('valid', 'masked_lm', valid_path=(str(tmp_path / name),), columns=columns)
    with pytest.raises(UserError, match=r"twice.parquet has 2 columns 'text' \(data.columns\)$"):
        load('valid', 'masked_lm', valid_path=(str(tmp_path / 'twice.parquet'),))


def test_an_array_that_points_outside_of_its_bytes_is_damage(tmp_path) -> None:
    """An offset of Arrow's text is not what it was; unnoticed, other memory would be read."""
    texts = ['ab' * 9] * 5
    feather.write_feather(pyarrow.table({'text': texts}), str(tmp_path / 'a.feather'), compression='uncompressed')
    whole = (tmp_path / 'a.feather').read_bytes()
    (tmp_path / 'a.feather').write_bytes(whole.replace(np.int32([36]).tobytes(), np.int32([-9]).tobytes(), 1))
    with pytest.raises(UserError, match=r'a.feather cannot be read: .*offset'):
        load('valid', 'masked_lm', valid_path=(str(tmp_path / 'a.feather'),))


NESTED = {
    'chat': {'messages': [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]},
    'question_answering': {
        'question': 'q', 'context': 'a b', 'answers': {'text': ['b'], 'answer_start': [2]},
    },
    'multiple_choice': {'context': 'a', 'choices': ['b', 'c'], 'label': 1},
    'regression': {'text': 'a', 'label': 0.5},
    'dpo': {'prompt': 'a', 'chosen': 'b', 'rejected': 'c'},
}  # fmt: skip


@pytest.mark.parametrize('objective', NESTED)
def test_columns_hold_whatever_json_does(tmp_path, objective: str) -> None:
    found = []
    jsonl(tmp_path / 'a.jsonl', [NESTED[objective]] * 2)
    parquets(tmp_path / 'a.parquet', [NESTED[objective]] * 2)
    arrow(tmp_path / 'a.arrow', [NESTED[objective]] * 2)
    for name in ('a.jsonl', 'a.parquet', 'a.arrow'):
        found.append(load('valid', objective, valid_path=(str(tmp_path / name),)))
        for record in found[-1]:
            del record['where']
    assert found[0] == found[1] == found[2] and len(found[0]) == 2


def test_only_the_columns_that_are_asked_for_are_read(tmp_path) -> None:
    """Another column is damaged, and nobody notices."""
    rows = [{'junk': f'some junk {i}' * 20, 'text': f'text {i}'} for i in range(500)]
    parquets(tmp_path / 'a.parquet', rows)
    whole = bytearray((tmp_path / 'a.parquet').read_bytes())
    place = parquet.read_metadata(tmp_path / 'a.parquet').row_group(0).column(0).data_page_offset
    whole[place : place + 40] = b'z' * 40
    (tmp_path / 'a.parquet').write_bytes(whole)
    assert len(load('valid', 'masked_lm', valid_path=(str(tmp_path / 'a.parquet'),))) == 500
    with pytest.raises(UserError, match=r'a.parquet cannot be read: '):
        load('valid', 'masked_lm', valid_path=(str(tmp_path / 'a.parquet'),), columns=('junk',))


def test_optional_columns_are_those_that_have_values(tmp_path) -> None:
    parquets(tmp_path / 'a.parquet', [{'text': 'a', 'label': 'x', 'pair': None}, {'text': 'b', 'label': 'y'}])
    assert ['pair' in record for record in load('valid', valid_path=(str(tmp_path / 'a.parquet'),))] == [False, False]
    parquets(tmp_path / 'a.parquet', [{'text': 'a', 'label': 'x', 'pair': 'c'}, {'text': 'b', 'label': 'y'}])
    with pytest.raises(UserError, match=r"a.parquet row 2: no key 'pair', unlike the lines before"):
        load('valid', valid_path=(str(tmp_path / 'a.parquet'),))


def test_sets_of_the_hubs_datasets(tmp_path) -> None:
    datasets = pytest.importorskip('datasets')
    datasets.disable_progress_bars()
    features = datasets.Features(
        tokens=datasets.Sequence(datasets.Value('string')),
        tags=datasets.Sequence(datasets.ClassLabel(names=['O', 'B-BIRD'])),
    )
    rows = {'tokens': [['a', f'bird{i}'] for i in range(400)], 'tags': [[0, 1]] * 400}
    whole = datasets.Dataset.from_dict(rows, features=features)
    short = whole.select(range(390, 400))
    datasets.DatasetDict(train=whole, validation=short).save_to_disk(tmp_path / 'splits', num_shards={'train': 3})
    whole.save_to_disk(tmp_path / 'one')
    (tmp_path / 'hub').mkdir()
    whole.to_parquet(tmp_path / 'hub' / 'train-00000-of-00001.parquet')
    short.to_parquet(tmp_path / 'hub' / 'validation-00000-of-00001.parquet')
    for name in ('splits', 'hub'):
        found = [load(split, 'token_classification', path=(str(tmp_path / name),)) for split in ('train', 'valid')]
        assert [[record['tokens'][1] for record in part] for part in found] == [
            [f'bird{i}' for i in range(first, 400)] for first in (0, 390)
        ]
        assert found[0][0]['tags'] == ['O', 'B-BIRD']
        with pytest.raises(UserError, match=r'test.* does not exist|has no split test'):
            load('test', 'token_classification', path=(str(tmp_path / name),))
    parts = [load(split, 'token_classification', path=(str(tmp_path / 'one'),)) for split in ('train', 'valid')]
    assert sum(map(len, parts)) <= 400 and len(parts[0]) > 350
    (tmp_path / 'splits' / 'train' / 'data-00001-of-00003.arrow').unlink()
    with pytest.raises(UserError, match=r'data-00001-of-00003.arrow, a part of .*train, does not exist'):
        load('train', 'token_classification', path=(str(tmp_path / 'splits'),))
    state = json.loads((tmp_path / 'one' / 'state.json').read_text())
    (tmp_path / 'one' / 'state.json').write_text(json.dumps(state | {'_indices_data_files': [{'filename': 'x'}]}))
    with pytest.raises(UserError, match=r'one is a selection of rows by an old version of datasets'):
        load('train', 'token_classification', path=(str(tmp_path / 'one'),))
    (tmp_path / 'one' / 'state.json').write_text('{}')
    with pytest.raises(UserError, match=r'state.json is not of a saved set: KeyError'):
        load('train', 'token_classification', path=(str(tmp_path / 'one'),))


def test_classes_of_a_split_without_labels_are_bad_rows(tmp_path) -> None:
    datasets = pytest.importorskip('datasets')
    datasets.disable_progress_bars()
    features = datasets.Features(text=datasets.Value('string'), label=datasets.ClassLabel(names=['no', 'yes']))
    rows = datasets.Dataset.from_dict({'text': ['a', 'b'], 'label': [1, -1]}, features=features)
    rows.to_parquet(tmp_path / 'a.parquet')
    with pytest.raises(UserError, match=r'a.parquet row 2: class -1 is not among the 2 of the file'):
        load('valid', valid_path=(str(tmp_path / 'a.parquet'),))
    (found,) = load('valid', valid_path=(str(tmp_path / 'a.parquet'),), bad_lines='skip')
    assert found['label'] == 'yes'
    table = parquet.read_table(tmp_path / 'a.parquet')
    for index, column in enumerate((['yes', 'no'], [1.0, 0.0])):
        wrong = table.set_column(1, 'label', [column])
        parquet.write_table(wrong, tmp_path / f'{index}.parquet')
        with pytest.raises(UserError, match=r'parquet row 1: class .* is not among the 2 of the file'):
            load('valid', valid_path=(str(tmp_path / f'{index}.parquet'),))


SHARDS = {
    'outside': ({'../a.txt': b'a'}, "its member '../a.txt' leads outside"),
    'absolute': ({'/etc/a.txt': b'a'}, "its member '/etc/a.txt' leads outside"),
    'twice': ({'1.txt': b'a', '1.text': b'b'}, "row 1: 1.text has 'text' a second time"),
    'no text': ({'1.png': b'a'}, "row 1: no key 'text'"),
    'no object': ({'1.json': b'[1]'}, 'row 1: 1.json is not a JSON object'),
    'not json': ({'1.json': b'{'}, 'row 1: 1.json is not JSON'),
    'no sample': ({'README': b'a', '.txt': b'b'}, 'a.tar holds no examples'),
}


@pytest.mark.parametrize('case', SHARDS)
def test_mistakes_in_shards(tmp_path, case: str) -> None:
    content, message = SHARDS[case]
    members(tmp_path / 'a.tar', content)
    with pytest.raises(UserError, match=message):
        load('valid', 'masked_lm', valid_path=(str(tmp_path / 'a.tar'),))
    assert sorted(path.name for path in tmp_path.iterdir()) == ['a.tar']


def test_members_that_belong_to_no_sample_are_ignored(tmp_path) -> None:
    content = {'README': b'read', './1.txt': b'one', './.DS_Store': bytes(4), './._2.txt': bytes(4), '2.txt': b'two'}
    members(tmp_path / 'a.tar', content)
    assert load('valid', 'masked_lm', valid_path=(str(tmp_path / 'a.tar'),)) == [{'text': 'one'}, {'text': 'two'}]


def test_a_byte_order_mark_is_no_part_of_a_member(tmp_path) -> None:
    members(tmp_path / 'a.tar', {'a.txt': b'\xef\xbb\xbfone', 'a.cls': b'x', 'b.json': b'\xef\xbb\xbf{"text": "two"}'})
    assert load('valid', 'masked_lm', valid_path=(str(tmp_path / 'a.tar'),)) == [{'text': 'one'}, {'text': 'two'}]


def test_a_shard_has_no_links(tmp_path) -> None:
    with tarfile.open(tmp_path / 'a.tar', 'w') as tar:
        link = tarfile.TarInfo('1.txt')
        link.type, link.linkname = tarfile.SYMTYPE, '/etc/passwd'
        tar.addfile(link)
    with pytest.raises(UserError, match=r"its member '1.txt' is not a file"):
        load('valid', 'masked_lm', valid_path=(str(tmp_path / 'a.tar'),))


def test_array_records_of_text(tmp_path) -> None:
    module = pytest.importorskip('array_record.python.array_record_module')
    writer = module.ArrayRecordWriter(str(tmp_path / 'a.array_record'), 'group_size:4')
    for text in ('one', '{two', 'three'):
        writer.write(text.encode())
    writer.close()
    found = load('valid', 'masked_lm', valid_path=(str(tmp_path / 'a.array_record'),))
    assert found == [{'text': 'one'}, {'text': '{two'}, {'text': 'three'}]


def test_a_first_array_record_that_json_cannot_read_is_one_bad_row(tmp_path) -> None:
    module = pytest.importorskip('array_record.python.array_record_module')
    writer = module.ArrayRecordWriter(str(tmp_path / 'a.array_record'), 'group_size:4')
    for text in ('{"text": ' + '1' * 5_000 + '}', '{"text": ' + '[' * 100_000, '{"text": "three"}'):
        writer.write(text.encode())
    writer.close()
    assert load('valid', 'masked_lm', valid_path=(str(tmp_path / 'a.array_record'),), bad_lines='skip') == [
        {'text': 'three'}
    ]
    with pytest.raises(UserError, match=r'a.array_record row 1: '):
        load('valid', 'masked_lm', valid_path=(str(tmp_path / 'a.array_record'),))


def test_an_old_feather_says_so(tmp_path) -> None:
    (tmp_path / 'a.feather').write_bytes(b'FEA1' + bytes(40))
    with pytest.raises(UserError, match=r'a.feather is Feather of version 1: write it as version 2'):
        load('valid', 'masked_lm', valid_path=(str(tmp_path / 'a.feather'),))


def test_a_missing_package_is_one_line(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquets(tmp_path / 'a.parquet', BAD[:1])
    packed(tmp_path / 'a.jsonl.zst', BAD[:1])
    monkeypatch.setitem(__import__('sys').modules, 'pyarrow', None)
    monkeypatch.setitem(__import__('sys').modules, 'pyarrow.parquet', None)
    for name in ('a.parquet', 'a.jsonl.zst'):
        with pytest.raises(UserError, match=r"need the package pyarrow: pip install 'tformer\[parquet\]'$"):
            load('valid', 'masked_lm', valid_path=(str(tmp_path / name),))


def test_a_file_is_read_a_few_rows_at_a_time(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One giant row group, and one giant batch of Arrow, become Python's objects a part at a time."""
    sizes, held = [], []
    real = tables._python

    def counted(batch):
        sizes.append(batch.num_rows)
        held.append(pyarrow.total_allocated_bytes())
        return real(batch)

    monkeypatch.setattr(tables, '_python', counted)
    table = pyarrow.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / 'a.parquet', row_group_size=len(ROWS))
    feather.write_feather(table, str(tmp_path / 'a.feather'), chunksize=len(ROWS))
    for name in ('a.parquet', 'a.feather'):
        assert len(load('valid', valid_path=(str(tmp_path / name),))) == len(ROWS)
    assert max(sizes) <= tables.AT_ONCE and sum(sizes) == 2 * len(ROWS)
    rng = np.random.default_rng(0)
    texts = [rng.bytes(800).hex() for _ in range(8_000)]
    parquet.write_table(pyarrow.table({'text': texts}), tmp_path / 'big.parquet', compression='none')
    del held[:]
    before, size = pyarrow.total_allocated_bytes(), sum(map(len, texts))
    assert len(load('valid', 'masked_lm', valid_path=(str(tmp_path / 'big.parquet'),))) == len(texts)
    assert max(held) - before < size / 2
