"""Plans on integer lengths: how documents are cut, which examples share a row, and which rows a batch.

A *layout* says which examples share a row and which padded shape the row has. It is the same in every epoch, so
an epoch has a fixed number of steps, and any step is found without planning those before it. A *plan* deals the
rows of a layout into the batches of one epoch.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from tformer.data.ragged import Ragged


def chunk(sizes: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts documents of `sizes` units into pieces of at most `room`; an empty document has none.

    Returns:
      record, start, stop: int64 [pieces], piece i is units start[i]:stop[i] of document record[i].
    """
    counts = -(-sizes // room)
    record = np.repeat(np.arange(len(sizes)), counts)
    ordinal = np.arange(len(record)) - np.repeat(np.cumsum(counts) - counts, counts)
    return record, ordinal * room, np.minimum((ordinal + 1) * room, sizes[record])


def bucket_boundaries(lengths: np.ndarray, num_buckets: int, max_len: int) -> np.ndarray:
    """The at most `num_buckets` increasing lengths to pad `lengths` [N] to that take the fewest positions.

    Each is rounded up to a multiple of 8, but not over `max_len`; the last one holds the longest. Found by dynamic
    programming over the lengths that occur.
    """
    candidates, counts = np.unique(np.minimum(_round_up(lengths), max_len), return_counts=True)
    under = np.cumsum(counts) - counts
    # cost[i, j]: positions where lengths candidates[i] to candidates[j] are padded to candidates[j]
    cost = (under + counts - under[:, None]) * candidates.astype(np.float64)
    cost[np.tri(len(candidates), k=-1, dtype=bool)] = np.inf
    total, firsts = cost[0], []  # of the best division of candidates[: j + 1]; where its last bucket begins
    for _ in range(min(num_buckets, len(candidates)) - 1):
        divided = np.concatenate(([np.inf], total[:-1]))[:, None] + cost
        firsts.append(divided.argmin(axis=0))
        total = divided.min(axis=0)
    last = [len(candidates) - 1]
    for first in reversed(firsts):
        last.append(first[last[-1]] - 1)
    return candidates[last[::-1]]


def first_fit(lengths: np.ndarray, limits: np.ndarray, window: int = 256) -> Ragged:
    """Packs examples into rows: each goes into the first of `window` open rows that has room in every stack.

    Args:
      lengths: int [N, stacks], tokens of each example in each stack.
      limits: int [stacks], tokens of a row.
      window: open rows; where none has room the fullest is closed.

    Returns:
      The examples of each row.
    """
    free = np.zeros((window, len(limits)), np.int64)
    slots: list[list[int]] = [[] for _ in range(window)]
    rows: list[list[int]] = []
    for example, need in enumerate(lengths):
        fits = (free >= need).all(axis=1)
        slot = int(fits.argmax())
        if not fits[slot]:
            slot = int(free.sum(axis=1).argmin())
            rows.append(slots[slot])
            slots[slot], free[slot] = [], limits
        slots[slot].append(example)
        free[slot] -= need
    return Ragged.of(row for row in rows + slots if row)


@dataclasses.dataclass(frozen=True)
class Layout:
    members: Ragged  # the examples of each row
    bucket: np.ndarray  # int [rows], index into shapes
    shapes: tuple[tuple[int, ...], ...]  # padded row length in each stack: (T,) or (T, S)


def pad(lengths: np.ndarray, limits: np.ndarray, num_buckets: int, rng: np.random.Generator | None) -> Layout:
    """One example a row, every row as long as the limits."""
    num = len(lengths)
    return Layout(_alone(num), np.zeros(num, np.int64), (tuple(map(int, limits)),))


def bucket(lengths: np.ndarray, limits: np.ndarray, num_buckets: int, rng: np.random.Generator | None) -> Layout:
    """One example a row; rows of similar length (of the longer stack) share a shape that just holds them."""
    longer = lengths.max(axis=1)
    boundaries = bucket_boundaries(longer, num_buckets, int(limits.max()))
    index = np.searchsorted(boundaries, longer)
    used, index = np.unique(index, return_inverse=True)
    shapes = [np.minimum(_round_up(lengths[index == b].max(axis=0)), limits) for b in range(len(used))]
    return Layout(_alone(len(lengths)), index, tuple(tuple(map(int, shape)) for shape in shapes))


def pack(lengths: np.ndarray, limits: np.ndarray, num_buckets: int, rng: np.random.Generator | None) -> Layout:
    """Several examples a row, told apart by their segment ids; every row as long as the limits."""
    order = np.arange(len(lengths)) if rng is None else rng.permutation(len(lengths))
    rows = first_fit(lengths[order], limits)
    members = Ragged(order[rows.flat].astype(np.int32), rows.offsets)
    return Layout(members, np.zeros(len(rows), np.int64), (tuple(map(int, limits)),))


@dataclasses.dataclass(frozen=True)
class Plan:
    bucket: np.ndarray  # int [steps], index into the layout's shapes
    rows: np.ndarray  # int [steps, most rows of any shape]; -1 is an empty row


def plan(layout: Layout, batch_rows: tuple[int, ...], rng: np.random.Generator | None) -> Plan:
    """Deals all rows of `layout` into batches of `batch_rows[bucket]` rows; -1 fills the last of each bucket.

    With `rng` the rows and the order of the batches are shuffled; without, batches come in the order of their
    first row.
    """
    buckets, batches = [], []
    for index, width in enumerate(batch_rows):
        rows: np.ndarray = np.flatnonzero(layout.bucket == index)
        rows = rows if rng is None else rng.permutation(rows)
        rows = np.pad(rows, (0, -len(rows) % width), constant_values=-1).reshape(-1, width)
        batches.append(np.pad(rows, ((0, 0), (0, max(batch_rows) - width)), constant_values=-1))
        buckets.append(np.full(len(rows), index))
    steps = np.concatenate(batches)
    order = np.argsort(steps[:, 0], kind='stable') if rng is None else rng.permutation(len(steps))
    return Plan(np.concatenate(buckets)[order], steps[order])


def num_steps(layout: Layout, batch_rows: tuple[int, ...]) -> int:
    """The number of batches that `plan` makes."""
    counts = np.bincount(layout.bucket, minlength=len(batch_rows))
    return int((-(-counts // np.array(batch_rows))).sum())


def _alone(num_examples: int) -> Ragged:
    return Ragged(np.arange(num_examples, dtype=np.int32), np.arange(num_examples + 1, dtype=np.int64))


def _round_up(lengths: np.ndarray) -> np.ndarray:
    """To multiples of 8, which accelerators and caches like; lengths of toy data (under 32) stay."""
    return -(-lengths // 8) * 8 if lengths.max() >= 32 else lengths


BATCHING: dict[str, Callable[[np.ndarray, np.ndarray, int, np.random.Generator | None], Layout]] = {
    'pad': pad,
    'bucket': bucket,
    'pack': pack,
}
