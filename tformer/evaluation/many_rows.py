"""A model applied to many rows of unequal length: similar rows share a batch, and few programs are compiled."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tformer.data.examples.example_arrays import OF_ROWS
from tformer.data.examples.special_tokens import Fields
from tformer.distributed.compilers import jit
from tformer.layers import masks

SHORTEST = 16  # positions of the shortest batch; each further length is twice the one before

Method = Callable[[Any, Mapping[str, jax.Array]], Any]  # (module, batch) -> outputs, with a leading axis of rows
Program = Callable[[Any, Mapping[str, Any]], Any]  # (variables, batch) -> outputs


@functools.lru_cache(maxsize=16)
def make_program(model: nn.Module, method: Method, mesh: Mesh) -> Program:
    """Returns the compiled (variables, batch) -> outputs of a method; every device has the outputs of all rows."""

    @functools.partial(jit, out_shardings=NamedSharding(mesh, PartitionSpec()))
    def program(variables: Any, batch: Mapping[str, jax.Array]) -> Any:
        with masks.ordered('behind'):
            return model.apply(variables, batch, method=method)

    return program


def batches(
    rows: Sequence[Fields], pad: int, width: int, longest: int
) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
    """Yields (indices of some rows, their batch) until every row was in one, the longest first.

    A row has its `inputs`, perhaps `encoder_inputs`, and other arrays as long as its inputs. Batches have `width` rows,
    the last of a length also empty ones, and at most `longest` positions.
    """
    lengths = [_length(max(len(row[name]) for name in row if name.endswith('inputs')), longest) for row in rows]
    order, start = sorted(range(len(rows)), key=lambda index: -lengths[index]), 0
    while start < len(order):
        length = lengths[order[start]]
        chosen = [index for index in order[start : start + width] if lengths[index] == length]
        yield chosen, _batch([rows[index] for index in chosen], width, length, pad)
        start += len(chosen)


def _length(size: int, longest: int) -> int:
    """Returns the smallest of 16, 32, 64 ... and `longest` that holds `size` tokens."""
    return min(SHORTEST << max(-(-size // SHORTEST) - 1, 0).bit_length(), longest)


def _batch(rows: Sequence[Fields], width: int, length: int, pad: int) -> dict[str, np.ndarray]:
    """Returns rows padded behind to [width, length]; padding has position -1, and 0 in what is not a token. Arrays of
    whole rows, as `segment_weights`, are padded to the longest of these rows."""
    batch: dict[str, np.ndarray] = {}
    for name, first in rows[0].items():
        size = max(len(row[name]) for row in rows) if name in OF_ROWS else length
        fill = pad if name.endswith('inputs') else -1 if name == 'positions' else 0
        array = np.full((width, size), fill, np.asarray(first).dtype)
        for place, row in enumerate(rows):
            array[place, : len(row[name])] = row[name]
        batch[name] = array
        if name.endswith('inputs'):
            sizes = np.array([len(row[name]) for row in rows] + [0] * (width - len(rows)))
            counted = np.arange(length, dtype=np.int32)
            places = np.where(counted < sizes[:, None], counted, -1).astype(np.int32)
            batch[name.replace('inputs', 'positions')] = places
    return batch
