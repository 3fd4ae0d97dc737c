"""The rows that a growing metrics.jsonl has gained since the last look: what was read is not read again."""

import os
import pathlib
from typing import Any

from tformer.config import json_files
from tformer.errors import UserError
from tformer.training import writers

KNOWN = 256  # bytes before the place that was read up to, by which a file that was written anew is told


class Follower:
    """Reads a file of rows as it grows. A half-written last line waits for its end.

    Attributes:
      error: the line that says why the file, or its first bad row, cannot be read; None: all can.
    """

    def __init__(self, file: pathlib.Path):
        self.error: str | None = None
        self._bad_row: str | None = None
        self._file = file
        self._seen: tuple[int, int, int] | None = None  # inode, size and time of the last look
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._end, self._lines, self._known, self._bad_row = 0, 0, b'', None

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Returns (whether the rows that were read before no longer count, the rows since then)."""
        try:
            anew, rows = self._read()
            self.error = self._bad_row
            return anew, rows
        except OSError as error:  # it may pass
            self.error = f'{self._file}: {error.strerror}'
            return False, []

    def _read(self) -> tuple[bool, list[dict[str, Any]]]:
        try:
            found = os.stat(self._file)
            seen = found.st_ino, found.st_size, found.st_mtime_ns
            if seen == self._seen:
                return False, []
            with self._file.open('rb') as file:
                anew = not self._goes_on(file)
                if anew:
                    self._begin_anew()
                file.seek(self._end)
                data = file.read()
        except FileNotFoundError:
            anew, self._seen = self._end > 0, None
            self._begin_anew()
            return anew, []
        self._seen = seen
        whole = data[: data.rfind(b'\n') + 1]
        self._end += len(whole)
        self._known = (self._known + whole)[-KNOWN:]
        return anew, self._parsed(whole)

    def _goes_on(self, file: Any) -> bool:
        """Returns whether a file still ends, up to the place that was read, as it did: a resumed run writes it anew."""
        file.seek(self._end - len(self._known))
        return file.read(len(self._known)) == self._known

    def _parsed(self, whole: bytes) -> list[dict[str, Any]]:
        rows = []
        for line in whole.splitlines():
            self._lines += 1
            where = f'{self._file}:{self._lines}'
            try:
                row = json_files.parse(line.decode())
                writers.check_row(row, where)
                rows.append(row)
            except UserError as error:
                self._bad_row = self._bad_row or str(error)
            except ValueError as error:
                self._bad_row = self._bad_row or f'{where}: {error}'
        return rows
