"""Rows of unequal length in two flat arrays: ten million tokens take forty megabytes, or none if they are on disk."""

import array
import dataclasses
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Ragged:
    """Rows of numbers: `ragged[i]` is a view of row i, `flat[offsets[i]:offsets[i + 1]]`.

    If the arrays are memory maps, a pickled copy in another process maps the same files.
    """

    flat: np.ndarray  # numbers [total]
    offsets: np.ndarray  # int64 [rows + 1]

    @classmethod
    def of(cls, rows: Iterable[Iterable[int]]) -> 'Ragged':
        """Returns lazy `rows`, of which one is held at a time, as int32."""
        flat: Any = array.array('i')
        offsets = array.array('q', [0])
        for row in rows:
            flat.extend(row)
            offsets.append(len(flat))
        return cls(np.array(flat), np.array(offsets, np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.flat[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[row] for row in range(len(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped, (_by_file(self.flat), _by_file(self.offsets))

    @property
    def files(self) -> tuple[str, ...]:
        """The files that hold its arrays."""
        return tuple(where[0] for where in map(_by_file, (self.flat, self.offsets)) if isinstance(where, tuple))

    @property
    def lengths(self) -> np.ndarray:
        """The length of each row, int64 [rows]."""
        return np.diff(self.offsets)


def check(flat: np.ndarray, offsets: np.ndarray, dtype: Any) -> None:
    """Raises a `ValueError` unless numbers [total] of `dtype` and int64 offsets [rows + 1] form a `Ragged`."""
    if flat.dtype != dtype or offsets.dtype != np.int64:
        raise ValueError(f'numbers and offsets are {flat.dtype} and {offsets.dtype}, not {np.dtype(dtype)} and int64')
    whole = len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == len(flat)
    if not whole or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(f'the offsets do not divide {len(flat)} numbers into rows')


def mapped(file: str, dtype: str) -> np.ndarray:
    """Returns the array in a file of raw numbers as a memory map, which reads them when they are needed."""
    if not os.path.getsize(file):  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(file, dtype, mode='r'))  # a plain array over the map slices faster


def _by_file(values: np.ndarray) -> Any:
    file = values.base
    if isinstance(file, np.memmap) and file.size == values.size:
        return str(file.filename), values.dtype.str
    return values


def _mapped(*arrays: Any) -> Ragged:
    return Ragged(*(mapped(*value) if isinstance(value, tuple) else value for value in arrays))
