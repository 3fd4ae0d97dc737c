"""Products of tokens, sorted by expert, with the kernels of their experts, as Pallas kernels.

XLA multiplies every token by every expert: on GPUs in each of these products, on TPUs in the gradient of the kernels.
Blocks that hold no token are neither multiplied nor read.

Shape letters as in moe.py: P slots, M blocks of slots, E experts.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from tformer.layers.accelerators import grouped_mosaic, grouped_triton
from tformer.layers.grouped_blocks import Blocks, Options
from tformer.layers.parallel.each_device import free_axes

LEAST, MOST = 16, 128  # slots of a block
NAME = 'grouped_product'  # of a result, by which model.remat keeps it
PLATFORMS: dict[str, Any] = {'gpu': grouped_triton, 'tpu': grouped_mosaic}


def block_size(choices: int, num_experts: int) -> int:
    """Returns the slots of a block: a power of two, of which an expert with its share of the choices fills four."""
    fourth = max(choices // (4 * num_experts), 1)
    return max(LEAST, min(MOST, 2 ** (fourth.bit_length() - 1)))


def serves(platform: str, x_PD: jax.Array, kernel_EDF: jax.Array) -> bool:
    """Returns whether there is such a kernel for these arrays, of one device's own tokens and experts."""
    if platform not in PLATFORMS:
        return False
    mesh = jax.sharding.get_abstract_mesh()
    alone = mesh.size == 1 or not free_axes()  # XLA cannot split it between devices
    return alone and all(size % PLATFORMS[platform].WIDTH == 0 for size in kernel_EDF.shape[1:])


def grouped_product(options: Options, x_PD: jax.Array, kernel_EDF: jax.Array, blocks: Blocks) -> jax.Array:
    """Returns y_PF, each slot times the kernel of its block's expert; 0 in blocks that hold no token."""
    return checkpoint_name(_product(options, *_alike(x_PD, kernel_EDF, *blocks)), NAME)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    options: Options, x_PD: jax.Array, kernel_EDF: jax.Array, expert_M: jax.Array, count_E: jax.Array
) -> jax.Array:
    return _multiplied(options, x_PD, kernel_EDF, Blocks(expert_M, count_E), False)


def _forward(options: Options, *read: jax.Array) -> tuple[jax.Array, Any]:
    return _product(options, *read), read


def _backward(options: Options, read: Any, dy_PF: jax.Array) -> tuple[jax.Array, jax.Array, None, None]:
    x_PD, kernel_EDF, *parts = read
    blocks = Blocks(*parts)
    dx_PD = _multiplied(options, dy_PF, kernel_EDF, blocks, True)
    with _counted(options, kernel_EDF, 'grouped_gradient'):
        dkernel_EDF = PLATFORMS[options.platform].gradient(options, x_PD, dy_PF, blocks, kernel_EDF)
    return dx_PD, dkernel_EDF, None, None


_product.defvjp(_forward, _backward)


def _multiplied(options: Options, x: jax.Array, kernel_EDF: jax.Array, blocks: Blocks, turned: bool) -> jax.Array:
    with _counted(options, kernel_EDF, 'grouped_product'):
        found: jax.Array = PLATFORMS[options.platform].multiply(options, x, kernel_EDF, blocks, turned)
    return found


@contextlib.contextmanager
def _counted(options: Options, kernel_EDF: jax.Array, name: str) -> Iterator[None]:
    """A context for the call of a kernel, which tells `distributed.costs` its floating-point operations."""
    flops = 2 * options.slots * kernel_EDF.shape[1] * kernel_EDF.shape[2]
    with jax.named_scope(f'products_{flops}'), jax.named_scope(name):
        yield


def _alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns arrays that vary over the same axes of the mesh, within `jax.shard_map`."""
    found = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    axes = frozenset[str]().union(*found)
    return tuple(jax.lax.pcast(x, tuple(axes - own), to='varying') for x, own in zip(arrays, found, strict=True))
