"""Where a process dies or halts: by what it has done, never by a clock. Each is given to a `Life` as `before`."""

import importlib
import os
import pathlib
import resource
import signal
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp

from tformer.commands import kept
from tformer.data import store_copies, store_lease, stores
from tformer.distributed import processes
from tformer.training import checkpoint, checkpoint_writer, digests, members, recorder, setup, stopping, writers


def once(owner: Any, name: str, call: int, act: Callable[..., None]) -> None:
    """Has the `call`-th call of a function, counted from 1, begin with act(*its arguments)."""
    real, calls = getattr(owner, name), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) == call:
            act(*args)
        return real(*args, **kwargs)

    setattr(owner, name, counted)


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(1)


def signal_itself(*_: object) -> None:
    """Sends SIGTERM to its own process, and would never end."""
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        pass


def write_half(writer: Any, step: int, numbers: Any) -> None:
    """Dies while a line of metrics.jsonl is written."""
    writer._file.write(f'{{"step": {step}, "trai'.encode())
    die()


MOMENTS: dict[str, tuple[Any, str, Callable[..., None]]] = {
    'a step': (members.Group, 'add_metrics', die),  # the devices may still compute it
    'the copy of the arrays': (checkpoint_writer.CheckpointWriter, 'save', die),
    'a save': (digests, 'write', die),  # all arrays are on disk, under a name that does not count
    'a deletion': (checkpoint, 'delete', die),  # a newer checkpoint is complete
    'a line': (writers.MetricWriter, 'write', write_half),
    'an evaluation': (recorder.RunRecorder, 'evaluate', die),
    'a row': (kept.Kept, 'add', die),  # of the outputs of a command
    'an object': (stores.Store, 'write', die),
}


def die_at(moment: str, call: int) -> None:
    """Dies at one of `MOMENTS`, when it comes for the `call`-th time."""
    owner, name, act = MOMENTS[moment]
    once(owner, name, call, act)


def die_behind(part: pathlib.Path, lines: int, call: int) -> None:
    """Dies at its `call`-th row, once the file in which another process keeps its rows has so many lines."""

    def wait(*_: object) -> None:
        while not part.exists() or part.read_bytes().count(b'\n') < lines:
            time.sleep(0.01)
        die()

    once(kept.Kept, 'add', call, wait)


def halt(sign: pathlib.Path, module: str, name: str) -> None:
    """Calls of tformer.MODULE:NAME, or of a class's method, make the file `sign` and never return."""
    owner: Any = importlib.import_module(f'tformer.{module}')
    for part in name.split('.')[:-1]:
        owner = getattr(owner, part)

    def stay(*_: object, **__: object) -> None:
        sign.touch()
        while True:
            time.sleep(0.01)

    setattr(owner, name.split('.')[-1], stay)


def halt_requested_save(sign: pathlib.Path) -> None:
    """The save that a signal asks for makes the file `sign` and never returns."""
    save = members.Group.save

    def stay(group: Any, step: int, state: Any, requested: bool) -> None:
        while requested:
            sign.touch()
            time.sleep(0.01)
        save(group, step, state, requested)

    members.Group.save = stay  # type: ignore[method-assign]


def stall_at(number: int, call: int) -> None:
    """Process `number` stands still at the `call`-th step; a missing process is told soon."""
    processes.HEARTBEAT_SECONDS = 10

    def stop(*_: object) -> None:
        if jax.process_index() == number:
            os.kill(os.getpid(), signal.SIGSTOP)

    once(members.Group, 'add_metrics', call, stop)


def limit_files(save: int, size: int) -> None:
    """From a save on, counted from 1, no file may grow beyond `size` bytes; those before it are complete."""
    limit = size, resource.RLIM_INFINITY
    once(ocp.AsyncCheckpointer, 'save', save, lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, limit))


def late_after(steps: int) -> None:
    """An hour passes, for train.max_minutes, after so many steps; before that none."""
    clock = {'now': 0.0}
    stopping.time = types.SimpleNamespace(monotonic=lambda: clock['now'])  # type: ignore[assignment]
    owner, name = (members.Group, 'add_metrics') if steps else (setup, 'load_state')
    once(owner, name, max(steps, 1), lambda *_: clock.update(now=3600.0))


def store_soon(environment: dict[str, str], moment: str | None = None, call: int = 1, number: int = 0) -> None:
    """Uses a store by an environment, quickly; process `number` dies at a moment once a checkpoint is on the store."""
    os.environ |= environment
    store_copies.PUSH_SECONDS = store_copies.BEAT_SECONDS = store_lease.SETTLE_SECONDS = 0.1
    store_lease.LEASE_SECONDS = 5.0
    copies: list[store_copies.Copy] = []
    once(store_copies.Copy, 'pull', 1, copies.append)

    def die_pushed(*_: object) -> None:
        if jax.process_index() == number:
            while not any(name.endswith(store_copies.DIGESTS) and '/' in name for name in copies[0].store.names()):
                time.sleep(0.1)
            die()

    if moment is not None:
        owner, name, _ = MOMENTS[moment]
        once(owner, name, call, die_pushed)
