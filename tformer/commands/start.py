"""How long a training takes from the command to its first step, and what of it: measured in processes of their own."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tformer.errors import UserError

Span = tuple[float, float]  # on the system's clock


def measure(spec: str, overrides: Mapping[str, str], extensions: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Returns the `Marks` of a config's training, `cold` (no compiled program is kept yet) and `warm` (all are).

    Data that are tokenised already are read from their cache both times.

    Raises:
      UserError: the training fails before its first step.
    """
    found = {}
    with tempfile.TemporaryDirectory() as place:
        kept = {name: value for name, value in os.environ.items() if name != 'JAX_COMPILATION_CACHE_DIR'}
        for name in ('cold', 'warm'):
            given = json.dumps([time.time(), spec, dict(overrides), list(extensions), str(pathlib.Path(place, name))])
            ran = subprocess.run(
                [sys.executable, '-m', 'tformer.commands.start', given],
                env=kept | {'XDG_CACHE_HOME': place},
                capture_output=True,
                text=True,
            )
            if ran.returncode:
                raise UserError((ran.stderr.strip().splitlines() or ['it ended without a word'])[-1])
            found[name] = json.loads(ran.stdout.splitlines()[-1])
    return found


def first_step(began: float, spec: str, overrides: dict[str, str], extensions: Sequence[str], workdir: str) -> None:
    """Trains to the end of the first step, and prints what took how long since `began`."""
    from tformer import checks
    from tformer.commands import allocator, train
    from tformer.config import extensions as extensions_lib
    from tformer.distributed import compilation_cache

    marks = Marks(began)
    allocator.keep_memory()
    extensions_lib.give(extensions)
    compilation_cache.keep()
    with contextlib.suppress(EndedFirstStep):
        train.loop.train(checks.load(spec, overrides), workdir, trace=marks)
    print(json.dumps(marks.found()))


class EndedFirstStep(Exception):
    """Ends the training."""


class Marks:
    """When the parts of a start ended. It stands for a trace of the first step (`StepTrace`), after which it ends."""

    def __init__(self, began: float) -> None:
        from jax import monitoring

        self._began, self._imported, self._opened, self._ended = began, time.time(), 0.0, 0.0
        self._spans: dict[str, list[Span]] = {}
        self._events: list[str] = []
        monitoring.register_event_time_span_listener(self._on_span)
        monitoring.register_event_listener(lambda event, **_: self._events.append(event))

    def _on_span(self, event: str, start_time: float, end_time: float, **_: str | int) -> None:
        self._spans.setdefault(event.removeprefix('/jax/core/compile/'), []).append((start_time, end_time))

    def check(self, made: int, num_steps: int) -> None:
        """Notes that the data and the workdir are open."""
        self._opened = time.time()

    def begin(self, step: int) -> None:
        """Does nothing: a step is measured from the command on."""

    def end(self, step: int, arrays: Any) -> None:
        """Waits for the step; raises `EndedFirstStep`."""
        import jax

        jax.block_until_ready(arrays)
        self._ended = time.time()
        raise EndedFirstStep

    def close(self) -> None:
        """Does nothing."""

    def found(self) -> dict[str, Any]:
        """Returns the seconds from the command to the end of the first step, and of parts, which overlap: a thread
        traces and compiles ahead."""
        spans = {name: [span for span in of if span[1] <= self._ended] for name, of in self._spans.items()}
        tracing = [span for name, of in spans.items() if name.startswith('jaxpr_') for span in of]
        programs = spans.get('backend_compile_duration', [])
        opening = [(start, end) for of in (tracing, programs) for start, end in of if end <= self._opened]
        return {
            'first_step_s': round(self._ended - self._began, 2),
            'imports_s': round(self._imported - self._began, 2),
            'data_s': round(self._opened - self._imported - covered(opening), 2),
            'tracing_s': round(covered(tracing), 2),
            'compiling_s': round(covered(programs), 2),
            'programs': len(programs),
            'loaded': self._events.count('/jax/compilation_cache/cache_hits'),
        }


def covered(spans: Iterable[Span]) -> float:
    """Returns the seconds that lie in any of the spans."""
    total, last = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


if __name__ == '__main__':
    try:
        first_step(*json.loads(sys.argv[1]))
    except UserError as mistake:
        print(mistake, file=sys.stderr)
        sys.exit(2)
