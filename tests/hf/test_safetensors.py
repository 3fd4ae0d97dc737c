"""Safetensors files are read and written as the format says; a malformed one is refused in one line."""

import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tformer.errors import UserError
from tformer.hf import safetensors

ARRAYS = {
    'a': np.arange(6, dtype=np.float32).reshape(2, 3),
    'b': np.arange(4).astype(ml_dtypes.bfloat16),
    'half': np.ones((2, 1), np.float16),
    'nothing': np.zeros((0, 3), np.float32),
    'one': np.array(7.0, np.float64),
    'ids': np.arange(3),
    'flags': np.array([True, False, True]),
}


def shapes_of(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: (array.dtype, array.shape) for name, array in arrays.items()}


def by_hand(place: pathlib.Path, header: object, data: bytes = bytes(24), length: int | None = None) -> pathlib.Path:
    """Writes a file of this header, JSON or text, and these numbers."""
    stored = (header if isinstance(header, str) else json.dumps(header)).encode()
    size = len(stored) if length is None else length
    file = place / 'model.safetensors'
    file.write_bytes(size.to_bytes(8, 'little') + stored + data)
    return file


def entry(start: int = 0, stop: int = 24, shape: object = (2, 3), dtype: object = 'F32') -> dict[str, object]:
    return {'dtype': dtype, 'shape': shape, 'data_offsets': [start, stop]}


def test_bytes_written_by_hand_are_read(tmp_path: pathlib.Path) -> None:
    numbers = np.array([[1.5, -2.0, 3.0], [4.0, 5.0, 6.0]], '<f4')
    found = safetensors.open_files([by_hand(tmp_path, {'x': entry(), '__metadata__': {}}, numbers.tobytes())])
    assert list(found) == ['x']
    np.testing.assert_array_equal(found['x'], numbers)
    odd = by_hand(tmp_path, {'x': entry(0, 1, [1], 'I8'), 'y': entry(1, 5, [1])}, b'\x02' + numbers.tobytes()[:4])
    assert safetensors.open_files([odd])['y'][0] == 1.5  # numbers that are not aligned
    header = {'x': entry(), 'end': entry(24, 24, [0]), 'begin': entry(0, 0, [0, 3])}  # in any order
    found = safetensors.open_files([by_hand(tmp_path, header, numbers.tobytes())])
    assert {name: array.shape for name, array in found.items()} == {'begin': (0, 3), 'x': (2, 3), 'end': (0,)}
    np.testing.assert_array_equal(found['x'], numbers)


@pytest.mark.parametrize('most_bytes', [1 << 30, 40, 1])
def test_what_is_written_is_read_bit_for_bit(tmp_path: pathlib.Path, most_bytes: int) -> None:
    files = safetensors.write_directory(tmp_path, shapes_of(ARRAYS), ARRAYS.__getitem__, most_bytes)
    found = safetensors.open_directory(tmp_path)
    assert found is not None and {*found} == {*ARRAYS}
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array), name
    assert len(files) == {1 << 30: 1, 40: 2, 1: len(ARRAYS)}[most_bytes]
    assert (tmp_path / safetensors.INDEX).exists() == (len(files) > 1)
    (tmp_path / safetensors.INDEX).unlink(missing_ok=True)
    assert {*(safetensors.open_directory(tmp_path) or ())} == {*ARRAYS}  # files that no index names are read as well


def test_the_formats_own_library_reads_and_writes_the_same(tmp_path: pathlib.Path) -> None:
    library = pytest.importorskip('safetensors.numpy')
    safetensors.write_directory(tmp_path, shapes_of(ARRAYS), ARRAYS.__getitem__, 1 << 30)
    theirs = library.load_file(tmp_path / safetensors.WHOLE)
    assert {name: array.tobytes() for name, array in theirs.items()} == {n: a.tobytes() for n, a in ARRAYS.items()}
    library.save_file(ARRAYS, tmp_path / 'other.safetensors')
    found = safetensors.open_files([tmp_path / 'other.safetensors'])
    assert {name: array.tobytes() for name, array in found.items()} == {n: a.tobytes() for n, a in ARRAYS.items()}


