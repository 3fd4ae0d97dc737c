"""ELECTRA: a detector of the tokens that a small generator has replaced (Clark et al. 2020)."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.layers.dropout import DropoutRates
from tformer.layers.embed import embedding_width
from tformer.layers.heads import LinearHead, VocabularyHead
from tformer.layers.linear import Dense
from tformer.layers.mlp import activated
from tformer.layers.resolved import ResolvedModel
from tformer.layers.tower import Batch, Tower, real_tokens


def detect(
    model: Any, batch: Batch, dropout_rates: DropoutRates | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (the generator's logits_BTV, tokens_BT with its samples, for each token the logit of being replaced).

    The generator samples tokens where `weights` is positive, with the random key `sample`; without one it always draws
    the same. No gradient passes through the samples (section 2). Generator and encoder share the token embeddings.
    """
    tied = model.embed.logits if model.cfg.tied_embeddings else None
    logits_BTV = model.generator(model.embed(batch['inputs']), batch, dropout_rates, tied)
    key = model.make_rng('sample') if model.has_rng('sample') else jax.random.key(0)
    drawn_BT = jax.random.categorical(key, jax.lax.stop_gradient(logits_BTV)).astype(batch['inputs'].dtype)
    tokens_BT = jnp.where(batch['weights'] > 0, drawn_BT, batch['inputs'])
    return logits_BTV, tokens_BT, model.detection_head(model.features({**batch, 'inputs': tokens_BT}, dropout_rates))


class Generator(nn.Module):
    """The small masked language model, on the token embeddings of the large one (3.2)."""

    cfg: ResolvedModel  # of the large model

    def setup(self) -> None:
        cfg = narrowed(self.cfg)
        self.encoder, self.head = Tower(cfg, 'encoder'), VocabularyHead(cfg)

    def __call__(
        self,
        x_BTW: jax.Array,
        batch: Batch,
        dropout_rates: DropoutRates | None,
        tied: Callable[[jax.Array], jax.Array] | None,
    ) -> jax.Array:
        """Returns logits_BTV, float32."""
        return self.head(self.encoder(x_BTW, batch, dropout_rates), real_tokens(batch), tied)


def narrowed(cfg: ResolvedModel) -> ResolvedModel:
    """Returns the generator's configuration: fewer heads of the same size, widths in proportion, equal token table."""
    heads = max(1, round(cfg.num_heads * cfg.generator_fraction))
    share = heads / cfg.num_heads
    return dataclasses.replace(
        cfg,
        num_heads=heads,
        num_kv_heads=math.gcd(heads, max(1, round(cfg.num_kv_heads * share))),
        emb_dim=round(cfg.emb_dim * share),
        mlp_dim=max(1, round(cfg.mlp_dim * share)),
        base_emb_dim=cfg.base_emb_dim and round(cfg.base_emb_dim * share),
        embedding_factor_dim=embedding_width(cfg),
    )


class DetectionHead(nn.Module):
    """One number for each token, float32 [B, T], by a layer of its own (as the paper's code does)."""

    cfg: ResolvedModel

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        cfg = self.cfg
        shape, names = (cfg.emb_dim, cfg.emb_dim), ('embed', 'mlp')
        dense = functools.partial(Dense, cfg, 'BTD,DW->BTW', shape, names, bias=True)
        x_BTD = activated(cfg.activation, x_BTD, lambda i: dense(name=f'dense_{i}'))
        return LinearHead(cfg, 1, name='score')(x_BTD, DropoutRates())[..., 0]
