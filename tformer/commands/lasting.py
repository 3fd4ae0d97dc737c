"""Output of commands whose work is not what they print: it goes on when nobody reads it any more."""

import os
import sys
from typing import Any


class Lasting:
    """A stream of text; once the other side of its pipe has gone, what is written is lost without an error."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return int(self._stream.write(text))
        except BrokenPipeError:
            self._lose()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._lose()

    def _lose(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def begin() -> None:
    """Lets standard output and error last."""
    sys.stdout, sys.stderr = (x if isinstance(x, Lasting) else Lasting(x) for x in (sys.stdout, sys.stderr))
