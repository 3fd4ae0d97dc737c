"""The one dense layer: an einsum with a kernel whose axes have logical names."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.config import Model
from tformer.errors import choose
from tformer.layers.initializers import INITIALIZERS
from tformer.sharding import partitioned


class Dense(nn.Module):
    """y = einsum(x, kernel) + bias, for kernels of any rank.

    The equation names the kernel's axes in its second operand: those that the input shares are summed over. The bias
    has the axes of the kernel that the output keeps.
    """

    cfg: Model
    equation: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    bias: bool = False
    output: str | None = None  # dtype of y; None: the activations'

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.cfg
        inputs, rest = self.equation.split(',')
        letters, outputs = rest.split('->')
        in_axis = [i for i, letter in enumerate(letters) if letter in inputs]
        out_axis = [i for i, letter in enumerate(letters) if letter not in inputs]
        init = choose(INITIALIZERS, cfg.initializer, 'model.initializer').kernel(in_axis, out_axis)
        kernel = self.param('kernel', partitioned(init, *self.names), self.shape, jnp.dtype(cfg.param_dtype))
        dtype = jnp.dtype(self.output or cfg.dtype)
        y = jnp.einsum(self.equation, x.astype(cfg.dtype), kernel.astype(cfg.dtype), preferred_element_type=dtype)
        if self.bias:
            kept = [letter for letter in outputs if letter in letters]
            axes = [letters.index(letter) for letter in kept]
            zeros = partitioned(nn.initializers.zeros, *(self.names[axis] for axis in axes))
            bias = self.param('bias', zeros, tuple(self.shape[axis] for axis in axes), jnp.dtype(cfg.param_dtype))
            spread = [self.shape[letters.index(letter)] if letter in letters else 1 for letter in outputs]
            y += bias.astype(dtype).reshape(spread)
        return y
