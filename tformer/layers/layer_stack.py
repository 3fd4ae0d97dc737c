"""Layers of a stack under one scan, and what differs from layer to layer."""

from collections.abc import Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.distributed.sharding import unboxed
from tformer.layers.quantized import INT8
from tformer.layers.resolved import ResolvedModel

TABLES = ('embed', 'encoder_embed', 'positions', 'token_types')  # modules whose table has a row of activations each


class PerLayer(flax.struct.PyTreeNode):
    """What differs from layer to layer besides the parameters; None where no layer differs."""

    window: jax.Array | None = None  # positions that local self-attention sees
    local: jax.Array | None = None  # whether self-attention is local, where that changes its angles too
    depth: jax.Array | None = None  # the layer's number, from 1
    normed: jax.Array | None = None  # whether self-attention reads the stream through its norm
    number: jax.Array | None = None  # from 0, where evaluation.activations names single layers


class LayerStack(nn.Module):
    """`num_layers` layers under one scan; unrolled, it is the same scan without a loop, on the same parameters."""

    cfg: ResolvedModel
    stack: str  # encoder or decoder
    num_layers: int
    cross: bool = False

    def each_layer(self) -> PerLayer:
        """Returns what differs from layer to layer, stacked."""
        return PerLayer()

    def scan(self, layer: Any, in_axes: Mapping[str, tuple[Any, ...]], *, shared: bool = False) -> Any:
        """Returns a class of modules like `layer` whose methods run all layers, on the same parameters if `shared`.

        `in_axes` are for each method those of its arguments after the first, which is carried (flax.linen.scan).
        """
        each = {'intermediates': 0, 'losses': 0, 'statistics': 0, INT8: 0}
        lift = {
            'variable_axes': each if shared else {'params': 0, **each},
            'variable_broadcast': 'params' if shared else False,
            'split_rngs': {'params': not shared, 'dropout': True},
            'length': self.num_layers,
            'unroll': 1 if self.cfg.scan_layers else self.num_layers,
            'metadata_params': {nn.PARTITION_NAME: 'layers'},
        }
        return nn.scan(layer, methods={name: {'in_axes': axes, **lift} for name, axes in in_axes.items()})


def layers_apart(variables: Any, path: Sequence[str], dtype: str) -> Any:
    """Returns the variables with those of each layer of the stack at `path` beside those of all, for `Stack.step`, in
    the dtype in which they are read.

    A loop of steps else copies every layer's parameters out of the stack's, at each token: XLA moves no slice out of a
    loop.
    """

    def of_layer(stacked: Any, number: int) -> Any:
        return jax.tree_util.tree_map_with_path(lambda keys, x: as_read(keys, x[number], dtype), stacked)

    def apart(tree: Any, path: Sequence[str]) -> Any:
        if path:
            return {**tree, path[0]: apart(tree[path[0]], path[1:])} if path[0] in tree else tree
        if 'layer_0' in tree:
            return tree
        layers = unboxed(tree['layers'])
        number = len(jax.tree.leaves(layers)[0]) if jax.tree.leaves(layers) else 0
        return {**tree, **{f'layer_{n}': of_layer(layers, n) for n in range(number)}}

    return {kind: apart(tree, path) for kind, tree in variables.items()}


def as_read(keys: Sequence[Any], x: jax.Array, dtype: str) -> jax.Array:
    """Returns the parameter at the end of these keys in the activations' dtype, where that is how the model reads it:
    kernels of products, but for a router's, and tables of tokens and of positions."""
    *_, module, name = ['', *(getattr(key, 'key', '') for key in keys)]
    read = module != 'router' if name == 'kernel' else name == 'table' and module in TABLES
    return x.astype(dtype) if read and jnp.dtype(dtype).itemsize < x.dtype.itemsize else x


class NamedValue(nn.Module):
    """The identity, under whose name evaluation.activations reads and replaces a value."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x
