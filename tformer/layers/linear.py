"""The one dense layer: an einsum with a kernel whose axes have logical names."""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.config import Model
from tformer.layers.initializers import make_initializer
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
    role: str = 'dense'  # of layers.initializers.Parameter
    stack: str = ''  # encoder or decoder, where it stands in one
    output: str | None = None  # dtype of y; None: the activations'

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.cfg
        inputs, rest = self.equation.split(',')
        letters, outputs = rest.split('->')
        sizes = dict(zip(letters, self.shape, strict=True))
        fan_in = math.prod(size for letter, size in sizes.items() if letter in inputs)
        fan_out = math.prod(size for letter, size in sizes.items() if letter not in inputs)
        init = partitioned(make_initializer(cfg, self.role, fan_in, fan_out, self.stack), *self.names)
        kernel = self.param('kernel', init, self.shape, jnp.dtype(cfg.param_dtype))
        dtype = jnp.dtype(self.output or cfg.dtype)
        y = jnp.einsum(self.equation, x.astype(cfg.dtype), kernel.astype(cfg.dtype), preferred_element_type=dtype)
        if self.bias:
            kept = [letter for letter in outputs if letter in sizes]
            zeros = partitioned(nn.initializers.zeros, *(self.names[letters.index(letter)] for letter in kept))
            bias = self.param('bias', zeros, tuple(sizes[letter] for letter in kept), jnp.dtype(cfg.param_dtype))
            y += bias.astype(dtype).reshape([sizes.get(letter, 1) for letter in outputs])
        return y
