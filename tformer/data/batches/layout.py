"""The rows of a split and their order: parts of a mixture laid out as rows, and the sampler of each batch's rows."""

import bisect
import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tformer.config import hashing
from tformer.config.run import Config
from tformer.data import cache, order, ragged
from tformer.data.batches import packing
from tformer.data.examples.example_arrays import Examples
from tformer.data.ragged import Computed, Ragged

LAYOUT, SHUFFLE, CORRUPT, SAMPLE = range(4)  # the use of a random stream
_AT_ONCE = 1 << 20  # rows, or examples, that are read together


Stage = tuple[int, list[float]]  # its first step, and the passes over each part in an epoch


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a mixture, laid out."""

    examples: Examples
    rows: Ragged  # the examples of each row
    by_bucket: tuple[Any, ...]  # the rows of each shape: arrays of int64, or `Computed`
    epochs: float  # passes over this part in one epoch of the mixture, at the first step


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a batch; each array is int64 [rows]."""

    part: np.ndarray  # -1: an empty row
    epoch: np.ndarray  # passes over the part before this one
    row: np.ndarray  # index among the part's rows


def lay_out(
    config: Config, part: int, examples: Examples, epochs: float, batching: str, shapes: packing.Shapes, cached: bool
) -> Part:
    """Lays out the examples of the mixture's part number `part`, by a key of packing.BATCHING.

    A packed layout takes time: if it may be `cached`, it is taken from the cache or put there.
    """
    how, limits = packing.BATCHING[batching], np.max(shapes, axis=0)
    lengths: Any = Computed(len(examples), examples.spans.lengths_of, examples.spans.lengths_between)
    kind = 'i' if len(examples) < 1 << 31 else 'q'
    rows = functools.partial(how.rows, lengths, limits, np.random.default_rng((config.train.seed, LAYOUT, part)))

    def write(writer: cache.Writer) -> None:
        stop = 0
        writer.append('offsets', np.zeros(1, np.int64))
        for some in _in_blocks(rows(), kind):
            writer.append('examples', some.flat)
            writer.append('offsets', some.offsets[1:] + stop)
            stop += len(some.flat)

    def check(arrays: cache.Arrays, facts: cache.Facts) -> None:
        ragged.check(arrays['examples'], arrays['offsets'], np.dtype(kind))
        every: Any = Computed(len(examples))
        if len(arrays['examples']) != len(every) or order.summed(arrays['examples']) != order.summed(every):
            raise ValueError(f'its rows do not hold each of {len(examples)} examples once')

    if cached and how.packs:
        some = (np.ascontiguousarray(lengths[start : start + _AT_ONCE]) for start in range(0, len(lengths), _AT_ONCE))
        depends_on = {
            'layout': how.plan,
            'lengths': hashing.digest_bytes(*some, size=64),
            'limits': limits.tolist(),
            'stream': [config.train.seed, part],
        }
        arrays, _ = cache.arrays(cache.directory(config.data), depends_on, write, check)
        laid = Ragged(arrays['examples'], arrays['offsets'])
    else:
        made = rows()
        laid = made if isinstance(made, Ragged) else Ragged.of(made, kind)
    by_bucket: tuple[Any, ...] = (Computed(len(laid)),)
    if len(shapes) > 1:
        by_bucket = examples.spans.by_shape(functools.partial(packing.bucket_of, shapes=shapes), len(shapes))
    return Part(examples, laid, by_bucket, epochs)


def _in_blocks(rows: Iterable[Iterable[int]], kind: str) -> Iterator[Ragged]:
    """Yields rows that are made already at once, and others as many together as are held in memory."""
    if isinstance(rows, Ragged):
        yield Ragged(rows.flat.astype(kind, copy=False), rows.offsets)
        return
    made = iter(rows)
    while len(some := Ragged.of(itertools.islice(made, _AT_ONCE), kind)):
        yield some


