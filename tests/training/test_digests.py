"""What digests of files find, and what they leave to those that do not ask for it."""

import json
import pathlib
import shutil
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from places import ROOT
from tformer.errors import UserError
from tformer.training import digests


@pytest.fixture
def place(tmp_path):
    for name, text in {'run/metadata': '{}', 'params/a/b': 'arrays', 'merit.json': '1'}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    digests.write(tmp_path)
    with digests.recording(tmp_path, 'merit.json'):
        pass
    return tmp_path


def test_every_file_of_a_subdirectory_is_listed_and_others_are_where_they_are_recorded(place):
    assert json.loads((place / digests.FILE).read_text()).keys() == {'run/metadata', 'params/a/b', 'merit.json'}
    assert digests.find_corruption(place) is None


def test_contents_that_changed_in_place_are_found_where_they_are_asked_for(place):
    (place / 'params/a/b').write_text('arrayz')
    assert digests.find_corruption(place) == f'{place}/params/a/b has changed since it was written'
    assert digests.find_corruption(place, contents=False) is None


def test_a_file_of_another_size_is_found_without_its_contents(place):
    (place / 'params/a/b').write_text('array')
    assert digests.find_corruption(place, contents=False) == f'{place}/params/a/b has 5 bytes, not 6'
    assert digests.find_corruption(place, arrays=False) is None
    (place / 'params/a/b').unlink()
    assert digests.find_corruption(place, contents=False) == f'{place}/params/a/b is missing'


@pytest.mark.parametrize('name', digests.RECORDS)
def test_what_is_read_without_arrays_is_always_checked(place, name):
    (place / name).write_text((place / name).read_text()[:-1] + 'x')
    for kind in ({}, {'contents': False}, {'arrays': False}):
        assert digests.find_corruption(place, **kind) == f'{place / name} has changed since it was written'


def test_a_file_is_not_listed_while_it_is_written_and_stays_so_if_the_block_fails(place):
    with pytest.raises(ZeroDivisionError), digests.recording(place, 'merit.json'):
        assert digests.matches(place, 'merit.json') is None
        assert digests.matches(place, 'run/metadata') is True
        raise ZeroDivisionError
    (place / 'merit.json').write_text('half')
    assert digests.find_corruption(place) is None
    with digests.recording(place, 'merit.json'):
        (place / 'merit.json').write_text('2')
    assert digests.matches(place, 'merit.json') is True
    (place / 'merit.json').write_text('3')
    with pytest.raises(UserError, match=r'merit\.json has changed'):
        digests.expect(place, 'merit.json')


# ------------------------------------------------------------------------------------------- a change of any byte


STORED = ROOT / 'tests/stored_run/checkpoints/3'
FILES = {
    'run/metadata': b'{"step": 3}',
    'variables/d/ab': bytes(range(200)),
    'variables/deep/er/x': b'\0',
    'a/b': b'12',
}


@pytest.fixture(scope='module')
def flipped(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with digests of FILES."""
    made = tmp_path_factory.mktemp('digests')
    for name, content in FILES.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(content)
    digests.write(made)
    return made


def test_sizes_and_sums_of_every_file_are_written(flipped: pathlib.Path) -> None:
    """The sums are CRC-32's, 8 hexadecimal digits."""
    listed = json.loads((flipped / digests.FILE).read_text())
    assert listed == {name: [len(content), f'{zlib.crc32(content):08x}'] for name, content in FILES.items()}
    assert digests.find_corruption(flipped) is None
    assert all(digests.matches(flipped, name) for name in FILES) and digests.matches(flipped, 'other') is None


@settings(max_examples=60)
@given(name=st.sampled_from(sorted(FILES)), at=st.integers(0, 199), flip=st.integers(1, 255))
def test_a_change_of_any_byte_of_any_file_is_found_and_named(flipped: pathlib.Path, name: str, at: int, flip: int):
    content = bytearray(FILES[name])
    content[at % len(content)] ^= flip
    (flipped / name).write_bytes(content)
    try:
        assert digests.find_corruption(flipped) == f'{flipped / name} has changed since it was written'
        assert digests.matches(flipped, name) is False
        # Without contents only the records are read.
        assert (digests.find_corruption(flipped, contents=False) is None) == (name not in digests.RECORDS)
    finally:
        (flipped / name).write_bytes(FILES[name])


def test_every_file_of_a_checkpoint_that_is_read_is_listed_and_its_change_found(tmp_path: pathlib.Path) -> None:
    """Orbax's own notes beside digests.json are not read."""
    copy = tmp_path / '3'
    shutil.copytree(STORED, copy)
    files = {str(file.relative_to(copy)) for file in copy.rglob('*') if file.is_file()}
    listed = json.loads((copy / digests.FILE).read_text()).keys()
    assert files - listed == {digests.FILE, '_CHECKPOINT_METADATA', 'commit_success.txt'} and listed <= files
    for name in listed:
        content = (copy / name).read_bytes()
        for at in {0, len(content) // 2, len(content) - 1}:
            changed = bytearray(content)
            changed[at] ^= 1
            (copy / name).write_bytes(changed)
            assert digests.find_corruption(copy) == f'{copy / name} has changed since it was written'
        (copy / name).write_bytes(content)
    assert digests.find_corruption(copy) is None
