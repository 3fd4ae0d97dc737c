"""Several processes that train as one: how each joins the others, and what only the first of them does."""

import os
import re
import sys
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar('T')

HEARTBEAT_SECONDS = 30  # without a sign of life from one process, the others end


def join(coordinator: str, num_processes: int, process_id: int) -> None:
    """Joins a run of several processes; all but the first are silent from then on.

    Args:
      coordinator: host:port, on the host of process 0.
      num_processes: of the run.
      process_id: of this one, from 0.
    """
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    jax.distributed.initialize(coordinator, num_processes, process_id, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    if process_id:
        sys.stdout = open(os.devnull, 'w')  # noqa: SIM115


def first() -> bool:
    """Returns whether this is the first process: the one that writes and prints."""
    return jax.process_index() == 0


def after_first(make: Callable[[], T]) -> T:
    """Returns make(), which the others call once the first has: it finds then what that one wrote."""
    if first():
        made = make()
        meet('made')
        return made
    meet('made')
    return make()


def same_number(number: Callable[[], int]) -> int:
    """Returns number() of the first process, which alone calls it."""
    if jax.process_count() == 1:
        return number()
    return int(multihost_utils.broadcast_one_to_all(np.int32(number() if first() else 0)))


def lost(error: Exception) -> str | None:
    """Returns what to tell of an error that comes of another process' end; None where it comes of something else."""
    if jax.process_count() == 1 or not isinstance(error, jax.errors.JaxRuntimeError):
        return None
    line = str(error).splitlines()[0]
    if not re.search('peer|Gloo|oordination|heartbeat', line):
        return None
    return f'another process of the run has ended; the same command goes on from the newest checkpoint ({line})'


def meet(name: str) -> None:
    """Waits until every process is here; `name` tells the places apart."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
