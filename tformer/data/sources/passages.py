"""Files that are one long text, a passage at a time: what a process holds does not grow with the longest of them."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tformer.data.sources.text_reader import Part

LENGTH = 1 << 20  # the bytes of a line at most, and the characters of a passage, about


class Passages(Part):
    """The text of a file, which is not packed, from byte `start` on and before `stop`, each the `beginning` of a line.

    A line of more than `LENGTH` bytes counts as several.
    """

    def texts(self) -> Iterator[str]:
        """Yields passages of whole lines; raises a `UserError` as the lines do."""
        lines: list[str] = []
        size = 0
        for _, line in self:
            lines.append(line)
            size += len(line)
            if size >= LENGTH:
                yield ''.join(lines)
                lines, size = [], 0
        if size:
            yield ''.join(lines)

    def _lines(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        place, number = self._start, int(self._start > 0)
        file.seek(place)
        while line := file.readline(min(LENGTH, self._stop - place)):
            if not line.endswith(b'\n') and place + len(line) < self._stop:
                line = line[: beginning(file, place + len(line), len(line)) - place]
                file.seek(place + len(line))
            number, place = number + 1, place + len(line)
            yield number, line


def beginning(file: BinaryIO, place: int, reach: int) -> int:
    """Returns where the line that goes on at byte `place` begins, or the word where that is over `reach` bytes before.

    Where the word begins before them too, it is the character.
    """
    first = max(place - reach, 0)
    file.seek(first)
    before = file.read(place - first)
    for mark in b'\n', b' ':
        if found := before.rfind(mark) + 1:
            return first + found
    after = before[-3:] + (file.read(1) or b'\n')
    return place - next((i for i, byte in enumerate(reversed(after)) if byte & 0xC0 != 0x80), 0)  # UTF-8's later bytes


def edges(path: Path, held_out: tuple[str, ...], share: float, size: int) -> Iterator[tuple[str, int, int]]:
    """Yields (split, start, stop) of the parts of a file, each of about `size` bytes.

    Its end is held out for the splits `held_out`, a `share` for each, from the beginning of a line on.
    """
    with path.open('rb') as file:
        stop = file.seek(0, 2)
        long = int(share * stop)
        for split in (*reversed(held_out), 'train'):
            start = beginning(file, stop - long, long) if split in held_out else 0
            count = max(-(-(stop - start) // size), 1)
            reach = min((stop - start) // count, LENGTH)
            places = [beginning(file, start + (stop - start) * i // count, reach) for i in range(1, count)]
            places = [start, *places, stop]
            yield from ((split, *edge) for edge in itertools.pairwise(places))
            stop = start
