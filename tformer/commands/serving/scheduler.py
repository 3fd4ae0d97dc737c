"""Requests for texts, written by one thread in the rows of an `Engine`, each as soon as a row is free.

What is asked for, said and given up passes between threads here; nothing of HTTP does.
"""

import collections
import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tformer.decode.drawing import Drawing
from tformer.decode.engine import Engine


class Piece(NamedTuple):
    """What is said of a text when there is more of it."""

    text: str  # that is new
    tokens: list[tuple[int, float]]  # new ones, with their log-probabilities
    finish: str | None = None  # stop, length, or why it was given up: timeout, shutdown, cancelled, error
    whole: str | None = None  # the text, where it has ended


@dataclasses.dataclass(eq=False)
class Request:
    """A text that is asked for."""

    batch: Mapping[str, Any]  # of one row, which the model reads
    drawing: Drawing
    most: int  # new tokens
    stops: tuple[str, ...]  # texts before which it ends
    say: Callable[[Piece], None]  # is called in the scheduler's thread
    deadline: float  # of time.monotonic()
    given_up: str | None = None  # why nobody waits for it any more
    text: 'Text | None' = None


_WINDOW = 16  # tokens after which what is decoded anew with each further one moves on
_CUT = 3  # replacement characters that a character which is not whole has at most


class Text:
    """A text as it grows: what of it is settled, and whether it has ended.

    Of a long one the last tokens alone are decoded anew, behind some whose own text is known; all of it at its end.
    """

    def __init__(
        self, most: int, stops: Sequence[str], decode: Callable[[list[int]], str], ends: Sequence[int]
    ) -> None:
        self.most, self.stops, self.decode, self.ends = most, stops, decode, ends
        self.ids: list[int] = []
        self.first, self.open = 0, 0  # the token from which texts are decoded, and that from which they may change
        self.known = ''  # the text of the tokens between them
        self.held = ''  # what is known and not said, as a stop may begin with it
        self.sent = ''  # what is said of the text behind

    def add(self, token: int, logprob: float) -> Piece:
        """Returns what a new token adds. Text that a stop may begin with, or half a character, waits for more."""
        ended = token in self.ends
        self.ids += [] if ended else [token]
        window = self.decode(self.ids[self.first :])
        text = whole = self.held + window[_same(window, self.known) :]
        finish = 'stop' if ended else None
        if places := [text.index(stop) for stop in self.stops if stop in text]:
            text, finish = text[: min(places)], 'stop'
        elif not ended:
            if len(self.ids) >= self.most:
                finish = 'length'
            else:
                text = text.rstrip('\N{REPLACEMENT CHARACTER}')
                text = text[: len(text) - max((_overlap(text, stop) for stop in self.stops), default=0)]
        # where a decoder wrote what was said anew, what is different goes on behind it
        new, self.sent = text[_same(text, self.sent) :], text
        half = whole.endswith('\N{REPLACEMENT CHARACTER}')  # a character, for which a while is waited
        if finish is None and len(self.ids) - self.open >= _WINDOW * (4 if half else 1):
            self.first, self.open = self.open, len(self.ids)
            known = self.decode(self.ids[self.first :])
            cut = min(len(known) - len(known.rstrip('\N{REPLACEMENT CHARACTER}')), _CUT)
            self.known, self.held, self.sent = known[: len(known) - cut], whole[len(text) : len(whole) - cut], ''
        return Piece(new, [(token, logprob)], finish, self._whole() if finish else None)

    def _whole(self) -> str:
        """Returns the text up to the first stop, decoded at once."""
        text = self.decode(self.ids)
        return text[: min([text.index(stop) for stop in self.stops if stop in text], default=None)]


def _same(text: str, other: str) -> int:
    """Returns the number of characters with which two texts begin alike."""
    if text.startswith(other):
        return len(other)
    return next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), len(text))


