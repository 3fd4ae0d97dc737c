"""A tower: one stack applied to a batch, from token embeddings to the residual stream."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.errors import choose
from tformer.layers.attention import AttentionContext, score_bias
from tformer.layers.block import LAYER_SHARING, Stack, StackInputs
from tformer.layers.cache import Cache, empty_cache
from tformer.layers.dropout import DropoutRates
from tformer.layers.embed import InputEmbedding
from tformer.layers.masks import AttentionMask, known_order
from tformer.layers.positions import POSITIONS, Angles, make_bias, rope_angles
from tformer.layers.resolved import ResolvedModel

Batch = Mapping[str, jax.Array]


def positions_of(batch: Batch, prefix: str = '') -> jax.Array:
    """Returns the batch's positions [B, T], counting from 0 where it has none."""
    tokens_BT = batch[f'{prefix}inputs']
    counted = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    return batch.get(f'{prefix}positions', counted)


def real_tokens(batch: Batch) -> jax.Array:
    """Returns mask_BT, False at padding."""
    return positions_of(batch) >= 0


def tokens_of_texts(batch: Batch) -> jax.Array:
    """Returns mask_BKT, True at the tokens of each of the K texts that share a row (`segment_weights` [B, K])."""
    numbers_K = 1 + jnp.arange(batch['segment_weights'].shape[1])
    return batch['segment_ids'][:, None, :] == numbers_K[None, :, None]


class AnyTower(nn.Module):
    """The input embedding and a stack: token embeddings in, residual stream out."""

    cfg: ResolvedModel
    stack_name: str  # encoder or decoder
    cross: bool = False

    @property
    def num_layers(self) -> int:
        return self.cfg.num_encoder_layers if self.stack_name == 'encoder' else self.cfg.num_decoder_layers

    def tokens(self, batch: Batch) -> tuple[jax.Array, jax.Array | None]:
        """Returns positions_BT and segments_BT of the tokens that this stack reads."""
        side = 'encoder_' if self.stack_name == 'encoder' and 'encoder_inputs' in batch else ''
        return positions_of(batch, side), batch.get(f'{side}segment_ids')


