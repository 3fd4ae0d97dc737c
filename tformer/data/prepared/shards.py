"""Prepared sets: documents of tokens in ArrayRecord files, and an index that says where each of them is.

A set is a directory with `prepared.json`, the index; the shards `SPLIT-NUMBER-of-COUNT.array_record`; two arrays with a
number for each document of a split, `SPLIT.lengths` (its tokens) and `SPLIT.records` (its first record); and the
tokenizer. The record of a shard is a document's tokens, or a part of them, and a checksum. A process reads the index
and the arrays, and opens a shard when it needs one of its documents.
"""

import dataclasses
import functools
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tformer.config import hashing
from tformer.data import remote
from tformer.data.ragged import Documents, mapped
from tformer.data.sources.records import fingerprint
from tformer.data.sources.token_files import Tokens
from tformer.data.tokenizers.vocabulary import Tokenizer
from tformer.errors import NoSplitError, UserError, nearest

INDEX = 'prepared.json'
LONGEST = 1 << 12  # tokens of a record; a longer document is several
_OPEN = 512  # shards that a process has open at once
_ARRAYS: dict[str, np.dtype[Any]] = {'lengths': np.dtype('<i4'), 'records': np.dtype('<i8')}
_SUM = 4  # bytes of a checksum


def write(file: Path, documents: Iterable[np.ndarray]) -> None:
    """Writes documents, each an array of tokens, as a shard. Raises an `OSError` where that fails."""
    from array_record.python import array_record_module

    number = 0
    try:
        writer = array_record_module.ArrayRecordWriter(str(file), 'group_size:1,uncompressed')
        for tokens in documents:
            for start in range(0, len(tokens), LONGEST):
                content = tokens[start : start + LONGEST].tobytes()
                writer.write(content + _checksum(content, number))
                number += 1
        writer.close()
    except RuntimeError as error:
        raise OSError(str(error).splitlines()[0]) from error


def _checksum(content: bytes, number: int) -> bytes:
    """Of a record and its number: those of ArrayRecord's own leave bytes out."""
    return zlib.crc32(content, number).to_bytes(_SUM, 'little')


