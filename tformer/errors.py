"""Errors that are the user's to mend: one line that says what, where and the nearest valid thing."""

import difflib
import errno
import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar('T')
_LONGEST = 4000  # characters of a line


class UserError(ValueError):
    """A mistake in the input, in one line that can be printed. The command line prints it and exits with its code."""

    code = 2

    def __init__(self, message: object) -> None:
        line = ' '.join(line.strip() for line in str(message).splitlines())
        if len(line) > _LONGEST:  # it quotes a long value
            line = f'{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}'
        super().__init__(line.encode('utf-8', 'backslashreplace').decode())


class NoSplitError(UserError):
    """A source has nothing for a split: no file of it, or no record in it."""


class Stopped(BaseException):
    """A run was asked to stop, has saved what it had, and can go on. The command line exits with `STOPPED`.

    A signal raises it wherever the run is. It is no `Exception`, so that code that goes on after errors ends with it.
    """


class Unsaved(RuntimeError):
    """What a command has done could not be written where it belongs, and the same command may do it: exit code 1."""


STOPPED = 75  # the exit code; sysexits.h calls it EX_TEMPFAIL
FAILING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ESHUTDOWN, errno.ENOTCONN)  # of a file system, not of a user


def nearest(word: object, options: Iterable[object], listed: int = 40) -> str:
    """Returns '; did you mean X?' for the closest of `options`, or where none is close all, if at most `listed`."""
    names = [str(option) for option in options]
    close = difflib.get_close_matches(str(word), names, n=1, cutoff=0.6)
    if close:
        return f'; did you mean {close[0]!r}?'
    return f'; valid: {", ".join(names)}' if 0 < len(names) <= listed else ''


def choose(table: Mapping[Any, T], key: object, field: str) -> T:
    """Returns `table[key]`.

    Raises:
      UserError: naming `field`, the valid keys and the nearest one.
    """
    if key in table:
        return table[key]
    valid = ', '.join(map(repr, table))
    close = difflib.get_close_matches(str(key), [str(name) for name in table], n=1, cutoff=0.5)
    hint = f'; did you mean {close[0]!r}?' if close else ''
    raise UserError(f'{field}={key!r} is unknown{hint} (valid: {valid})')


def machine_memory() -> int:
    """Returns the bytes of this machine's memory."""
    return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')


def check_memory(what: str, size: float) -> None:
    """Raises a `UserError` where `size` bytes are more than the memory of this machine; `what` needs them."""
    memory = machine_memory()
    if size > memory:
        raise UserError(f'{what} need {size / 2**30:,.1f} GiB of memory, and this machine has {memory / 2**30:,.1f}')
