"""A trace of a range of steps, for xprof and Perfetto: what the devices and the host do, instruction by instruction."""

import pathlib
import re
from typing import Any, Protocol

import jax

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
        self._runs = False

    def check(self, made: int, num_steps: int) -> None:
        """Raises a `UserError` if the steps after `made`, up to `num_steps`, do not hold all of the range."""
        if self.last > num_steps:
            raise UserError(f'--profile={self.first}:{self.last}: the last step is {num_steps:,}')
        if self.first <= made:
            raise UserError(f'--profile={self.first}:{self.last}: the next step is {made + 1:,}')

    def begin(self, step: int) -> None:
        """Starts the trace if `step` is the first of it."""
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
            print(f'a trace of steps {self.first:,} to {self.last:,} is in {self.place}', flush=True)

    def close(self) -> None:
        """Ends a trace that runs, e.g. because the run was stopped."""
        if self._runs:
            self._runs = False
            jax.profiler.stop_trace()
