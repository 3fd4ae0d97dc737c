"""Orders by arithmetic: any position of an endless order is computed without the positions before it."""

import functools

import numpy as np

_SMALL = 1 << 15  # permutations up to this size are made whole and kept
_ROUNDS = 6
_MIX = np.uint64(0x9E3779B97F4A7C15)  # the golden ratio's bits


def permuted(index: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
    """Returns the image of each `index`, int [N], under the random permutation of range(size) for `key`: int64 [N].

    A large permutation is never made whole: it is a Feistel network (Luby & Rackoff 1988) over the next power of two,
    applied until the result is below the size (cycle walking; Black & Rogaway 2002, section 4).
    """
    if size <= _SMALL:
        return _whole(size, key)[index]
    bits = (size - 1).bit_length()
    low_bits = np.uint64(bits // 2)
    low, high = (np.uint64(2**width - 1) for width in (bits // 2, bits - bits // 2))
    keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)
    image = np.asarray(index, np.uint64).copy()
    outside = np.arange(len(image))
    while len(outside):
        left, right = image[outside] >> low_bits, image[outside] & low
        for even, odd in keys.reshape(-1, 2):
            left = left ^ (_hash(right ^ even) & high)
            right = right ^ (_hash(left ^ odd) & low)
        image[outside] = left << low_bits | right
        outside = outside[image[outside] >= size]
    return image.astype(np.int64)


def summed(numbers: np.ndarray, count: int = 1 << 22) -> int:
    """Returns the sum of the hashes of whole numbers, mod 2^64, which does not depend on their order, and depends on
    each of them; `count` are hashed together."""
    some = (numbers[start : start + count] for start in range(0, len(numbers), count))
    return sum(int(_hash(np.asarray(each).astype(np.uint64)).sum()) for each in some) % (1 << 64)


@functools.lru_cache(maxsize=256)
def _whole(size: int, key: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(key).permutation(size)


def _hash(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele et al. 2014): each bit of the input flips about half of the output's bits."""
    x = x * _MIX
    for shift in (30, 27):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(0xBF58476D1CE4E5B9)
    return x ^ (x >> np.uint64(31))


def interleave(rates: np.ndarray, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns `count` positions, from `start` on, of an endless order that merges C streams in proportion to `rates`.

    Stream c has the share rates[c] / sum(rates). The order is Webster's method of apportionment (Balinski & Young
    1982): item i of stream c has the time (i + 1/2) / rates[c], and items are sorted by time. So every prefix of the
    order holds nearly the right share of each stream, and the number of items taken from each stream is known directly.

    Takes `rates`, positive float [C]; returns the stream of each position and the index of the item in its stream, both
    int64 [count].
    """
    if len(rates) == 1:
        return np.zeros(count, np.int64), np.arange(start, start + count)
    past, stream, item = _by_time(rates, start, count)
    chosen = slice(start - int(past.sum()), start - int(past.sum()) + count)
    return stream[chosen], item[chosen]


def taken(rates: np.ndarray, count: int) -> np.ndarray:
    """Returns how many items of each stream are among the first `count` of the order of `interleave`: int64 [C]."""
    if len(rates) == 1:
        return np.array([count])
    past, stream, _ = _by_time(rates, count, 1)
    return past + np.bincount(stream[: count - int(past.sum())], minlength=len(rates))


def _by_time(rates: np.ndarray, start: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns how many items of each stream are passed over, int64 [C], and the stream and the index of the items after
    them in their order, int64 [more than count] each, among them those at the positions from `start` on."""
    num = len(rates)
    shares = rates / rates.sum()
    # `past` items certainly come before `start`, a few fewer than `start` in all; those after them are sorted by time.
    past = np.maximum(np.floor((start - num) * shares + 0.5).astype(np.int64) - 1, 0)
    ahead = np.ceil((count + start - past.sum() + num) * shares).astype(np.int64) + 2
    stream = np.repeat(np.arange(num), ahead)
    item = np.concatenate([np.arange(first, first + more) for first, more in zip(past, ahead, strict=True)])
    order = np.lexsort((stream, (item + 0.5) / shares[stream]))
    return past, stream[order], item[order]
