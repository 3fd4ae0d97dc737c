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
from tformer.layers.parallel.few_tokens import STEP, travel
from tformer.layers.products import einsum
from tformer.layers.quantized import Quantized, quantized_kernel, quantized_product
from tformer.layers.resolved import ResolvedModel

ALIGNED = 64  # the sizes of products that a GPU computes fast are multiples of it


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
    def __call__(self, x: jax.Array, apart: bool = False) -> Any:
        """Returns y; `apart`: (y, whose gradient leaves the bias out, the bias in float32 or None)."""
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
        order = ''.join(letter for letter in inputs + letters if letter in outputs) if platform() == 'gpu' else outputs
        few, given = travel(self.equation, x, self.shape, self.names), x.astype(cfg.dtype)
        given = given if few is None else few.to_kernel(given, inputs)
        y = product(f'{inputs},{letters}->{order}', given, kernel, dtype, integers)
        y = y if few is None else few.back(y, order)
        if cfg.lora_rank is not None and self.role in [LORA_TARGETS[target] for target in cfg.lora_targets]:
            y += self.low_rank(x.astype(cfg.dtype), cfg.lora_rank, fan_in, order).astype(dtype)
        wide = None
        if self.bias:
            kept = [letter for letter in outputs if letter in sizes]
            zeros = partitioned(nn.initializers.zeros, *(self.names[letters.index(letter)] for letter in kept))
            bias = self.param('bias', zeros, tuple(sizes[letter] for letter in kept), jnp.dtype(cfg.param_dtype))
            wide = bias.astype(jnp.float32)
        if wide is not None:
            full, shape = y.shape, [sizes.get(letter, 1) for letter in order]
            if order.endswith(''.join(kept)):  # as one axis, for cuBLAS to add it
                shape, y = [1] * (y.ndim - len(kept)) + [-1], y.reshape(*y.shape[: -len(kept)], -1)
            added = (jax.lax.stop_gradient(wide) if apart else wide).reshape(shape)
            y += jnp.broadcast_to(added, y.shape).astype(dtype)  # so that its gradient, a sum, is one in float32
            y = y.reshape(full)
        y = y if order == outputs else jnp.einsum(f'{order}->{outputs}', y)
        return (y, wide) if apart else y

    def low_rank(self, x: jax.Array, rank: int, fan_in: int, outputs: str) -> jax.Array:
        """Returns (alpha / rank) x A B, with the axes `outputs`: A random, B zero at first."""
        inputs, rest = self.equation.split(',')
        letters = rest.partition('->')[0]
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
    equation: str,
    x: jax.Array,
    kernel: jax.Array | None,
    dtype: Any,
    integers: Quantized | None = None,
    bias: jax.Array | None = None,
    padded: bool = False,
) -> jax.Array:
    """Returns einsum(equation, x, kernel) in a dtype, by the kernel's integers where there are some, plus a bias in
    that dtype along the result's last axis. Where it may be `padded`, the result is as wide as `_pad` makes it.

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
        return widening_einsum(equation, dtype, padded, x, kernel, bias)

    if bias is not None and (integers is not None or dtype == x.dtype):
        y = product(equation, x, kernel, dtype, integers)
        return y + jnp.broadcast_to(bias, y.shape)
    turned = kept != outputs and len(kept) == len(outputs)
    if not turned or (x.shape[1] > STEP and platform() != 'cpu'):
        return times(equation)
    return jnp.einsum(f'{kept}->{outputs}', times(f'{inputs},{letters}->{kept}'))


def _pad(equation: str, x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, list[tuple[int, int]]]:
    """Returns the kernel, and what it adds to each axis of the result. On a GPU the axes that the result keeps of the
    kernel are padded: products of other sizes, such as that of BERT's vocabulary, take up to five times as long."""
    inputs, rest = equation.split(',')
    letters, outputs = rest.split('->')
    added = {}
    if platform() == 'gpu':
        sizes = zip(letters, kernel.shape, strict=True)
        added = {letter: -size % ALIGNED for letter, size in sizes if size % 8 and letter not in inputs}
    padding = [[(0, added.get(letter, 0)) for letter in each] for each in (letters, outputs)]
    return jnp.pad(kernel, padding[0]), padding[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def widening_einsum(
    equation: str, dtype: Any, padded: bool, x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
    """`jnp.einsum` with results in a wider dtype than the operands', plus a bias in it along the last axis. Gradients
    are rounded to the operands' first: else the products of the backward pass would be in the wider one, several times
    as slow. `padded`: the result is left as `_pad` makes it."""
    kernel, padding = _pad(equation, x, kernel)
    y = einsum(equation, dtype, x, kernel)
    if padded:
        bias = None if bias is None else jnp.pad(bias, padding[-1])
    else:
        y = y[tuple(slice(size - after) for size, (_, after) in zip(y.shape, padding, strict=True))]
    return y if bias is None else y + jnp.broadcast_to(bias, y.shape)


def _forward(
    equation: str, dtype: Any, padded: bool, x: jax.Array, kernel: jax.Array, bias: Any = None
) -> tuple[jax.Array, Any]:
    return widening_einsum(equation, dtype, padded, x, kernel, bias), (x, kernel, bias)


def _backward(equation: str, dtype: Any, padded: bool, operands: Any, dy: jax.Array) -> Any:
    x, kernel, bias = operands
    wide, padding = _pad(equation, x, kernel)
    dy = dy.astype(x.dtype)
    if not padded:
        dy = jnp.pad(dy, padding)
    if bias is not None and platform() == 'gpu':  # else XLA would make it again for the sum
        dy = jax.lax.optimization_barrier(dy)
    _, pull = jax.vjp(functools.partial(einsum, equation, x.dtype), x, wide)
    dx, dwide = pull(dy)
    dkernel = dwide[tuple(slice(size) for size in kernel.shape)]
    if bias is None:
        return dx, dkernel, None
    sums = jnp.sum(dy, range(dy.ndim - 1), dtype=jnp.float32)[: bias.size]
    return dx, dkernel, sums.astype(bias.dtype)


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
