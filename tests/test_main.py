"""How the installed script ends: one line and a code for each kind of end, and streams that the caller has closed."""

import errno
import io
import logging as standard_logging
import os
import signal
import sys

import pytest
from absl import logging

from tformer import __main__ as command_line
from tformer import errors

ASYNCIO = standard_logging.getLogger('asyncio')
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), 'runs/demo/metrics.jsonl')
ENDS = {
    "a user's mistake": (errors.UserError('no workdir'), 2, 'tformer: no workdir\n'),
    'a signal that saved': (errors.Stopped('SIGTERM: stopped'), 75, 'tformer: SIGTERM: stopped\n'),
    'an interrupt': (KeyboardInterrupt(), 130, ''),
    'a full disk': (FULL, 2, 'tformer: runs/demo/metrics.jsonl: No space left on device\n'),
    'a mistake of no file': (OSError(errno.EXDEV, os.strerror(errno.EXDEV)), 2, 'tformer: Invalid cross-device link\n'),
    'a file system that fails': (OSError(errno.EIO, os.strerror(errno.EIO)), 1, 'tformer: Input/output error\n'),
    'one that cut this host off': (OSError(errno.ESHUTDOWN, 'cut off', 'a/b'), 1, 'tformer: a/b: cut off\n'),
    'no memory': (MemoryError(), 2, 'tformer: there is not enough memory\n'),
    'no memory for an array': (MemoryError('8 GiB'), 2, 'tformer: there is not enough memory: 8 GiB\n'),
    'no memory on the device': (
        RuntimeError('RESOURCE_EXHAUSTED: Out of memory\n  allocating 8 GiB'), 2,
        'tformer: there is not enough memory on the device: RESOURCE_EXHAUSTED: Out of memory allocating 8 GiB\n',
    ),
}  # fmt: skip


@pytest.fixture
def ends(monkeypatch):
    """Returns (the exit code, what is said on standard error) of the script whose command raises this."""
    monkeypatch.setattr(sys, 'unraisablehook', sys.unraisablehook)
    verbosity, level = logging.get_verbosity(), ASYNCIO.level

    def end(error: BaseException) -> tuple[object, str]:
        def main(argv: object) -> None:
            raise error

        said = io.StringIO()
        said.close = lambda: said.write('closed')  # type: ignore[method-assign]
        monkeypatch.setattr(sys, 'stderr', said)
        monkeypatch.setattr(command_line, 'main', main)
        with pytest.raises(SystemExit) as ended:
            command_line.run()
        return ended.value.code, said.getvalue()

    yield end
    logging.set_verbosity(verbosity)
    ASYNCIO.setLevel(level)


@pytest.mark.parametrize('case', ENDS)
def test_each_end_has_its_code_and_at_most_one_line(ends, case: str) -> None:
    error, code, line = ENDS[case]
    assert ends(error) == (code, line)


def test_any_other_exception_is_printed_with_its_traceback_and_ends_with_1(ends) -> None:
    code, said = ends(ZeroDivisionError('of nothing'))
    assert code == 1 and said.startswith('Traceback') and said.endswith('ZeroDivisionError: of nothing\n')


def test_a_failure_in_a_task_of_a_library_is_not_told_twice(ends) -> None:
    assert ASYNCIO.isEnabledFor(standard_logging.ERROR)
    ends(errors.UserError('no workdir'))
    assert not ASYNCIO.isEnabledFor(standard_logging.ERROR)


def test_a_reader_that_has_read_enough_is_no_error_and_nothing_is_said_at_the_end(ends) -> None:
    assert ends(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))) == (0, 'closed')


def test_the_first_process_of_a_container_handles_sigterm_from_the_start(ends, monkeypatch) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        monkeypatch.setattr(os, 'getpid', lambda: 1)
        monkeypatch.setattr(os, '_exit', lambda code: pytest.fail(f'exit {code}'))
        ends(errors.UserError('no workdir'))
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        with pytest.raises(pytest.fail.Exception, match='exit 143'):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_closed_streams_are_those_of_nothing(ends, monkeypatch) -> None:
    monkeypatch.setattr(sys, 'stdin', None)
    monkeypatch.setattr(sys, 'stdout', None)
    ends(KeyboardInterrupt())
    with sys.stdin as given, sys.stdout as out:
        assert given.read() == '' and out.name == os.devnull and out.errors == 'backslashreplace'
