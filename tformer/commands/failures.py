"""How a command ends: the exit code of an error, and the line that a user reads."""

import sys
import traceback

from tformer import errors


def explain(error: BaseException) -> tuple[int, str | None]:
    """Returns (the exit code of a command that ended by an error, its line); None: the traceback, which is printed."""
    if isinstance(error, errors.UserError):
        return error.code, str(error)
    if isinstance(error, errors.Unsaved):
        return 1, str(error)
    if isinstance(error, errors.Stopped):
        return errors.STOPPED, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, None
    if isinstance(error, OSError):  # a full disk, a directory that cannot be written, a file system that fails
        where = f'{error.filename}: ' if error.filename else ''
        return 1 if error.errno in errors.FAILING else 2, f'{where}{error.strerror or error}'
    if isinstance(error, MemoryError):
        return 2, f'there is not enough memory: {error}'.removesuffix(': ')
    if 'RESOURCE_EXHAUSTED' in str(error):  # XLA's
        return 2, f'there is not enough memory on the device: {" ".join(str(error).split())[:200]}'
    processes = sys.modules.get('tformer.distributed.processes')
    line = processes.lost(error) if processes else None
    if line is None:
        traceback.print_exception(error)
    return 1, line
