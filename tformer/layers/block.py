"""The one block, and the stack of them. A family is which stacks exist and which mask they get."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tformer.distributed.sharding import Schedule, constrain, partitioned, platform, schedule, unboxed
from tformer.errors import choose
from tformer.layers import grouped_products
from tformer.layers.attention import Attention, AttentionContext, windows
from tformer.layers.cache import Cached, KeyValues
from tformer.layers.dropout import DropoutRates, drop
from tformer.layers.initializers import deepnorm, depths
from tformer.layers.latent_attention import LatentAttention
from tformer.layers.layer_stack import LayerStack, PerLayer
from tformer.layers.masks import known_order
from tformer.layers.mlp import Mlp
from tformer.layers.moe import Moe
from tformer.layers.norms import Norm, make_norm
from tformer.layers.parallel.each_device import heads_to_split
from tformer.layers.parallel.pipeline_stages import pipelined
from tformer.layers.placements import PLACEMENTS, Function, Sublayer
from tformer.layers.positions import POSITIONS, sinusoidal
from tformer.layers.products import fork
from tformer.layers.quantized import INT8
from tformer.layers.resolved import ResolvedModel


class StackInputs(flax.struct.PyTreeNode):
    """What every layer of a stack reads besides the residual stream; built once per call."""

    own: AttentionContext  # of self-attention
    dropout_rates: DropoutRates  # of this call
    index: jax.Array | None = None  # first free slot of the cache; None without a cache
    cross: AttentionContext | None = None  # of cross-attention; None without an encoder
    # the encoder's output; None without an encoder, or where its keys and values are cached
    encoded_BSD: jax.Array | None = None
    around: bool = flax.struct.field(pytree_node=False, default=False)  # as of `KeyValues.extend`
    near: 'StackInputs | None' = None  # what layers with a window read in steps; None: the same


class Block(nn.Module):
    """Self-attention, cross-attention where there is an encoder, feed-forward; each with its residual and norm."""

    cfg: ResolvedModel
    stack: str
    cross: bool = False

    def setup(self) -> None:
        cfg, stack = self.cfg, self.stack
        self.attention = remat(Attention if cfg.kv_latent_dim is None else LatentAttention, cfg)(cfg, stack)
        self.attention_norm, self.attention_out_norm, self.attention_gain = make_norm(cfg), make_norm(cfg), Gain()
        if self.cross:
            self.cross_attention = remat(Attention, cfg)(cfg, stack, cross=True)
            self.cross_norm, self.cross_out_norm, self.cross_gain = make_norm(cfg), make_norm(cfg), Gain()
        self.mlp = Moe(cfg, stack, cfg.num_experts) if cfg.num_experts else Mlp(cfg, stack)
        self.mlp_norm, self.mlp_out_norm, self.mlp_gain = make_norm(cfg), make_norm(cfg), Gain()

    def __call__(
        self, x_BTD: jax.Array, own: KeyValues | None, cross: KeyValues | None, layer: PerLayer, inputs: StackInputs
    ) -> tuple[jax.Array, KeyValues | None]:
        """Returns (x_BTD after the block, its extended cache or None).

        The placement says where norms and residual sums stand. With `pre`, each sub-layer F in turn: x + F(norm(x)).
        """
        cfg, real_BT, rates = self.cfg, inputs.own.positions[0] >= 0, inputs.dropout_rates

        def attention(h_BTD: jax.Array) -> jax.Array:
            nonlocal own
            h_BTD, own = self.attend_self(h_BTD, own, layer, inputs)
            return h_BTD

        def cross_attention(h_BTD: jax.Array) -> jax.Array:
            return self.attend_encoder(h_BTD, cross, inputs)

        def mlp(h_BTD: jax.Array) -> jax.Array:
            return self.mlp(h_BTD, real_BT, rates.activation)

        def sublayer(function: Function, norm: Callable[..., jax.Array], out_norm: Norm, gain: Gain) -> Sublayer:
            def branch(x_BTD: jax.Array) -> jax.Array:
                # Whole on both sides: XLA's sum of a stream split by heads and of a partial one is wrong (jax 0.10.2).
                return drop(self, stream(whole(function(whole(x_BTD)))), rates.residual)

            return Sublayer(branch, lambda x: norm(x, real_BT), lambda x: out_norm(x, real_BT), gain)

        def attention_norm(x_BTD: jax.Array, real_BT: jax.Array) -> jax.Array:
            h_BTD = self.attention_norm(x_BTD, real_BT)
            return h_BTD if layer.normed is None else jnp.where(layer.normed, h_BTD, x_BTD)

        sublayers = [sublayer(attention, attention_norm, self.attention_out_norm, self.attention_gain)]
        if self.cross:
            sublayers += [sublayer(cross_attention, self.cross_norm, self.cross_out_norm, self.cross_gain)]
        sublayers += [sublayer(mlp, self.mlp_norm, self.mlp_out_norm, self.mlp_gain)]

        if layer.depth is not None:
            x_BTD += coordinates(cfg, inputs.own.positions[0], layer.depth)
        alpha = deepnorm(self.stack, *depths(cfg))[0]
        placement = choose(PLACEMENTS, cfg.norm_placement, 'model.norm_placement')
        return stream(placement.block(x_BTD, sublayers, alpha)), own

    def attend_self(
        self, h_BTD: jax.Array, cache: KeyValues | None, layer: PerLayer, inputs: StackInputs
    ) -> tuple[jax.Array, KeyValues | None]:
        """Returns (the output of self-attention, the cache extended by its keys and values)."""
        context, (for_keys, h_BTD) = inputs.own.of_layer(layer.local), fork(h_BTD)
        keys, values = self.attention.keys_values(for_keys, context.query_angles)
        attend = self.attention
        if cache is not None and inputs.index is not None:
            new, first = KeyValues.of(keys, values), known_order() == 'front'
            cache = cache.extend(new, inputs.index, first=first, around=inputs.around)
            keys, values = cache.pair()
            if self.cfg.kv_latent_dim is not None and not (first and 2 * h_BTD.shape[1] >= cache.slots):
                attend = self.attention.absorbed
        return attend(h_BTD, keys, values, context, layer.window, inputs.dropout_rates.attention), cache

    def attend_encoder(self, h_BTD: jax.Array, cached: KeyValues | None, inputs: StackInputs) -> jax.Array:
        """Returns the output of cross-attention."""
        assert inputs.cross is not None
        if cached is None:
            assert inputs.encoded_BSD is not None
            keys, values = self.cross_attention.keys_values(inputs.encoded_BSD, inputs.cross.key_angles)
        else:
            keys, values = cached.pair()
        return self.cross_attention(h_BTD, keys, values, inputs.cross, None, inputs.dropout_rates.attention)

    def cross_keys_values(self, carry: None, encoded_BSD: jax.Array, angles: Any) -> tuple[None, KeyValues]:
        """Returns this layer's keys and values of the encoder's output, for decoding."""
        found = KeyValues.of(*self.cross_attention.keys_values(encoded_BSD, angles))
        return carry, found.with_heads(heads_to_split(self.cfg.num_kv_heads, self.cfg.num_heads)).apart()


def stream(x_BTD: jax.Array) -> jax.Array:
    """Returns the residual stream, sharded as it is between sub-layers."""
    return constrain(x_BTD, 'batch', 'stream_length', 'act_embed')


def whole(x_BTD: jax.Array) -> jax.Array:
    """Returns the stream with whole rows on each device, as sub-layers read and write it."""
    return constrain(x_BTD, 'batch', 'length', 'act_embed')


class Gain(nn.Module):
    """A trained scalar, 0 at first."""

    @nn.compact
    def __call__(self) -> jax.Array:
        return self.param('gain', partitioned(nn.initializers.zeros), (), jnp.float32)


def coordinates(cfg: ResolvedModel, positions_BT: jax.Array, depth: jax.Array) -> jax.Array:
    """Returns what the Universal Transformer adds before each layer: the sinusoids of its depth and, with sinusoidal
    positions, of the positions (Dehghani et al. 2019, eq. 4 and 5)."""
    x_BTD = sinusoidal(depth.reshape(1, 1), cfg.emb_dim)
    if POSITIONS[cfg.position].sinusoids:
        x_BTD += sinusoidal(positions_BT, cfg.emb_dim)
    return x_BTD.astype(cfg.dtype)


class Stack(LayerStack):
    """Blocks, and the norm after the last of them."""

    def setup(self) -> None:
        cfg = self.cfg
        in_axes: dict[str, tuple[Any, ...]] = {'__call__': (0, 0, 0, nn.broadcast)}
        if self.cross:
            in_axes['cross_keys_values'] = nn.broadcast, nn.broadcast
        shared = choose(LAYER_SHARING, cfg.layer_sharing, 'model.layer_sharing').shared
        self.layers = self.scan(remat(Block, cfg), in_axes, shared=shared)(cfg, self.stack, self.cross)
        self.norm = make_norm(cfg) if cfg.final_norm else None

    def each_layer(self) -> PerLayer:
        """Returns what differs from layer to layer, stacked."""
        cfg, layer = self.cfg, PerLayer()
        windowed = [window is not None for window in windows(cfg, self.num_layers)]
        if any(windowed):
            widths = [cfg.window if narrow else np.iinfo(np.int32).max for narrow in windowed]
            layer = layer.replace(window=jnp.asarray(widths, jnp.int32))
        if cfg.local_rope_theta is not None:
            layer = layer.replace(local=jnp.asarray(windowed))
        if LAYER_SHARING[cfg.layer_sharing].coordinates:
            layer = layer.replace(depth=jnp.arange(1, self.num_layers + 1))
        if not cfg.first_norm:
            layer = layer.replace(normed=jnp.arange(self.num_layers) > 0)
        return layer

    def __call__(self, x_BTD: jax.Array, inputs: StackInputs) -> jax.Array:
        """Returns x_BTD after all layers."""
        stages = schedule()
        if stages is not None and not self.is_initializing():
            x_BTD = self.in_stages(x_BTD, inputs, stages)
        else:
            x_BTD = self.layers(x_BTD, None, None, self.each_layer(), inputs)[0]
        return self.normed(x_BTD, inputs)

    def normed(self, x_BTD: jax.Array, inputs: StackInputs) -> jax.Array:
        """Returns the stream after the last norm."""
        return whole(x_BTD if self.norm is None else self.norm(x_BTD, inputs.own.positions[0] >= 0))

    def read(
        self, x_BTD: jax.Array, inputs: StackInputs, own: Cached, cross: Cached | None
    ) -> tuple[jax.Array, Cached]:
        """Returns (x_BTD after all layers, each layer's keys and values with those of the new tokens), for a prompt."""
        x_BTD, extended = self.layers(x_BTD, stacked(own), stacked(cross), self.each_layer(), inputs)
        return self.normed(x_BTD, inputs), self.unstacked(extended)

    def step(
        self, x_BTD: jax.Array, inputs: StackInputs, own: Cached, cross: Cached | None
    ) -> tuple[jax.Array, Cached]:
        """Returns what `read` does, one layer after another: a scan would copy each layer's parameters and cache out of
        the stack's, at each token. Where the collection 'alignments' is mutable, it gets the weights that the
        cross-attention of the last layer gives the encoder's tokens."""
        block, each = Block(self.cfg, self.stack, self.cross, parent=None), self.each_layer()
        mutable = ['alignments'] if self.is_mutable_collection('alignments') else []

        narrow = windows(self.cfg, self.num_layers)

        def layer(number: int, x_BTD: jax.Array) -> Any:
            cached = None if cross is None else cross[number]
            facts = jax.tree.map(lambda x: x[number], each)
            read = inputs if inputs.near is None or narrow[number] is None else inputs.near
            return block.apply(self.of_layer(number), x_BTD, own[number], cached, facts, read, mutable=mutable)

        extended: Cached = ()
        for number in range(self.num_layers):
            (x_BTD, keys_values), sown = layer(number, x_BTD)
            extended += (keys_values,)
        for weights_BTS in jax.tree.leaves(sown):
            self.sow('alignments', 'weights_BTS', weights_BTS)
        return self.normed(x_BTD, inputs), extended

    def of_layer(self, number: int) -> dict[str, Any]:
        """Returns the variables of one layer."""
        name = f'layer_{number}'
        if name in self.variables['params']:  # of `layers_apart`
            return {kind: tree[name] for kind, tree in self.variables.items() if name in tree}
        shared = LAYER_SHARING[self.cfg.layer_sharing].shared
        return {
            name: tree if shared and name == 'params' else jax.tree.map(lambda x: x[number], unboxed(tree))
            for name, tree in self.layers.variables.items()
        }

    def in_stages(self, x_BTD: jax.Array, inputs: StackInputs, stages: Schedule) -> jax.Array:
        """Returns x_BTD after all layers, which are split over the mesh axis `pipeline`.

        Dropout draws other numbers than on one stage, for each part and each device along `data` its own: always the
        same ones of a key and these numbers.
        """
        cfg, block = self.cfg, remat(Block, self.cfg)(self.cfg, self.stack, self.cross, parent=None)
        scan = cfg.scan_layers or platform() == 'tpu'  # XLA aborts there at two layers in turn
        variables = {kind: tree for kind, tree in self.layers.variables.items() if kind in ('params', INT8)}

        def layer(
            each: Any, x_BTD: jax.Array, common: tuple[StackInputs, jax.Array | None], part: jax.Array
        ) -> jax.Array:
            (variables, own, number), (inputs, key) = each, common
            rngs = {} if key is None else {'dropout': jax.random.fold_in(jax.random.fold_in(key, part), number)}
            return block.apply(variables, x_BTD, None, None, own, inputs, rngs=rngs)[0]

        return pipelined(
            layer,
            (variables, self.each_layer(), jnp.arange(self.num_layers)),
            x_BTD,
            (inputs, self.make_rng('dropout') if self.has_rng('dropout') else None),
            stages,
            unroll=1 if scan else True,
        )

    def cross_keys_values(self, encoded_BSD: jax.Array, angles: Any) -> Cached:
        """Returns keys and values of the encoder's output for every layer."""
        return self.unstacked(self.layers.cross_keys_values(None, encoded_BSD, angles)[1])

    def unstacked(self, keys_values: KeyValues) -> Cached:
        """Returns each layer's part of keys and values [L, B, K, S, H]."""
        return tuple(jax.tree.map(lambda x, number=number: x[number], keys_values) for number in range(self.num_layers))


def stacked(keys_values: Cached | None) -> KeyValues | None:
    """Returns the layers' keys and values as one `[L, B, K, S, H]`."""
    return None if keys_values is None else jax.tree.map(lambda *layers: jnp.stack(layers), *keys_values)


class LayerSharing(NamedTuple):
    """How layers share parameters."""

    shared: bool  # all layers have the same parameters
    # every layer adds the sinusoids of its depth, and of the positions where those are sinusoidal
    coordinates: bool = False


LAYER_SHARING: dict[str | None, LayerSharing] = {
    'all': LayerSharing(shared=True),  # Lan et al. 2020, 3.1
    'universal': LayerSharing(shared=True, coordinates=True),  # Dehghani et al. 2019
    None: LayerSharing(shared=False),
}


def remat(module: type[nn.Module], cfg: ResolvedModel) -> Any:
    """Returns a class of modules whose backward pass computes again what model.remat does not keep of the forward."""
    policy = choose(REMAT, cfg.remat, 'model.remat').get(module)
    return module if policy is None else nn.remat(module, policy=policy, prevent_cse=not cfg.scan_layers)


_PRODUCTS = jax.checkpoint_policies.save_from_both_policies(  # products with parameters, not scores and values
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(grouped_products.NAME),
)
_OFFLOADED = jax.checkpoint_policies.offload_dot_with_no_batch_dims('device', 'pinned_host')

REMAT: dict[str | None, dict[type[nn.Module], Callable[..., Any]]] = {
    # The modules, and what their forward pass keeps; MiB of a step's temporaries in tests/training/test_memory.py.
    None: {},  # all: 98
    'attention': {
        Attention: _PRODUCTS,
        LatentAttention: _PRODUCTS,
    },  # all but scores and probabilities (Korthikanti et al. 2023, section 5): 67
    'dots': {Block: _PRODUCTS},  # products with parameters: 49
    'offload': {Block: _OFFLOADED},  # the same, in the host's memory
    'full': {Block: jax.checkpoint_policies.nothing_saveable},  # the stream between layers (Chen et al. 2016): 26
}
