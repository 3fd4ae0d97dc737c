"""The pieces of documents by arithmetic: neither memory nor the time of a step grows with their number."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tformer.data.ragged import Computed, Ragged

MOST_BLOCKS = 1 << 18  # of documents: no table of this file has more numbers
_AT_ONCE = 1 << 22  # documents that are counted together


@dataclasses.dataclass(frozen=True)
class Spans:
    """The tokens of examples, as in `Examples`; `overlong`, bool [records], marks records that are not shown whole."""

    record: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    lengths: list[np.ndarray]
    overlong: np.ndarray

    def __len__(self) -> int:
        return len(self.record)

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        """Returns the record of an example, and its first token and the one after its last."""
        return int(self.record[index]), int(self.start[index]), int(self.stop[index])

    def of_record(self, record: int) -> range:
        """Returns the examples of a record."""
        return range(*np.searchsorted(self.record, [record, record + 1]).tolist())

    def kept(self, keep: np.ndarray) -> 'Spans':
        """Returns the examples of some records, bool [records]."""
        own = keep[self.record]
        return Spans(
            self.record[own], self.start[own], self.stop[own], [each[own] for each in self.lengths], self.overlong
        )

    @property
    def longest(self) -> int:
        """The most tokens of an example."""
        return int((self.stop - self.start).max(initial=0))

    def lengths_of(self, index: np.ndarray) -> np.ndarray:
        """Returns the positions that some examples take in each stack: int64 [k, stacks]."""
        return np.stack([each[index] for each in self.lengths], axis=1)

    def lengths_between(self, start: int, stop: int) -> np.ndarray:
        """Returns `lengths_of` the examples from `start` up to `stop`."""
        return np.stack([each[start:stop] for each in self.lengths], axis=1)

    def counted(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns lengths, int64 [n, stacks], and how many examples have each of them, int64 [n]."""
        return np.stack(self.lengths, axis=1), np.ones(len(self), np.int64)

    def by_shape(self, shape_of: Callable[[np.ndarray], np.ndarray], count: int) -> tuple[Any, ...]:
        """Returns the examples of each of `count` shapes; `shape_of` gives that of each of some lengths."""
        shape = shape_of(np.stack(self.lengths, axis=1))
        return tuple(np.flatnonzero(shape == index) for index in range(count))


