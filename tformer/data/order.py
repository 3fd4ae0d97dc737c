"""Which row comes when, by arithmetic alone: any place of an endless order is found without those before it."""

import functools

import numpy as np

_SMALL = 1 << 15  # permutations that are made whole, and kept
_ROUNDS = 6
_MIX = np.uint64(0x9E3779B97F4A7C15)  # the golden ratio's bits


def permuted(index: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
    """Where each `index` goes in a permutation of range(size), without making the permutation where it is large.

    A Feistel network (Luby & Rackoff 1988) over the next power of two, walked until it is within the size again
    (Black & Rogaway 2002, section 4).

    Args:
      index: int [N], of range(size).
      size: 1 or more.
      key: integers from 0; each key has a permutation of its own.
    """
    if size <= _SMALL:
        return _whole(size, key)[index]
    bits = (size - 1).bit_length()
    low_bits = np.uint64(bits // 2)
    low, high = (np.uint64(2**width - 1) for width in (bits // 2, bits - bits // 2))
    keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)
    found = np.asarray(index, np.uint64).copy()
    outside = np.arange(len(found))
    while len(outside):
        left, right = found[outside] >> low_bits, found[outside] & low
        for even, odd in keys.reshape(-1, 2):
            left = left ^ (_hash(right ^ even) & high)
            right = right ^ (_hash(left ^ odd) & low)
        found[outside] = left << low_bits | right
        outside = outside[found[outside] >= size]
    return found.astype(np.int64)


@functools.lru_cache(maxsize=256)
def _whole(size: int, key: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(key).permutation(size)


def _hash(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele et al. 2014): every bit of the input moves half of the output's."""
    x = x * _MIX
    for shift in (30, 27):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(0xBF58476D1CE4E5B9)
    return x ^ (x >> np.uint64(31))


def interleave(rates: np.ndarray, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Items `start` to `start + count` of an endless order in which stream c has the share rates[c] / sum(rates).

    The order is Webster's method of apportionment (Balinski & Young 1982): item i of stream c stands at the time
    (i + 1/2) / rates[c]. So at every moment each stream is near its share, and what each has had is known at once.

    Args:
      rates: float [C], positive.
      start: the first place.
      count: places.

    Returns:
      stream, item: int64 [count].
    """
    num = len(rates)
    if num == 1:
        return np.zeros(count, np.int64), np.arange(start, start + count)
    shares = rates / rates.sum()
    # Items that are past for sure, somewhat fewer than `start`; those that follow are sorted by their times.
    past = np.maximum(np.floor((start - num) * shares + 0.5).astype(np.int64) - 1, 0)
    ahead = np.ceil((count + start - past.sum() + num) * shares).astype(np.int64) + 2
    stream = np.repeat(np.arange(num), ahead)
    item = np.concatenate([np.arange(first, first + more) for first, more in zip(past, ahead, strict=True)])
    chosen = np.lexsort((stream, (item + 0.5) / shares[stream]))[start - past.sum() :][:count]
    return stream[chosen], item[chosen]
