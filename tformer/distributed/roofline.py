"""Lower bounds of a step's time on accelerators, from their published peaks and the work of the step."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tformer.distributed.hlo import Collective


class Device(NamedTuple):
    """Published peaks of one device.

    Attributes:
      memory: bytes.
      flops: operations per second of matrix products, by the type of their operands.
      bandwidth: bytes per second of its memory.
      near: the number of devices that the fast network joins.
      near_bytes: bytes per second that a device sends on the fast network, in one ring.
      far_bytes: bytes per second that a device sends beyond it.
    """

    memory: float
    flops: Mapping[str, float]
    bandwidth: float
    near: int
    near_bytes: float
    far_bytes: float


class Times(NamedTuple):
    """Seconds that a step keeps the matrix units, the memory and the network of a device busy at their peaks."""

    compute: float
    memory: float
    network: float


def times(
    device: Device, dtype: str, flops: float, traffic: float, collectives: Iterable[Collective], mesh: Mapping[str, int]
) -> Times:
    """Returns how long a step keeps a device busy at its peaks.

    The three overlap at best, so that their maximum bounds the step's time from below; one after the other they take
    their sum.

    Args:
      device: the peaks.
      dtype: the type of the products' operands.
      flops: operations of one device's products.
      traffic: bytes that one device reads from and writes to its memory.
      collectives: those of one device.
      mesh: the sizes of the mesh's axes; devices are numbered along the last axis first, and neighbours are near.
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
