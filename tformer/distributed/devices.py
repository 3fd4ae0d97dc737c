"""Accelerators by name: their published peaks, and the devices that their compilers compile for, present or not.

`v5e:2x4` is a TPU slice, eight chips of a torus; `v5p:4x4x4:2` are two slices that the data center network joins;
`h100:16` are sixteen GPUs, eight a node; `cpu:8` is this machine's CPU, eight times.
"""

import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from tformer.errors import UserError, choose


def _peaks(bfloat16: float, float32: float) -> dict[str, float]:
    """Returns operations per second by type of operands; integers of 8 bits have twice those of bfloat16."""
    return {'bfloat16': bfloat16, 'float32': float32, 'int8': 2 * bfloat16}


class Device(NamedTuple):
    """A kind of device, with its published peaks.

    Attributes:
      name: in words.
      platform: tpu, cuda or cpu.
      memory: bytes.
      flops: operations per second of matrix products, by the type of their operands.
      bandwidth: bytes per second of its memory.
      near: the number of devices that the fast network joins.
      near_bytes: bytes per second that a device sends on the fast network, in one ring.
      far_bytes: bytes per second that a device sends beyond it.
      clock: cycles per second, of which the compiler's estimates speak; 0 where it makes none.
      axes: the number of axes of a slice's torus; 0 where devices are only counted.
    """

    name: str
    platform: str
    memory: float
    flops: Mapping[str, float]
    bandwidth: float
    near: int
    near_bytes: float
    far_bytes: float
    clock: float = 0.0
    axes: int = 0


