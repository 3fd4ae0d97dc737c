"""Position encodings: what is added to the embeddings, how queries and keys are turned."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.config import Model
from tformer.errors import choose
from tformer.layers.initializers import INITIALIZERS
from tformer.sharding import partitioned


def sinusoidal(positions_BT: jax.Array, emb_dim: int) -> jax.Array:
    """Returns PE_BTD: sin in the even columns, cos in the odd ones (Vaswani et al. 2017, 3.5)."""
    frequencies = 10_000.0 ** (-jnp.arange(0, emb_dim, 2) / emb_dim)
    angles = positions_BT[..., None].astype(jnp.float32) * frequencies[None, None]
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], -1).reshape(*positions_BT.shape, emb_dim)


def rotary_angles(positions_BT: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Returns (cos, sin), each `[B, 1, T, H/2]`, float32, of the rotary embedding (Su et al. 2021, eq. 15)."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2) / head_dim)
    angles = positions_BT[:, None, :, None].astype(jnp.float32) * frequencies[None, None, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BNTH: jax.Array, angles: tuple[jax.Array, jax.Array] | None) -> jax.Array:
    """Turns the pairs (i, i + H/2) of queries or keys by their position's angles; None leaves them."""
    if angles is None:
        return x_BNTH
    cos, sin = angles
    a, b = jnp.split(x_BNTH.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BNTH.dtype)


class Sinusoidal(nn.Module):
    cfg: Model

    def __call__(self, positions_BT: jax.Array) -> jax.Array:
        return sinusoidal(positions_BT, self.cfg.emb_dim).astype(self.cfg.dtype)


class Learned(nn.Module):
    """One trained vector for each position (Gehring et al. 2017; Devlin et al. 2019)."""

    cfg: Model

    @nn.compact
    def __call__(self, positions_BT: jax.Array) -> jax.Array:
        cfg = self.cfg
        init = choose(INITIALIZERS, cfg.initializer, 'model.initializer').embedding(cfg.emb_dim)
        shape = (cfg.max_len, cfg.emb_dim)
        table = self.param('table', partitioned(init, 'positions', 'embed'), shape, jnp.dtype(cfg.param_dtype))
        return table.astype(cfg.dtype)[jnp.maximum(positions_BT, 0)]


class Position(NamedTuple):
    """A position encoding: a module that gives the vectors to add, and the angles to rotate by."""

    added: Callable[[Model], nn.Module] | None = None
    angles: Callable[[jax.Array, int, float], tuple[jax.Array, jax.Array]] | None = None


POSITIONS: dict[str | None, Position] = {
    'sinusoidal': Position(added=Sinusoidal),  # Vaswani et al. 2017
    'learned': Position(added=Learned),  # Devlin et al. 2019
    'rope': Position(angles=rotary_angles),  # Su et al. 2021
    None: Position(),
}
