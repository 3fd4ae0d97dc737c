"""Rows of unequal length in two flat arrays, so that ten million tokens cost forty megabytes."""

import array
import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np


@dataclasses.dataclass(frozen=True)
class Ragged:
    """`ragged[i]` is a view of row i: `flat[offsets[i]:offsets[i + 1]]`."""

    flat: np.ndarray  # int32 [total]
    offsets: np.ndarray  # int64 [rows + 1]

    @classmethod
    def of(cls, rows: Iterable[Iterable[int]]) -> 'Ragged':
        """Builds it from `rows`, which may be lazy: only one of them is held at a time."""
        flat, offsets = array.array('i'), array.array('q', [0])
        for row in rows:
            flat.extend(row)
            offsets.append(len(flat))
        return cls(np.array(flat, np.int32), np.array(offsets, np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.flat[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[row] for row in range(len(self)))

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows]."""
        return np.diff(self.offsets)