def records_of(lengths: np.ndarray) -> np.ndarray:
    """Returns the number of records of documents of so many tokens, int64 [documents]."""
    return -(-lengths.astype(np.int64) // LONGEST)


# ------------------------------------------------------------------------------------------------------------ the index


def is_set(name: str) -> bool:
    """Returns whether a directory is a prepared set."""
    return os.path.isfile(Path(name, INDEX))  # False, too, of names that no file can have


def read_index(place: Path) -> dict[str, Any]:
    """Returns the index of a set. Raises a `UserError` if it is not as it was written."""
    try:
        index = json.loads((place / INDEX).read_text())
        written = index.pop('digest')
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise UserError(f'{place / INDEX} cannot be read: {error}') from None
    if written != hashing.digest_json(index):
        raise _changed(place / INDEX)
    return index


def faults(place: Path, index: dict[str, Any], whole: bool) -> Iterator[str]:
    """Yields the names of files that are not as they were written: by their sizes, and if `whole` by all their bytes.

    Those of the arrays are always read.
    """
    for name, (size, crc32) in index['files'].items():
        file = place / name
        sized = file.is_file() and file.stat().st_size == size
        read = whole or file.suffix[1:] in _ARRAYS
        if not sized or (read and hashing.crc32_file(file) != crc32):
            yield name


def _changed(file: Path, why: str = '') -> UserError:
    return UserError(f'{file} has changed since it was written{why}: `tformer prepare` makes it again')


# ---------------------------------------------------------------------------------------------------------- the reader


class Shards:
    """The shards of a split of the set with this fingerprint."""

    def __init__(self, place: str, split: str, mark: str) -> None:
        index = read_index(Path(place))
        if index['fingerprint'] != mark:
            raise UserError(f'{place} is another set than before')
        own = index['splits'][split]
        self.place, self.split, self.mark = place, split, mark
        self.dtype = np.dtype(index['dtype'])
        self._files = own['shards']
        self._ends = np.cumsum(own['records'])
        self.lengths, self._records = (mapped(f'{place}/{split}.{name}', dtype.str) for name, dtype in _ARRAYS.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (self.place, self.split, self.mark)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Returns some tokens of a document. Raises a `UserError` if a byte of them has changed."""
        pieces = []
        first, size = int(self._records[document]), int(self.lengths[document])
        for part in range(start // LONGEST, -(-stop // LONGEST)):
            expected = min(size - part * LONGEST, LONGEST)
            pieces.append(self._record(first + part, expected))
        if not pieces:
            return np.zeros(0, self.dtype)
        skipped = start // LONGEST * LONGEST
        return (np.concatenate(pieces) if len(pieces) > 1 else pieces[0])[start - skipped : stop - skipped]

    def _record(self, number: int, size: int) -> np.ndarray:
        shard = int(np.searchsorted(self._ends, number, side='right'))
        begin = int(self._ends[shard - 1]) if shard else 0
        file = Path(self.place, self._files[shard])
        try:
            (stored,) = _reader(str(file), int(self._ends[shard]) - begin, self.mark).read([number - begin])
        except (RuntimeError, ValueError, OSError, IndexError) as error:
            raise _changed(file, f' ({str(error).splitlines()[0]})') from error
        content = stored[:-_SUM]
        if len(content) != size * self.dtype.itemsize or stored[-_SUM:] != _checksum(content, number - begin):
            raise _changed(file)
        return np.frombuffer(content, self.dtype)


@functools.lru_cache(maxsize=64)
def _opened(place: str, split: str, mark: str) -> Shards:
    """Returns the shards of a split, which are opened once in a process."""
    return Shards(place, split, mark)  # a function, because a cache over the class would not pickle


@functools.lru_cache(maxsize=_OPEN)
def _reader(file: str, records: int, mark: str) -> Any:
    """Returns the reader of a shard, which is opened once."""
    from array_record.python import array_record_module

    reader = array_record_module.ArrayRecordReader(file, 'readahead_buffer_size:0')
    if not reader.ok() or reader.num_records() != records:
        raise ValueError(f'it does not hold {records:,} records')
    return reader


class Document:
    """The tokens of a document, of which slices are read."""

    def __init__(self, shards: Shards, row: int) -> None:
        self._shards, self._row = shards, row

    def __len__(self) -> int:
        return int(self._shards.lengths[self._row])

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, step = part.indices(len(self))
        return self._shards.read(self._row, start, max(stop, start))[::step]


class Sharded(Documents):
    """The documents of shards, or some of them by their numbers, int64 [any number]."""

    def __init__(self, shards: Shards, rows: np.ndarray | None = None) -> None:
        vars(self).update(shards=shards, rows=rows)

    shards: Shards
    rows: np.ndarray | None

    def __len__(self) -> int:
        return len(self.shards.lengths if self.rows is None else self.rows)

    def __getitem__(self, row: int) -> Any:
        return Document(self.shards, int(row if self.rows is None else self.rows[row]))

    def __reduce__(self) -> tuple[Any, ...]:
        return Sharded, (self.shards, self.rows)

    def sizes(self, rows: Any) -> np.ndarray:
        return self.shards.lengths[rows if self.rows is None else self.rows[rows]].astype(np.int64)

    def taken(self, rows: np.ndarray) -> 'Sharded':
        return Sharded(self.shards, rows if self.rows is None else self.rows[rows])


class PreparedTokens(Tokens):
    """The documents of a split of a prepared set, in place of records with text."""

    def __init__(self, place: str, tokenizer: str, documents: Sharded) -> None:
        super().__init__((), documents)
        self._place, self._tokenizer = place, tokenizer

    def taken(self, indices: Any) -> 'PreparedTokens':
        assert isinstance(self.documents, Sharded)
        return PreparedTokens(self._place, self._tokenizer, self.documents.taken(np.array(indices, np.int64)))

    @remote.by_url()
    def of_tokenizer(self, tokenizer: Tokenizer, lender: str | None = None) -> Documents:
        """Returns the documents, which have text from then on; a `UserError` if another tokenizer has written them."""
        if tokenizer.fingerprint != self._tokenizer:
            remedy = f'set data.tokenizer_from={self._place}'
            if lender not in (None, self._place):
                remedy = f'prepare it again with --config.data.tokenizer_from={lender}'
            raise UserError(f'{self._place} has tokens of another tokenizer than this run: {remedy}')
        self._decode = tokenizer.decode
        return self.documents


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads a split of a prepared set."""

    place: str
    split: str
    mark: str  # the set's fingerprint
    tokenizer: str  # that of its tokenizer
    of_tokens: ClassVar[bool] = True

    def __call__(self) -> tuple[PreparedTokens, int]:
        """Returns the documents; none is skipped."""
        return PreparedTokens(self.place, self.tokenizer, Sharded(_opened(self.place, self.split, self.mark))), 0


def load(place: str, split: str) -> tuple[str, Reader]:
    """Returns the fingerprint of a split and a function that gives its documents. No shard is opened.

    Raises:
      UserError: the set lacks the split, or a file of it is damaged.
    """
    index = read_index(Path(place))
    if split not in index['splits']:
        raise NoSplitError(f'{place} has no split {split}{nearest(split, index["splits"])}')
    for name in faults(Path(place), index, whole=False):
        raise _changed(Path(place, name))
    return fingerprint('prepared', index['fingerprint'], split), Reader(
        place, split, index['fingerprint'], index['tokenizer']
    )