class Tower(AnyTower):
    """A tower of blocks."""

    def setup(self) -> None:
        cfg = self.cfg
        sharing = choose(LAYER_SHARING, cfg.layer_sharing, 'model.layer_sharing')
        position = choose(POSITIONS, cfg.position, 'model.position')
        in_blocks = sharing.coordinates and position.sinusoids
        self.input_embedding = InputEmbedding(cfg, None if in_blocks else cfg.position)
        self.stack = Stack(cfg, self.stack_name, self.num_layers, self.cross)
        self.bias = make_bias(cfg, self.stack_name, cross=False, per_layer=False)
        self.cross_bias = make_bias(cfg, self.stack_name, cross=True, per_layer=False)

    def angles(self, positions_BT: jax.Array) -> Angles | None:
        """Returns the angles of a rotary encoding at these positions; None where the encoding rotates nothing."""
        angles = POSITIONS[self.cfg.position].angles
        return None if angles is None else angles(self.cfg, positions_BT)

    def local_angles(self, positions_BT: jax.Array) -> Angles | None:
        """Returns the angles of local layers, which turn by a base of their own and unscaled; None where none do."""
        theta = self.cfg.local_rope_theta
        if theta is None:
            return None
        return rope_angles(dataclasses.replace(self.cfg, rope_theta=theta, rope_scaling=None), positions_BT)

    def context(
        self,
        query_BT: jax.Array,
        key_BS: jax.Array,
        query_segments_BT: jax.Array | None = None,
        key_segments_BS: jax.Array | None = None,
        prefix_BS: jax.Array | None = None,
        *,
        visible_BTS: jax.Array | None = None,
        cross: bool = False,
    ) -> AttentionContext:
        """Returns the context of this stack's self-attention, or cross-attention; arguments as of `AttentionMask`."""
        segments, causal = (query_segments_BT, key_segments_BS), self.stack_name == 'decoder' and not cross
        order = known_order()
        if order is not None and (cross or self.stack_name == 'encoder'):
            order = 'behind'  # so are the keys, and where all are seen the queries' order is nothing
        bias, placed = (self.cross_bias, self.cfg.cross_position) if cross else (self.bias, True)
        within = query_BT is key_BS
        mask = AttentionMask(
            query_BT, key_BS, *segments, prefix_BS, visible_BTS=visible_BTS, causal=causal, order=order, within=within
        )
        bias_BNTS, bias_1NX = score_bias(bias, self, self.cfg, mask, cross=cross)
        return AttentionContext(
            mask,
            bias_BNTS=bias_BNTS,
            bias_1NX=bias_1NX,
            query_angles=self.angles(query_BT) if placed else None,
            key_angles=self.angles(key_BS) if placed and cross else None,
            local_angles=None if cross else self.local_angles(query_BT),
        )

    def __call__(
        self,
        x_BTW: jax.Array,
        batch: Batch,
        dropout_rates: DropoutRates | None = None,
        encoded_BSD: jax.Array | None = None,
    ) -> jax.Array:
        """Returns x_BTD after the stack, all positions at once."""
        rates, (positions_BT, segments_BT) = DropoutRates.of(self.cfg, dropout_rates), self.tokens(batch)
        prefix_BT = batch.get('prefix') if self.stack_name == 'decoder' else None
        inputs = StackInputs(self.context(positions_BT, positions_BT, segments_BT, segments_BT, prefix_BT), rates)
        if encoded_BSD is not None:
            encoder = positions_of(batch, 'encoder_'), segments_BT, batch.get('encoder_segment_ids')
            inputs = inputs.replace(cross=self.context(positions_BT, *encoder, cross=True), encoded_BSD=encoded_BSD)
        return self.stack(self.input_embedding(x_BTW, positions_BT, rates, batch.get('token_types')), inputs)

    def encode(self, x_BTW: jax.Array, batch: Batch, dropout_rates: DropoutRates | None = None) -> jax.Array:
        """Returns x_BTD, which a decoder attends to."""
        return self(x_BTW, batch, dropout_rates)

    def start(self, rows: int, slots: int, encoded_BSD: jax.Array | None, positions_BS: jax.Array | None) -> Cache:
        """Returns an empty cache of `slots` slots, with every layer's keys and values of the encoder's output."""
        cache = empty_cache(self.cfg, rows, slots)
        if encoded_BSD is None:
            return cache
        angles = None if positions_BS is None or not self.cfg.cross_position else self.angles(positions_BS)
        cross = self.stack.cross_keys_values(encoded_BSD, angles)
        return cache.replace(cross=cross, encoder_positions_BS=positions_BS)

    def extend(
        self, x_BTW: jax.Array, positions_BT: jax.Array, cache: Cache, prefix_BT: jax.Array | None = None
    ) -> tuple[jax.Array, Cache]:
        """Returns (x_BTD of the new tokens, the cache with them)."""
        placed = cache.place(positions_BT, prefix_BT)
        plain = prefix_BT is None and known_order() == 'front'  # the first tokens of the cache, none of them a prefix
        prefix_BS, visible_BTS = None if plain else placed.prefix_BS, placed.branches_BMS
        context = self.context(positions_BT, placed.positions_BS, prefix_BS=prefix_BS, visible_BTS=visible_BTS)
        inputs = StackInputs(context, DropoutRates(), cache.index)
        if cache.encoder_positions_BS is not None:
            inputs = inputs.replace(cross=self.context(positions_BT, cache.encoder_positions_BS, cross=True))
        if cache.near is not None and placed.near is not None:
            near = self.context(positions_BT, placed.near.positions_BS)
            inputs = inputs.replace(near=inputs.replace(own=near, index=cache.near.index, around=True))
        x_BTD = self.input_embedding(x_BTW, positions_BT, DropoutRates())
        hypotheses, by_row = placed.branches_BMS is not None, placed.index.ndim > 0
        one = positions_BT.shape[1] == 1 or hypotheses or by_row or placed.near is not None
        x_BTD, own = (self.stack.step if one else self.stack.read)(x_BTD, inputs, cache.own, cache.cross)
        return x_BTD, placed.replace(own=own)
