"""What digests of files find, and what they leave to those that do not ask for it."""

import json

import pytest

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
