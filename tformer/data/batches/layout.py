"""The rows of a split: its parts tokenised, cut and laid out, and which rows a batch has."""

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from tformer.config.run import Config
from tformer.data import cache, order
from tformer.data.batches import packing
from tformer.data.examples.example_formats import Examples
from tformer.data.ragged import Ragged

LAYOUT, SHUFFLE, CORRUPT, SAMPLE = range(4)  # what a random stream is for


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a mixture, laid out."""

    examples: Examples
    rows: Ragged  # the examples of each row
    by_bucket: tuple[np.ndarray, ...]  # the rows of each shape
    epochs: float  # passes over this part in one epoch of the mixture


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a batch, each array int64 [rows]."""

    part: np.ndarray  # -1: an empty row
    epoch: np.ndarray  # how many passes over the part came before
    row: np.ndarray  # of the part


def lay_out(
    config: Config, number: int, examples: Examples, epochs: float, batching: str, shapes: packing.Shapes, cached: bool
) -> Part:
    """Lays out part `number` of a mixture, or finds the layout in the cache, where packing took its time."""
    limits = np.max(shapes, axis=0)

    def rows() -> Ragged:
        rng = np.random.default_rng((config.train.seed, LAYOUT, number))
        return packing.BATCHING[batching].rows(examples.lengths, limits, rng)

    def write(writer: cache.Writer) -> None:
        made = rows()
        writer.append('examples', made.flat)
        writer.append('offsets', made.offsets)

    if cached and batching == 'pack':
        depends_on = {
            'layout': packing.WINDOW,
            'lengths': hashlib.blake2b(np.ascontiguousarray(examples.lengths).data).hexdigest(),
            'limits': limits.tolist(),
            'stream': [config.train.seed, number],
        }
        found, _ = cache.arrays(cache.directory(config.data), depends_on, write)
        laid = Ragged(found['examples'], found['offsets'])
    else:
        laid = rows()
    several = len(shapes) > 1
    bucket = packing.bucket_of(examples.lengths, shapes) if several else np.zeros(len(laid), np.int64)
    return Part(examples, laid, tuple(np.flatnonzero(bucket == index) for index in range(len(shapes))), epochs)


class TrainSampler:
    """The batches of training, found by arithmetic: nothing is kept from one step to the next.

    Batches of the shapes alternate in proportion to their rows, and so do rows of the parts within a batch. Each row
    of a part comes once in each pass over it, in an order of that pass; the rows left at its end come before the first
    ones of the next.
    """

    def __init__(self, parts: Sequence[Part], widths: Sequence[int], seed: int) -> None:
        """`widths` are the rows of a batch of each shape."""
        self._parts, self._widths, self._seed = parts, np.array(widths), seed
        self._rates = np.array([[len(rows) * part.epochs for rows in part.by_bucket] for part in parts]).T
        self._batch_rates = self._rates.sum(axis=1) / self._widths  # batches of each shape in an epoch
        self.steps_per_epoch = float(self._batch_rates.sum())

    def find(self, step: int) -> tuple[int, Rows]:
        """The shape of a step, and its rows."""
        (bucket,), (batch,) = order.interleave(self._batch_rates, step, 1)
        width = int(self._widths[bucket])
        there = np.flatnonzero(self._rates[bucket])
        stream, places = order.interleave(self._rates[bucket][there], int(batch) * width, width)
        part, epoch, row = there[stream], np.zeros(width, np.int64), np.zeros(width, np.int64)
        for number in there.tolist():
            rows = self._parts[number].by_bucket[bucket]
            mine = np.flatnonzero(part == number)
            epoch[mine], place = np.divmod(places[mine], len(rows))
            for now in np.unique(epoch[mine]):
                key = (self._seed, SHUFFLE, number, int(bucket), int(now))
                here = epoch[mine] == now
                row[mine[here]] = rows[order.permuted(place[here], len(rows), key)]
        return int(bucket), Rows(part, epoch, row)


class EvalSampler:
    """The batches of an evaluation: each row once, in order, the last batch of a shape filled up."""

    def __init__(self, parts: Sequence[Part], widths: Sequence[int]) -> None:
        self._batches = []
        for bucket, width in enumerate(widths):
            rows = np.concatenate([part.by_bucket[bucket] for part in parts])
            owner = np.repeat(np.arange(len(parts)), [len(part.by_bucket[bucket]) for part in parts])
            for start in range(0, len(rows), width):
                some = slice(start, start + width)
                empty = (0, width - len(rows[some]))
                part, row = (np.pad(values[some], empty, constant_values=-1) for values in (owner, rows))
                self._batches.append((bucket, Rows(part, np.zeros_like(row), row)))
        self._batches.sort(key=lambda batch: (batch[1].part[0], batch[1].row[0]))
        self.steps_per_epoch = len(self._batches)

    def find(self, step: int) -> tuple[int, Rows]:
        """The shape of a step, and its rows."""
        return self._batches[step]