HOSTILE: dict[str, tuple[Callable[[pathlib.Path], object], str]] = {
    'empty': (lambda p: (p / 'model.safetensors').write_bytes(b''), 'is truncated'),
    'short': (lambda p: (p / 'model.safetensors').write_bytes(b'\x01\x02'), 'is truncated'),
    'a header beyond the file': (lambda p: by_hand(p, {}, b'', 1 << 20), 'a header of 1,048,576 bytes'),
    'a header of 2^63 bytes': (lambda p: by_hand(p, {}, b'', 1 << 63), 'is truncated or no safetensors file'),
    'a pickle': (lambda p: (p / 'model.safetensors').write_bytes(b'\x80\x02cos\nsystem\n.'), 'is truncated or no'),
    'no JSON': (lambda p: by_hand(p, '{"x": '), 'Expecting value'),
    'not UTF-8': (lambda p: by_hand(p, '{}', b'', 1) and (p / 'model.safetensors').write_bytes(
        (1).to_bytes(8, 'little') + b'\xff'), "can't decode"),
    'a list': (lambda p: by_hand(p, []), 'not a JSON object'),
    'deep': (lambda p: by_hand(p, '[' * 100_000), 'nested too deeply'),
    'a tensor twice': (lambda p: by_hand(p, f'{{"x": {json.dumps(entry())}, "x": {json.dumps(entry())}}}'),
                       "the key 'x' is given twice"),
    'no offsets': (lambda p: by_hand(p, {'x': {'dtype': 'F32', 'shape': [1]}}), 'has no dtype, shape and data_offsets'),
    'an entry of text': (lambda p: by_hand(p, {'x': 'F32'}), 'has no dtype, shape and data_offsets'),
    'fp8': (lambda p: by_hand(p, {'x': entry(dtype='F8_E4M3')}), "dtype 'F8_E4M3', which is not read; valid: F64, F32"),
    'a list as dtype': (lambda p: by_hand(p, {'x': entry(dtype=['F32'])}), "dtype ['F32'], which is not read"),
    'a negative size': (lambda p: by_hand(p, {'x': entry(shape=[-2, -3])}), 'has shape [-2, -3], not a list of whole'),
    'a size of text': (lambda p: by_hand(p, {'x': entry(shape='23')}), 'has shape 23, not a list'),
    'a size True': (lambda p: by_hand(p, {'x': entry(shape=[True, 6])}), 'has shape [True, 6], not a list'),
    'a huge size': (lambda p: by_hand(p, {'x': entry(shape=[2**40, 2**40])}), 'has data_offsets [0, 24]'),
    'many axes': (lambda p: by_hand(p, {'x': entry(0, 4, [1] * 99)}, bytes(4)), 'has data_offsets [0, 4]'),
    'a negative offset': (lambda p: by_hand(p, {'x': entry(-24, 0)}), 'has data_offsets [-24, 0], not a list of whole'),
    'three offsets': (lambda p: by_hand(p, {'x': {**entry(), 'data_offsets': [0, 24, 24]}}), '[0, 24, 24]'),
    'offsets in reverse': (lambda p: by_hand(p, {'x': entry(24, 0)}), 'has data_offsets [24, 0]'),
    'offsets that do not fit the shape': (lambda p: by_hand(p, {'x': entry(0, 20)}), 'has data_offsets [0, 20]'),
    'offsets beyond the file': (lambda p: by_hand(p, {'x': entry(0, 24)}, bytes(20)), 'is truncated: its header'),
    'overlapping': (lambda p: by_hand(p, {'x': entry(), 'y': entry(20, 44)}, bytes(44)), 'tensor y overlaps tensor x'),
    'the same place': (lambda p: by_hand(p, {'x': entry(), 'y': entry()}), 'tensor y overlaps tensor x'),
    'a gap': (lambda p: by_hand(p, {'x': entry(4, 28)}, bytes(28)), 'tensor x leaves a gap after the header'),
    'more bytes': (lambda p: by_hand(p, {'x': entry()}, bytes(30)), 'has bytes after its last tensor'),
    'a directory': (lambda p: (p / 'model.safetensors').mkdir(), 'is not a file'),
}  # fmt: skip


@pytest.mark.parametrize('case', HOSTILE)
def test_a_malformed_file_is_refused_in_one_line(tmp_path: pathlib.Path, case: str) -> None:
    make, words = HOSTILE[case]
    make(tmp_path)
    with pytest.raises(UserError, match=re.escape(words)) as error:
        safetensors.open_directory(tmp_path)
    assert str(tmp_path) in str(error.value) and '\n' not in str(error.value) and len(str(error.value)) < 500


INDICES: dict[str, tuple[object, str]] = {
    'no map': ({'metadata': {}}, 'has no weight_map'),
    'a map of text': ({'weight_map': 'a'}, 'has no weight_map'),
    'an absolute path': ({'weight_map': {'a': '/etc/passwd'}}, 'is not the name of a file beside it'),
    'a path upwards': ({'weight_map': {'a': '../model-1.safetensors'}}, 'is not the name of a file beside it'),
    'backslashes': ({'weight_map': {'a': '..\\x'}}, 'is not the name of a file beside it'),
    'the directory above': ({'weight_map': {'a': '..'}}, 'is not the name of a file beside it'),
    'a number': ({'weight_map': {'a': 3}}, 'is not the name of a file beside it'),
    'a name longer than names may be': ({'weight_map': {'a': 'x' * 256}}, 'is not the name of a file beside it'),
    'half a character': ({'weight_map': {'a': '\ud800'}}, r'\ud800 is not a file'),
    'a missing file': ({'weight_map': {'a': 'absent.safetensors'}}, 'absent.safetensors is not a file'),
    'a tensor that is not there': ({'weight_map': {'a': '1.safetensors', 'z': '1.safetensors'}}, 'tensor z is not in'),
    'another file': ({'weight_map': {'a': '2.safetensors', 'b': '1.safetensors'}}, 'is not in'),
    'a tensor without a place': ({'weight_map': {'a': '1.safetensors'}}, 'does not name tensor half'),
    'tensors of two files': ({'weight_map': {'a': '1.safetensors', 'b': '3.safetensors'}}, 'in 1.safetensors as well'),
}


@pytest.mark.parametrize('case', INDICES)
def test_a_malformed_index_is_refused_in_one_line(tmp_path: pathlib.Path, case: str) -> None:
    for file, names in (('1', ('a', 'half')), ('2', ('b',)), ('3', ('b', 'half'))):
        arrays = {name: ARRAYS[name] for name in names}
        safetensors.write(tmp_path / f'{file}.safetensors', shapes_of(arrays), arrays.__getitem__)
    index, words = INDICES[case]
    (tmp_path / safetensors.INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=re.escape(words)) as error:
        safetensors.open_directory(tmp_path)
    assert '\n' not in str(error.value)


def test_one_tensor_of_a_file_takes_memory_while_it_is_used(tmp_path: pathlib.Path) -> None:
    """A tensor is a window into its file, not a copy of it."""
    safetensors.write_directory(tmp_path, shapes_of(ARRAYS), ARRAYS.__getitem__, 1 << 30)
    found = safetensors.open_directory(tmp_path)
    assert found is not None
    base: Any = found['a']
    while getattr(base, 'base', None) is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap) and base.nbytes == ARRAYS['a'].nbytes
