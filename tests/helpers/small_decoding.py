"""A tiny model of each family, and its forward pass."""

import jax
import jax.numpy as jnp

from tformer import config
from tformer.model import build

V, B, P, S, T = 11, 3, 5, 4, 6


def make(family, vocab_size=V, seed=0, scale=1.0, **fields):
    """A tiny model and its variables; `scale` widens the distribution over the vocabulary."""
    sizes = {'emb_dim': 16, 'mlp_dim': 32, 'num_heads': 4, 'num_encoder_layers': 1, 'num_decoder_layers': 2}
    model = build(
        config.Model(family=family.removeprefix('prefix_'), vocab_size=vocab_size, max_len=16, **{**sizes, **fields})
    )
    batch = {'inputs': jnp.ones((1, 2), jnp.int32), 'encoder_inputs': jnp.ones((1, 2), jnp.int32)}
    variables = jax.jit(model.init)(jax.random.key(seed), batch)
    return model, jax.tree.map(lambda x: x * scale, variables)


FORWARD = jax.jit(lambda model, variables, batch: model.apply(variables, batch), static_argnums=0)


@jax.tree_util.register_static
class Nothing:
    """A cache of beams whose steps read no cache."""

    def branch(self, hypotheses):
        return self

    def take(self, parents_BM):
        return self
