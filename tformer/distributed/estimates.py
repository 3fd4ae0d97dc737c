"""How long a compiled step takes at a device's published peaks, or as its compiler says."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tformer.distributed.collectives import Collective
from tformer.distributed.costs import Work
from tformer.distributed.devices import Device


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
    axes, compute, memory, busy = list(mesh), 0.0, 0.0, 0.0
    for work in works:
        peak = device.flops['int8' if work.integers else dtype]
        products, moved = work.flops / peak, work.bytes / device.bandwidth
        said = work.cycles / device.clock if work.cycles and device.clock else 0.0
        compute += work.times * products
        memory += work.times * moved
        busy += work.times * (said or max(products, moved))
    network = hidden = 0.0
    for found in collectives:
        inner = [mesh[axis] for axis in axes[axes.index(found.axes[0]) :]] if found.axes else []
        near = math.prod(inner) <= device.near and not found.far
        speed = device.near_bytes if near else device.far_bytes
        network += found.bytes / speed
        hidden += found.hidden / speed
    return Times(compute, memory, network, max(busy, hidden) + network - hidden)
