"""What a source gives for each objective, and how a key decides about its split."""

import abc
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

# The fields of an objective, as str; seq2seq may add `references`: list[str], all acceptable targets.
Record = dict[str, Any]

SPLITS = ('train', 'valid', 'test')

Read = Callable[[], tuple[Sequence[Record], int]]  # gives (the records, how many bad ones were skipped)

FIELDS: dict[str, tuple[str, ...]] = {
    'causal_lm': ('text',),
    'masked_lm': ('text',),
    'masked_lm_nsp': ('text',),
    'masked_lm_sop': ('text',),
    'replaced_token': ('text',),
    'seq2seq': ('source', 'target'),
    'classification': ('label', 'text'),
    'regression': ('label', 'text'),
    'token_classification': ('tokens', 'tags'),
    'question_answering': ('question', 'context', 'answers'),
    'prefix_lm': ('text',),
    'span_corruption': ('text',),
    'denoising': ('text',),
    'ul2': ('text',),
}


class View(Sequence[Record]):
    """Records that are made when they are asked for, several at once."""

    @abc.abstractmethod
    def _records(self, indices: range) -> list[Record]:
        """The records at `indices`, which are not negative."""

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


class Split(Sequence[Record]):
    """The records of a split, read when the first of them is asked for.

    Attributes:
      fingerprint: splits of the same fingerprint have the same records, on every machine.
      skipped: how many bad lines were passed over (data.bad_lines); reads the records.
    """

    def __init__(self, fingerprint: str, read: Read) -> None:
        self.fingerprint = fingerprint
        self._read = read

    @functools.cached_property
    def _found(self) -> tuple[Sequence[Record], int]:
        return self._read()

    @property
    def skipped(self) -> int:
        return self._found[1]

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
