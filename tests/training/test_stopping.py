"""How a run stops, within this process: what a second signal, a limit and a block that can be repeated do."""

import concurrent.futures
import errno
import os
import pathlib
import signal
import time
from collections.abc import Callable
from unittest import mock

import pytest

from lives import HANG
from tformer.distributed import processes
from tformer.errors import STOPPED, Stopped
from tformer.training import stopping
from tformer.training.stopping import StopMonitor


class Left(Exception):
    """The process would have ended with this code."""


def raised(number: signal.Signals, noted: Callable[[], object]) -> None:
    """Raises a signal and waits for its handler, which other threads may hold up in Python 3.12."""
    signal.raise_signal(number)
    end = time.monotonic() + HANG
    while not noted() and time.monotonic() < end:
        time.sleep(0.001)


@pytest.fixture
def watched(monkeypatch):
    """Returns the code with which the process ends after these signals."""

    def end(code):
        raise Left(code)

    monkeypatch.setattr(stopping.os, '_exit', end)
    monkeypatch.setattr(processes, 'leave', lambda code: None)

    def watch(*numbers: signal.Signals, has_step: bool):
        monitor = StopMonitor(None)
        monitor.has_step, monitor._before = has_step, dict.fromkeys(stopping.SIGNALS)
        pipe, there = os.pipe()
        os.write(there, bytes(numbers))
        os.close(there)
        try:
            monitor._watch(pipe)
        except Left as left:
            return left.args[0]
        return None

    return watch


def test_a_second_signal_ends_the_process_at_once_with_its_number(watched):
    assert watched(signal.SIGTERM, has_step=True) is None
    assert watched(signal.SIGTERM, signal.SIGTERM, has_step=True) == 128 + signal.SIGTERM
    assert watched(signal.SIGTERM, signal.SIGINT, has_step=True) == 130
    assert watched(signal.SIGINT, signal.SIGUSR1, has_step=True) is None  # not one of ours


def test_before_the_first_step_one_signal_ends_the_process_as_stopped(watched):
    assert watched(signal.SIGTERM, has_step=False) == STOPPED == 75


def test_a_limit_is_in_minutes(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, 'monotonic', lambda: now[0])
    monitor = StopMonitor(0.5)
    now[0] += 30
    assert monitor.reason(1) is None
    now[0] += 1
    assert monitor.reason(2) == 'train.max_minutes=0.5'
    assert StopMonitor(None).reason(1) is None


@pytest.fixture
def interruptible():
    """SIGINT counts, which a shell has a command in the background ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_signal_is_a_reason_and_ends_only_a_block_that_can_be_repeated(interruptible):
    before = signal.getsignal(signal.SIGINT)
    with StopMonitor(None) as monitor:
        monitor.has_step = True
        assert monitor.reason(1) is None
        with pytest.raises(Stopped, match='SIGINT'), monitor.interruptible():
            raised(signal.SIGINT, lambda: False)
            pytest.fail('the block goes on')
        assert monitor.reason(1) == 'SIGINT'
        with pytest.raises(Stopped), monitor.interruptible():
            pytest.fail('a block begins after the signal')
    with StopMonitor(None, training=False) as monitor:
        monitor.has_step = True
        raised(signal.SIGTERM, lambda: monitor.reason(1))
        assert monitor.reason(1) == 'SIGTERM'
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_that_comes_while_a_request_is_looked_for_is_not_lost(interruptible, tmp_path, monkeypatch):
    with StopMonitor(None, workdirs=[tmp_path]) as monitor:
        monitor.has_step = True
        with monkeypatch.context() as patch:
            patch.setattr(pathlib.Path, 'exists', lambda path: signal.raise_signal(signal.SIGTERM))
            found = monitor.reason(1), monitor.reason(2)
        assert found[1] == 'SIGTERM'


def test_a_request_is_looked_for_again_where_the_file_system_fails(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, 'monotonic', lambda: now[0])
    monitor = StopMonitor(None, workdirs=[tmp_path])
    stopping.request(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, 'stat', mock.Mock(side_effect=OSError(errno.ESTALE, 'stale')))
        assert monitor.reason(1) is None
    now[0] += 1.5
    assert monitor.reason(2) == f'requested by {tmp_path}/stop'


def test_signals_that_the_caller_ignores_stay_ignored(monkeypatch):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for a command in the background
    try:
        with StopMonitor(None) as monitor:
            monitor.has_step = True
            signal.raise_signal(signal.SIGINT)
            assert monitor.reason(1) is None and signal.getsignal(signal.SIGTERM) == monitor._on_signal
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_where_all_signals_are_ignored_nothing_of_the_monitor_stays():
    before = {each: signal.signal(each, signal.SIG_IGN) for each in stopping.SIGNALS}
    try:
        with StopMonitor(None) as monitor:
            pipe = monitor._pipe_end
        with pytest.raises(OSError, match='Bad file descriptor'):
            os.fstat(pipe)
        assert signal.set_wakeup_fd(-1) != pipe
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_beside_the_main_thread_signals_are_left_to_the_caller():
    """Python lets no other thread handle them, and a run within one still stops by its limit."""
    before = {each: signal.getsignal(each) for each in stopping.SIGNALS}

    def run():
        with StopMonitor(-1) as monitor:
            return monitor.reason(1), {each: signal.getsignal(each) for each in stopping.SIGNALS}

    with concurrent.futures.ThreadPoolExecutor() as threads:
        assert threads.submit(run).result() == ('train.max_minutes=-1', before)


def test_a_file_in_the_workdir_is_a_request_that_is_obeyed_once_and_asked_for_once_a_second(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, 'monotonic', lambda: now[0])
    other = tmp_path / 'other'
    other.mkdir()
    monitor = StopMonitor(None, workdirs=[tmp_path, other])
    assert monitor.reason(1) is None
    stopping.request(other)
    assert monitor.reason(2) is None and stopping.is_stopped(other)  # it is not a second later
    now[0] += 1.5
    assert monitor.reason(3) == f'requested by {other}/stop' == monitor.reason(4)
    assert {file.name for file in other.iterdir()} == {'stopped'} and stopping.is_stopped(other)
    assert not stopping.is_stopped(tmp_path) and StopMonitor(None, workdirs=[other]).reason(1) is None
    stopping.request(other)
    stopping.release(other)
    assert not stopping.is_stopped(other) and not [*other.iterdir()]
