"""The devices and cores of this host, dealt out to the processes that train at once."""

import glob
import math
import os
from typing import NamedTuple

from tformer.distributed import gpu_memory
from tformer.errors import UserError

MEMORY = 0.9  # of a device, that the processes on it share; the rest is for their contexts


class Share(NamedTuple):
    """What one of several processes may use."""

    cores: frozenset[int]  # empty: all
    environment: dict[str, str]  # the variables that say which devices it sees


class Devices(NamedTuple):
    """The accelerators that processes of this host can be given."""

    kind: str | None  # 'gpu' or 'tpu'; None: there are none
    names: tuple[str, ...]  # as the variable of their kind names them


def visible() -> Devices:
    """Returns the accelerators of this host that this process sees, without starting them."""
    if os.environ.get('JAX_PLATFORMS', '').split(',')[0] == 'cpu':
        return Devices(None, ())
    named = os.environ.get('CUDA_VISIBLE_DEVICES')
    gpus = glob.glob('/dev/nvidia[0-9]*') if named is None else [x for x in named.split(',') if x and x != '-1']
    if gpus:
        return Devices('gpu', tuple(str(i) for i in range(len(gpus))) if named is None else tuple(gpus))
    named = os.environ.get('TPU_VISIBLE_CHIPS')
    chips = glob.glob('/dev/accel[0-9]*') or glob.glob('/dev/vfio/[0-9]*')
    if named or chips:
        return Devices('tpu', tuple(named.split(',')) if named else tuple(str(i) for i in range(len(chips))))
    return Devices(None, ())


def count(parallel: int | None, per_device: int | None, devices: Devices) -> int:
    """Returns how many processes train at once: `parallel`, or `per_device` on each device; else one.

    Raises:
      UserError: a number is not positive, both are given, or there is no device.
    """
    for name, number in (('parallel', parallel), ('per_device', per_device)):
        if number is not None and number < 1:
            raise UserError(f'--{name}={number} must be positive')
    if per_device is None:
        return parallel or 1
    if parallel is not None:
        raise UserError('--parallel and --per_device both say how many trials train at once: give one of them')
    if devices.kind is None:
        raise UserError(f'--per_device={per_device}: this host shows no GPU or TPU; --parallel=K trains K at once')
    return per_device * len(devices.names)


def share(slot: int, parallel: int, devices: Devices) -> Share:
    """Returns the share of process number `slot` of `parallel`; one alone has everything.

    Each has as many whole devices as there are for all, or else a device with others and its part of the memory. Cores
    are dealt out where there is one for each.

    Raises:
      UserError: several processes would share a TPU chip, which only one can open.
    """
    if parallel == 1:
        return Share(frozenset(), {})
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else []
    own = frozenset(cores[slot::parallel]) if len(cores) >= parallel else frozenset()
    number = len(devices.names)
    if devices.kind is None:
        return Share(own, {})
    each = max(number // parallel, 1)
    first = slot * each % number
    names = devices.names[first : first + each]
    if devices.kind == 'gpu':
        sharing = math.ceil(parallel / number)
        fraction = {'XLA_PYTHON_CLIENT_MEM_FRACTION': f'{MEMORY / sharing:.3g}'} if sharing > 1 else {}
        return Share(own, {'CUDA_VISIBLE_DEVICES': ','.join(names), **({} if gpu_memory.is_given() else fraction)})
    if parallel > number:
        raise UserError(f'{parallel} processes at once: a TPU chip serves one process, and this host has {number}')
    bounds = {1: '1,1,1', 2: '1,2,1', 4: '2,2,1', 8: '2,4,1'}
    each = max(size for size in bounds if size <= each)
    chips = ','.join(devices.names[slot * each : (slot + 1) * each])
    return Share(
        own,
        {
            'TPU_VISIBLE_CHIPS': chips,
            'TPU_CHIPS_PER_PROCESS_BOUNDS': bounds[each],
            'TPU_PROCESS_BOUNDS': '1,1,1',
        },
    )


def shares(slot: int, parallel: int, processes: int, devices: Devices) -> list[Share]:
    """Returns the shares of the processes that train the trial of a slot as one: the cores of `share`, devices apart.

    Raises:
      UserError: as `share`, or each process cannot have GPUs of its own.
    """
    together = share(slot, parallel, devices)
    if processes == 1 or devices.kind is None:
        return processes * [together]
    number, needed = len(devices.names), parallel * processes
    if devices.kind == 'tpu':
        raise UserError(f'--processes={processes}: the TPU chips of a host train a trial as one process')
    if needed > number:
        raise UserError(f'--processes={processes}: {needed} processes need a GPU each, and this host shows {number}')
    each = (share(slot * processes + index, needed, devices) for index in range(processes))
    return [together._replace(environment=one.environment) for one in each]
