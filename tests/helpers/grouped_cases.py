"""Products of slots by the kernels of their experts with their gradients, by a function and by hand in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from tformer.layers.grouped_blocks import Blocks


def make(counts, size, widths, empty=0, dtype='float32', behind=0.0):
    """Returns (x_PD, kernel_EDF, dy_PF, blocks): `counts` blocks of each expert, of `size` slots, and `empty` ones
    behind them, whose numbers are `behind`."""
    rng, (D, F) = np.random.default_rng(0), widths
    held = sum(counts) * size
    expert_M = np.repeat([*range(len(counts)), len(counts) - 1], [*counts, empty])
    x_PD, dy_PF = (rng.standard_normal((held + empty * size, width)) for width in (D, F))
    x_PD[held:] = dy_PF[held:] = behind
    kernel_EDF = rng.standard_normal((len(counts), D, F))
    blocks = Blocks(jnp.asarray(expert_M, jnp.int32), jnp.asarray(counts, jnp.int32))
    return *(jnp.asarray(x, dtype) for x in (x_PD, kernel_EDF, dy_PF)), blocks


def run(product, x_PD, kernel_EDF, dy_PF, blocks):
    """Returns product(x, kernel, blocks) and its gradients, by name."""

    @jax.jit
    def program(x_PD, kernel_EDF, dy_PF, blocks):
        y_PF, pull = jax.vjp(lambda x_PD, kernel_EDF: product(x_PD, kernel_EDF, blocks), x_PD, kernel_EDF)
        dx_PD, dkernel_EDF = pull(dy_PF)
        return {'y': y_PF, 'x': dx_PD, 'kernel': dkernel_EDF}

    return jax.device_get(program(x_PD, kernel_EDF, dy_PF, blocks))


def by_hand(x_PD, kernel_EDF, dy_PF, blocks):
    """The same of `run` in float64, expert by expert."""
    x_PD, kernel_EDF, dy_PF = (np.asarray(x, np.float64) for x in (x_PD, kernel_EDF, dy_PF))
    size, first = len(x_PD) // len(blocks.expert_M), 0
    found = {'y': np.zeros_like(dy_PF), 'x': np.zeros_like(x_PD), 'kernel': np.zeros_like(kernel_EDF)}
    for expert, count in enumerate(np.asarray(blocks.count_E)):
        own = slice(first * size, (first + count) * size)
        found['y'][own] = x_PD[own] @ kernel_EDF[expert]
        found['x'][own] = dy_PF[own] @ kernel_EDF[expert].T
        found['kernel'][expert] = x_PD[own].T @ dy_PF[own]
        first += count
    return found
