"""Rows of unequal length in two flat arrays: ten million tokens take forty megabytes, or none if they are on disk."""

import array
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

_AT_ONCE = 1 << 22  # numbers of a large array that are read together


def _itself(places: np.ndarray) -> np.ndarray:
    return places


@dataclasses.dataclass(frozen=True)
class Computed:
    """Numbers [size] that are computed where they are read: `of` returns those at some places, int64 [k], and `between`
    those from one place to another, if that is quicker.

    Without `of` they are 0, 1, 2 and so on.
    """

    size: int
    of: Callable[[np.ndarray], np.ndarray] = _itself
    between: Callable[[int, int], np.ndarray] | None = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(self.size)
            if self.between and step == 1:
                return self.between(start, max(start, stop))
            return self.of(np.arange(start, stop, step))
        return self.of(index) if isinstance(index, np.ndarray) else self.of(np.array([index]))[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)


@dataclasses.dataclass(frozen=True)
class Ragged:
    """Rows of numbers: `ragged[i]` is a view of row i, `flat[offsets[i]:offsets[i + 1]]`.

    If the arrays are memory maps, a pickled copy in another process maps the same files.
    """

    flat: np.ndarray  # numbers [total]
    offsets: np.ndarray  # int64 [rows + 1]

    @classmethod
    def of(cls, rows: Iterable[Iterable[int]], kind: str = 'i') -> 'Ragged':
        """Returns lazy `rows`, of which one is held at a time, as int32, or as int64 if `kind` is q."""
        flat: Any = array.array(kind)
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
        return self.sizes(slice(None))

    def sizes(self, rows: Any) -> np.ndarray:
        """Returns the lengths of some rows, int64 [k] or a slice: int64 [k]."""
        return self.offsets[1:][rows] - self.offsets[:-1][rows]


class Documents(Ragged):
    """Rows of numbers anywhere in several arrays: row i is `arrays[owners[i]][starts[i]:stops[i]]`.

    Pickled memory maps are mapped again, as of `Ragged`.
    """

    def __init__(
        self, arrays: tuple[np.ndarray, ...], owners: np.ndarray, starts: np.ndarray, stops: np.ndarray
    ) -> None:
        vars(self).update(arrays=arrays, owners=owners, starts=starts, stops=stops)

    arrays: tuple[np.ndarray, ...]
    owners: np.ndarray  # int64 [rows], as the next two
    starts: np.ndarray
    stops: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: int) -> np.ndarray:
        return self.arrays[self.owners[row]][self.starts[row] : self.stops[row]]

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped_documents, (tuple(map(_by_file, self.arrays)), self.owners, self.starts, self.stops)

    @property
    def files(self) -> tuple[str, ...]:
        return ()

    def sizes(self, rows: Any) -> np.ndarray:
        return self.stops[rows] - self.starts[rows]

    def taken(self, rows: np.ndarray) -> 'Documents':
        """Returns some of the rows, by their numbers, int64 [any number]."""
        return Documents(self.arrays, self.owners[rows], self.starts[rows], self.stops[rows])

    def outside(self, size: int) -> Iterator[tuple[int, int]]:
        """Yields (place, number) of the first number of each array that is below 0 or from `size` on, else (-1, 0).

        What stands between the first and the last row of an array is read once.
        """
        for index, values in enumerate(self.arrays):
            own = self.owners == index
            first = int(self.starts[own].min(initial=len(values)))
            wrong = -1
            for some in _pieces(values[first : int(self.stops[own].max(initial=first))]):
                if some.min() < 0 or some.max() >= size:
                    wrong = first + int(np.flatnonzero((some < 0) | (some >= size))[0])
                    break
                first += len(some)
            yield wrong, 0 if wrong < 0 else int(values[wrong])

    def stripped(self, first: int, last: int) -> 'Documents':
        """Returns the rows without their first number where that is `first`, and without their last one if `last`."""
        starts, stops = self.starts.copy(), self.stops.copy()
        for index, values in enumerate(self.arrays):
            own = np.flatnonzero((self.owners == index) & (stops > starts))
            stops[own] -= values[stops[own] - 1] == last
            own = own[stops[own] > starts[own]]
            starts[own] += values[starts[own]] == first
        return Documents(self.arrays, self.owners, starts, stops)


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
    file = getattr(values, 'base', None)
    if isinstance(file, np.memmap) and file.size == values.size:
        return str(file.filename), values.dtype.str
    return values


def _pieces(values: np.ndarray) -> Iterator[np.ndarray]:
    return (values[start : start + _AT_ONCE] for start in range(0, len(values), _AT_ONCE))


def _mapped_documents(arrays: tuple[Any, ...], *rows: np.ndarray) -> Documents:
    return Documents(tuple(mapped(*value) if isinstance(value, tuple) else value for value in arrays), *rows)


def _mapped(*arrays: Any) -> Ragged:
    return Ragged(*(mapped(*value) if isinstance(value, tuple) else value for value in arrays))
