"""The parts that a run is trained on, one or several, and how much of each."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tformer.config.convert import parts
from tformer.config.run import Config
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
        """What they are samples of (data.train_examples), else themselves."""
        return Concatenation([split.whole for split in self.splits])

    def __len__(self) -> int:
        return sum(map(len, self.splits))

    def _records(self, indices: Sequence[int]) -> list[Record]:
        return list(map(self._record, indices))

    def _record(self, index: int) -> Record:
        for split in self.splits:
            if index < len(split):
                return split[index]
            index -= len(split)
        raise IndexError(f'{index} records beyond the end')

    def __iter__(self) -> Iterator[Record]:
        return itertools.chain.from_iterable(self.splits)


def load(config: Config, split: str) -> Concatenation:
    """The records of a split: those of every part of data.mixture, in its order.

    What parts have in common is scored once, and a part need not have records to be scored. Of the training split it
    is data.train_examples, chosen by train.seed, where that is set.

    Raises:
      UserError: as `sources.load` does.
    """
    found: dict[Any, Split] = {}
    missing: list[NoSplitError] = []
    for number, part in enumerate(parts(config.data)):
        try:
            records = sources.load(part, config.train.objective, split)
            if split == 'train' and config.data.train_examples is not None:
                records = records.sample(config.data.train_examples, (config.train.seed, layout.SAMPLE))
            found[number if split == 'train' else records.fingerprint] = records
        except NoSplitError as error:
            missing.append(error)
    if missing and (split == 'train' or not found):
        raise missing[0]
    return Concatenation(list(found.values()))


def epochs_of_parts(weights: Sequence[float | None], counts: Sequence[int], temperature: float) -> list[float]:
    """How often each part is gone through while as many examples are seen as all of them have.

    The share of a part is its weight to the power 1/temperature (Raffel et al. 2020, section 3.5.2; Arivazhagan et al.
    2019, section 3.2).

    Args:
      weights: of each part; None: as many as it has examples.
      counts: examples of each part.
      temperature: 1 leaves the shares as they are, more evens them out.
    """
    known = [count if weight is None else weight for weight, count in zip(weights, counts, strict=True)]
    shares = (np.array(known, float) / max(known)) ** (1 / temperature)
    found = shares / shares.sum() * sum(counts) / np.array(counts)
    for number in np.flatnonzero(found < 1e-12):
        raise UserError(f'data.mixture[{number}] is never seen: its share of the examples is {shares[number]:.3g}')
    return found.tolist()
