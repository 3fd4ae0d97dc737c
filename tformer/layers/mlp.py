"""The position-wise feed-forward: out(activation(in(x))), or gated."""

from collections.abc import Callable

import jax
from flax import linen as nn

from tformer.config import Model
from tformer.errors import choose
from tformer.layers.dropout import Rate, dropout
from tformer.layers.linear import Dense
from tformer.sharding import constrain


def gelu(x: jax.Array) -> jax.Array:
    """x Phi(x), exactly (Hendrycks & Gimpel 2016)."""
    return jax.nn.gelu(x, approximate=False)


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up (Shazeer 2020, eq. 6)."""
    return jax.nn.silu(gate) * up


class Mlp(nn.Module):
    cfg: Model

    @nn.compact
    def __call__(self, x_BTD: jax.Array, dropout_rate: Rate = None) -> jax.Array:
        cfg = self.cfg
        inputs, activation = choose(ACTIVATIONS, cfg.activation, 'model.activation')
        shape, names = (cfg.emb_dim, cfg.mlp_dim), ('embed', 'mlp')
        projected = [
            Dense(cfg, 'BTD,DF->BTF', shape, names, cfg.mlp_bias, name=f'in_{i}')(x_BTD) for i in range(inputs)
        ]
        h_BTF = constrain(activation(*projected), 'batch', 'length', 'act_mlp')
        if self.has_rng('dropout') and dropout_rate is not None:
            h_BTF = dropout(h_BTF, dropout_rate, self.make_rng('dropout'))
        return Dense(cfg, 'BTF,FD->BTD', shape[::-1], names[::-1], cfg.mlp_bias, name='out')(h_BTF)


ACTIVATIONS: dict[str, tuple[int, Callable[..., jax.Array]]] = {  # how many projections in, and what joins them
    'relu': (1, jax.nn.relu),  # Vaswani et al. 2017, eq. 2
    'gelu': (1, gelu),  # Devlin et al. 2019
    'swiglu': (2, swiglu),  # Shazeer 2020
}
