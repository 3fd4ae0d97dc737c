"""Attention before the transformer: what a recurrent decoder's outputs look at, the encoder's.

Shapes: B batch, T target length, S source length, D width, E that of the keys.
"""

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.errors import choose
from tformer.layers.layer_stack import NamedValue
from tformer.layers.linear import Dense
from tformer.layers.resolved import ResolvedModel


class Source(flax.struct.PyTreeNode):
    """What attention looks at."""

    keys_BSE: jax.Array  # of the encoder's outputs, as the score takes them
    values_BSD: jax.Array  # the outputs themselves
    positions_BS: jax.Array  # -1 is padding, which has weight 0


class CrossAttention(nn.Module):
    """tanh(W [c; h]), c the encoder's outputs under the weights of their scores with h (Luong et al. 2015, eq. 5)."""

    cfg: ResolvedModel
    stack: str

    def setup(self) -> None:
        cfg, D = self.cfg, self.cfg.emb_dim
        self.score = choose(SCORES, cfg.recurrent_attention, 'model.recurrent_attention')(cfg, self.stack)
        self.probabilities = NamedValue()
        self.out = Dense(cfg, 'BTC,CD->BTD', (2 * D, D), ('cell', 'embed'), stack=self.stack)

    def keys(self, x_BSD: jax.Array) -> jax.Array:
        """Returns keys_BSE of the encoder's outputs."""
        return self.score.keys(x_BSD)

    def __call__(self, x_BTD: jax.Array, source: Source) -> jax.Array:
        """Returns x_BTD."""
        scores_BTS, real_BS = self.score(x_BTD, source.keys_BSE), source.positions_BS >= 0
        weights_BTS = self.probabilities(attention_weights(scores_BTS, real_BS))
        if not self.is_initializing():
            self.sow('alignments', 'weights_BTS', weights_BTS)
        context_BTD = jnp.einsum('BTS,BSD->BTD', weights_BTS.astype(x_BTD.dtype), source.values_BSD)
        return jnp.tanh(self.out(jnp.concatenate([context_BTD, x_BTD], -1)))


def attention_weights(scores_BTS: jax.Array, real_BS: jax.Array) -> jax.Array:
    """Returns weights_BTS, float32, that sum to 1 over the real tokens; all 0 where there are none."""
    real_B1S = real_BS[:, None]
    scores_BTS = jnp.where(real_B1S, scores_BTS.astype(jnp.float32), jnp.finfo(jnp.float32).min)
    return jnp.where(real_B1S, jax.nn.softmax(scores_BTS), 0.0)


class DotScore(nn.Module):
    """h . k (Luong et al. 2015, eq. 8)."""

    cfg: ResolvedModel
    stack: str

    def keys(self, x_BSD: jax.Array) -> jax.Array:
        """Returns keys_BSD: the outputs themselves."""
        return x_BSD

    def __call__(self, x_BTD: jax.Array, keys_BSD: jax.Array) -> jax.Array:
        """Returns scores_BTS, float32."""
        return jnp.einsum('BTD,BSD->BTS', x_BTD, keys_BSD, preferred_element_type=jnp.float32)


class AdditiveScore(nn.Module):
    """v . tanh(W h + U k) (Bahdanau et al. 2015, A.1.2)."""

    cfg: ResolvedModel
    stack: str

    def setup(self) -> None:
        cfg, D = self.cfg, self.cfg.emb_dim
        self.query = Dense(cfg, 'BTD,DE->BTE', (D, D), ('embed', 'cell'), stack=self.stack)
        self.key = Dense(cfg, 'BSD,DE->BSE', (D, D), ('embed', 'cell'), stack=self.stack)
        self.vector = Dense(cfg, 'BTSE,E->BTS', (D,), ('cell',), stack=self.stack, output='float32')

    def keys(self, x_BSD: jax.Array) -> jax.Array:
        """Returns keys_BSE: U k."""
        return self.key(x_BSD)

    def __call__(self, x_BTD: jax.Array, keys_BSE: jax.Array) -> jax.Array:
        """Returns scores_BTS, float32."""
        return self.vector(jnp.tanh(self.query(x_BTD)[:, :, None] + keys_BSE[:, None]))


SCORES: dict[str, type[nn.Module]] = {'dot': DotScore, 'additive': AdditiveScore}
