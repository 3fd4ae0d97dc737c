"""The share of padding in an epoch, under the batching of a run and under others, counted from the layout."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from tformer.config.run import Config, Data
from tformer.data.batches import layout, packing
from tformer.data.batches.pipeline import Batches
from tformer.data.examples.example_formats import format_of
from tformer.data.ragged import Ragged

MOST_SAMPLED = 20_000  # examples: packing is tried on a sample of this size, because it takes time
NUM_BUCKETS = (4, 8, 16, 32, 64, 104)  # numbers of buckets to compare
_ENCODER_MULTIPLE = 4  # a suggested length is a multiple of this


@dataclasses.dataclass(frozen=True)
class Filled:
    """The contents of the rows of an epoch, by their shape."""

    shapes: packing.Shapes
    rows: np.ndarray  # float [shapes]
    tokens: np.ndarray  # float [shapes, stacks]: positions that are not padding

    @property
    def slots(self) -> np.ndarray:
        """Positions, padding included: float [shapes, stacks]."""
        return self.rows[:, None] * np.array(self.shapes)

    @property
    def padding(self) -> float:
        """The share of padding in all positions of all stacks."""
        return 1 - float(self.tokens.sum() / self.slots.sum())

    @property
    def paddings(self) -> np.ndarray:
        """The share of padding in the positions of each stack: float [stacks]."""
        return 1 - self.tokens.sum(axis=0) / self.slots.sum(axis=0)


def filled(batches: Batches) -> Filled:
    """Counts the batches of one epoch.

    In evaluation, the empty rows that complete a batch count as padding, and so does what pads a batch of a rare shape
    to a larger one.
    """
    if batches.training:
        return _counted(batches.shapes, [(part.rows, part.examples.lengths, part.epochs) for part in batches.parts])
    found = _counted(batches.shapes, [(part.rows, part.examples.lengths, 1) for part in batches.parts])
    counts = np.ceil(found.rows / batches.widths).astype(int)
    padded = layout.fewer_shapes(counts.tolist(), batches.widths, batches.shapes)
    rows, tokens = np.zeros_like(found.rows), np.zeros_like(found.tokens)
    np.add.at(rows, padded, counts * batches.widths)
    np.add.at(tokens, padded, found.tokens)
    return Filled(batches.shapes, rows, tokens)


def laid(
    lengths: Sequence[np.ndarray], epochs: Sequence[float], limits: np.ndarray, batching: str, num_buckets: int
) -> Filled:
    """Counts an epoch of training, which passes `epochs` times over each part, under a key of packing.BATCHING.

    The examples of each part have `lengths`, int [N, stacks], which are cut to `limits`, int [stacks].
    """
    how, cut = packing.BATCHING[batching], [np.minimum(own, limits) for own in lengths]
    shapes = how.shapes(np.concatenate(cut), limits, num_buckets)
    rows = [Ragged.of(how.rows(own, limits, np.random.default_rng(0))) for own in cut]
    return _counted(shapes, zip(rows, cut, epochs, strict=True))


def _counted(shapes: packing.Shapes, parts: Iterable[tuple[Ragged, np.ndarray, float]]) -> Filled:
    """Counts an epoch of parts, each given as (its rows, the tokens of its examples, int [N, stacks], its passes)."""
    rows, tokens = np.zeros(len(shapes)), np.zeros(np.shape(shapes))
    for examples, lengths, epochs in parts:
        held = np.add.reduceat(lengths[examples.flat], examples.offsets[:-1], axis=0)  # by each row
        bucket = packing.bucket_of(held, shapes)
        rows += epochs * np.bincount(bucket, minlength=len(shapes))
        np.add.at(tokens, bucket, epochs * held)
    return Filled(shapes, rows, tokens)


def compared(config: Config, train: Batches) -> dict[str, Filled]:
    """Returns the padding of an epoch under every batching that the objective allows, by its name.

    Packing of a large split is measured on a sample. With two stacks, one more entry packs with the `balanced`
    data.encoder_length.
    """
    data, example_format = config.data, format_of(config)
    every, epochs = [part.examples.lengths for part in train.parts], [part.epochs for part in train.parts]
    limits = longest(data, every[0].shape[1])
    own = f'bucket, {train.num_buckets}' if data.batching == 'bucket' else data.batching
    paddings = {'pad': laid(every, epochs, limits, 'pad', 1)}
    for buckets in sorted({*NUM_BUCKETS, train.num_buckets}):
        paddings[f'bucket, {buckets}'] = laid(every, epochs, limits, 'bucket', buckets)
    sample, often = _sample(train)
    count = sum(map(len, sample))
    of = f' ({count:,} examples)' if count < train.num_examples else ''
    if not example_format.labelled:  # a packed row has several examples, and so no single label
        for name in (name for name, how in packing.BATCHING.items() if how.packs):
            paddings[name if own == name else f'{name}{of}'] = laid(sample, often, limits, name, 1)
    if len(limits) == 2:
        length = balanced(np.concatenate(sample), data.length)
        wide = np.array([data.length, length])
        paddings[f'pack, data.encoder_length={length}{of}'] = laid(sample, often, wide, 'pack', 1)
    paddings[own] = filled(train)
    return {f'{name} <- this run' if name == own else name: each for name, each in paddings.items()}


def longest(data: Data, stacks: int) -> np.ndarray:
    """Returns the most tokens of an example for the decoder (or the only stack) and the encoder, int [stacks]."""
    return np.array([data.length, data.encoder_length or data.length][:stacks])


def balanced(lengths: np.ndarray, length: int) -> int:
    """Returns the data.encoder_length with which both stacks of packed rows fill up together.

    The examples have `lengths` tokens for the decoder and the encoder, int [N, 2]; the decoder's rows have `length`.
    """
    target, source = lengths.mean(axis=0)
    return max(_ENCODER_MULTIPLE, round(length * source / target / _ENCODER_MULTIPLE) * _ENCODER_MULTIPLE)


def _sample(train: Batches) -> tuple[list[np.ndarray], list[float]]:
    """Samples about MOST_SAMPLED examples, the same share of each part: their lengths and the passes over each part."""
    rng, share = np.random.default_rng(0), min(1, MOST_SAMPLED / train.num_examples)
    lengths, epochs = [], []
    for part in train.parts:
        own = part.examples.lengths
        chosen = np.sort(rng.choice(len(own), max(1, int(len(own) * share)), replace=False))
        lengths.append(own[chosen])
        epochs.append(part.epochs * len(own) / len(chosen))
    return lengths, epochs