def _overlap(text: str, stop: str) -> int:
    """Returns how many characters at the end of a text are the beginning of another."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


class Scheduler:
    """Writes requests, of which `rows` are written at once and `most_waiting` wait.

    `place` gives a context on whose devices they are written (`sharding.placed`).
    """

    def __init__(
        self,
        engine: Engine,
        variables: Any,
        place: Callable[[], contextlib.AbstractContextManager[None]],
        *,
        rows: int,
        most_waiting: int,
        decode: Callable[[list[int]], str],
        ends: Sequence[int],
    ) -> None:
        self.engine, self.variables, self.place = engine, variables, place
        self.rows, self.most_waiting = rows, most_waiting
        self.decode, self.ends = decode, ends
        self.writing: dict[int, Request] = {}
        self.waiting: collections.deque[Request] = collections.deque()
        self.changed = threading.Condition()
        self.closed: str | None = None
        self.last = float('inf')  # the time when all that is left is given up
        self.thread = threading.Thread(target=self._run, name='scheduler', daemon=True)

    def start(self) -> None:
        """Starts the thread that writes."""
        self.thread.start()

    def submit(self, requests: Sequence[Request]) -> str | None:
        """Takes all of some requests, or none: returns why not, `full` or `shutdown`."""
        with self.changed:
            if self.closed is not None:
                return self.closed
            if len(self.waiting) + len(requests) > self.most_waiting:
                return 'full'
            self.waiting.extend(requests)
            self.changed.notify()
        return None

    def give_up(self, requests: Sequence[Request], why: str = 'cancelled') -> None:
        """Lets requests go, wherever they are."""
        with self.changed:
            for request in requests:
                request.given_up = request.given_up or why
            self.changed.notify()

    def close(self, grace: float) -> None:
        """Takes no more requests, and after `grace` seconds gives up those that are left."""
        with self.changed:
            self.closed, self.last = 'shutdown', min(self.last, time.monotonic() + grace)
            self.changed.notify()

    def idle(self) -> bool:
        """Returns whether nothing waits and nothing is written."""
        with self.changed:
            return not self.waiting and not self.writing

    def _run(self) -> None:
        with self.place():
            self._write()

    def _write(self) -> None:
        slots = None
        while True:
            with self.changed:
                while not self.waiting and not self.writing:
                    self.changed.wait()
            try:
                slots = self.engine.empty(self.variables) if slots is None else slots
                slots = self._let_go(slots)
                slots = self._admit(slots)
                slots = self._step(slots) if self.writing else slots
            except Exception as error:  # of a device, such as memory: these texts are lost, the server goes on
                print(f'tformer serve: {type(error).__name__}: {error}', file=sys.stderr, flush=True)
                with self.changed:
                    lost = [*self.writing.values(), *(self.waiting if slots is None else ())]
                    self.writing.clear()
                    if slots is None:  # not even free rows can be had
                        self.waiting.clear()
                slots = None
                for request in lost:
                    request.say(Piece('', [], 'error'))

    def _why(self, request: Request, now: float) -> str | None:
        """Returns why a request is to be let go, if it is."""
        if request.given_up is not None:
            return request.given_up
        return 'timeout' if now >= request.deadline else 'shutdown' if now >= self.last else None

    def _let_go(self, slots: Any) -> Any:
        """Answers the requests that nobody waits for any more or that are out of time."""
        now = time.monotonic()
        with self.changed:
            gone = [(request, why) for request in self.waiting if (why := self._why(request, now))]
            for request, _ in gone:
                self.waiting.remove(request)
            rows = [(row, why) for row, request in self.writing.items() if (why := self._why(request, now))]
            gone += [(self.writing.pop(row), why) for row, why in rows]
        for request, why in gone:
            request.say(Piece('', [], why))
        for row, _ in rows:
            slots = self.engine.free(slots, np.int32(row))
        return slots

    def _admit(self, slots: Any) -> Any:
        """Begins the texts of waiting requests in free rows."""
        while True:
            with self.changed:
                free = set(range(self.rows)) - self.writing.keys()
                if not free or not self.waiting:
                    return slots
                row, request = min(free), self.waiting.popleft()
                self.writing[row] = request
            request.text = Text(request.most, request.stops, self.decode, self.ends)
            slots = self.engine.insert(self.variables, slots, request.batch, np.int32(row), request.drawing)

    def _step(self, slots: Any) -> Any:
        """Writes a token of each text."""
        slots, tokens_B, logprobs_B = self.engine.step(self.variables, slots)
        tokens_B, logprobs_B = jax.device_get((tokens_B, logprobs_B))
        for row, request in list(self.writing.items()):
            assert request.text is not None
            piece = request.text.add(int(tokens_B[row]), float(logprobs_B[row]))
            if piece.finish is not None:
                slots = self.engine.free(slots, np.int32(row))
                with self.changed:
                    del self.writing[row]
            request.say(piece)
        return slots
