"""Safetensors files, read tensor by tensor and written in shards. Nothing in a file is executed.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name -> dtype, shape, data_offsets), and
the numbers. A checkpoint of several files has an index, JSON too, that says in which file each tensor is.
"""

import itertools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tformer.config import json_files
from tformer.errors import UserError

DTYPES: dict[str, np.dtype[Any]] = {
    'F64': np.dtype('<f8'),
    'F32': np.dtype('<f4'),
    'F16': np.dtype('<f2'),
    'BF16': np.dtype(ml_dtypes.bfloat16),
    **{f'{kind}{8 * size}': np.dtype(f'<{kind.lower()}{size}') for kind in 'IU' for size in (1, 2, 4, 8)},
    'BOOL': np.dtype(bool),
}
INDEX = 'model.safetensors.index.json'
WHOLE = 'model.safetensors'
_LONGEST_HEADER = 100_000_000  # bytes, as in the format's own library
_MOST_AXES = 32


class Tensor(NamedTuple):
    """Where the numbers of one tensor are."""

    file: pathlib.Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int  # bytes, from the beginning of the file

    @property
    def size(self) -> int:
        """Its number of bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        """Returns the tensor: its pages are read from the file when they are used, and let go with the array."""
        if not self.size:
            return np.zeros(self.shape, self.dtype)
        mapped = np.memmap(self.file, np.uint8, 'r', self.start, (self.size,))
        return np.asarray(mapped.view(self.dtype).reshape(self.shape))


class Tensors(Mapping[str, np.ndarray]):
    """The tensors of a checkpoint by name; one is read when it is asked for."""

    def __init__(self, entries: Mapping[str, Tensor]):
        self.entries = entries

    def __getitem__(self, name: str) -> np.ndarray:
        return self.entries[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def read_header(file: pathlib.Path) -> dict[str, Tensor]:
    """Returns the tensors of one file, in the order of their numbers.

    Raises:
      UserError: the file is truncated, its header is malformed, it has a tensor of a dtype that is not read, or tensors
        overlap, leave gaps or reach beyond the end of the file.
    """
    if not file.is_file():
        raise UserError(f'{file} is not a file')
    size = file.stat().st_size
    with file.open('rb') as opened:
        length = int.from_bytes(opened.read(8), 'little')
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise UserError(f'{file} is truncated or no safetensors file: a header of {length:,} bytes in {size:,}')
        stored = opened.read(length)
    try:
        header = json_files.parse(stored.decode())
        header.pop('__metadata__', None)
        found = {name: _entry(file, name, entry, 8 + length) for name, entry in header.items()}
    except ValueError as error:
        raise UserError(f'{file}: {error}') from error
    found = dict(sorted(found.items(), key=lambda item: (item[1].start, item[1].size)))
    end, before = 8 + length, 'the header'
    for name, tensor in found.items():
        if tensor.start != end:
            what = 'overlaps' if tensor.start < end else 'leaves a gap after'
            raise UserError(f'{file}: tensor {name} {what} {before}')
        end, before = end + tensor.size, f'tensor {name}'
    if end != size:
        what = 'is truncated' if end > size else 'has bytes after its last tensor'
        raise UserError(f'{file} {what}: its header describes {end:,} bytes, and it has {size:,}')
    return found


def _entry(file: pathlib.Path, name: str, entry: Any, first: int) -> Tensor:
    """Returns the place of one tensor by its entry in the header. Raises a `ValueError` if that is malformed."""
    if not isinstance(entry, dict) or not {'dtype', 'shape', 'data_offsets'} <= entry.keys():
        raise ValueError(f'tensor {name} has no dtype, shape and data_offsets')
    kind, shape, offsets = entry['dtype'], entry['shape'], entry['data_offsets']
    if not isinstance(kind, str) or kind not in DTYPES:
        raise ValueError(f'tensor {name} has dtype {kind!r}, which is not read; valid: {", ".join(DTYPES)}')
    for what, numbers in (('shape', shape), ('data_offsets', offsets)):
        if not isinstance(numbers, list) or not all(type(each) is int and each >= 0 for each in numbers):
            raise ValueError(f'tensor {name} has {what} {str(numbers)[:80]}, not a list of whole numbers')
    tensor = Tensor(file, DTYPES[kind], tuple(shape), first + offsets[0] if offsets else first)
    if len(shape) > _MOST_AXES or len(offsets) != 2 or offsets[1] - offsets[0] != tensor.size:
        raise ValueError(f'tensor {name} of shape {str(shape)[:80]} and dtype {kind} has data_offsets {offsets}')
    return tensor


def open_files(files: Sequence[pathlib.Path]) -> Tensors:
    """Returns the tensors of several files. Raises a `UserError` as `read_header`, or if two have a tensor's name."""
    entries: dict[str, Tensor] = {}
    for file in files:
        found = read_header(file)
        if twice := entries.keys() & found.keys():
            name = min(twice)
            raise UserError(f'{file}: tensor {name} is in {entries[name].file.name} as well')
        entries |= found
    return Tensors(entries)


