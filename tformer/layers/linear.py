"""The one dense layer: an einsum with a kernel whose axes have logical names, and its low-rank adapter."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.distributed.sharding import partitioned, platform
from tformer.layers.initializers import Initializer, make_initializer
from tformer.layers.products import einsum
from tformer.layers.quantized import Quantized, quantized_kernel, quantized_product
from tformer.layers.resolved import ResolvedModel

ALIGNED = 64  # the sizes of products that a GPU computes fast are multiples of it
STEP = 16  # tokens of a row that a step of decoding reads, at most


class Dense(nn.Module):
    """y = einsum(x, kernel) + bias, for kernels of any rank; with an adapter + (alpha / rank) x A B.

    The equation names the kernel's axes in its second operand: those that the input shares are summed over. The bias
    has the axes of the kernel that the output keeps.
    """

    cfg: ResolvedModel
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
        dtype = jnp.dtype(self.output or cfg.dtype)
        summed = [place for place, letter in enumerate(letters) if letter in inputs]

        def parameter() -> jax.Array:
            return self.param('kernel', init, self.shape, jnp.dtype(cfg.param_dtype))

        kernel, integers = quantized_kernel(self, 'kernel', parameter, summed)
        kernel = None if kernel is None else kernel.astype(cfg.dtype)
        y = product(self.equation, x.astype(cfg.dtype), kernel, dtype, integers)
        if cfg.lora_rank is not None and self.role in [LORA_TARGETS[target] for target in cfg.lora_targets]:
            y += self.low_rank(x.astype(cfg.dtype), cfg.lora_rank, fan_in).astype(dtype)
        if self.bias:
            kept = [letter for letter in outputs if letter in sizes]
            zeros = partitioned(nn.initializers.zeros, *(self.names[letters.index(letter)] for letter in kept))
            bias = self.param('bias', zeros, tuple(sizes[letter] for letter in kept), jnp.dtype(cfg.param_dtype))
            wide = bias.astype(jnp.float32).reshape([sizes.get(letter, 1) for letter in outputs])
            y += jnp.broadcast_to(wide, y.shape).astype(dtype)  # so that the gradient, a sum, is one in float32
        return y

    def low_rank(self, x: jax.Array, rank: int, fan_in: int) -> jax.Array:
        """Returns (alpha / rank) x A B: A random, B zero at first."""
        inputs, rest = self.equation.split(',')
        letters, outputs = rest.split('->')
        shared = ''.join(letter for letter in letters if letter in inputs)
        assert letters.startswith(shared)  # as merge_lora takes them
        kept, rows = letters.removeprefix(shared), ''.join(letter for letter in inputs if letter not in shared)
        sizes = {**dict(zip(letters, self.shape, strict=True)), 'r': rank}
        axes = {**dict(zip(letters, self.names, strict=True)), 'r': 'lora'}

        def kernel(name: str, letters: str, init: Initializer) -> jax.Array:
            shape, names = tuple(sizes[letter] for letter in letters), tuple(axes[letter] for letter in letters)
            return Kernel(self.cfg, shape, names, init, name=name)()[0].astype(x.dtype)

        a = kernel('lora_a', f'{shared}r', make_initializer(self.cfg, 'dense', fan_in, rank, self.stack))
        b = kernel('lora_b', f'r{kept}', nn.initializers.zeros)
        h = jnp.einsum(f'{inputs},{shared}r->{rows}r', x, a) * (self.cfg.lora_alpha / rank)
        return jnp.einsum(f'{rows}r,r{kept}->{outputs}', h, b)


def product(
    equation: str, x: jax.Array, kernel: jax.Array | None, dtype: Any, integers: Quantized | None = None
) -> jax.Array:
    """Returns einsum(equation, x, kernel) in a dtype, by the kernel's integers where there are some.

    On a CPU, and for the few tokens of a step, the result is transposed after the product: XLA would make it from
    a transposed kernel instead, which takes longer.
    """
    inputs, rest = equation.split(',')
    letters, outputs = rest.split('->')
    kept = ''.join(letter for letter in inputs + letters if letter in outputs)

    def times(equation: str) -> jax.Array:
        if integers is not None:
            return quantized_product(equation, x, integers, dtype)
        assert kernel is not None
        if dtype == x.dtype:
            return einsum(equation, dtype, x, kernel)
        return widening_einsum(equation, dtype, x, kernel)

    turned = kept != outputs and len(kept) == len(outputs)
    if not turned or (x.shape[1] > STEP and platform() != 'cpu'):
        return times(equation)
    return jnp.einsum(f'{kept}->{outputs}', times(f'{inputs},{letters}->{kept}'))


def _aligned_einsum(equation: str, dtype: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`jnp.einsum` with results in a dtype. On a GPU the axes that the output keeps of the kernel are padded: products
    of other sizes, such as that of BERT's vocabulary, take up to five times as long there."""
    inputs, rest = equation.split(',')
    letters, outputs = rest.split('->')
    added = {}
    if platform() == 'gpu':
        sizes = zip(letters, kernel.shape, strict=True)
        added = {letter: -size % ALIGNED for letter, size in sizes if size % 8 and letter not in inputs}
    kernel = jnp.pad(kernel, [(0, added.get(letter, 0)) for letter in letters])
    y = einsum(equation, dtype, x, kernel)
    return y[tuple(slice(y.shape[axis] - added.get(letter, 0)) for axis, letter in enumerate(outputs))]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def widening_einsum(equation: str, dtype: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`jnp.einsum` with results in a wider dtype than the operands', to which the gradient is rounded first: else the
    products of the backward pass would be in the wider one, several times as slow."""
    return _aligned_einsum(equation, dtype, x, kernel)


def _forward(equation: str, dtype: Any, x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, Any]:
    return _aligned_einsum(equation, dtype, x, kernel), (x, kernel)


def _backward(equation: str, dtype: Any, operands: Any, dy: jax.Array) -> Any:
    _, pull = jax.vjp(functools.partial(_aligned_einsum, equation, operands[0].dtype), *operands)
    return pull(dy.astype(operands[0].dtype))


widening_einsum.defvjp(_forward, _backward)


class Kernel(nn.Module):
    """Owns a kernel [..., in, out] and, where asked for, its bias [..., out]."""

    cfg: ResolvedModel
    shape: tuple[int, ...]
    names: tuple[str, ...]
    initializer: Initializer
    bias: bool = False

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array | None]:
        dtype = jnp.dtype(self.cfg.param_dtype)
        kernel = self.param('kernel', partitioned(self.initializer, *self.names), self.shape, dtype)
        if not self.bias:
            return kernel, None
        zeros = partitioned(nn.initializers.zeros, *self.names[:-2], self.names[-1])
        return kernel, self.param('bias', zeros, (*self.shape[:-2], self.shape[-1]), dtype)


def merge_lora(params: Mapping[str, Any], alpha: float) -> dict[str, Any]:
    """Returns the parameters of the same model without adapters: each is added to its kernel (Hu et al. 2022, 4.1).
    `alpha` is model.lora_alpha."""
    merged = {
        name: merge_lora(part, alpha) if isinstance(part, Mapping) else part
        for name, part in params.items()
        if name not in ADAPTERS
    }
    if 'lora_a' in params:
        kernel, a, b = params['kernel'], *(params[name]['kernel'].astype(jnp.float32) for name in ADAPTERS)
        product = functools.partial(jnp.tensordot, axes=1, precision=jax.lax.Precision.HIGHEST)
        for _ in range(a.ndim + b.ndim - 2 - kernel.ndim):  # axes that stack layers
            product = jax.vmap(product)
        merged['kernel'] = (kernel + alpha / a.shape[-1] * product(a, b)).astype(kernel.dtype)
    return merged


ADAPTERS = ('lora_a', 'lora_b')  # the names of an adapter's kernels, beside the kernel that they adapt

LORA_TARGETS = {  # the projections that may have an adapter, by their role (layers.initializers.Parameter)
    'query': 'query',
    'key': 'key',
    'value': 'value',
    'out': 'attention_out',
    'mlp_in': 'mlp_in',
    'mlp_out': 'mlp_out',
}
