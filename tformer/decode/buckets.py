"""Batches whose prompts are padded to one of few lengths, so that few programs are compiled."""

from collections.abc import Mapping

import numpy as np


def length(size: int, longest: int) -> int:
    """Returns the least of 16, 32, 48, 64, 96, 128, 192 ... that holds `size`, at most `longest` where that does."""
    bucket = 16
    while bucket < size:
        bucket += max(16, 1 << (bucket.bit_length() - 2))
    return min(bucket, max(size, longest))


def padded(batch: Mapping[str, np.ndarray], size: int, pad: int) -> dict[str, np.ndarray]:
    """Returns a batch whose prompts, or beside an encoder whose sources, have at least `size` places.

    Prompts are padded in front, sources behind.
    """
    paired = 'encoder_inputs' in batch

    def wide(name: str, x_BT: np.ndarray) -> np.ndarray:
        if paired and not name.startswith('encoder_'):  # the tokens that a decoder starts from
            return x_BT
        fill = -1 if name.endswith('positions') else pad if name.endswith('inputs') else 0
        more = max(size - x_BT.shape[1], 0)
        return np.pad(x_BT, ((0, 0), (0, more) if paired else (more, 0)), constant_values=fill)

    return {name: wide(name, x_BT) for name, x_BT in batch.items()}
