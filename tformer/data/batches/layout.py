"""The rows of a split and their order: parts of a mixture laid out as rows, and the sampler of each batch's rows."""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tformer.config import hashing
from tformer.config.run import Config
from tformer.data import cache, order, ragged
from tformer.data.batches import packing
from tformer.data.examples.example_arrays import Examples
from tformer.data.ragged import Computed, Ragged

LAYOUT, SHUFFLE, CORRUPT, SAMPLE = range(4)  # the use of a random stream


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a mixture, laid out."""

    examples: Examples
    rows: Ragged  # the examples of each row
    by_bucket: tuple[Any, ...]  # the rows of each shape: arrays of int64, or `Computed`
    epochs: float  # passes over this part in one epoch of the mixture


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
    limits = np.max(shapes, axis=0)
    lengths: Any = Computed(len(examples), examples.spans.lengths_of)

    def rows() -> Ragged:
        rng = np.random.default_rng((config.train.seed, LAYOUT, part))
        return packing.BATCHING[batching].rows(lengths, limits, rng)

    def write(writer: cache.Writer) -> None:
        made = rows()
        writer.append('examples', made.flat)
        writer.append('offsets', made.offsets)

    if cached and batching == 'pack':
        depends_on = {
            'layout': packing.WINDOW,
            'lengths': hashing.digest_bytes(np.ascontiguousarray(lengths), size=64),
            'limits': limits.tolist(),
            'stream': [config.train.seed, part],
        }

        def check(arrays: cache.Arrays, facts: cache.Facts) -> None:
            ragged.check(arrays['examples'], arrays['offsets'], np.int32)
            if not np.array_equal(np.sort(arrays['examples']), np.arange(len(examples))):
                raise ValueError(f'its rows do not hold each of {len(examples)} examples once')

        arrays, _ = cache.arrays(cache.directory(config.data), depends_on, write, check)
        laid = Ragged(arrays['examples'], arrays['offsets'])
    else:
        laid = rows()
    by_bucket: tuple[Any, ...] = (Computed(len(laid)),)
    if len(shapes) > 1:
        by_bucket = examples.spans.by_shape(functools.partial(packing.bucket_of, shapes=shapes), len(shapes))
    return Part(examples, laid, by_bucket, epochs)


class TrainSampler:
    """The rows of each training batch, computed from its step alone, without state.

    Batches of the different shapes alternate in proportion to their rows; within a batch, so do rows of the parts. Each
    pass over a part takes each of its rows once, in its own random order. The rows left over at the end of a pass come
    before the first rows of the next.
    """

    def __init__(self, parts: Sequence[Part], widths: Sequence[int], seed: int) -> None:
        """Takes the parts, the number of rows in a batch of each shape, and the seed of the orders."""
        self._parts, self._widths, self._seed = parts, np.array(widths), seed
        self._rates = np.array([[len(rows) * part.epochs for rows in part.by_bucket] for part in parts]).T
        self.batch_rates = self._rates.sum(axis=1) / self._widths  # batches of each shape in an epoch
        self.steps_per_epoch = float(self.batch_rates.sum())

    def find(self, step: int) -> tuple[int, Rows]:
        """Returns the index of the shape of a step, and its rows."""
        (bucket,), (batch,) = order.interleave(self.batch_rates, step, 1)
        width = int(self._widths[bucket])
        nonempty = np.flatnonzero(self._rates[bucket])  # parts with rows of this shape
        stream, items = order.interleave(self._rates[bucket][nonempty], int(batch) * width, width)
        part, epoch, row = nonempty[stream], np.zeros(width, np.int64), np.zeros(width, np.int64)
        for index in nonempty.tolist():
            rows = self._parts[index].by_bucket[bucket]
            mine = np.flatnonzero(part == index)
            epoch[mine], item = np.divmod(items[mine], len(rows))
            for now in np.unique(epoch[mine]):
                key = (self._seed, SHUFFLE, index, int(bucket), int(now))
                in_epoch = epoch[mine] == now
                row[mine[in_epoch]] = rows[order.permuted(item[in_epoch], len(rows), key)]
        return int(bucket), Rows(part, epoch, row)


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
            for start in range(0, len(rows), width):
                in_batch = slice(start, start + width)
                empty = (0, width - len(rows[in_batch]))
                part, row = (np.pad(values[in_batch], empty, constant_values=-1) for values in (owner, rows))
                self._batches.append((bucket, Rows(part, np.zeros_like(row), row)))
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
