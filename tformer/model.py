"""The three families: which stacks exist and which mask they get.

Shapes: B batch, T query length, S key length, D residual width, F MLP width, N query heads, K key/value heads,
G = N/K, H head size, V vocabulary, L layers, C classes.

A batch holds `inputs positions` [B, T] (position -1 is padding), with packing `segment_ids`, and for two stacks
`encoder_inputs encoder_positions encoder_segment_ids`. Missing positions count from 0. Training is the presence of a
dropout rng; decoding is the presence of a cache.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.config import Model, resolve_model
from tformer.errors import choose
from tformer.layers.block import Side, Stack
from tformer.layers.cache import Cache, empty_cache
from tformer.layers.dropout import Rates
from tformer.layers.embed import Embedding, Foot
from tformer.layers.heads import ClassHead, VocabularyHead
from tformer.layers.masks import attention_mask
from tformer.layers.positions import POSITIONS

Batch = Mapping[str, jax.Array]


def positions_of(batch: Batch, prefix: str = '') -> jax.Array:
    """Returns the batch's positions [B, T], counting from 0 where it has none."""
    tokens_BT = batch[f'{prefix}inputs']
    counted = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    return batch.get(f'{prefix}positions', counted)


class Tower(nn.Module):
    """A foot and a stack: embedded tokens in, residual stream out."""

    cfg: Model
    num_layers: int
    causal: bool
    cross: bool = False

    def setup(self) -> None:
        self.foot = Foot(self.cfg)
        self.stack = Stack(self.cfg, self.num_layers, self.cross)

    def side(self, query_BT: jax.Array, key_BS: jax.Array, segments_BT: jax.Array | None, rates: Rates) -> Side:
        angles = choose(POSITIONS, self.cfg.position, 'model.position').angles
        assert self.cfg.head_dim
        return Side(
            mask_BTS=attention_mask(query_BT, key_BS, segments_BT, segments_BT, causal=self.causal),
            angles=angles(query_BT, self.cfg.head_dim, self.cfg.rope_theta) if angles else None,
            rates=rates,
        )

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        segments_BT: jax.Array | None,
        rates: Rates,
        encoded_BSD: jax.Array | None = None,
        cross_mask_BTS: jax.Array | None = None,
    ) -> jax.Array:
        """Returns x_BTD after the stack, all positions at once."""
        side = self.side(positions_BT, positions_BT, segments_BT, rates)
        side = side.replace(encoded_BSD=encoded_BSD, cross_mask_BTS=cross_mask_BTS)
        return self.stack(self.foot(x_BTD, positions_BT, rates), side)[0]

    def extend(self, x_BTD: jax.Array, positions_BT: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Returns (x_BTD of the new tokens, the cache with them)."""
        placed = cache.place(positions_BT)
        side = self.side(positions_BT, placed.positions_BS, None, Rates())
        if cache.encoder_positions_BS is not None:
            cross_mask_BTS = attention_mask(positions_BT, cache.encoder_positions_BS, causal=False)
            side = side.replace(cross_mask_BTS=cross_mask_BTS)
        side = side.replace(index=cache.index)
        x_BTD, own = self.stack(self.foot(x_BTD, positions_BT, Rates()), side, cache.own, cache.cross)
        return x_BTD, placed.replace(own=own)


class EncoderOnly(nn.Module):
    """BERT: every token sees every other (Devlin et al. 2019)."""

    cfg: Model

    def setup(self) -> None:
        cfg = self.cfg
        assert cfg.vocab_size
        self.embed = Embedding(cfg, cfg.vocab_size)
        self.encoder = Tower(cfg, cfg.num_encoder_layers, causal=False)
        self.head = VocabularyHead(cfg)
        self.class_head = ClassHead(cfg)

    def encode(self, batch: Batch, rates: Rates | None = None) -> jax.Array:
        """Returns x_BTD."""
        rates = Rates.of(self.cfg) if rates is None else rates
        x_BTD = self.embed(batch['inputs'])
        return self.encoder(x_BTD, positions_of(batch), batch.get('segment_ids'), rates)

    def __call__(self, batch: Batch, rates: Rates | None = None) -> jax.Array:
        """Returns logits_BTV, float32."""
        return self.head(self.encode(batch, rates), self.embed.logits if self.cfg.tied_embeddings else None)

    def classify(self, batch: Batch, rates: Rates | None = None) -> jax.Array:
        """Returns logits_BC, float32, of the pooled sequence."""
        return self.class_head(self.encode(batch, rates), positions_of(batch))


class DecoderOnly(nn.Module):
    """GPT: every token sees those before it (Radford et al. 2018)."""

    cfg: Model

    def setup(self) -> None:
        cfg = self.cfg
        assert cfg.vocab_size
        self.embed = Embedding(cfg, cfg.vocab_size)
        self.decoder = Tower(cfg, cfg.num_decoder_layers, causal=True)
        self.head = VocabularyHead(cfg)

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        return self.head(x_BTD, self.embed.logits if self.cfg.tied_embeddings else None)

    def __call__(self, batch: Batch, rates: Rates | None = None) -> jax.Array:
        """Returns logits_BTV, float32."""
        rates = Rates.of(self.cfg) if rates is None else rates
        x_BTD = self.embed(batch['inputs'])
        return self.logits(self.decoder(x_BTD, positions_of(batch), batch.get('segment_ids'), rates))

    def start(self, batch: Batch, slots: int) -> Cache:
        """Returns an empty cache of `slots` slots for the rows of `batch`."""
        return empty_cache(self.cfg, batch['inputs'].shape[0], slots)

    def extend(self, tokens_BT: jax.Array, positions_BT: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Returns (logits_BTV of the new tokens, the cache with them)."""
        x_BTD, cache = self.decoder.extend(self.embed(tokens_BT), positions_BT, cache)
        return self.logits(x_BTD), cache


class EncoderDecoder(nn.Module):
    """The original (Vaswani et al. 2017), T5, BART: a decoder that also sees an encoder's output."""

    cfg: Model

    def setup(self) -> None:
        cfg = self.cfg
        assert cfg.vocab_size and cfg.encoder_vocab_size
        self.embed = Embedding(cfg, cfg.vocab_size)
        if cfg.tied_embeddings not in ('all', 'inputs'):
            self.encoder_embed = Embedding(cfg, cfg.encoder_vocab_size)
        self.encoder = Tower(cfg, cfg.num_encoder_layers, causal=False)
        self.decoder = Tower(cfg, cfg.num_decoder_layers, causal=True, cross=True)
        self.head = VocabularyHead(cfg)

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        return self.head(x_BTD, self.embed.logits if self.cfg.tied_embeddings in ('all', 'output') else None)

    def encode(self, batch: Batch, rates: Rates | None = None) -> jax.Array:
        """Returns the encoder's output [B, S, D]."""
        rates = Rates.of(self.cfg) if rates is None else rates
        embed = self.embed if self.cfg.tied_embeddings in ('all', 'inputs') else self.encoder_embed
        x_BSD = embed(batch['encoder_inputs'])
        return self.encoder(x_BSD, positions_of(batch, 'encoder_'), batch.get('encoder_segment_ids'), rates)

    def __call__(self, batch: Batch, rates: Rates | None = None) -> jax.Array:
        """Returns the decoder's logits_BTV, float32."""
        rates = Rates.of(self.cfg) if rates is None else rates
        encoded_BSD = self.encode(batch, rates)
        positions_BT, segments_BT = positions_of(batch), batch.get('segment_ids')
        cross_mask_BTS = attention_mask(
            positions_BT,
            positions_of(batch, 'encoder_'),
            segments_BT,
            batch.get('encoder_segment_ids'),
            causal=False,
        )
        x_BTD = self.embed(batch['inputs'])
        return self.logits(self.decoder(x_BTD, positions_BT, segments_BT, rates, encoded_BSD, cross_mask_BTS))

    def start(self, batch: Batch, slots: int) -> Cache:
        """Returns an empty cache of `slots` slots that holds the encoder's keys and values of `batch`."""
        encoded_BSD = self.encode(batch, Rates())
        cache = empty_cache(self.cfg, encoded_BSD.shape[0], slots)
        cross = self.decoder.stack.cross_keys_values(encoded_BSD)
        return cache.replace(cross=cross, encoder_positions_BS=positions_of(batch, 'encoder_'))

    def extend(self, tokens_BT: jax.Array, positions_BT: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Returns (logits_BTV of the new tokens, the cache with them)."""
        x_BTD, cache = self.decoder.extend(self.embed(tokens_BT), positions_BT, cache)
        return self.logits(x_BTD), cache


FAMILIES: dict[str, type[nn.Module]] = {
    'encoder': EncoderOnly,
    'decoder': DecoderOnly,
    'encoder_decoder': EncoderDecoder,
}

TIED_EMBEDDINGS = ('all', 'inputs', 'output', None)


def build(cfg: Model) -> nn.Module:
    """Returns the model of `cfg`, derived sizes filled in.

    Raises:
      UserError: an unknown family.
    """
    return choose(FAMILIES, cfg.family, 'model.family')(resolve_model(cfg))
