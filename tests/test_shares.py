"""A test file that outgrows its share of the time is named."""

import shares
from places import ROOT


def test_a_file_that_takes_more_than_its_share_is_named_whatever_the_speed_of_the_machine() -> None:
    allowed = {'quick': {'a': 60.0, 'b': 40.0}, 'slow': {'a': 100.0}}
    for speed in (0.01, 1, 1000):
        same = {'quick': {'a': 6 * speed, 'b': 4 * speed}, 'slow': {'a': 3 * speed}}
        assert shares.outgrown(same, allowed) == []
        grown = {'quick': {'a': 3 * speed, 'b': 7 * speed}, 'slow': {'a': 3 * speed}}
        assert shares.outgrown(grown, allowed) == ['b takes 70.0 % of the time of the quick tests; its share is 40.0 %']
    new = shares.outgrown({'slow': {'a': 9.0, 'c': 1.0}}, allowed)
    assert new == ['c takes 10.0 % of the time of the slow tests; its share is 0.0 %']
    assert shares.outgrown({'slow': {'a': 99.0, 'c': 1.0}}, allowed) == []


def test_the_stored_shares_are_of_files_that_are_there_and_each_is_a_part_of_the_whole() -> None:
    for files in shares.load().values():
        assert all((ROOT / file).is_file() for file in files)
        assert abs(sum(files.values()) - 100) < 2
