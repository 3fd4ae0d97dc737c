"""Records of files on disk: a corpus of any size is read once, and takes eight bytes of memory for each record."""

import array
import os
import pickle
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

from tformer.data.sources.records import Record, View
from tformer.errors import UserError


class Spooled(View):
    """Records in a temporary file without a name, which ends with its process however that ends."""

    def __init__(self, records: Iterable[Record], place: Path) -> None:
        """Takes records, of which one is held at a time, and the directory of the file.

        Raises:
          UserError: the file cannot be written, e.g. the disk is full.
        """
        self._stops = array.array('q', [0])
        own = iter(records)
        try:
            place.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=place)  # noqa: SIM115
            weakref.finalize(self, self._file.close).atexit = False  # threads may read it until the process ends
            for record in own:
                pickle.dump(record, self._file, protocol=5)  # a long text goes to the file without a copy
                self._stops.append(self._file.tell())
            self._file.flush()
        except OSError as error:
            raise UserError(f'cannot keep records in {place} (data.cache_dir): {error.strerror or error}') from error

    def __len__(self) -> int:
        return len(self._stops) - 1

    def _records(self, indices: Sequence[int]) -> list[Record]:
        return [pickle.loads(self._read(self._stops[index], self._stops[index + 1])) for index in indices]

    def _read(self, start: int, stop: int) -> bytes:
        """Returns bytes of the file; any number of threads may read, and one call of the system gives 2 GiB at most."""
        content = os.pread(self._file.fileno(), stop - start, start)
        while len(content) < stop - start:
            content += os.pread(self._file.fileno(), stop - start - len(content), start + len(content))
        return content
