"""The three families: which stacks exist and which mask they get.

Shapes: B batch, T query length, S key length, D residual width, E width of the token table, F MLP width, N query heads,
K key/value heads, G = N/K, H head size of queries and keys, V that of values or the vocabulary, L layers, C classes.

A batch holds `inputs positions` [B, T] (position -1 is padding), with packing `segment_ids`, for a prefix LM `prefix`
(bool), for an encoder `token_types`, and for two stacks `encoder_inputs encoder_positions encoder_segment_ids`. Missing
positions count from 0. Training is the presence of a dropout rng; decoding is the presence of a cache; BatchNorm's
statistics change where their collection is mutable.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.config import Model, resolve_model
from tformer.errors import choose
from tformer.layers.attention import Scope
from tformer.layers.block import Side, Stack
from tformer.layers.cache import Cache, KeyValues, empty_cache
from tformer.layers.dropout import Rates
from tformer.layers.embed import Embedding, Foot
from tformer.layers.heads import ClassHead, Pooler, VocabularyHead
from tformer.layers.masks import attention_mask
from tformer.layers.positions import POSITIONS, ROPE_SCALINGS, Angles, rotary_angles, rotary_frequencies

Batch = Mapping[str, jax.Array]


def positions_of(batch: Batch, prefix: str = '') -> jax.Array:
    """Returns the batch's positions [B, T], counting from 0 where it has none."""
    tokens_BT = batch[f'{prefix}inputs']
    counted = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    return batch.get(f'{prefix}positions', counted)


def real_tokens(batch: Batch) -> jax.Array:
    """Returns mask_BT, False at padding."""
    return positions_of(batch) >= 0


class Tower(nn.Module):
    """A foot and a stack: embedded tokens in, residual stream out."""

    cfg: Model
    stack_name: str  # encoder or decoder
    cross: bool = False

    def setup(self) -> None:
        cfg, encoder = self.cfg, self.stack_name == 'encoder'
        self.foot = Foot(cfg)
        num_layers = cfg.num_encoder_layers if encoder else cfg.num_decoder_layers
        self.stack = Stack(cfg, self.stack_name, num_layers, self.cross)
        position = choose(POSITIONS, cfg.position, 'model.position')
        shared = position.bias is not None and not cfg.relative_per_layer
        self.bias = position.bias(cfg, encoder) if position.bias and shared else None
        self.cross_bias = position.bias(cfg, True) if position.bias and shared and cfg.cross_position else None

    def angles(self, positions_BT: jax.Array) -> Angles | None:
        """Returns what queries and keys at these positions are turned by; None where they are not."""
        cfg = self.cfg
        if not POSITIONS[cfg.position].rotates:
            return None
        assert cfg.head_dim
        frequencies = rotary_frequencies(round(cfg.head_dim * cfg.rope_fraction), cfg.rope_theta)
        scaling = choose(ROPE_SCALINGS, cfg.rope_scaling, 'model.rope_scaling')
        return rotary_angles(positions_BT, scaling(frequencies, cfg.rope_factor, cfg.rope_trained_len))

    def own_scope(
        self,
        query_BT: jax.Array,
        key_BS: jax.Array,
        segments_BT: jax.Array | None = None,
        prefix_BS: jax.Array | None = None,
    ) -> Scope:
        """Returns what this stack's self-attention sees."""
        causal = self.stack_name == 'decoder'
        return Scope(
            query_BT,
            key_BS,
            mask_BTS=attention_mask(query_BT, key_BS, segments_BT, segments_BT, prefix_BS, causal=causal),
            bias_BNTS=None if self.bias is None else self.bias(query_BT, key_BS),
            query_angles=self.angles(query_BT),
        )

    def cross_scope(
        self,
        query_BT: jax.Array,
        key_BS: jax.Array,
        query_segments_BT: jax.Array | None = None,
        key_segments_BS: jax.Array | None = None,
    ) -> Scope:
        """Returns what this stack's cross-attention sees."""
        scope = Scope(
            query_BT,
            key_BS,
            mask_BTS=attention_mask(query_BT, key_BS, query_segments_BT, key_segments_BS, causal=False),
        )
        if not self.cfg.cross_position:
            return scope
        return scope.replace(
            bias_BNTS=None if self.cross_bias is None else self.cross_bias(query_BT, key_BS),
            query_angles=self.angles(query_BT),
            key_angles=self.angles(key_BS),
        )

    def __call__(self, x_BTE: jax.Array, batch: Batch, rates: Rates, encoded_BSD: jax.Array | None = None) -> jax.Array:
        """Returns x_BTD after the stack, all positions at once."""
        prefix = 'encoder_' if self.stack_name == 'encoder' and 'encoder_inputs' in batch else ''
        positions_BT, segments_BT = positions_of(batch, prefix), batch.get(f'{prefix}segment_ids')
        seen_early = batch.get('prefix') if self.stack_name == 'decoder' else None
        side = Side(self.own_scope(positions_BT, positions_BT, segments_BT, seen_early), rates)
        if encoded_BSD is not None:
            encoder = positions_of(batch, 'encoder_'), segments_BT, batch.get('encoder_segment_ids')
            side = side.replace(cross=self.cross_scope(positions_BT, *encoder), encoded_BSD=encoded_BSD)
        return self.stack(self.foot(x_BTE, positions_BT, rates, batch.get('token_types')), side)[0]

    def extend(
        self, x_BTE: jax.Array, positions_BT: jax.Array, cache: Cache, prefix_BT: jax.Array | None = None
    ) -> tuple[jax.Array, Cache]:
        """Returns (x_BTD of the new tokens, the cache with them)."""
        placed = cache.place(positions_BT, prefix_BT)
        own = self.own_scope(positions_BT, placed.positions_BS, None, placed.prefix_BS)
        side = Side(own, Rates(), cache.index)
        if cache.encoder_positions_BS is not None:
            side = side.replace(cross=self.cross_scope(positions_BT, cache.encoder_positions_BS))
        x_BTD, keys_values = self.stack(self.foot(x_BTE, positions_BT, Rates()), side, cache.own, cache.cross)
        return x_BTD, placed.replace(own=keys_values)

    def cross_keys_values(self, encoded_BSD: jax.Array, positions_BS: jax.Array) -> KeyValues:
        """Returns keys and values of the encoder's output for every layer."""
        return self.stack.cross_keys_values(encoded_BSD, self.angles(positions_BS) if self.cfg.cross_position else None)