def open_directory(directory: pathlib.Path) -> Tensors | None:
    """Returns the tensors of a hub directory: of model.safetensors, else of the index's files, else of all such files.

    None: it has no safetensors file.

    Raises:
      UserError: as `open_files`, or the index does not fit the files.
    """
    if os.path.lexists(directory / WHOLE):
        return open_files([directory / WHOLE])
    if os.path.lexists(directory / INDEX):
        return _open_index(directory / INDEX)
    files = sorted(file for file in directory.glob('*.safetensors') if not file.name.startswith('adapter_'))
    return open_files(files) if files else None


def _open_index(index: pathlib.Path) -> Tensors:
    places = read_index(index)
    found = open_files([index.parent / name for name in sorted(set(places.values()))])
    for name, file in places.items():
        if name not in found or found.entries[name].file.name != file:
            raise UserError(f'{index}: tensor {name} is not in {file}')
    if others := [name for name in found if name not in places]:
        raise UserError(f'{index} does not name tensor {others[0]} of {found.entries[others[0]].file.name}')
    return found


def read_index(index: pathlib.Path) -> dict[str, str]:
    """Returns tensor -> file name of an index. Raises a `UserError` if it is malformed or names other directories."""
    places = json_files.read(index).get('weight_map')
    if not isinstance(places, dict) or not places:
        raise UserError(f'{index} has no weight_map')
    for name, file in places.items():
        if not isinstance(file, str) or not re.fullmatch(r'[^/\\\0]{1,255}', file) or file in ('.', '..'):
            raise UserError(f'{index}: tensor {name} is in {file!r}, which is not the name of a file beside it')
    return places


# ------------------------------------------------------------------------------------------------------- writing
Shapes = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]  # of tensors by name


def write(file: pathlib.Path, shapes: Shapes, read: Callable[[str], np.ndarray]) -> None:
    """Writes a file; `read` gives each tensor when its turn comes, so that one at a time is in memory."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    ends = list(itertools.accumulate(_size(*shapes[name]) for name in shapes))
    header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}  # the hub's library asks for it
    for (name, (dtype, shape)), start, end in zip(shapes.items(), [0, *ends], ends, strict=False):
        header[name] = {'dtype': names[dtype], 'shape': list(shape), 'data_offsets': [start, end]}
    stored = json.dumps(header, separators=(',', ':')).encode()
    stored += b' ' * (-len(stored) % 8)  # numbers are aligned
    with file.open('wb') as opened:
        opened.write(len(stored).to_bytes(8, 'little') + stored)
        for name, (dtype, shape) in shapes.items():
            array = np.asarray(read(name), dtype)
            assert array.shape == shape, name
            opened.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        opened.flush()
        os.fsync(opened.fileno())


def split(shapes: Shapes, most_bytes: int) -> list[Shapes]:
    """Returns the tensors of each file of at most `most_bytes`, or of one tensor, in their order."""
    shards: list[dict[str, Any]] = [{}]
    room = most_bytes
    for name, (dtype, shape) in shapes.items():
        if _size(dtype, shape) > room and shards[-1]:
            shards.append({})
            room = most_bytes
        shards[-1][name] = dtype, shape
        room -= _size(dtype, shape)
    return list(shards)


def write_directory(
    directory: pathlib.Path, shapes: Shapes, read: Callable[[str], np.ndarray], most_bytes: int
) -> list[str]:
    """Writes tensors in files of at most `most_bytes`, or of one tensor, and the index of several files; returns the
    files' names."""
    shards = split(shapes, most_bytes)
    if len(shards) == 1:
        write(directory / WHOLE, shapes, read)
        return [WHOLE]
    files = [f'model-{number:05}-of-{len(shards):05}.safetensors' for number in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        write(directory / file, shard, read)
    places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    total = sum(_size(*each) for each in shapes.values())
    index = {'metadata': {'total_size': total}, 'weight_map': places}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + '\n')
    return files


def _size(dtype: np.dtype[Any], shape: Sequence[int]) -> int:
    return math.prod(shape) * dtype.itemsize
