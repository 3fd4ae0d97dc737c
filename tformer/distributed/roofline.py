"""Lower bounds of a step's time on accelerators, from their published peaks and the work of the step."""

import dataclasses
import math
from collections.abc import Iterable, Mapping

from tformer.distributed.hlo import Collective


@dataclasses.dataclass(frozen=True)
class Device:
    """Published numbers of one device.

    Attributes:
      memory: bytes.
      flops: peak operations a second of matrix products, by the type of their operands.
      bandwidth: bytes a second of its memory.
      near: how many devices the fast network joins.
      near_bytes: that a device sends on it, in one ring, a second.
      far_bytes: that a device sends beyond it a second.
    """

    memory: float
    flops: Mapping[str, float]
    bandwidth: float
    near: int
    near_bytes: float
    far_bytes: float


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds that a step keeps the products, the memory and the network of a device busy."""

    compute: float
    memory: float
    network: float

    @property
    def best(self) -> float:
        """All three at the same time."""
        return max(self.compute, self.memory, self.network)

    @property
    def worst(self) -> float:
        """One after the other."""
        return self.compute + self.memory + self.network


def times(
    device: Device, dtype: str, flops: float, traffic: float, collectives: Iterable[Collective], mesh: Mapping[str, int]
) -> Times:
    """Returns how long a step keeps a device busy at its peaks.

    Args:
      device: its peaks.
      dtype: of the products' operands.
      flops: operations of a device's products.
      traffic: bytes that a device reads and writes in its memory.
      collectives: of a device.
      mesh: sizes of its axes; devices are numbered along the last one first, and neighbours are near.
    """
    axes, network = list(mesh), 0.0
    for found in collectives:
        inner = [mesh[axis] for axis in axes[axes.index(found.axes[0]) :]] if found.axes else []
        near = math.prod(inner) <= device.near
        network += found.bytes / (device.near_bytes if near else device.far_bytes)
    return Times(flops / device.flops[dtype], traffic / device.bandwidth, network)


DEVICES: dict[str, Device] = {
    # NVIDIA H100 Tensor Core GPU Datasheet, SXM: dense products, half of those with sparsity; TF32 for float32;
    # NVLink 900 GB/s both ways together. NVIDIA DGX H100 Datasheet: 8 GPUs, with 400 Gb/s of InfiniBand each.
    'H100 SXM (80 GB)': Device(80e9, {'bfloat16': 989e12, 'float32': 494e12}, 3.35e12, 8, 450e9, 50e9),
    # Google Cloud, TPU v5p: 95 GiB; ICI 1,200 GB/s both ways together on the three axes of a torus, a ring takes one
    # of them; pods of 8,960; data center network 50 Gb/s a chip. Products of float32 are of bfloat16 by default (JAX).
    'TPU v5p (95 GiB)': Device(95 * 2**30, {'bfloat16': 459e12, 'float32': 459e12}, 2.765e12, 8960, 200e9, 6.25e9),
}