class EncoderOnly(nn.Module):
    """BERT: every token sees every other (Devlin et al. 2019)."""

    cfg: Model

    def setup(self) -> None:
        cfg = self.cfg
        assert cfg.vocab_size
        self.embed = Embedding(cfg, cfg.vocab_size)
        self.encoder = Tower(cfg, 'encoder')
        self.head = VocabularyHead(cfg)
        self.pooler = Pooler(cfg)
        self.class_head = ClassHead(cfg)

    def encode(self, batch: Batch, rates: Rates | None = None) -> jax.Array:
        """Returns x_BTD."""
        rates = Rates.of(self.cfg) if rates is None else rates
        return self.encoder(self.embed(batch['inputs']), batch, rates)

    def __call__(self, batch: Batch, rates: Rates | None = None) -> jax.Array:
        """Returns logits_BTV, float32."""
        tied = self.embed.logits if self.cfg.tied_embeddings else None
        return self.head(self.encode(batch, rates), real_tokens(batch), tied)

    def pool(self, batch: Batch, rates: Rates | None = None) -> jax.Array:
        """Returns x_BD, one vector for each sequence."""
        return self.pooler(self.encode(batch, rates), real_tokens(batch))

    def classify(self, batch: Batch, rates: Rates | None = None) -> jax.Array:
        """Returns logits_BC, float32, of the pooled sequence."""
        return self.class_head(self.pool(batch, rates))


