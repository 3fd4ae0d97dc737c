"""The sums of softmax over a vocabulary on GPUs, as a Pallas (Triton) kernel that reads the logits once.

XLA reads them twice; its reduction of both sums at once takes longer than this kernel.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tformer.layers.parallel.each_device import on_own_tokens, split, ways

BLOCK = 2048  # logits that a program reads at once, one for each of as many running sums
WARPS = 8
LEAST = 4 * BLOCK  # logits of a row from which on it is worth it
ALIGNED = 4  # numbers of 16 bytes, with which a row begins
FLOOR = jnp.finfo(jnp.float32).min  # of running maxima: infinities would have no difference


def serves(logits: jax.Array) -> bool:
    """Returns whether the kernel reads such logits: of long rows that are whole on each device."""
    V, axes = logits.shape[-1], split('act_vocab', logits.shape[-1])
    return logits.ndim == 3 and V >= LEAST and V % ALIGNED == 0 and axes is not None and ways(axes) == 1


def sums(logits_BTV: jax.Array, size: int, interpret: bool = False) -> tuple[jax.Array, ...]:
    """Returns (the largest logit, the sum of exp(logit - largest), the first place of the largest, the sum of the
    logits), each [B, T], of the first `size` logits of a token (Milakov & Gimelshein 2018, algorithm 3); each device
    has its own tokens."""

    def of_rows(_: None, logits_BTV: jax.Array) -> tuple[jax.Array, ...]:
        B, T, V = logits_BTV.shape
        found = _call(logits_BTV.reshape(B * T, V), size, interpret)
        return tuple(x.reshape(B, T) for x in found)

    return tuple(on_own_tokens(of_rows, None, logits_BTV))


def _call(logits_RV: jax.Array, size: int, interpret: bool) -> Any:
    from jax.experimental.pallas import triton as gpu  # slow to import

    R, V = logits_RV.shape
    one = pl.BlockSpec((1,), lambda i: (i,))
    call = pl.pallas_call(
        functools.partial(_kernel, size),
        grid=(R,),
        in_specs=[pl.BlockSpec((1, pl.next_power_of_2(V)), lambda i: (i, 0))],
        out_specs=[one] * 4,
        out_shape=[jax.ShapeDtypeStruct((R,), dtype) for dtype in (jnp.float32, jnp.float32, jnp.int32, jnp.float32)],
        compiler_params=gpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
    )
    return call(logits_RV)


def _kernel(size: int, logits: Any, largest: Any, total: Any, place: Any, plain: Any) -> None:
    from jax.experimental.pallas import triton as gpu

    lanes = jnp.arange(BLOCK)[None]

    def join(block: Any, sums: Any, x: jax.Array, there: Any = True) -> Any:
        """Adds a block of logits to running sums; of both exponentials one is 1."""
        top, exponentials, blocks, plain = sums
        plain += jnp.where(there, x, 0.0)
        above, factor = x > top, jnp.where(there, jnp.exp(-jnp.abs(x - top)), 0.0)
        exponentials = jnp.where(above, exponentials * factor + 1, exponentials + factor)
        return jnp.where(above, x, top), exponentials, jnp.where(above, block, blocks), plain

    def whole(block: Any, sums: Any) -> Any:
        return join(block, sums, gpu.load(logits.at[pl.ds(0, 1), pl.ds(block * BLOCK, BLOCK)]))

    zeros = jnp.zeros((1, BLOCK), jnp.float32)
    sums = jax.lax.fori_loop(0, size // BLOCK, whole, (zeros + FLOOR, zeros, jnp.zeros((1, BLOCK), jnp.int32), zeros))
    if size % BLOCK:
        there = lanes < size % BLOCK
        rest = logits.at[pl.ds(0, 1), pl.ds(size // BLOCK * BLOCK, BLOCK)]
        sums = join(size // BLOCK, sums, gpu.load(rest, mask=there, other=FLOOR), there)
    top, exponentials, blocks, plain_sums = sums
    best = jnp.max(top)
    first = jnp.min(jnp.where(top == best, blocks * BLOCK + lanes, size))
    found = best, jnp.sum(exponentials * jnp.exp(top - best)), first, jnp.sum(plain_sums)
    for ref, value in zip((largest, total, place, plain), found, strict=True):
        gpu.store(ref.at[pl.ds(0, 1)], value[None])
