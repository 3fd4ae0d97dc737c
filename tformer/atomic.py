"""Files that are written whole or not at all."""

import contextlib
import os
import pathlib
import secrets


def write(file: pathlib.Path, contents: str | bytes) -> None:
    """Writes a file, text as UTF-8, in place of what stands there: who reads it finds the old contents or the new.

    Of several processes that write it at once, the last one's stays.

    Raises:
      OSError: it could not be written; the old contents stand.
    """
    partial = file.with_name(f'{file.name}.{secrets.token_hex(8)}.tmp')  # of no other process, of other hosts either
    try:
        partial.write_bytes(contents.encode() if isinstance(contents, str) else contents)
        os.replace(partial, file)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            error.filename = str(file)  # a full disk has no name of its own
        raise
