"""Token embeddings, and what a stack gets at its foot."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.config import Model
from tformer.errors import choose
from tformer.layers.dropout import Rates, dropout
from tformer.layers.initializers import INITIALIZERS
from tformer.layers.positions import POSITIONS
from tformer.sharding import constrain, partitioned


class Embedding(nn.Module):
    """One vector for each token; the same table turns vectors into logits where the output is tied to it."""

    cfg: Model
    vocab_size: int

    def setup(self) -> None:
        cfg = self.cfg
        init = choose(INITIALIZERS, cfg.initializer, 'model.initializer').embedding(cfg.emb_dim)
        shape = (self.vocab_size, cfg.emb_dim)
        self.table = self.param('table', partitioned(init, 'vocab', 'embed'), shape, jnp.dtype(cfg.param_dtype))

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        return self.table.astype(self.cfg.dtype)[tokens_BT]

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Returns logits_BTV, float32 (Press & Wolf 2017)."""
        table = self.table.astype(self.cfg.dtype)
        logits = jnp.einsum('BTD,VD->BTV', x_BTD, table, preferred_element_type=jnp.float32)
        return constrain(logits, 'batch', 'length', 'act_vocab')


class Foot(nn.Module):
    """Scales embeddings, adds position vectors, drops out (Vaswani et al. 2017, 3.4, 3.5 and 5.4)."""

    cfg: Model

    @nn.compact
    def __call__(self, x_BTD: jax.Array, positions_BT: jax.Array, rates: Rates) -> jax.Array:
        cfg = self.cfg
        x_BTD = x_BTD * choose(EMBEDDING_SCALES, cfg.embedding_scale, 'model.embedding_scale')(cfg.emb_dim)
        added = choose(POSITIONS, cfg.position, 'model.position').added
        if added is not None:
            x_BTD += added(cfg, name='positions')(positions_BT)  # type: ignore[call-arg]
        if self.has_rng('dropout') and rates.residual is not None:
            x_BTD = dropout(x_BTD, rates.residual, self.make_rng('dropout'))
        return constrain(x_BTD, 'batch', 'length', 'act_embed')


EMBEDDING_SCALES = {
    'sqrt_dim': lambda emb_dim: emb_dim**0.5,  # Vaswani et al. 2017, 3.4
    None: lambda emb_dim: 1.0,
}
