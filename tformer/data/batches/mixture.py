"""The parts of a training mixture (one where there is no mixture), and the amount of each."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tformer.config import mixtures
from tformer.config.mixtures import parts
from tformer.config.run import Config, Data
from tformer.data.batches import layout
from tformer.data.sources import sources
from tformer.data.sources.records import Record, Split, View
from tformer.errors import NoSplitError, UserError


class Concatenation(View):
    """The records of several splits, one after the other."""

    def __init__(self, splits: Sequence[Split]) -> None:
        self.splits = splits

    @property
    def whole(self) -> 'Concatenation':
        """The whole splits, of which these may be samples (data.train_examples)."""
        return Concatenation([split.whole for split in self.splits])

    def first(self, count: int) -> Sequence[Record]:
        """Returns the first records, or all where there are fewer; of files of tokens as splits of documents."""
        left = min(count, len(self))
        if not any(split.of_tokens for split in self.splits):
            return self[:left]
        sizes = np.diff(np.minimum(np.cumsum([0, *map(len, self.splits)]), left)).tolist()
        return Concatenation([split.first(size) for split, size in zip(self.splits, sizes, strict=True) if size])

    def __len__(self) -> int:
        return sum(map(len, self.splits))

    def _records(self, indices: Sequence[int]) -> list[Record]:
        starts = np.cumsum([0, *map(len, self.splits)])
        owners = np.searchsorted(starts, indices, side='right') - 1
        return [self.splits[owner][int(index - starts[owner])] for owner, index in zip(owners, indices, strict=True)]

    def __iter__(self) -> Iterator[Record]:
        return itertools.chain.from_iterable(self.splits)


def load(config: Config, split: str) -> Concatenation:
    """Returns the records of a split of every part of data.mixture, in its order.

    In evaluation, records that parts share count once, and parts without the split are left out. If
    data.train_examples is set, the training split is a sample of that size, drawn by train.seed.
    """
    splits: dict[Any, Split] = {}
    missing: list[NoSplitError] = []
    for index, part in enumerate(parts(config.data)):
        try:
            records = sources.load(part, config.train.objective, split)
            if split == 'train' and config.data.train_examples is not None:
                records = records.sample(config.data.train_examples, (config.train.seed, layout.SAMPLE))
            splits[index if split == 'train' else records.fingerprint] = records
        except NoSplitError as error:
            missing.append(error)
    if missing and (split == 'train' or not splits):
        raise missing[0]
    return Concatenation(list(splits.values()))


def epochs_of_parts(weights: Sequence[float | None], counts: Sequence[int], temperature: float) -> list[float]:
    """Returns the passes over each part in one epoch of the mixture, which has as many examples as all parts together.

    The share of a part is proportional to its weight, or the count of its examples where that is None, to the power
    1/temperature: 1 keeps the proportions of the weights, and a higher one evens them out (Raffel et al. 2020, section
    3.5.2; Arivazhagan et al. 2019, section 3.2).

    Raises:
      UserError: a part has a share of practically zero.
    """
    known = [count if weight is None else weight for weight, count in zip(weights, counts, strict=True)]
    shares = (np.array(known, float) / max(known)) ** (1 / temperature)
    epochs = shares / shares.sum() * sum(counts) / np.array(counts)
    for part in np.flatnonzero(epochs < 1e-12):
        raise UserError(f'data.mixture[{part}] is never seen: its share of the examples is {shares[part]:.3g}')
    return epochs.tolist()


def stages(data: Data, counts: Sequence[int]) -> list[layout.Stage]:
    """Returns the stages of data.mixture_stages, for parts of so many examples: in an epoch of each there are as many
    examples as in all parts. A part of weight 0 is not seen."""
    found = []
    for step, weights in mixtures.stages(data):
        seen = [part for part, weight in enumerate(weights) if weight]
        own = epochs_of_parts(
            [weights[part] for part in seen], [counts[part] for part in seen], data.mixture_temperature
        )
        scale, passes = sum(counts) / sum(counts[part] for part in seen), [0.0] * len(weights)
        for part, epochs in zip(seen, own, strict=True):
            passes[part] = epochs * scale
        found.append((step, passes))
    return found
