"""What a source gives for each objective, what is done about bad ones, and how a key decides about its split."""

import abc
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np

from tformer.config.tasks import TASKS
from tformer.data.order import permuted
from tformer.errors import UserError, nearest

# The fields of an objective (`config.tasks`) and some of its optional ones: str, but
#   label of regression: float;
#   tokens, tags: list[str], equally long, tags as BIO (O, B-TYPE, I-TYPE);
#   answers: list of (start in the context in characters, text), [] where the question has none;
#   references: list[str], all acceptable targets.
# Records with labels have `where` besides: the file and line, or the set, split and number that they come from.
Record = dict[str, Any]

SPLITS = ('train', 'valid', 'test')

Read = Callable[[], tuple[Sequence[Record], int]]  # gives (the records, how many bad ones were skipped)

_AHEAD = 1024  # records read together: of a TFDS set ten times as fast as one by one
_NO_TEXT = ('label', 'tags', 'answers', 'references')


def texts(record: Record, objective: str) -> list[str]:
    """The texts of a record that become tokens."""
    task = TASKS[objective]
    return [
        text_of(record, field) for field in (*task.fields, *task.optional) if field not in _NO_TEXT and field in record
    ]


def text_of(record: Record, field: str) -> str:
    """The text of a field: words with a space between, nothing where the record lacks it."""
    value = record.get(field, '')
    return value if isinstance(value, str) else ' '.join(value)


class BadRecord(ValueError):
    """Why a record is not as it should be."""


def no_key(key: str, values: Mapping[str, Any]) -> BadRecord:
    """What to raise where `values` have no `key`."""
    return BadRecord(f'no key {key!r}{nearest(key, [name for name in values if name.isprintable()])}')


class Bad:
    """What is done about bad records: a run stops at the first one, or they are left out and counted.

    Attributes:
      skipped: how many were left out until now.
    """

    def __init__(self, rule: str) -> None:
        """`rule` is a key of BAD_LINES (data.bad_lines)."""
        self.skipped = 0
        self._found = BAD_LINES[rule]

    def found(self, where: str, why: object) -> None:
        """Deals with the bad record at `where`, e.g. 'train.tsv:7', which the caller leaves out.

        Raises:
          UserError: the rule is to stop.
        """
        self._found(f'{where}: {why}')
        self.skipped += 1


class View(Sequence[Record]):
    """Records that are made when they are asked for, several at once."""

    @abc.abstractmethod
    def _records(self, indices: Sequence[int]) -> list[Record]:
        """The records at `indices`, which are not negative."""

    def chunks(self) -> Iterator[range]:
        """The places of all records, as many at once as are read together."""
        for start in range(0, len(self), _AHEAD):
            yield range(start, min(start + _AHEAD, len(self)))

    def __iter__(self) -> Iterator[Record]:
        for some in self.chunks():
            yield from self._records(some)

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...

    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return self._records(range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f'record {index} of {len(self)}')
        return self._records(range(index % len(self), index % len(self) + 1))[0]


class Subset(View):
    """Some records of others, in an order of their own."""

    def __init__(self, records: Sequence[Record], places: Sequence[int]) -> None:
        self._all, self._places = records, places

    def __len__(self) -> int:
        return len(self._places)

    def _records(self, indices: Sequence[int]) -> list[Record]:
        places = [self._places[index] for index in indices]
        return self._all._records(places) if isinstance(self._all, View) else [self._all[place] for place in places]


class Split(Sequence[Record]):
    """The records of a split, read when the first of them is asked for.

    Attributes:
      fingerprint: splits of the same fingerprint have the same records, on every machine.
      whole: what it is a sample of (data.train_examples), else itself.
      skipped: how many bad lines were passed over (data.bad_lines); reads the records.
    """

    def __init__(self, fingerprint: str, read: Read, whole: 'Split | None' = None) -> None:
        self.fingerprint = fingerprint
        self.whole = self if whole is None else whole
        self._read = read

    @functools.cached_property
    def _found(self) -> tuple[Sequence[Record], int]:
        return self._read()

    @property
    def skipped(self) -> int:
        return self._found[1]

    def sample(self, count: int, key: tuple[int, ...]) -> 'Split':
        """The first `count` records in the order of `key` (`order.permuted`): a larger sample begins as a smaller one.

        Raises:
          UserError: there are fewer, when the records are read.
        """

        def read() -> tuple[Sequence[Record], int]:
            records, skipped = self._found
            if count > len(records):
                raise UserError(f'data.train_examples={count} is more than the training split has: {len(records)}')
            return Subset(records, permuted(np.arange(count), len(records), key).tolist()), skipped

        return Split(fingerprint('sample', self.fingerprint, count, key), read, whole=self)

    def __len__(self) -> int:
        return len(self._found[0])

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Record]: ...

    def __getitem__(self, index: int | slice) -> Record | Sequence[Record]:
        return self._found[0][index]

    def __iter__(self) -> Iterator[Record]:
        return iter(self._found[0])


def fingerprint(*parts: Any) -> str:
    """A short hash of what JSON can write, the same on every machine."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def place_of(key: str) -> float:
    """The place in [0, 1) of `key` by its MD5 hash, the same on every machine."""
    return int.from_bytes(hashlib.md5(key.encode()).digest()[:8], 'big') / 2**64


def split_of(key: str, valid: float, test: float) -> str:
    """The split of `key` by its hash: these shares of all keys, train the rest."""
    place = place_of(key)
    return 'valid' if place < valid else 'test' if place < valid + test else 'train'


def _stop(line: str) -> None:
    raise UserError(line)


def _skip(line: str) -> None:
    """Left out; the caller counts it."""


BAD_LINES: dict[str, Callable[[str], None]] = {
    'stop': _stop,
    'skip': _skip,
}
