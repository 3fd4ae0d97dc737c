"""Several processes that train as one: how they join, agree and wait, and what only the first process does."""

import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tformer.config import hashing
from tformer.errors import UserError, nearest

AUTO = 'auto'  # value of --coordinator: jax asks the scheduler
MEETING_SECONDS = 600  # all processes must join within this time
HEARTBEAT_SECONDS = 30  # after this time without a heartbeat of one process the others exit
LEAVING_SECONDS = 2

_number: int | None = None  # of this process, once it has joined


def join(coordinator: str, num_processes: int | None, process_id: int | None, preemptible: bool) -> None:
    """Joins a run of several processes, of which only the first one prints to standard output.

    If they do not all join within `MEETING_SECONDS`, the process exits with a line on standard error and code 2.

    Args:
      coordinator: host:port on the host of process 0; or `AUTO`: jax finds all three arguments in the environment that
        SLURM, Open MPI, Cloud TPU or Kubernetes (with the package `kubernetes`) provide.
      num_processes: of the run.
      process_id: of this process, from 0.
      preemptible: whether SIGTERM is a notice to all of them, which `stopping.StopMonitor` answers; otherwise it ends
        the process.

    Raises:
      UserError: the arguments contradict each other, the port is in use, or jax finds no environment.
    """
    global _number
    where: dict[str, Any] = {}
    if coordinator != AUTO:
        port = _port(coordinator, num_processes, process_id)
        where = {'coordinator_address': coordinator, 'num_processes': num_processes, 'process_id': process_id}
        where['cluster_detection_method'] = 'deactivate'
        if process_id == 0:
            _check_free(coordinator, port)
    elif num_processes is not None or process_id is not None:
        raise UserError('--coordinator=auto finds --num_processes and --process_id by itself: leave them out')
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    jax.config.update('jax_enable_preemption_service', preemptible)
    try:
        with _at_most(MEETING_SECONDS, lambda: _absent(coordinator, num_processes, process_id)):
            jax.distributed.initialize(
                **where, initialization_timeout=2 * MEETING_SECONDS, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
            )
            _number = jax.process_index()
    except Exception as error:
        line = str(error).splitlines()[0]
        if line == 'coordinator_address should be defined.':  # jax's message where it finds none
            line = 'no SLURM step, Open MPI, Cloud TPU or Kubernetes job has started this process; give HOST:PORT'
        raise UserError(f'--coordinator={coordinator}: {line}') from error
    sys.stdout.flush()
    ours = os.devnull if _number else os.dup(1)
    sys.stdout = open(ours, 'w', buffering=1, encoding=sys.stdout.encoding)  # noqa: SIM115
    os.dup2(2, 1)  # keeps Gloo's messages out of standard output


def _port(coordinator: str, num_processes: int | None, process_id: int | None) -> int:
    """Returns the port; raises a `UserError` where the arguments contradict each other."""
    host, _, port = coordinator.rpartition(':')
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f'--coordinator={coordinator} is no HOST:PORT{nearest(coordinator, [AUTO])}')
    if num_processes is None or process_id is None:
        raise UserError(f'--coordinator={coordinator} needs --num_processes and --process_id')
    if not 0 <= process_id < num_processes:
        raise UserError(f'--process_id={process_id} is not from 0 to {num_processes - 1} (--num_processes)')
    return int(port)


def _check_free(coordinator: str, port: int) -> None:
    """Raises a `UserError` where the port is in use, with which jax would crash."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        socket.create_server(('', port), family=family, dualstack_ipv6=family == socket.AF_INET6).close()
    except OSError as error:
        raise UserError(
            f'--coordinator={coordinator}: port {port} of this host: {os.strerror(error.errno or 0)}'
        ) from error


def _absent(coordinator: str, num_processes: int | None, process_id: int | None) -> str:
    """Returns the error for processes that did not all join."""
    flag = f'--coordinator={coordinator}'
    host, _, port = coordinator.rpartition(':')
    if process_id:
        try:
            socket.create_connection((host.strip('[]'), int(port)), timeout=2).close()
        except OSError as error:
            return f'{flag}: process 0 was not reached in {MEETING_SECONDS} s: {error.strerror or error}'
    several = 'the processes' if num_processes is None else f'the {num_processes} processes'
    return f'{flag}: {several} of the run did not all join in {MEETING_SECONDS} s'


@contextlib.contextmanager
def _at_most(seconds: float, complaint: Callable[[], str]) -> Iterator[None]:
    """Ends the process where its block takes longer, even in a call that cannot be interrupted."""

    def end() -> None:
        print(f'tformer: {complaint()}', file=sys.stderr, flush=True)
        os._exit(2)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def leave(code: int) -> None:
    """Exits at once if this process has joined others; at the interpreter's exit jax would wait for them.

    The first process, which the others need, waits a moment so that those that fail alike can print their errors.
    """
    if not jax.distributed.is_initialized():
        return
    if _number == 0:
        time.sleep(LEAVING_SECONDS)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed
            stream.flush()
    os._exit(code)


def first() -> bool:
    """Returns whether this is the first process, the one that writes and prints."""
    return jax.process_index() == 0


def same_number(number: Callable[[], int]) -> int:
    """Returns the first process's number(); the others do not call it."""
    if jax.process_count() == 1:
        return number()
    return int(multihost_utils.broadcast_one_to_all(np.int32(number() if first() else 0)))


def any_of(fact: bool) -> bool:
    """Returns whether `fact` is true in any process; all of them must call this."""
    return fact if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.array(fact)).any())


def agree(facts: Mapping[str, object]) -> None:
    """Checks, by digests of their `repr`, that facts are the same in every process.

    Raises:
      UserError: in all processes, where one differs from the first.
    """
    if jax.process_count() == 1:
        return
    digests = ''.join(hashing.digest_bytes(repr(fact).encode(), size=8) for fact in facts.values())
    found = multihost_utils.process_allgather(np.frombuffer(bytes.fromhex(digests), np.uint32).reshape(-1, 2))
    process, which = np.nonzero((found != found[0]).any(-1))
    if process.size:
        names = [list(facts)[i] for i in which[process == process[0]]]
        more = f' and {len(names) - 3} more' if len(names) > 3 else ''
        raise UserError(f'process {process[0]} differs from process 0 in: {", ".join(names[:3])}{more}')


def lost(error: Exception) -> str | None:
    """Returns the message for an error that the end of another process has caused; None for other errors."""
    line = str(error).partition('\n')[0]
    if jax.process_count() == 1 or not re.match('[A-Z_]+: .*(peer|Gloo|oordination|heartbeat)', line):
        return None
    return f'another process of the run has ended; the same command resumes from what is saved ({line})'


def meet(name: str) -> None:
    """Waits until every process has called this with the same `name`."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
