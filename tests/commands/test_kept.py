"""Rows that are kept for a command that goes on."""

import json
import pathlib

import pytest

from tformer.commands.kept import kept
from tformer.errors import UserError

OF = {'run': 'a', 'texts': ['x' * 300]}


def interrupted(path: pathlib.Path, of: dict, rows: dict) -> dict:
    """Returns the rows that were there; those given are added, and then the command fails."""
    with pytest.raises(RuntimeError), kept(path, of, 9) as there:
        found = dict(there.rows)
        for index, row in rows.items():
            there.add(index, row)
        raise RuntimeError
    return found


def test_rows_stay_until_all_went_well(tmp_path: pathlib.Path) -> None:
    path, part = tmp_path / 'out', tmp_path / 'out.part'
    assert interrupted(path, OF, {3: ['ä\n', -0.1], 0: []}) == {}
    assert interrupted(path, OF, {1: [1]}) == {3: ['ä\n', -0.1], 0: []}
    assert len(part.read_text().splitlines()[0]) < 150  # a long value stands there as its digest
    with kept(path, OF, 9) as there:
        assert there.rows == {3: ['ä\n', -0.1], 0: [], 1: [1]}
    assert not part.exists()


@pytest.mark.parametrize('cut', range(12))
def test_a_torn_end_is_dropped_wherever_it_is_torn(tmp_path: pathlib.Path, cut: int) -> None:
    path, part = tmp_path / 'out', tmp_path / 'out.part'
    interrupted(path, OF, {0: ['a'], 1: ['bä']})
    whole = part.read_bytes()
    for size in range(cut, len(whole), 12):
        part.write_bytes(whole[:size])
        lines = whole[:size].count(b'\n')
        assert interrupted(path, OF, {}) == dict([(0, ['a']), (1, ['bä'])][: max(0, lines - 1)])
        interrupted(path, OF, {7: ['z']})
        assert interrupted(path, OF, {})[7] == ['z']


def test_rows_of_something_else_are_refused_and_stay(tmp_path: pathlib.Path) -> None:
    path, part = tmp_path / 'out', tmp_path / 'out.part'
    interrupted(path, OF, {0: ['a']})
    before = part.read_bytes()
    with pytest.raises(UserError, match=r'out\.part is of something else \(run=a there, b here\): remove it, or name'):
        interrupted(path, {**OF, 'run': 'b'}, {})
    with pytest.raises(UserError, match=r'out\.part is of something else \(texts=\w{64} there, \w{64} here\)'):
        interrupted(path, {**OF, 'texts': ['x' * 299 + 'y']}, {})
    assert part.read_bytes() == before
    part.write_text('not a head\n[0, 1]\n')
    with pytest.raises(UserError, match='is of something else: remove it'):
        interrupted(path, OF, {})
    part.write_text(json.dumps({}) + '\n')
    for row in ('{"no": "row"}', '[7, 1]', '["a", []]', '[9, []]', '[-1, []]', '[true, []]', '5', '[1, [], []]'):
        part.write_bytes(before + f'{row}\n'.encode())
        with pytest.raises(UserError, match='is damaged: remove it'):
            interrupted(path, OF, {})


def test_two_processes_do_not_write_the_same_rows(tmp_path: pathlib.Path) -> None:
    with (
        kept(tmp_path / 'out', OF, 9),
        pytest.raises(UserError, match='another process writes it'),
        kept(tmp_path / 'out', OF, 9),
    ):
        pass