class DecoderOnly(nn.Module):
    """GPT: every token sees those before it (Radford et al. 2018)."""

    cfg: Model

    def setup(self) -> None:
        cfg = self.cfg
        assert cfg.vocab_size
        self.embed = Embedding(cfg, cfg.vocab_size)
        self.decoder = Tower(cfg, 'decoder')
        self.head = VocabularyHead(cfg)

    def logits(self, x_BTD: jax.Array, real_BT: jax.Array) -> jax.Array:
        return self.head(x_BTD, real_BT, self.embed.logits if self.cfg.tied_embeddings else None)

    def __call__(self, batch: Batch, rates: Rates | None = None) -> jax.Array:
        """Returns logits_BTV, float32."""
        rates = Rates.of(self.cfg) if rates is None else rates
        x_BTD = self.decoder(self.embed(batch['inputs']), batch, rates)
        return self.logits(x_BTD, real_tokens(batch))

    def start(self, batch: Batch, slots: int) -> Cache:
        """Returns an empty cache of `slots` slots for the rows of `batch`."""
        return empty_cache(self.cfg, batch['inputs'].shape[0], slots)

    def extend(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, cache: Cache, prefix_BT: jax.Array | None = None
    ) -> tuple[jax.Array, Cache]:
        """Returns (logits_BTV of the new tokens, the cache with them); a prefix must come in one call."""
        x_BTD, cache = self.decoder.extend(self.embed(tokens_BT), positions_BT, cache, prefix_BT)
        return self.logits(x_BTD, positions_BT >= 0), cache


class EncoderDecoder(nn.Module):
    """The original (Vaswani et al. 2017), T5, BART: a decoder that also sees an encoder's output."""

    cfg: Model

    def setup(self) -> None:
        cfg = self.cfg
        assert cfg.vocab_size and cfg.encoder_vocab_size
        self.embed = Embedding(cfg, cfg.vocab_size)
        if cfg.tied_embeddings not in ('all', 'inputs'):
            self.encoder_embed = Embedding(cfg, cfg.encoder_vocab_size)
        self.encoder = Tower(cfg, 'encoder')
        self.decoder = Tower(cfg, 'decoder', cross=True)
        self.head = VocabularyHead(cfg)

    def logits(self, x_BTD: jax.Array, real_BT: jax.Array) -> jax.Array:
        return self.head(x_BTD, real_BT, self.embed.logits if self.cfg.tied_embeddings in ('all', 'output') else None)

    def encode(self, batch: Batch, rates: Rates | None = None) -> jax.Array:
        """Returns the encoder's output [B, S, D]."""
        rates = Rates.of(self.cfg) if rates is None else rates
        embed = self.embed if self.cfg.tied_embeddings in ('all', 'inputs') else self.encoder_embed
        return self.encoder(embed(batch['encoder_inputs']), batch, rates)

    def __call__(self, batch: Batch, rates: Rates | None = None) -> jax.Array:
        """Returns the decoder's logits_BTV, float32."""
        rates = Rates.of(self.cfg) if rates is None else rates
        encoded_BSD = self.encode(batch, rates)
        x_BTD = self.decoder(self.embed(batch['inputs']), batch, rates, encoded_BSD)
        return self.logits(x_BTD, real_tokens(batch))

    def start(self, batch: Batch, slots: int) -> Cache:
        """Returns an empty cache of `slots` slots that holds the encoder's keys and values of `batch`."""
        if 'encoder_segment_ids' in batch:
            raise ValueError('decoding reads one source a row: no encoder_segment_ids')
        encoded_BSD, positions_BS = self.encode(batch, Rates()), positions_of(batch, 'encoder_')
        cache = empty_cache(self.cfg, encoded_BSD.shape[0], slots)
        cross = self.decoder.cross_keys_values(encoded_BSD, positions_BS)
        return cache.replace(cross=cross, encoder_positions_BS=positions_BS)

    def extend(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, cache: Cache, prefix_BT: jax.Array | None = None
    ) -> tuple[jax.Array, Cache]:
        """Returns (logits_BTV of the new tokens, the cache with them); a prefix must come in one call."""
        x_BTD, cache = self.decoder.extend(self.embed(tokens_BT), positions_BT, cache, prefix_BT)
        return self.logits(x_BTD, positions_BT >= 0), cache


FAMILIES: dict[str, type[nn.Module]] = {
    'encoder': EncoderOnly,
    'decoder': DecoderOnly,
    'encoder_decoder': EncoderDecoder,
}

TIED_EMBEDDINGS = ('all', 'inputs', 'output', None)

PARAMETRIZATIONS = ('mup', None)  # Yang et al. 2022: the best learning rate does not change with the width


def build(cfg: Model) -> nn.Module:
    """Returns the model of `cfg`, derived sizes filled in.

    Raises:
      UserError: an unknown family.
    """
    return choose(FAMILIES, cfg.family, 'model.family')(resolve_model(cfg))
