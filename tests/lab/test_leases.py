"""Leases among processes of several hosts, whose clocks and deaths are simulated."""

import concurrent.futures
import dataclasses
import errno
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lives import HANG
from tformer.lab.sweep import leases
from tformer.lab.sweep.leases import PATIENCE, Holder, Lease, Leases, deciding


@dataclasses.dataclass
class Clock:
    """The clock of one host; those of others show other times."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def host(place: pathlib.Path, name: str, clock: Clock | None = None, pid: int = 1) -> Leases:
    return Leases(place, Holder(name, pid, started=7), clock or Clock())


def take(of: Leases, name: str = 'arm/seed_0') -> Lease | None:
    of.look()
    return of.take(name)


def test_one_of_several_takes_it_and_gives_it_back(tmp_path: pathlib.Path) -> None:
    a, b = host(tmp_path, 'a'), host(tmp_path, 'b')
    held = take(a)
    assert held is not None and held.renew() and take(b) is None and take(a) is None
    assert b.is_held('arm/seed_0') and not b.is_held('arm/seed_1') and b.names() == ['arm/seed_0']
    held.release(deaths=2)
    taken = take(b)
    assert taken is not None and taken.deaths == 2 and take(a) is None
    taken.release(done=True)
    assert os.listdir(tmp_path) == []


def test_who_looked_before_another_took_it_does_not_get_it(tmp_path: pathlib.Path) -> None:
    """Whether that one still has it, or it has been taken and given back in between."""
    a, b, c = (host(tmp_path, name) for name in 'abc')
    b.look()
    held = take(a)
    assert held is not None and b.take('arm/seed_0') is None
    held.release()
    again = take(c)
    assert again is not None and os.listdir(tmp_path) == ['arm@seed_0.2']
    assert b.take('arm/seed_0') is None and again.renew() and os.listdir(tmp_path) == ['arm@seed_0.2']


def test_a_holder_notices_who_took_over_though_its_file_stands(tmp_path: pathlib.Path, monkeypatch) -> None:
    clock = Clock()
    a, b = host(tmp_path, 'a'), host(tmp_path, 'b', clock)
    held = take(a)
    assert held is not None and take(b) is None
    clock.now += PATIENCE + 1
    monkeypatch.setattr(pathlib.Path, 'unlink', mock.Mock(side_effect=OSError))  # the taker died before
    taken = take(b)
    assert taken is not None and len(os.listdir(tmp_path)) == 2
    assert not held.renew() and taken.renew()


@pytest.mark.parametrize('lead', [-1e6, 0.0, 1e6])
def test_a_silent_holder_of_another_host_loses_it_by_the_clock_of_who_looks(tmp_path, lead: float) -> None:
    clock = Clock(lead)
    a, b = host(tmp_path, 'a', Clock()), host(tmp_path, 'b', clock)
    held = take(a)
    assert held is not None and take(b) is None
    clock.now += PATIENCE
    assert held.renew() and take(b) is None  # the file has changed
    clock.now += PATIENCE
    assert take(b) is None
    clock.now += 1
    taken = take(b)
    assert taken is not None and not held.renew() and taken.renew()
    held.release(done=True)  # of what is another's
    assert taken.renew() and take(host(tmp_path, 'c')) is None


@pytest.mark.parametrize('text', [b'', b'{"host": "a", "pi', b'\xff' * 600, b'[]', b'{"host": 1}'])
def test_a_lease_that_cannot_be_read_goes_by_time(tmp_path: pathlib.Path, text: bytes) -> None:
    (tmp_path / 'arm@seed_0.3').write_bytes(text)
    clock = Clock()
    b = host(tmp_path, 'b', clock)
    assert take(b) is None
    clock.now += PATIENCE + 1
    taken = take(b)
    assert taken is not None and os.listdir(tmp_path) == ['arm@seed_0.4']


def test_files_of_another_kind_are_no_leases(tmp_path: pathlib.Path) -> None:
    for name in ('lock', 'x.tmp', 'arm@seed_0.', 'y.1.txt'):
        (tmp_path / name).touch()
    assert take(host(tmp_path, 'a')) is not None
    assert host(tmp_path, 'b').names() == []


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='without /proc only silence tells')
def test_a_process_of_this_host_that_has_ended_loses_it_at_once(tmp_path: pathlib.Path) -> None:
    with subprocess.Popen(['cat'], stdin=subprocess.PIPE) as other:  # ends with the block, whatever happens
        here = Holder.here()
        theirs = Leases(tmp_path, here._replace(pid=other.pid, started=leases._start_of(other.pid)))
        assert take(theirs) is not None
        ours = Leases(tmp_path, here, clock := Clock())
        ours.look()
        clock.now = 10 * PATIENCE
        assert take(ours) is None  # it lives, however long it says nothing
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # a zombie
        assert take(ours) is not None


def test_another_process_of_the_same_number_is_another_holder() -> None:
    me = Holder.here()
    assert not me.sees_end_of(me) and me.sees_end_of(me._replace(started=me.started + 1))
    assert not me.sees_end_of(me._replace(host='another', pid=2**22 + 1))
    assert me.sees_end_of(me._replace(pid=2**22 + 1))


def test_all_texts_of_a_lease_are_of_one_length(tmp_path: pathlib.Path) -> None:
    long = Holder('h' * 64 + '/' + 'b' * 36 + '/pid:[4026531836]', 2**22, 2**63)
    held = take(Leases(tmp_path, long))
    assert held is not None
    sizes = {held.file.stat().st_size}
    held.renew()
    held.release(deaths=3)
    assert sizes | {held.file.stat().st_size} == {leases.LENGTH} and json.loads(held.file.read_text())['free']


STEPS = st.lists(
    st.tuples(st.sampled_from(['take', 'renew', 'release', 'done', 'die', 'stall', 'look']), st.integers(0, 3),
              st.integers(0, 1)),
    max_size=60,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(STEPS, st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=4))
def test_nobody_has_what_another_has(steps: list[tuple[str, int, int]], leads: list[float]) -> None:
    """Four hosts and two names. Who has taken over from a silent holder is the only one whose lease holds."""
    with tempfile.TemporaryDirectory() as place:
        clocks = [Clock(lead) for lead in leads]
        hosts = [host(pathlib.Path(place), str(index), clocks[index]) for index in range(4)]
        held: dict[tuple[int, int], Lease] = {}
        for action, who, which in steps:
            lease, name = held.get((who, which)), f'arm/seed_{which}'
            if action == 'look':
                hosts[who].look()
            elif action == 'stall':  # all but this one's leases fall silent
                for clock in clocks:
                    clock.now += PATIENCE + 1
                for (owner, _), each in held.items():
                    if owner == who:
                        each.renew()
            elif action == 'take':
                before = {owner for (owner, name_), each in held.items() if name_ == which and each._is_own()}
                if (taken := take(hosts[who], name)) is not None:
                    assert who not in before
                    if lease is not None:
                        lease.release()
                    held[who, which] = taken
            elif lease is not None:
                if action == 'renew':
                    lease.renew()
                elif action in ('release', 'done'):
                    held.pop((who, which)).release(done=action == 'done')
                else:
                    held.pop((who, which))  # it says nothing more
            for seed in (0, 1):
                assert sum(each.renew() for (_, name_), each in held.items() if name_ == seed) <= 1
        for clock in clocks:
            clock.now += PATIENCE + 1  # nothing is lost for ever
        for each in held.values():
            each.release()
        hosts[0].look()
        clocks[0].now += PATIENCE + 1
        assert take(hosts[0]) is not None


def test_a_lease_whose_end_cannot_be_written_is_free_and_a_stale_file_is_lost(tmp_path, monkeypatch) -> None:
    held, lost = take(host(tmp_path, 'a')), take(host(tmp_path, 'a'), 'arm/seed_1')
    assert held is not None and lost is not None

    def refuse(code: int) -> None:
        monkeypatch.setattr(leases.os, 'pwrite', mock.Mock(side_effect=OSError(code, os.strerror(code))))

    refuse(errno.ENOSPC)
    assert held.renew() and lost.renew()
    held.release()
    refuse(errno.ESTALE)
    assert not lost.renew()
    monkeypatch.undo()
    assert take(host(tmp_path, 'b')) is not None


def test_a_lease_that_a_full_disk_does_not_hold_is_free_at_once(tmp_path, monkeypatch) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch, pytest.raises(OSError, match='No space'):
        patch.setattr(leases.os, 'pwrite', mock.Mock(side_effect=full))
        take(host(tmp_path, 'a'))
    assert os.listdir(tmp_path) == [] and take(host(tmp_path, 'b')) is not None


def test_who_finds_another_deciding_may_go_on_with_something_else(tmp_path: pathlib.Path) -> None:
    with deciding(tmp_path) as first, deciding(tmp_path, patience=0.0) as second:
        assert first and not second
    with deciding(tmp_path, patience=0.0) as third:
        assert third


def test_one_decides_at_a_time(tmp_path: pathlib.Path) -> None:
    """Each opens the lock's file anew, as processes do."""
    number = tmp_path / 'number'
    number.write_text('0')

    def count() -> None:
        for _ in range(50):
            with deciding(tmp_path, patience=HANG):
                found = int(number.read_text())
                number.write_text('')
                number.write_text(str(found + 1))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for ended in [pool.submit(count) for _ in range(4)]:
            ended.result()
    assert number.read_text() == '200'


def test_where_there_are_no_locks_leases_decide(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, 'Operation not supported')

    monkeypatch.setattr(leases.fcntl, 'flock', refuse)
    with deciding(tmp_path) as one, deciding(tmp_path) as other:
        assert one and other
        assert take(host(tmp_path, 'a')) is not None and take(host(tmp_path, 'b')) is None
