"""Token embeddings, and what is done to them before the first block of a stack."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.config import Model
from tformer.distributed.sharding import constrain, partitioned
from tformer.errors import choose
from tformer.layers.dropout import DropoutRates, drop
from tformer.layers.initializers import base_width, make_initializer
from tformer.layers.linear import Dense
from tformer.layers.norms import make_norm
from tformer.layers.positions import POSITIONS


def embedding_width(cfg: Model) -> int:
    """Returns the width E of the token table: emb_dim, unless it is factorised."""
    return cfg.embedding_factor_dim or cfg.emb_dim


class Embedding(nn.Module):
    """One vector for each token; the same table turns vectors into logits where the output is tied to it."""

    cfg: Model
    vocab_size: int

    def setup(self) -> None:
        self.table = make_table(self, self.cfg, 'vocab', self.vocab_size)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        return constrain(self.table[tokens_BT], 'batch', 'length', 'act_embed')

    def logits(self, x_BTW: jax.Array) -> jax.Array:
        """Returns logits_BTV, float32 (Press & Wolf 2017)."""
        logits = jnp.einsum('BTW,VW->BTV', x_BTW, self.table, preferred_element_type=jnp.float32)
        return constrain(logits, 'batch', 'length', 'act_vocab')


class TokenTypes(nn.Module):
    """One vector for each type of token (Devlin et al. 2019, 3.2)."""

    cfg: Model

    @nn.compact
    def __call__(self, token_types_BT: jax.Array) -> jax.Array:
        cfg = self.cfg
        assert cfg.num_token_types
        return make_table(self, cfg, 'token_types', cfg.num_token_types)[token_types_BT]


def make_table(module: nn.Module, cfg: Model, axis: str, rows: int) -> jax.Array:
    """Returns the parameter `table` [rows, E] of a module, each row whole: XLA looks up parts of rows badly."""
    width = embedding_width(cfg)
    init = partitioned(make_initializer(cfg, 'embedding', width, rows), axis, 'embed')
    table = module.param('table', init, (rows, width), jnp.dtype(cfg.param_dtype))
    return constrain(table.astype(cfg.dtype), 'act_vocab' if axis == 'vocab' else None, 'act_embed')


class InputEmbedding(nn.Module):
    """Scales embeddings, adds positions and types, normalises, drops out, projects up.

    Vaswani et al. 2017, 3.4, 3.5 and 5.4; Devlin et al. 2019, 3.2; Lan et al. 2020, 3.1.
    """

    cfg: Model

    @nn.compact
    def __call__(
        self,
        x_BTW: jax.Array,
        positions_BT: jax.Array,
        dropout_rates: DropoutRates,
        token_types_BT: jax.Array | None = None,
    ) -> jax.Array:
        cfg, width = self.cfg, embedding_width(self.cfg)
        x_BTW = x_BTW * choose(EMBEDDING_SCALES, cfg.embedding_scale, 'model.embedding_scale')(
            cfg.embedding_factor_dim or base_width(cfg)
        )
        added = choose(POSITIONS, cfg.position, 'model.position').added
        every_step = cfg.layer_sharing == 'universal' and cfg.position == 'sinusoidal'  # then the blocks add them
        if added is not None and not every_step:
            x_BTW += added(cfg, width, name='positions')(positions_BT)
        if cfg.num_token_types:
            types = jnp.zeros_like(positions_BT) if token_types_BT is None else token_types_BT
            x_BTW += TokenTypes(cfg, name='token_types')(types)
        if cfg.embedding_norm:
            x_BTW = make_norm(cfg)(x_BTW, positions_BT >= 0)
        x_BTW = drop(self, x_BTW, dropout_rates.residual)
        if cfg.embedding_factor_dim:
            shape, names = (width, cfg.emb_dim), ('factor', 'embed')
            x_BTW = Dense(cfg, 'BTW,WD->BTD', shape, names, bias=True, name='projection')(x_BTW)
        return constrain(x_BTW, 'batch', 'stream_length', 'act_embed')


EMBEDDING_SCALES: dict[str | None, Callable[[int], float]] = {
    'sqrt_dim': lambda emb_dim: emb_dim**0.5,  # Vaswani et al. 2017, 3.4
    None: lambda emb_dim: 1.0,
}