class TrainSampler:
    """The rows of each training batch, computed from its step alone, without state.

    Batches of the different shapes alternate in proportion to their rows; within a batch, so do rows of the parts. Each
    pass over a part takes each of its rows once, in its own random order. The rows left over at the end of a pass come
    before the first rows of the next. A new stage of the mixture goes on with the rows of each part where the one
    before it ends.
    """

    def __init__(self, parts: Sequence[Part], widths: Sequence[int], seed: int, stages: Sequence[Stage] = ()) -> None:
        """Takes the parts, the number of rows in a batch of each shape, the seed of the orders, and the later stages:
        the first step of each, and the passes over each part from then on."""
        self._parts, self._widths, self._seed = parts, np.array(widths), seed
        sizes = np.array([[len(rows) for rows in part.by_bucket] for part in parts]).T
        self._starts = [0, *(start for start, _ in stages)]
        passes = [[part.epochs for part in parts], *(passes for _, passes in stages)]
        self._rates = [sizes * np.array(own) for own in passes]  # of each stage [shapes, parts]
        self.batch_rates = [rates.sum(axis=1) / self._widths for rates in self._rates]  # batches of each shape an epoch
        self.steps_per_epoch = float(self.batch_rates[0].sum())
        self._before = [np.zeros_like(sizes)]  # rows of each shape and part that come before each stage
        for stage, stop in enumerate(self._starts[1:]):
            self._before.append(self._before[-1] + self._taken(stage, stop - self._starts[stage]))

    def _taken(self, stage: int, steps: int) -> np.ndarray:
        """Returns how many rows of each shape and part are in the first `steps` of a stage: int64 [shapes, parts]."""
        found = np.zeros_like(self._before[0])
        used, rates = np.flatnonzero(self.batch_rates[stage]), self._rates[stage]
        for bucket, batches in zip(used, order.taken(self.batch_rates[stage][used], steps), strict=True):
            seen = np.flatnonzero(rates[bucket])
            found[bucket, seen] = order.taken(rates[bucket][seen], int(batches * self._widths[bucket]))
        return found

    def find(self, step: int) -> tuple[int, Rows]:
        """Returns the index of the shape of a step, and its rows."""
        stage = bisect.bisect_right(self._starts, step) - 1
        used = np.flatnonzero(self.batch_rates[stage])
        (shape,), (batch,) = order.interleave(self.batch_rates[stage][used], step - self._starts[stage], 1)
        bucket = int(used[shape])
        width, rates = int(self._widths[bucket]), self._rates[stage][bucket]
        nonempty = np.flatnonzero(rates)  # parts with rows of this shape
        stream, items = order.interleave(rates[nonempty], int(batch) * width, width)
        part, epoch, row = nonempty[stream], np.zeros(width, np.int64), np.zeros(width, np.int64)
        for index in nonempty.tolist():
            rows = self._parts[index].by_bucket[bucket]
            mine = np.flatnonzero(part == index)
            epoch[mine], item = np.divmod(items[mine] + self._before[stage][bucket, index], len(rows))
            for now in np.unique(epoch[mine]):
                key = (self._seed, SHUFFLE, index, bucket, int(now))
                in_epoch = epoch[mine] == now
                row[mine[in_epoch]] = rows[order.permuted(item[in_epoch], len(rows), key)]
        return bucket, Rows(part, epoch, row)


RARE = 4  # a shape of fewer evaluation batches is not worth a program of its own


class EvalSampler:
    """The rows of each evaluation batch: every row once, in order; empty rows complete the last batch of a shape.

    Batches of a rare shape are padded to a larger one that occurs, so that few programs are compiled.
    """

    def __init__(self, parts: Sequence[Part], widths: Sequence[int], shapes: packing.Shapes) -> None:
        self._batches = []
        for bucket, width in enumerate(widths):
            rows = np.concatenate([part.by_bucket[bucket] for part in parts])
            owner = np.repeat(np.arange(len(parts)), [len(part.by_bucket[bucket]) for part in parts])
            empty = (0, -len(rows) % width)
            part, row = (np.pad(values, empty, constant_values=-1).reshape(-1, width) for values in (owner, rows))
            self._batches += [(bucket, Rows(*batch)) for batch in zip(part, np.zeros_like(row), row, strict=True)]
        counts = collections.Counter(bucket for bucket, _ in self._batches)
        padded = fewer_shapes([counts[bucket] for bucket in range(len(shapes))], widths, shapes)
        self._batches = [(padded[bucket], rows) for bucket, rows in self._batches]
        self._batches.sort(key=lambda batch: (batch[1].part[0], batch[1].row[0]))
        self.steps_per_epoch = len(self._batches)

    def find(self, step: int) -> tuple[int, Rows]:
        """Returns the index of the shape of a step, and its rows."""
        return self._batches[step]


def fewer_shapes(counts: Sequence[int], widths: Sequence[int], shapes: packing.Shapes) -> list[int]:
    """Returns the index of the shape to which the batches of each shape are padded: their own, unless they are RARE.

    `counts` are the batches of each shape, and `widths` their rows, which stay as they are. Of the larger shapes that
    occur, it is the smallest.
    """
    found, left = list(range(len(shapes))), list(counts)
    for own in sorted(range(len(shapes)), key=lambda index: sum(shapes[index])):
        larger = [
            other
            for other in range(len(shapes))
            if left[other] and other != own and widths[other] == widths[own]
            if all(there >= here for there, here in zip(shapes[other], shapes[own], strict=True))
        ]
        if 0 < left[own] < RARE and larger:
            target = min(larger, key=lambda index: sum(shapes[index]))
            left[target], left[own] = left[target] + left[own], 0
            found = [target if index == own else index for index in found]
    return found