@dataclasses.dataclass(frozen=True, eq=False)
class Pieces:
    """All the text, in pieces of at most `room` tokens, with the methods of `Spans`; an empty document has no piece."""

    texts: Ragged  # the tokens of the documents
    room: int
    more: int  # tokens of a document besides those of its text
    first: int  # the place of a document's first token among those of its text
    positions: np.ndarray  # int64 [room + 1, stacks], that a piece of so many tokens takes

    @functools.cached_property
    def every(self) -> '_Counted':
        return _Counted(self, np.ones(self.room + 1, bool))

    def __len__(self) -> int:
        return len(self.every)

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        (record,), (start,), (stop,) = self.find(np.array([index]))
        return int(record), int(start), int(stop)

    def find(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the record, the first token and the one after the last, of some pieces: int64 [k] each."""
        record, ordinal = self.every.find(index)
        start = ordinal * self.room
        stop = np.minimum(start + self.room, self.sizes(record))
        return record, start + self.first, stop + self.first

    def sizes(self, records: Any) -> np.ndarray:
        """Returns the tokens that some documents, int64 [k] or a slice, are cut into: int64 [k]."""
        return self.texts.sizes(records) + self.more

    def of_record(self, record: int) -> range:
        return range(*self.every.before(np.array([record, record + 1])).tolist())

    def kept(self, keep: np.ndarray) -> Spans:
        whole = self.find(np.arange(len(self)))
        return Spans(*whole, list(self.positions[whole[2] - whole[1]].T), self.overlong).kept(keep)

    @property
    def overlong(self) -> np.ndarray:
        return np.broadcast_to(False, len(self.texts))

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """The pieces of each size: int64 [room + 1]."""
        found = np.zeros(self.room + 1, np.int64)
        for some in _blocks(len(self.texts)):
            full, left = np.divmod(self.sizes(some), self.room)
            found += np.bincount(left, minlength=self.room + 1)
            found[self.room] += full.sum()
        found[0] = 0
        return found

    @property
    def longest(self) -> int:
        return int(np.flatnonzero(self.counts).max(initial=0))

    def lengths_of(self, index: np.ndarray) -> np.ndarray:
        _, start, stop = self.find(index)
        return self.positions[stop - start]

    def lengths_between(self, start: int, stop: int) -> np.ndarray:
        size = np.full(stop - start, self.room)
        if len(size):
            (first, last), (skipped, _) = self.every.find(np.array([start, stop - 1]))
            full, left = np.divmod(self.sizes(slice(int(first), int(last) + 1)), self.room)
            ends = np.cumsum(full + (left > 0)) - 1 - skipped  # the last piece of each document
            cut = (left > 0) & (ends >= 0) & (ends < len(size))
            size[ends[cut]] = left[cut]
        return self.positions[size]

    def counted(self) -> tuple[np.ndarray, np.ndarray]:
        sizes = np.flatnonzero(self.counts)
        return self.positions[sizes], self.counts[sizes]

    def by_shape(self, shape_of: Callable[[np.ndarray], np.ndarray], count: int) -> tuple[Any, ...]:
        shape = shape_of(self.positions)
        of_shapes = (_Counted(self, shape == index) for index in range(count))
        return tuple(Computed(len(each), each.numbers) for each in of_shapes)


class _Counted:
    """The pieces of some sizes, `wanted`, bool [room + 1]; all pieces of a document but the last one are full.

    `_starts`, int64 [blocks + 1], are how many come before each block of `_stride` documents. The rest is counted anew,
    within one block, for every piece that is looked for.
    """

    def __init__(self, pieces: Pieces, wanted: np.ndarray) -> None:
        self._pieces, self._wanted = pieces, wanted & (np.arange(len(wanted)) > 0)
        documents = len(pieces.texts)
        self._stride = -(-documents // MOST_BLOCKS) or 1
        sums = [np.zeros(1, np.int64)]
        for some in _blocks(documents, max(_AT_ONCE // self._stride, 1) * self._stride):
            counts = self._counts(some)
            sums.append(np.add.reduceat(counts, np.arange(0, len(counts), self._stride)))
        self._starts = np.cumsum(np.concatenate(sums))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def find(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the document of some of these pieces, and their number among its own: int64 [k] each."""
        block = np.searchsorted(self._starts, index, 'right') - 1
        document, before = block * self._stride, self._starts[block]
        for own, edges, mine in self._within(block):
            place = np.searchsorted(edges, index[mine], 'right') - 1
            document[mine] = own[place // self._stride] * self._stride + place % self._stride
            before[mine] = edges[place]
        return document, index - before

    def before(self, document: np.ndarray) -> np.ndarray:
        """Returns how many of these pieces come before those of some documents: int64 [k]."""
        block, inside = np.divmod(document, self._stride)
        before = self._starts[block]
        for own, edges, mine in self._within(block):
            before[mine] = edges[np.searchsorted(own, block[mine]) * self._stride + inside[mine]]
        return before

    def numbers(self, index: np.ndarray) -> np.ndarray:
        """Returns the numbers of some of these pieces among all pieces: int64 [k]."""
        pieces = self._pieces
        document, ordinal = self.find(index)
        if not self._wanted[pieces.room]:  # the last one
            ordinal = pieces.sizes(document) // pieces.room
        return pieces.every.before(document) + ordinal

    def _within(self, block: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yields some of the blocks, int64 [n] ascending; how many pieces come before each of their documents, int64
        [n * stride]; and where these blocks stand in `block`, int64 [k]. Nothing if a block is one document."""
        if self._stride == 1:
            return
        blocks, of = np.unique(block, return_inverse=True)
        together = max(_AT_ONCE // self._stride, 1)
        for some in _blocks(len(blocks), together):
            own = blocks[some]
            documents = own[:, None] * self._stride + np.arange(self._stride)
            last = len(self._pieces.texts) - 1
            counts = self._counts(np.minimum(documents, last).ravel()).reshape(documents.shape) * (documents <= last)
            edges = self._starts[own][:, None] + np.cumsum(counts, axis=1) - counts
            yield own, edges.ravel(), np.flatnonzero((of >= some.start) & (of < some.stop))

    def _counts(self, documents: Any) -> np.ndarray:
        """Returns how many of these pieces some documents have: int64 [k]."""
        full, left = np.divmod(self._pieces.sizes(documents), self._pieces.room)
        return full * self._wanted[self._pieces.room] + self._wanted[left]


def _blocks(count: int, size: int = _AT_ONCE) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))