# ------------------------------------------------------------------------------------------------ devices by name
def _example(device: Device, kind: str, sizes: Sequence[int]) -> str:
    """Returns a layout that there is, near to sizes if they are given."""
    if not device.axes:
        return f'{kind}:8'
    if len(sizes) == 1:
        sizes = [*[2] * (device.axes - 1), -(-sizes[0] // 2 ** (device.axes - 1))]
    filled = [*sizes, *[1] * device.axes][: device.axes] if sizes else [4] * device.axes
    even = [max(size + size % 2, 2) for size in filled[:2]]  # hosts have 2 x 2
    if math.prod([*even, *filled[2:]]) > device.near:
        return _example(device, kind, ())
    return f'{kind}:{"x".join(map(str, [*even, *(max(size, 1) for size in filled[2:])]))}'


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to compile for, and whether they are here does not matter."""

    kind: str  # key of DEVICES
    sizes: tuple[int, ...]  # of a slice's torus, or the number of devices
    slices: int = 1

    @classmethod
    def parse(cls, text: str) -> 'Target':
        """Returns the target of a text such as v5e:2x4, v5p:4x4x4:2, h100:16 or cpu:8.

        Raises:
          UserError: there is no such kind of device, or it has no such layout.
        """
        kind, _, layout = text.partition(':')
        device = choose(DEVICES, kind, '--device')
        axes = device.axes or 1
        found = re.fullmatch(r'(\d+(?:x\d+)*)(?::(\d+))?', layout)
        sizes = tuple(int(size) for size in found[1].split('x')) if found else ()
        slices = int(found[2] or 1) if found else 1
        example = _example(device, kind, sizes)
        if not found or len(sizes) != axes or 0 in (*sizes, slices) or (found[2] and not device.axes):
            raise UserError(f'--device={text!r} is not a layout of {device.name}; write e.g. {example}')
        if device.axes and set(sizes) != {1} and (sizes[0] % 2 or sizes[1] % 2):
            raise UserError(f'--device={text!r}: {device.name} are on hosts of 2 x 2; write e.g. {example}')
        if device.platform == 'cuda' and sizes[0] > device.near and sizes[0] % device.near:
            raise UserError(
                f'--device={text!r}: more than {device.near} {device.name} are whole nodes of {device.near}; '
                f'write e.g. {kind}:{-(-sizes[0] // device.near) * device.near}'
            )
        if device.axes and math.prod(sizes) > device.near:
            raise UserError(
                f'--device={text!r}: a slice has at most {device.near:,} {device.name}; for more slices write e.g. '
                f'{_example(device, kind, ())}:2'
            )
        return cls(kind, sizes, slices)

    @property
    def device(self) -> Device:
        return DEVICES[self.kind]

    @property
    def jax_platform(self) -> str:
        """The name of its JAX backend."""
        return {'cuda': 'gpu'}.get(self.device.platform, self.device.platform)

    @property
    def count(self) -> int:
        """The number of devices."""
        return math.prod(self.sizes) * self.slices

    def __str__(self) -> str:
        layout = 'x'.join(map(str, self.sizes)) + (f':{self.slices}' if self.slices > 1 else '')
        return f'{self.kind}:{layout}'

    def devices(self) -> list[jax.Device]:
        """Returns the devices, for `jit(...).lower(...).compile()` alone: nothing can run on those that are not here.

        JAX must not have started: it is told what it needs for the compiler.

        Raises:
          UserError: the compiler is not installed, or knows no such layout.
        """
        if self.device.platform == 'cpu':
            return list(jax.devices('cpu')[: self.count])
        from jax.experimental import topologies

        try:
            return list(self._describe(topologies.get_topology_desc).devices)
        except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
            raise UserError(f'--device={self}: {str(error).splitlines()[0]}') from error

    def _describe(self, describe: Any) -> Any:
        if self.device.platform == 'tpu':
            layout: dict[str, Any] = {'num_slices': self.slices} if self.slices > 1 else {}
            if set(self.sizes) == {1}:  # other hosts have 2 x 2 chips
                layout['chips_per_host_bounds'] = [1, 1, 1]
            return describe(platform='tpu', topology_name=f'{self.kind}:{"x".join(map(str, self.sizes))}', **layout)
        nodes, each = max(self.count // self.device.near, 1), min(self.count, self.device.near)
        return describe(self.kind, platform='cuda', target_config=GPUS[self.kind], topology=f'1 x {nodes} x {each}')


# ------------------------------------------------------------------------------------------------ compilers
COMPILERS = 'TFORMER_COMPILERS'  # the variable that names their folder


def folder(platform: str) -> pathlib.Path:
    """Returns the folder in which the compiler of a platform is looked for."""
    return pathlib.Path(os.environ.get(COMPILERS, 'build/compilers')).absolute() / platform


def prepare(platform: str) -> None:
    """Lets JAX find the compiler of a platform, in $TFORMER_COMPILERS or installed, without its devices.

    Raises:
      UserError: it is not installed; the line says how to.
    """
    jax.config.update('jax_platforms', 'cpu')
    if platform == 'cpu':
        return
    if folder(platform).is_dir():
        sys.path.append(str(folder(platform)))
    if not any(importlib.util.find_spec(name) for name in MODULES[platform]):
        command = f'pip install --no-deps --target={folder(platform)} {" ".join(requirements(platform))}'
        raise UserError(f'the compiler for {platform} is not installed: make compilers, or {command}')
    os.environ |= SETTINGS[platform]


def find_cudnn() -> None:
    """Lets the compiler of GPUs find cuDNN's libraries in $TFORMER_COMPILERS, or installed.

    Raises:
      UserError: they are nowhere; the line says how to install them.
    """
    home = folder('cudnn') / 'nvidia'
    for library in LIBRARIES if home.is_dir() else ():
        ctypes.CDLL(str(home / library), ctypes.RTLD_GLOBAL)
    if not home.is_dir() and not (importlib.util.find_spec('nvidia') and importlib.util.find_spec('nvidia.cudnn')):
        command = f'pip install --no-deps --target={folder("cudnn")} {" ".join(requirements("cudnn"))}'
        raise UserError(
            f'the attention kernel cudnn needs cuDNN: make compilers, or {command}; '
            'or choose model.attention_kernel=triton'
        )


def requirements(platform: str) -> list[str]:
    """Returns what pip installs without dependencies for the compiler of a platform, in the versions that JAX names."""
    if platform == 'cudnn':
        return ['nvidia-cudnn-cu13', 'nvidia-cublas', 'nvidia-cuda-nvrtc']
    if platform == 'cuda':
        version = importlib.metadata.version('jax')
        return [f'jax-cuda13-plugin=={version}', f'jax-cuda13-pjrt=={version}']
    named = [text for text in importlib.metadata.requires('jax') or () if text.startswith('libtpu')]
    return [named[0].partition(';')[0].strip().replace(' ', '')]


# Of cuDNN, each after those that it needs.
LIBRARIES = (
    *('cu13/lib/libnvrtc.so.13', 'cu13/lib/libcublasLt.so.13', 'cu13/lib/libcublas.so.13'),
    'cudnn/lib/libcudnn.so.9',
)
MODULES = {'tpu': ('libtpu',), 'cuda': ('jax_cuda13_plugin', 'jax_cuda12_plugin')}
SETTINGS = {
    'tpu': {  # as on a host of its own, that asks no server who it is
        'TPU_SKIP_MDS_QUERY': '1', 'TPU_ACCELERATOR_TYPE': 'v5litepod-8', 'TPU_WORKER_HOSTNAMES': 'localhost',
        'TPU_WORKER_ID': '0', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
    },
    'cuda': {'JAX_SKIP_CUDA_CONSTRAINTS_CHECK': '1'},
}  # fmt: skip

DEVICES: dict[str, Device] = {
    # Google Cloud, TPU v5e: 16 GB; ICI 400 GB/s both ways together on the two axes of a torus, a ring takes one of
    # them; pods of 256; two network cards of 100 Gb/s for eight chips. Its four matrix units of 128 x 128 make the
    # clock. Products of float32 are of bfloat16 by default (JAX); so for all TPUs.
    'v5e': Device(
        'TPU v5e (16 GB)', 'tpu', 16e9, _peaks(197e12, 197e12), 819e9, 256, 100e9, 3.125e9, 1.5e9, 2
    ),
    # Google Cloud, TPU v5p: 95 GiB; ICI 1,200 GB/s both ways together on the three axes; pods of 8,960; data center
    # network 50 Gb/s a chip.
    'v5p': Device(
        'TPU v5p (95 GiB)', 'tpu', 95 * 2**30, _peaks(459e12, 459e12), 2.765e12, 8960, 200e9, 6.25e9,
        1.75e9, 3,
    ),
    # Google Cloud, TPU v6e: 32 GB; ICI 800 GB/s both ways together on the two axes; pods of 256; four network cards of
    # 200 Gb/s for eight chips. The compiler counts four matrix units of 256 x 256, which make the clock.
    'v6e': Device(
        'TPU v6e (32 GB)', 'tpu', 32e9, _peaks(918e12, 918e12), 1.638e12, 256, 200e9, 12.5e9, 1.75e9,
        2,
    ),
    # NVIDIA H100 Tensor Core GPU Datasheet, SXM: dense products, half of those with sparsity; TF32 for float32;
    # NVLink 900 GB/s both ways together. NVIDIA DGX H100 Datasheet: 8 GPUs, with 400 Gb/s of InfiniBand each.
    'h100': Device('H100 SXM (80 GB)', 'cuda', 80e9, _peaks(989e12, 494e12), 3.35e12, 8, 450e9, 50e9),
    # NVIDIA H200 Tensor Core GPU Datasheet, SXM.
    'h200': Device('H200 SXM (141 GB)', 'cuda', 141e9, _peaks(989e12, 494e12), 4.8e12, 8, 450e9, 50e9),
    # No peaks of this machine are known.
    'cpu': Device('CPU', 'cpu', math.inf, {}, math.inf, 1, math.inf, math.inf),
}  # fmt: skip

# What JAX calls the devices whose peaks stand above; other forms of the same chips have other peaks.
KINDS = {
    'TPU v5 lite': 'v5e', 'TPU v5e': 'v5e', 'TPU v5': 'v5p', 'TPU v5p': 'v5p', 'TPU v6 lite': 'v6e', 'TPU v6e': 'v6e',
    'NVIDIA H100 80GB HBM3': 'h100', 'NVIDIA H200': 'h200',
}  # fmt: skip


def peak_flops(kind: str, dtype: str) -> float | None:
    """Returns the peak of a device of JAX's `device_kind`, in operations per second of products of `dtype`.

    None where it is not known.
    """
    return DEVICES[KINDS[kind]].flops.get(dtype) if kind in KINDS else None


def _hopper(name: str, memory: int, bandwidth: float) -> str:
    """Returns what XLA's compiler asks to know of a GPU of the Hopper architecture, as a text proto."""
    numbers = {
        'threads_per_block_limit': 1024, 'threads_per_warp': 32, 'shared_memory_per_block': 48 * 2**10,
        'shared_memory_per_core': 228 * 2**10, 'threads_per_core_limit': 2048, 'core_count': 132, 'fpus_per_core': 128,
        'block_dim_limit_x': 2**31 - 1, 'block_dim_limit_y': 2**16 - 1, 'block_dim_limit_z': 2**16 - 1,
        'memory_bandwidth': int(bandwidth), 'l2_cache_size': 50 * 2**20, 'clock_rate_ghz': 1.98,
        'device_memory_size': memory, 'shared_memory_per_block_optin': 227 * 2**10,
        'registers_per_core_limit': 2**16, 'registers_per_block_limit': 2**16,
    }  # fmt: skip
    listed = ' '.join(f'{field}: {value}' for field, value in numbers.items())
    return (
        f'gpu_device_info {{ {listed} cuda_compute_capability {{ major: 9 minor: 0 }} }} platform_name: "CUDA" '
        f'dnn_version_info {{ major: 9 minor: 10 patch: 0 }} device_description_str: "{name}"'
    )


GPUS = {
    'h100': _hopper('NVIDIA H100 80GB HBM3', 81_008 * 2**20, 3.35e12),
    'h200': _hopper('NVIDIA H200', 143_771 * 2**20, 4.8e12),
}
