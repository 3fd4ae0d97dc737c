"""Layouts: how documents are cut, which examples share a row, and to what shape a row is padded.

A layout is made from integer lengths alone. It is the same in every epoch, so that the number of rows in an epoch is
known and any row is found without laying out those before it; the order of the rows is another matter.
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from tformer.data.ragged import Ragged

WINDOW = 4096  # examples that are packed with each other: bounds the time and memory that packing takes

Shapes = tuple[tuple[int, ...], ...]  # padded row lengths in each stack, (T,) or (T, S), one for each bucket


# ------------------------------------------------------------------------------------------------------------ shapes


def one_shape(lengths: np.ndarray, limits: np.ndarray, num_buckets: int) -> Shapes:
    """Every row as long as the limits."""
    return (tuple(map(int, limits)),)


def bucket_shapes(lengths: np.ndarray, limits: np.ndarray, num_buckets: int) -> Shapes:
    """At most `num_buckets` shapes that waste few positions: a tree of the cuts that save most, each time.

    Args:
      lengths: int [N, stacks], tokens of each example in each stack.
      limits: int [stacks]; no shape is longer.
      num_buckets: compiled programs one is ready to have.
    """
    rounded = np.minimum(_round_up(lengths), limits)
    codes = np.ravel_multi_index(tuple(rounded.T), tuple(limits + 1))  # one number for each pair: sorts faster
    found, counts = np.unique(codes, return_counts=True)
    distinct = np.stack(np.unravel_index(found, tuple(limits + 1)), axis=1)
    buckets = [(distinct, counts)]
    cuts = [_best_cut(distinct, counts)]
    while len(buckets) < num_buckets:
        most = max(range(len(cuts)), key=lambda i: cuts[i][0])
        saved, below = cuts[most]
        if saved <= 0:
            break
        (distinct, counts), parts = buckets[most], (below, ~below)
        buckets[most : most + 1] = [(distinct[part], counts[part]) for part in parts]
        cuts[most : most + 1] = [_best_cut(*bucket) for bucket in buckets[most : most + 2]]
    return tuple(sorted({tuple(map(int, bucket.max(axis=0))) for bucket, _ in buckets}))


def _best_cut(lengths: np.ndarray, counts: np.ndarray) -> tuple[float, np.ndarray]:
    """Cuts a bucket in two between lengths of one stack, or of the longer one.

    Returns:
      The positions that the best cut saves, and which of `lengths` are below it.
    """
    best = (0.0, np.zeros(len(lengths), bool))
    whole = counts.sum() * lengths.max(axis=0).sum()
    for stack in [*lengths.T, lengths.max(axis=1)]:  # the longer side too: sides of a pair are alike
        order = np.argsort(stack, kind='stable')
        size = np.cumsum(counts[order])[:-1]
        below = np.maximum.accumulate(lengths[order])[:-1].sum(axis=1)
        above = np.maximum.accumulate(lengths[order][::-1])[::-1][1:].sum(axis=1)
        saved = np.where(np.diff(stack[order]) > 0, whole - size * below - (counts.sum() - size) * above, 0)
        if len(saved) and saved.max() > best[0]:
            best = float(saved.max()), stack <= stack[order[saved.argmax()]]
    return best


def bucket_of(lengths: np.ndarray, shapes: Shapes) -> np.ndarray:
    """int [N]: for each example the smallest of the `shapes` that holds it."""
    smallest = np.full(lengths.max(axis=0) + 1, -1, np.int32)  # by the length in each stack
    for index in sorted(range(len(shapes)), key=lambda i: -sum(shapes[i])):
        smallest[tuple(slice(length + 1) for length in shapes[index])] = index
    return smallest[tuple(lengths.T)]


def _round_up(lengths: np.ndarray) -> np.ndarray:
    """Long ones to multiples of 8, which accelerators like and which makes fewer shapes."""
    return np.where(lengths < 64, lengths, -(-lengths // 8) * 8)


# -------------------------------------------------------------------------------------------------------------- rows


def alone(lengths: np.ndarray, limits: np.ndarray, rng: np.random.Generator) -> Ragged:
    """One example a row."""
    return Ragged(np.arange(len(lengths), dtype=np.int32), np.arange(len(lengths) + 1, dtype=np.int64))


def pack(lengths: np.ndarray, limits: np.ndarray, rng: np.random.Generator, window: int = WINDOW) -> Ragged:
    """Several examples a row, in windows of `window` examples in random order.

    Rows are filled one by one, each time with the example that lies best along the room left in every stack: the
    bin-centric dot product of Panigrahy et al. 2011 (section 3). With one stack that is the longest that fits.

    Args:
      lengths: int [N, stacks], tokens of each example in each stack, from 1 to the limits.
      limits: int [stacks], tokens of a row.
      rng: the source of all randomness.
      window: examples that may share rows.

    Returns:
      The examples of each row.
    """
    order = rng.permutation(len(lengths))
    windows = (order[start : start + window] for start in range(0, len(order), window))
    return Ragged.of(row for members in windows for row in _fill_rows(members, lengths[members], limits))


def _fill_rows(members: np.ndarray, lengths: np.ndarray, limits: np.ndarray) -> Iterator[list[int]]:
    """The rows of one window; examples of the same lengths stand for each other, so few kinds are compared."""
    kinds, kind = np.unique(lengths, axis=0, return_inverse=True)
    waiting = [members[kind == index].tolist() for index in range(len(kinds))]
    left, shares = np.bincount(kind), kinds / limits
    while left.any():
        free, row = limits.copy(), []
        while (fits := (left > 0) & (kinds <= free).all(axis=1)).any():
            best = int(np.where(fits, shares @ (free / limits), -1).argmax())
            row.append(waiting[best].pop())
            left[best] -= 1
            free -= kinds[best]
        yield row


@dataclasses.dataclass(frozen=True)
class Batching:
    """How examples become rows, and rows get their shapes."""

    shapes: Callable[[np.ndarray, np.ndarray, int], Shapes]  # lengths, limits, num_buckets
    rows: Callable[[np.ndarray, np.ndarray, np.random.Generator], Ragged]  # lengths, limits, rng


BATCHING: dict[str, Batching] = {
    'pad': Batching(one_shape, alone),
    'bucket': Batching(bucket_shapes, alone),
    'pack': Batching(one_shape, pack),
}
