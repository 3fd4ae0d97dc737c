"""Rows that are kept for a command that goes on."""

import errno
import json
import os
import pathlib
from unittest import mock

import pytest

from tformer.commands import kept as kept_lib
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
    assert interrupted(path, OF, {}) == {} and not part.exists()
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


@pytest.fixture
def among(monkeypatch):
    """Returns a function by which this is process `number` of `count`; the others are always there already."""

    def be(number: int, count: int) -> None:
        monkeypatch.setattr(kept_lib.jax, 'process_index', lambda: number)
        monkeypatch.setattr(kept_lib.jax, 'process_count', lambda: count)
        monkeypatch.setattr(kept_lib.processes, 'meet', lambda name: None)

    return be


def test_rows_of_any_number_of_processes_are_found_by_any_other(tmp_path: pathlib.Path, among) -> None:
    """Three processes leave rows; a first one of two takes all, its second one reads them, and one writes the file."""
    path, part = tmp_path / 'o.t', tmp_path / 'o.t.part'
    (tmp_path / 'o.t.part.x').write_text('of somebody else')
    (tmp_path / 'o-t.part.1').write_text('of somebody else')
    for number in range(3):
        among(number, 3)
        assert interrupted(path, OF, {number: [number]}) == ({} if number == 0 else {0: [0]})
    assert sorted(each.name for each in tmp_path.glob('o.t.part*')) == [
        f'o.t.part{end}' for end in ('', '.1', '.2', '.x')
    ]
    among(0, 2)
    assert interrupted(path, OF, {5: [5]}) == {0: [0], 1: [1], 2: [2]}
    assert not part.with_name('o.t.part.1').exists() and not part.with_name('o.t.part.2').exists()
    among(1, 2)
    assert interrupted(path, OF, {}) and part.exists() and not part.with_name('o.t.part.1').exists()
    assert interrupted(path, OF, {7: [7]}) == {0: [0], 1: [1], 2: [2], 5: [5]}
    among(0, 1)
    with kept(path, OF, 9) as there:
        assert there.whole() == {number: [number] for number in (0, 1, 2, 5, 7)}
    assert not part.exists() and len(list(tmp_path.iterdir())) == 2


def test_the_first_of_several_processes_waits_for_the_rows_of_the_others(tmp_path: pathlib.Path, among) -> None:
    path = tmp_path / 'out'
    among(0, 2)
    with kept(path, OF, 9) as first:
        among(1, 2)
        with kept(path, OF, 9) as second:
            assert first.added_elsewhere() == 0
            second.add(3, ['a'])
            second.add(4, ['b'])
            assert first.added_elsewhere() == 2 and first.added_elsewhere() == 0
            second.add(5, ['c'])
            with pytest.raises(UserError, match=r'out\.part\.1: another process writes it'), kept(path, OF, 9):
                pass
            assert second.whole() is None
        among(0, 2)
        first.add(0, ['d'])
        assert first.added_elsewhere() == 1
        assert first.whole() == {3: ['a'], 4: ['b'], 5: ['c'], 0: ['d']}
    assert not list(tmp_path.iterdir())


def test_a_failure_behind_the_first_process_is_what_is_raised(tmp_path: pathlib.Path, among) -> None:
    among(0, 2)
    assert interrupted(tmp_path / 'out', OF, {0: [0]}) == {}
    among(1, 2)
    with pytest.raises(UserError, match='of the second'), kept(tmp_path / 'out', OF, 9):
        (tmp_path / 'out.part.1').unlink()  # as the first process does when it has all rows
        raise UserError('of the second')


def test_rows_that_another_process_made_of_something_else_are_refused(tmp_path: pathlib.Path, among) -> None:
    among(1, 2)
    (tmp_path / 'out.part').write_text(json.dumps(OF) + '\n')
    with pytest.raises(UserError, match='is of something else'), kept(tmp_path / 'out', OF, 9):
        pass
    (tmp_path / 'out.part').unlink()
    (tmp_path / 'out.part.4').write_text('{"run": "b", "texts": []}\n')
    among(0, 1)
    with pytest.raises(UserError, match=r'out\.part\.4 is of something else'), kept(tmp_path / 'out', OF, 9):
        pass
    assert (tmp_path / 'out.part.4').exists()


def test_without_locks_rows_are_kept_and_it_is_said(tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    none = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    monkeypatch.setattr(kept_lib.fcntl, 'flock', mock.Mock(side_effect=none))
    interrupted(tmp_path / 'out', OF, {0: ['a']})
    with kept(tmp_path / 'out', OF, 9) as there:
        assert there.rows == {0: ['a']}
    assert f'{tmp_path}/out.part: nothing keeps a second process out of it: ' in capsys.readouterr().err
