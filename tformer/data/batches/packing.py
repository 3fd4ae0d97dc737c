"""Layouts: which examples share a row, and the shape that a row is padded to.

A layout depends on the lengths of the examples only. It is the same in every epoch: so the number of rows in an epoch
is known, and any row is found without laying out the rows before it. Samplers decide the order of the rows.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from tformer.data.order import permuted
from tformer.data.ragged import Computed, Ragged

WINDOW = 4096  # examples that are packed together: this bounds the time and memory of packing
BEST_FIT_WINDOW, NEIGHBOURS = 1 << 16, 64  # the same of `best_fit`, which reads so many neighbours together
WORTH_A_BUCKET = 0.02  # of all positions: what one more bucket saves where their number is not given
PROGRAMS = 32  # steps of a run that its two programs are worth: a small model compiles them on a CPU in that time
_AT_ONCE = 1 << 22  # of `pack` in one stack: examples, or counts of lengths, of windows that are filled together
OPEN_ROWS = 1024  # of `best_fit`: rows with room that wait for the examples of later windows

Shapes = tuple[tuple[int, ...], ...]  # padded row lengths in each stack, (T,) or (T, S), one for each bucket


# ------------------------------------------------------------------------------------------------------------ shapes


def one_shape(lengths: np.ndarray, limits: np.ndarray, num_buckets: int, counts: np.ndarray | None = None) -> Shapes:
    """Returns a single shape: the limits."""
    return (tuple(map(int, limits)),)


def bucket_shapes(
    lengths: np.ndarray, limits: np.ndarray, num_buckets: int, counts: np.ndarray | None = None
) -> Shapes:
    """Returns at most `num_buckets` shapes that waste few positions, by a greedy tree of the cuts that save most.

    `lengths`, int [N, stacks], are the tokens of an example in each stack, and `counts`, int [N], how many examples
    have them (None: one each); no shape exceeds `limits`, int [stacks].
    """
    buckets = _buckets(lengths, limits, num_buckets, 0.0, counts)
    return tuple(sorted({tuple(map(int, bucket.max(axis=0))) for bucket in buckets}))


def enough_buckets(
    lengths: np.ndarray, limits: np.ndarray, counts: np.ndarray | None = None, num_steps: float = math.inf
) -> int:
    """Returns the `num_buckets` of `bucket_shapes` from which on another bucket saves less than a fiftieth, or less
    than the time in which it is compiled in a run of `num_steps` steps."""
    return len(_buckets(lengths, limits, None, max(WORTH_A_BUCKET, PROGRAMS / num_steps), counts))


def _buckets(
    lengths: np.ndarray, limits: np.ndarray, most: int | None, worth: float, counts: np.ndarray | None
) -> list[np.ndarray]:
    """Divides the distinct lengths in at most `most` buckets, while a cut saves over `worth` of all positions."""
    # Long lengths become multiples of 8, which suit accelerators and make fewer shapes.
    rounded = np.minimum(np.where(lengths < 64, lengths, -(-lengths // 8) * 8), limits)
    codes = np.ravel_multi_index(tuple(rounded.T), tuple(limits + 1))  # one number per example sorts faster
    found, kind = np.unique(codes, return_inverse=True)
    counts = np.bincount(kind, counts).astype(np.int64)
    distinct = np.stack(np.unravel_index(found, tuple(limits + 1)), axis=1)
    buckets = [(distinct, counts)]
    cuts = [_best_cut(distinct, counts)]
    positions = counts.sum() * distinct.max(axis=0).sum()
    while most is None or len(buckets) < most:
        best = max(range(len(cuts)), key=lambda i: cuts[i][0])
        saved, below = cuts[best]
        if saved <= worth * positions:
            break
        positions -= saved
        (distinct, counts), parts = buckets[best], (below, ~below)
        buckets[best : best + 1] = [(distinct[part], counts[part]) for part in parts]
        cuts[best : best + 1] = [_best_cut(*bucket) for bucket in buckets[best : best + 2]]
    return [bucket for bucket, _ in buckets]


def _best_cut(lengths: np.ndarray, counts: np.ndarray) -> tuple[float, np.ndarray]:
    """Finds the best cut of a bucket in two: the positions that it saves, and which of `lengths` are below it."""
    best = (0.0, np.zeros(len(lengths), bool))
    whole = counts.sum() * lengths.max(axis=0).sum()
    for stack in [*lengths.T, lengths.max(axis=1)]:  # the longer one too, because both sides of a pair are similar
        order = np.argsort(stack, kind='stable')
        size = np.cumsum(counts[order])[:-1]
        below = np.maximum.accumulate(lengths[order])[:-1].sum(axis=1)
        above = np.maximum.accumulate(lengths[order][::-1])[::-1][1:].sum(axis=1)
        saved = np.where(np.diff(stack[order]) > 0, whole - size * below - (counts.sum() - size) * above, 0)
        if len(saved) and saved.max() > best[0]:
            best = float(saved.max()), stack <= stack[order[saved.argmax()]]
    return best


def bucket_of(lengths: np.ndarray, shapes: Shapes) -> np.ndarray:
    """Returns the index of the smallest of `shapes` that holds each example, int [N]; -1 where none does."""
    smallest = np.full(lengths.max(axis=0) + 1, -1, np.int32)  # by the length in each stack
    for index in sorted(range(len(shapes)), key=lambda i: -sum(shapes[i])):
        smallest[tuple(slice(length + 1) for length in shapes[index])] = index
    return smallest[tuple(lengths.T)]


# -------------------------------------------------------------------------------------------------------------- rows


def alone(lengths: np.ndarray, limits: np.ndarray, rng: np.random.Generator) -> Ragged:
    """One example a row."""
    examples: Any = Computed(len(lengths))
    offsets: Any = Computed(len(lengths) + 1)
    return Ragged(examples, offsets)


def pack(lengths: np.ndarray, limits: np.ndarray, rng: np.random.Generator, window: int = WINDOW) -> Ragged:
    """Puts several examples in a row, within windows of `window` examples in random order.

    Rows are filled one by one. The next example is the one whose lengths best match the room left in every stack, by
    the bin-centric dot product of Panigrahy et al. 2011 (section 3). With one stack, it is the longest that fits.
    `lengths`, int [N, stacks], are from 1 to `limits`, int [stacks].
    """
    lengths = np.asarray(lengths)
    order = rng.permutation(len(lengths))
    if len(limits) == 1:
        return _longest_first(order, lengths[:, 0], int(limits[0]), window)
    windows = (order[start : start + window] for start in range(0, len(order), window))
    return Ragged.of(row for members in windows for row in _fill_rows(members, lengths[members], limits))


def best_fit(
    lengths: np.ndarray, limits: np.ndarray, rng: np.random.Generator, window: int = BEST_FIT_WINDOW
) -> Iterator[list[int]]:
    """Yields the rows of best-fit decreasing (Johnson 1974; Ding et al. 2024, section 3.2), within windows of examples.

    A window has about `window` examples, in runs of neighbours from random places. Of these, the longest comes first,
    into the row with the least room that holds it; the room of several stacks is summed, as a share of `limits`. The
    rows with the most room, OPEN_ROWS of them, also wait for the next window. So memory does not grow with the number
    of examples. `lengths`, int [N, stacks], are from 1 to `limits`, int [stacks].
    """
    runs, key = -(-len(lengths) // NEIGHBOURS), (int(rng.integers(1 << 62)),)
    free = np.zeros((0, len(limits)), np.int64)
    rows: list[list[int]] = []
    for start in range(0, runs, step := max(window // NEIGHBOURS, 1)):
        firsts = NEIGHBOURS * permuted(np.arange(start, min(start + step, runs)), runs, key)
        members = np.concatenate([np.arange(first, min(first + NEIGHBOURS, len(lengths))) for first in firsts])
        own = np.concatenate([lengths[first : first + NEIGHBOURS] for first in firsts.tolist()])
        kinds, kind = np.unique(own, axis=0, return_inverse=True)
        waiting = np.split(members[np.argsort(kind, kind='stable')], np.cumsum(np.bincount(kind))[:-1])
        for one in np.argsort(-(kinds / limits).sum(axis=1), kind='stable').tolist():
            if (kinds[one] == limits).all():
                yield from ([member] for member in waiting[one].tolist())
            else:
                free = _place(waiting[one].tolist(), kinds[one], limits, free, rows)
        room = (free / limits).sum(axis=1)
        emptiest = np.argsort(-room, kind='stable')[:OPEN_ROWS]
        wait = np.isin(np.arange(len(rows)), emptiest) & (free > 0).all(axis=1)
        yield from (row for row, waits in zip(rows, wait.tolist(), strict=True) if not waits)
        rows, free = [row for row, waits in zip(rows, wait.tolist(), strict=True) if waits], free[wait]
    yield from rows


def _place(
    members: list[int], size: np.ndarray, limits: np.ndarray, free: np.ndarray, rows: list[list[int]]
) -> np.ndarray:
    """Adds examples of one `size`, int [stacks], to `rows`, with `free`, int [rows, stacks], positions left, or to new
    ones, which is what best fit does with one after the other; returns what is left then."""
    fits = (free // size).min(axis=1)
    best = np.flatnonzero(fits)
    best = best[np.argsort((free[best] / limits).sum(axis=1), kind='stable')]
    ends = np.minimum(np.cumsum(fits[best]), len(members))
    taken = np.diff(ends, prepend=0)
    for row, start, stop in zip(best.tolist(), (ends - taken).tolist(), ends.tolist(), strict=True):
        rows[row] += members[start:stop]
    free[best] -= taken[:, None] * size
    left, most = members[ends[-1] if len(ends) else 0 :], int((limits // size).min())
    new = [left[start : start + most] for start in range(0, len(left), most)]
    rows += new
    return np.concatenate([free, limits - np.array([len(row) for row in new], np.int64).reshape(-1, 1) * size])


def _fill_rows(members: np.ndarray, lengths: np.ndarray, limits: np.ndarray) -> Iterator[list[int]]:
    """Yields the rows of one window. Examples of the same lengths are interchangeable, so few kinds are compared."""
    kinds, kind = np.unique(lengths, axis=0, return_inverse=True)
    waiting = [members[kind == index].tolist() for index in range(len(kinds))]
    left, shares = np.bincount(kind), kinds / limits
    for full in np.flatnonzero((kinds == limits).all(axis=1)):  # the best for an empty row, and nothing else fits
        yield from ([member] for member in reversed(waiting[full]))
        left[full] = 0
    while left.any():
        free, row = limits.copy(), []
        while (fits := (left > 0) & (kinds <= free).all(axis=1)).any():
            best = int(np.where(fits, shares @ (free / limits), -1).argmax())
            row.append(waiting[best].pop())
            left[best] -= 1
            free -= kinds[best]
        yield row


def _longest_first(order: np.ndarray, sizes: np.ndarray, limit: int, window: int) -> Ragged:
    """Returns the rows of `_fill_rows` in one stack, of windows of `order` one after the other.

    `sizes`, int [N], are from 1 to `limit`. Many windows are filled side by side, one example of each at a time.
    """
    together = max(min(_AT_ONCE // window, _AT_ONCE // (limit + 1)), 1) * window
    flat: list[np.ndarray] = [np.zeros(0, np.int32 if len(order) < 1 << 31 else np.int64)]
    begins = [np.zeros(0, bool)]
    for start in range(0, len(order), together):
        some = order[start : start + together]
        count = -(-len(some) // window)
        own = np.zeros(count * window, np.min_scalar_type(limit))  # of size 0: after the end of the last window
        own[: len(some)] = sizes[some]
        places, first = _fill_windows(own.reshape(count, window), limit)
        places += window * np.arange(count)[:, None]
        real = own.reshape(count, window) > 0
        filled = np.arange(window) < real.sum(axis=1, keepdims=True)
        flat.append(some[places[filled]].astype(flat[0].dtype))
        begins.append(first[filled])
    firsts = np.flatnonzero(np.concatenate(begins))
    return Ragged(np.concatenate(flat), np.append(firsts, len(order)).astype(np.int64))


def _fill_windows(sizes: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the order in which the examples of windows are put in rows, int [windows, window], and which of them
    begin a row, bool. The next one is the longest that fits in the row, or in an empty one if none does.

    `sizes`, int [windows, window], are at most `limit`; those of size 0 are none, and come last.
    """
    windows, window = sizes.shape
    by_size = np.argsort(sizes, axis=1, kind='stable')
    start = np.arange(windows) * (limit + 1)  # of each window, in flat tables with a number for each size
    counts = np.bincount((start[:, None] + sizes).ravel(), minlength=windows * (limit + 1)).reshape(windows, -1)
    full, left = counts[:, limit].copy(), counts[:, 1:limit].sum(axis=1)
    counts[:, limit] = 0
    sizes_left = np.where(counts > 0, np.arange(limit + 1), 0)
    # The largest size up to each that may be left.
    below = np.maximum.accumulate(sizes_left, axis=1).astype(sizes.dtype).ravel()
    ends = np.cumsum(counts, axis=1).astype(np.int32).ravel()  # in `by_size`, of those that are left of each size
    firsts = ends - counts.ravel().astype(np.int32)
    firsts[start] = -1  # so that size 0 is never used up

    def longest(table: np.ndarray, room: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the largest size that is left and fits, 0 if none, its place in the tables and its end: it is found
        through sizes that are used up, and kept."""
        asked = table + room
        size = below[asked]
        at = table + size
        end = ends[at]
        gone = used = np.flatnonzero(end == firsts[at])
        while len(gone):
            size[gone] = below[at[gone] - 1]
            at[gone] = table[gone] + size[gone]
            end[gone] = ends[at[gone]]
            gone = gone[end[gone] == firsts[at[gone]]]
        if len(used):
            below[asked[used]] = size[used]
        return size, at, end

    place = np.tile(np.arange(window)[::-1], windows)  # in `by_size`; full ones, rows of their own, stay there
    begins = np.ones(windows * window, bool)
    longer = np.argsort(-left, kind='stable')  # the windows that are still filled are the first of these
    to, table, free = longer * window + full[longer], start[longer], np.zeros(windows, np.int64)
    for live in windows - np.searchsorted(np.sort(left), np.arange(left.max()), 'right'):
        size, at, end = longest(table[:live], free[:live])
        begins[to[:live]] = size == 0
        if len(new := np.flatnonzero(size == 0)):
            free[new] = limit
            size[new], at[new], end[new] = longest(table[new], free[new])
        end -= 1
        ends[at] = place[to[:live]] = end
        free[:live] -= size
        to[:live] += 1
    return np.take_along_axis(by_size, place.reshape(sizes.shape), axis=1), begins.reshape(sizes.shape)


@dataclasses.dataclass(frozen=True)
class Batching:
    """How examples are put in rows, and the shapes of the rows."""

    shapes: Callable[..., Shapes]  # lengths, limits, num_buckets, counts
    rows: Callable[[np.ndarray, np.ndarray, np.random.Generator], Iterable[Iterable[int]]]  # lengths, limits, rng
    fields: tuple[str, ...] = ()  # the fields of config.data that it reads
    plan: object = None  # where rows have several examples: what decides them, besides the arguments of `rows`

    @property
    def packs(self) -> bool:
        """Whether rows have several examples; in evaluation each has its own, padded to buckets."""
        return self.plan is not None


BATCHING: dict[str, Batching] = {
    'pad': Batching(one_shape, alone),
    'bucket': Batching(bucket_shapes, alone, ('num_buckets',)),
    'pack': Batching(one_shape, pack, ('num_buckets',), plan=WINDOW),
    'best_fit': Batching(one_shape, best_fit, ('num_buckets',), ['best_fit', BEST_FIT_WINDOW, NEIGHBOURS, OPEN_ROWS]),
}
