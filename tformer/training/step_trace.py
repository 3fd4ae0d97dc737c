"""A trace of a range of steps, for xprof and Perfetto: what the devices and the host do, instruction by instruction."""

import pathlib
import re
import sys
from typing import Any, Protocol

import jax

from tformer.data import store_copies
from tformer.errors import UserError


class Trace(Protocol):
    """What a loop tells of its steps."""

    def check(self, made: int, num_steps: int) -> None: ...
    def begin(self, step: int) -> None: ...
    def end(self, step: int, arrays: Any) -> None: ...
    def close(self) -> None: ...


class StepTrace:
    """Traces the steps FIRST:LAST, counted from 1, into DIRECTORY/profile."""

    def __init__(self, text: str, directory: pathlib.Path):
        """Raises a `UserError` if the text is not such a range."""
        found = re.fullmatch(r'(\d{1,15}):(\d{1,15})', text)
        self.first, self.last = (int(found[1]), int(found[2])) if found else (0, 0)
        if not 1 <= self.first <= self.last:
            raise UserError(f'--profile={text!r} is not FIRST:LAST, two steps from 1 on, in order; write e.g. 10:12')
        several = (f'process_{jax.process_index()}',) if jax.process_count() > 1 else ()
        self.place = directory.joinpath('profile', *several)
        self._runs = self._ends = False
        self._step = 0

    def check(self, made: int, num_steps: int) -> None:
        """Prepares for the steps after `made`, up to `num_steps`; a line says so if the range has begun already, in a
        process before this one, as nothing is traced then.

        Raises:
          UserError: the range goes beyond the last step, or its directory cannot be made.
        """
        self.check_last(num_steps)
        if self.first <= made:
            self._say(f'nothing is traced, as step {made:,} is made already')
            self._ends = True
            return
        try:
            self.place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f'{self.place}: {error.strerror}') from error

    def check_last(self, num_steps: int) -> None:
        """Raises a `UserError` if the range goes beyond the last step."""
        if self.last > num_steps:
            raise UserError(f'--profile={self.first}:{self.last}: the last step is {num_steps:,}')

    def begin(self, step: int) -> None:
        """Starts the trace if `step` is the first of it."""
        self._step = step
        if step == self.first:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # calls of Python, which fill the million events that Perfetto's file takes
            jax.profiler.start_trace(self.place, create_perfetto_trace=True, profiler_options=options)
            self._runs = True

    def end(self, step: int, arrays: Any) -> None:
        """Waits for what `step` computes and writes the trace, if it is the last of it."""
        if step == self.last:
            jax.block_until_ready(arrays)
            self.close()

    def close(self) -> None:
        """Ends a trace that runs, e.g. because the run was stopped; says which steps it has."""
        if self._runs:
            jax.profiler.stop_trace()
            where = store_copies.shown(self.place)
            print(f'a trace of steps {self.first:,} to {self._step:,} is in {where}', flush=True)
        elif not self._ends:
            self._say(f'nothing is traced, as the last step was {self._step:,}')
        self._runs, self._ends = False, True

    def _say(self, line: str) -> None:
        print(f'--profile={self.first}:{self.last}: {line}', file=sys.stderr, flush=True)
