"""Records: their fields, their splits, and the treatment of malformed ones."""

import abc
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tformer.config import hashing
from tformer.config.tasks import TASKS
from tformer.data.order import permuted
from tformer.errors import UserError, choose, nearest

# The fields of an objective (`config.tasks`) and some of its optional ones: str, but
#   label of regression and cosine_similarity: float; of multiple_choice: int, the right one of `choices` from 0;
#   tokens, tags: list[str], equally long, tags as BIO (O, B-TYPE, I-TYPE);
#   answers: list of (start in the context in characters, text), [] where the question has none;
#   references: list[str], all acceptable targets;
#   negative: list[str], texts that are not `positive`; choices: list[str];
#   texts: list[str], all texts of a row that holds several, made of the other fields;
#   messages: list of {"role": str, "content": str}.
# Records with labels have `where` besides: the file and line, or the set, split and number that they come from.
Record = dict[str, Any]

SPLITS = ('train', 'valid', 'test')

Read = Callable[[], tuple[Sequence[Record], int]]  # gives (the records, how many bad ones were skipped)

_AHEAD = 1024  # records read together, which is ten times as fast as one by one for a TFDS set
_NO_TEXT = ('label', 'tags', 'answers', 'references')


def texts(record: Record, objective: str) -> list[str]:
    """Returns the texts of a record that are tokenised."""
    named = (*TASKS[objective].fields, *TASKS[objective].optional)
    return [text_of(record, field) for field in named if field in record and field not in _NO_TEXT]


def text_of(record: Record, field: str) -> str:
    """Returns the text of a field: words, or roles and messages, joined by spaces; '' if the record lacks it."""
    value = record.get(field, '')
    if field == 'messages':
        value = [part for message in value for part in message.values()]
    return value if isinstance(value, str) else ' '.join(value)


class BadRecord(ValueError):
    """The reason why a record is malformed."""


def no_key(key: str, values: Mapping[str, Any]) -> BadRecord:
    """Returns the error to raise where `values` have no `key`."""
    return BadRecord(f'no key {key!r}{nearest(key, [name for name in values if name.isprintable()])}')


class Bad:
    """The treatment of bad records by data.bad_lines: `found` stops the run, or counts the record as `skipped`."""

    def __init__(self, rule: str) -> None:
        self.skipped = 0
        self._stops = choose(BAD_LINES, rule, 'data.bad_lines')

    def found(self, where: str, why: object) -> None:
        """Treats the bad record at `where`, e.g. 'train.tsv:7', which the caller leaves out."""
        if self._stops:
            raise UserError(f'{where}: {why}')
        self.skipped += 1


class View(Sequence[Record]):
    """Records that are made on access, several at once."""

    @abc.abstractmethod
    def _records(self, indices: Sequence[int]) -> list[Record]:
        """Returns the records at `indices`, which are not negative."""

    def chunks(self) -> Iterator[range]:
        """Yields ranges of indices, each as long as records are read together."""
        for start in range(0, len(self), _AHEAD):
            yield range(len(self))[start : start + _AHEAD]

    def __iter__(self) -> Iterator[Record]:
        for some in self.chunks():
            yield from self._records(some)

    def __getitem__(self, index: Any) -> Any:
        found = range(len(self))[index]  # an index, or the indices of a slice
        return self._records(found) if isinstance(found, range) else self._records([found])[0]

    def taken(self, indices: Sequence[int]) -> 'View':
        """Returns the records at some indices, in their order."""
        return Subset(self, indices)


class Subset(View):
    """The records at some indices of others, in the order of the indices."""

    def __init__(self, records: Sequence[Record], indices: Sequence[int]) -> None:
        self._all, self._indices = records, indices

    def __len__(self) -> int:
        return len(self._indices)

    def _records(self, indices: Sequence[int]) -> list[Record]:
        inner = [self._indices[index] for index in indices]
        return self._all._records(inner) if isinstance(self._all, View) else [self._all[index] for index in inner]


def _taken(records: Sequence[Record], indices: Sequence[int]) -> View:
    return records.taken(indices) if isinstance(records, View) else Subset(records, indices)


class Split(Sequence[Record]):
    """The records of a split, read on first access."""

    def __init__(self, fingerprint: str, read: Read, whole: 'Split | None' = None, of_tokens: bool = False) -> None:
        self.fingerprint = fingerprint  # splits with the same one have the same records, on every machine
        self.whole = self if whole is None else whole  # the split that this is a sample of (data.train_examples)
        self.of_tokens = of_tokens  # whether `contents` are `token_files.Tokens`
        self._read = read

    @property
    def contents(self) -> Sequence[Record]:
        """The records as the source gives them."""
        return self._contents[0]

    @functools.cached_property
    def _contents(self) -> tuple[Sequence[Record], int]:
        return self._read()

    @property
    def skipped(self) -> int:
        """The number of bad lines that were skipped (data.bad_lines)."""
        return self._contents[1]

    def first(self, count: int) -> 'Split':
        """Returns the first `count` records, of which there are so many."""

        def read() -> tuple[Sequence[Record], int]:
            records, skipped = self._contents
            return _taken(records, range(count)), skipped

        return Split(fingerprint('first', self.fingerprint, count), read, of_tokens=self.of_tokens)

    def sample(self, count: int, key: tuple[int, ...]) -> 'Split':
        """Returns the first `count` records in the random order of `key`; a larger sample starts with a smaller one."""

        def read() -> tuple[Sequence[Record], int]:
            records, skipped = self._contents
            if count > len(records):
                raise UserError(f'data.train_examples={count} is more than the training split has: {len(records)}')
            return _taken(records, permuted(np.arange(count), len(records), key).tolist()), skipped

        return Split(fingerprint('sample', self.fingerprint, count, key), read, self, self.of_tokens)

    def __len__(self) -> int:
        return len(self._contents[0])

    def __getitem__(self, index: Any) -> Any:
        return self._contents[0][index]

    def __iter__(self) -> Iterator[Record]:
        return iter(self._contents[0])


def fingerprint(*parts: Any) -> str:
    """Returns a short hash of JSON values, the same on every machine."""
    return hashing.digest_json(parts)


def place_of(key: str) -> float:
    """Returns a number in [0, 1) from the MD5 hash of `key`, the same on every machine."""
    return int.from_bytes(hashlib.md5(key.encode()).digest()[:8], 'big') / 2**64


def split_of(key: str, valid: float, test: float) -> str:
    """Returns the split of `key` by its hash: `valid` and `test` are the shares of these splits, train has the rest."""
    place = place_of(key)
    return 'valid' if place < valid else 'test' if place < valid + test else 'train'


BAD_LINES: dict[str, bool] = {'stop': True, 'skip': False}  # whether a bad record stops the run
