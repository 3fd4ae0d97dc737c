"""The one block, and the stack of them. A family is which stacks exist and which mask they get."""

from collections.abc import Callable

import flax.struct
import jax
from flax import linen as nn

from tformer.config import Model
from tformer.errors import choose
from tformer.layers.attention import Angles, Attention
from tformer.layers.cache import KeyValues
from tformer.layers.dropout import Rates, dropout
from tformer.layers.mlp import Mlp
from tformer.layers.norms import make_norm
from tformer.sharding import constrain

Sublayer = Callable[[jax.Array], jax.Array]


class Side(flax.struct.PyTreeNode):
    """What every layer of a stack reads besides its own activations; built once per call."""

    mask_BTS: jax.Array
    angles: Angles  # rotary, of the queries' positions
    rates: Rates
    index: jax.Array | None = None  # first free slot of the cache
    encoded_BSD: jax.Array | None = None
    cross_mask_BTS: jax.Array | None = None


def pre_norm(norm: Sublayer, sublayer: Sublayer, x: jax.Array) -> jax.Array:
    """x + F(norm(x)) (Baevski & Auli 2019; Xiong et al. 2020)."""
    return x + sublayer(norm(x))


def post_norm(norm: Sublayer, sublayer: Sublayer, x: jax.Array) -> jax.Array:
    """norm(x + F(x)) (Vaswani et al. 2017, 3.1)."""
    return norm(x + sublayer(x))


class Block(nn.Module):
    """Self-attention, cross-attention where there is an encoder, feed-forward; each in its residual and norm."""

    cfg: Model
    cross: bool = False

    def setup(self) -> None:
        cfg = self.cfg
        self.residual = choose(PLACEMENTS, cfg.norm_placement, 'model.norm_placement')
        self.attention, self.attention_norm = Attention(cfg), make_norm(cfg)
        if self.cross:
            self.cross_attention, self.cross_norm = Attention(cfg), make_norm(cfg)
        self.mlp, self.mlp_norm = Mlp(cfg), make_norm(cfg)

    def cross_keys_values(self, carry: None, encoded_BSD: jax.Array) -> tuple[None, KeyValues]:
        """Returns this layer's keys and values of the encoder's output, for decoding."""
        return carry, KeyValues(*self.cross_attention.keys_values(encoded_BSD, None))

    def __call__(
        self, x_BTD: jax.Array, own: KeyValues | None, cross: KeyValues | None, side: Side
    ) -> tuple[jax.Array, KeyValues | None]:
        rates = side.rates

        def drop(x: jax.Array) -> jax.Array:
            training = self.has_rng('dropout') and rates.residual is not None
            return dropout(x, rates.residual, self.make_rng('dropout')) if training else x

        def attend_self(h_BTD: jax.Array) -> jax.Array:
            nonlocal own
            k, v = self.attention.keys_values(h_BTD, side.angles)
            if own is not None:
                assert side.index is not None
                own = own.extend(k, v, side.index)
                k, v = own.k, own.v
            return drop(self.attention(h_BTD, k, v, side.mask_BTS, side.angles, rates.attention))

        def attend_encoder(h_BTD: jax.Array) -> jax.Array:
            kv = cross
            if kv is None:
                assert side.encoded_BSD is not None
                kv = self.cross_keys_values(None, side.encoded_BSD)[1]
            assert side.cross_mask_BTS is not None
            return drop(self.cross_attention(h_BTD, kv.k, kv.v, side.cross_mask_BTS, None, rates.attention))

        def feed_forward(h_BTD: jax.Array) -> jax.Array:
            return drop(self.mlp(h_BTD, rates.activation))

        x_BTD = self.residual(self.attention_norm, attend_self, x_BTD)
        if self.cross:
            x_BTD = self.residual(self.cross_norm, attend_encoder, x_BTD)
        x_BTD = self.residual(self.mlp_norm, feed_forward, x_BTD)
        return constrain(x_BTD, 'batch', 'length', 'act_embed'), own


class Stack(nn.Module):
    """`num_layers` blocks under one scan; unrolled, it is the same scan without a loop, on the same parameters."""

    cfg: Model
    num_layers: int
    cross: bool = False

    def setup(self) -> None:
        cfg = self.cfg
        block: type[nn.Module] = Block
        if cfg.remat is not None:
            block = nn.remat(Block, policy=choose(REMAT, cfg.remat, 'model.remat'), prevent_cse=not cfg.scan_layers)
        lift = {
            'variable_axes': {'params': 0, 'intermediates': 0},
            'split_rngs': {'params': True, 'dropout': True},
            'length': self.num_layers,
            'unroll': 1 if cfg.scan_layers else self.num_layers,
            'metadata_params': {nn.PARTITION_NAME: 'layers'},
        }
        methods = {'__call__': {'in_axes': (0, 0, nn.broadcast), **lift}}
        if self.cross:
            methods['cross_keys_values'] = {'in_axes': nn.broadcast, **lift}
        self.layers = nn.scan(block, methods=methods)(cfg, self.cross)
        self.norm = make_norm(cfg) if cfg.final_norm else None

    def __call__(
        self, x_BTD: jax.Array, side: Side, own: KeyValues | None = None, cross: KeyValues | None = None
    ) -> tuple[jax.Array, KeyValues | None]:
        """Returns (x_BTD after all layers, the extended cache or None)."""
        x_BTD, own = self.layers(x_BTD, own, cross, side)
        return x_BTD if self.norm is None else self.norm(x_BTD), own

    def cross_keys_values(self, encoded_BSD: jax.Array) -> KeyValues:
        """Returns keys and values of the encoder's output for every layer `[L, B, K, S, H]`."""
        return self.layers.cross_keys_values(None, encoded_BSD)[1]


PLACEMENTS: dict[str, Callable[[Sublayer, Sublayer, jax.Array], jax.Array]] = {
    'pre': pre_norm,
    'post': post_norm,
}

REMAT: dict[str | None, Callable[..., bool] | None] = {  # what the forward pass keeps for the backward one
    None: None,
    'full': jax.checkpoint_policies.nothing_saveable,
    'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
