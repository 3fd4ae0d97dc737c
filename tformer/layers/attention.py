"""Multi-head attention: softmax(q k^T / sqrt(H)) v, for self, causal and cross attention alike."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.config import Model
from tformer.layers.dropout import Rate, dropout
from tformer.layers.linear import Dense
from tformer.layers.positions import rotate
from tformer.sharding import constrain

Angles = tuple[jax.Array, jax.Array] | None


def attention_probabilities(q_BNTH: jax.Array, k_BKSH: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    """Returns softmax(q k^T / sqrt(H)) as probs_BKGTS, float32 (Vaswani et al. 2017, eq. 1).

    Args:
      q_BNTH: queries of N heads.
      k_BKSH: keys of K heads; each serves G = N / K query heads (Ainslie et al. 2023).
      mask_BTS: True where query t may see key s; a query that sees nothing gets uniform weights.
    """
    B, N, T, H = q_BNTH.shape
    K = k_BKSH.shape[1]
    q_BKGTH = (q_BNTH * H**-0.5).reshape(B, K, N // K, T, H)
    logits_BKGTS = jnp.einsum('BKGTH,BKSH->BKGTS', q_BKGTH, k_BKSH, preferred_element_type=jnp.float32)
    logits_BKGTS = jnp.where(mask_BTS[:, None, None], logits_BKGTS, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(logits_BKGTS, axis=-1)


def attend(probs_BKGTS: jax.Array, v_BKSH: jax.Array) -> jax.Array:
    """Returns the values' averages out_BNTH under the given probabilities."""
    B, K, G, T, _ = probs_BKGTS.shape
    out_BKGTH = jnp.einsum('BKGTS,BKSH->BKGTH', probs_BKGTS.astype(v_BKSH.dtype), v_BKSH)
    return out_BKGTH.reshape(B, K * G, T, v_BKSH.shape[-1])


class Attention(nn.Module):
    """Projections around attention. Keys and values come from `keys_values`, so that a cache can stand between."""

    cfg: Model

    def setup(self) -> None:
        cfg = self.cfg
        assert cfg.num_kv_heads and cfg.head_dim
        D, N, K, H = cfg.emb_dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        bias = cfg.attention_bias
        self.query = Dense(cfg, 'BTD,DNH->BNTH', (D, N, H), ('embed', 'heads', 'head_dim'), bias)
        self.key = Dense(cfg, 'BSD,DKH->BKSH', (D, K, H), ('embed', 'kv_heads', 'head_dim'), bias)
        self.value = Dense(cfg, 'BSD,DKH->BKSH', (D, K, H), ('embed', 'kv_heads', 'head_dim'), bias)
        self.out = Dense(cfg, 'BNTH,NHD->BTD', (N, H, D), ('heads', 'head_dim', 'embed'), bias)

    def keys_values(self, x_BSD: jax.Array, angles: Angles) -> tuple[jax.Array, jax.Array]:
        """Returns (k_BKSH, v_BKSH), the keys turned by their positions' angles."""
        return rotate(self.key(x_BSD), angles), self.value(x_BSD)

    def __call__(
        self,
        x_BTD: jax.Array,
        k_BKSH: jax.Array,
        v_BKSH: jax.Array,
        mask_BTS: jax.Array,
        angles: Angles,
        dropout_rate: Rate = None,
    ) -> jax.Array:
        q_BNTH = constrain(rotate(self.query(x_BTD), angles), 'batch', 'act_heads', 'length', 'act_head_dim')
        probs_BKGTS = attention_probabilities(q_BNTH, k_BKSH, mask_BTS)
        self.sow('intermediates', 'probabilities', probs_BKGTS)  # kept only where the caller asks (attention maps)
        if self.has_rng('dropout') and dropout_rate is not None:
            probs_BKGTS = dropout(probs_BKGTS, dropout_rate, self.make_rng('dropout'))
        return self.out(attend(probs_BKGTS, v_BKSH))
