"""From the residual stream to what is scored: vocabulary logits, or classes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.config import Model
from tformer.errors import choose
from tformer.layers.linear import Dense
from tformer.layers.mlp import ACTIVATIONS
from tformer.layers.norms import make_norm
from tformer.sharding import constrain, partitioned


class VocabularyHead(nn.Module):
    """logits_BTV, float32, from x_BTD: by `tied` where given (an `Embedding.logits`), else by a kernel of its own."""

    cfg: Model

    @nn.compact
    def __call__(self, x_BTD: jax.Array, tied: Callable[[jax.Array], jax.Array] | None = None) -> jax.Array:
        cfg = self.cfg
        assert cfg.vocab_size
        if cfg.mlm_transform:
            inputs, activation = choose(ACTIVATIONS, cfg.activation, 'model.activation')
            shape, names = (cfg.emb_dim, cfg.emb_dim), ('embed', 'mlp')
            layers = [Dense(cfg, 'BTD,DF->BTF', shape, names, bias=True, name=f'transform_{i}') for i in range(inputs)]
            x_BTD = make_norm(cfg)(activation(*[layer(x_BTD) for layer in layers]))
        if tied is not None:
            logits_BTV = tied(x_BTD)
        else:
            shape, names = (cfg.emb_dim, cfg.vocab_size), ('embed', 'vocab')
            head = Dense(cfg, 'BTD,DV->BTV', shape, names, output='float32', name='logits')
            logits_BTV = constrain(head(x_BTD), 'batch', 'length', 'act_vocab')
        if cfg.output_bias:
            bias = self.param('bias', partitioned(nn.initializers.zeros, 'vocab'), (cfg.vocab_size,), jnp.float32)
            logits_BTV += bias[None, None]
        return logits_BTV


class ClassHead(nn.Module):
    """logits_BC, float32, from one pooled vector (Devlin et al. 2019, 3.2)."""

    cfg: Model

    @nn.compact
    def __call__(self, x_BTD: jax.Array, positions_BT: jax.Array) -> jax.Array:
        cfg = self.cfg
        assert cfg.num_classes
        pooled_B1D = choose(POOLINGS, cfg.pooling, 'model.pooling')(x_BTD, positions_BT >= 0)
        shape, names = (cfg.emb_dim, cfg.num_classes), ('embed', 'classes')
        head = Dense(cfg, 'BTD,DC->BTC', shape, names, bias=True, output='float32', name='classes')
        return head(pooled_B1D)[:, 0]


def first_token(x_BTD: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """The vector of the first token, [CLS] (Devlin et al. 2019)."""
    return x_BTD[:, :1]


def mean_token(x_BTD: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """The mean over the tokens that are not padding, in float32."""
    weights_BT1 = mask_BT[:, :, None].astype(jnp.float32)
    total = jnp.sum(x_BTD.astype(jnp.float32) * weights_BT1, 1, keepdims=True)
    return (total / jnp.maximum(jnp.sum(weights_BT1, 1, keepdims=True), 1.0)).astype(x_BTD.dtype)


POOLINGS = {'cls': first_token, 'mean': mean_token}
