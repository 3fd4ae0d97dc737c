"""How long a compiled step takes at a device's published peaks, or as its compiler says."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tformer.distributed import costs, hlo
from tformer.distributed.collectives import Collective, Pace
from tformer.distributed.costs import Work
from tformer.distributed.devices import Device
from tformer.distributed.hlo import Computation, Instruction, Program


class Times(NamedTuple):
    """Seconds that a step keeps the matrix units, the memory and the network of a device busy at their peaks.

    `step` is an estimate of the step: every instruction takes as long as the compiler says, or as long as its products
    or its bytes at the peaks; collectives take their time unless they run beside other work.
    """

    compute: float
    memory: float
    network: float
    step: float

    @property
    def least(self) -> float:
        """The lower bound of a step: the three overlap at best."""
        return max(self.compute, self.memory, self.network)


def times(
    device: Device, dtype: str, works: Iterable[Work], collectives: Iterable[Collective], mesh: Mapping[str, int]
) -> Times:
    """Returns how long a step keeps a device busy.

    Args:
      device: the peaks.
      dtype: the type of the products' operands.
      works: those of one device.
      collectives: likewise.
      mesh: the sizes of the mesh's axes; devices are numbered along the last axis first, and neighbours are near.
    """
    compute = memory = busy = 0.0
    for work in works:
        products, moved, own = _seconds(device, dtype, work)
        compute += work.times * products
        memory += work.times * moved
        busy += work.times * own
    network = hidden = 0.0
    for found in collectives:
        network += found.bytes / speed(device, mesh, found.axes, found.far)
        hidden += found.hidden / speed(device, mesh, found.axes, found.far)
    return Times(compute, memory, network, max(busy, hidden) + network - hidden)


def _seconds(device: Device, dtype: str, work: Work) -> tuple[float, float, float]:
    """Returns how long the products, the bytes, and all of one execution take."""
    peak = device.flops['int8' if work.integers else dtype]
    products, moved = work.flops / peak, work.bytes / device.bandwidth
    said = work.cycles / device.clock if work.cycles and device.clock else 0.0
    return products, moved, said or max(products, moved)


def speed(device: Device, mesh: Mapping[str, int], axes: Sequence[str], far: bool) -> float:
    """Returns the bytes a second that a device sends along axes of a mesh; `far`: to other slices."""
    names = list(mesh)
    inner = [mesh[axis] for axis in names[names.index(axes[0]) :]] if axes else []
    return device.near_bytes if math.prod(inner) <= device.near and not far else device.far_bytes


def pace(program: Program, device: Device, dtype: str, mesh: Mapping[str, int]) -> Pace:
    """Returns how fast a device runs a program, arguments as of `times`."""
    cost = functools.partial(costs.operations, program)

    @functools.cache
    def of_computation(name: str) -> float:
        computation = program.computations[name]
        return sum(working(i, computation) for i in computation.values())

    def working(i: Instruction, c: Computation) -> float:
        if i.opcode in ('while', 'conditional', 'call'):
            return sum(times * of_computation(name) for name, times in hlo.callees(program, i, c, cost))
        return _seconds(device, dtype, costs.work_of(program, i, c))[2]

    return Pace(working, lambda axes, far: speed(device, mesh, axes, far))
