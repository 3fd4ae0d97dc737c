"""Position encodings: vectors added to the embeddings, rotations of queries and keys, biases added to the scores."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tformer.distributed.sharding import constrain, partitioned
from tformer.errors import choose
from tformer.layers.initializers import make_initializer
from tformer.layers.lookup import lookup
from tformer.layers.resolved import ResolvedModel
from tformer.layers.rope_scalings import ROPE_SCALINGS, Frequencies, scaled

Angles = tuple[jax.Array, jax.Array]


def sinusoidal(positions_BT: jax.Array, emb_dim: int) -> jax.Array:
    """Returns PE_BTD: sin in the even columns, cos in the odd ones (Vaswani et al. 2017, 3.5)."""
    frequencies = 10_000.0 ** (-jnp.arange(0, emb_dim, 2) / emb_dim)
    angles = positions_BT[..., None].astype(jnp.float32) * frequencies[None, None]
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], -1).reshape(*positions_BT.shape, emb_dim)


def timing_signal(positions_BT: jax.Array, emb_dim: int) -> jax.Array:
    """Returns PE_BTD as the paper's code makes it: all sines before all cosines, and frequencies from 1 to exactly
    1 / 10,000 (Vaswani et al. 2018); the last column of an odd width is 0."""
    half = emb_dim // 2
    frequencies = 10_000.0 ** (-jnp.arange(half) / max(half - 1, 1))
    angles = positions_BT[..., None].astype(jnp.float32) * frequencies[None, None]
    return jnp.pad(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1), ((0, 0), (0, 0), (0, emb_dim % 2)))


def rotary_angles(positions_BT: jax.Array, frequencies: Frequencies) -> Angles:
    """Returns (cos, sin), each `[B, 1, T, R/2]`, float32, of the rotary embedding (Su et al. 2021, eq. 15)."""
    angles = (
        positions_BT[:, None, :, None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)[None, None, None]
    )
    return jnp.cos(angles), jnp.sin(angles)


def rotary_frequencies(rotary_dim: int, theta: float) -> np.ndarray:
    """Returns theta^(-2i/R) for each of the R/2 pairs, in radians per position (Su et al. 2021, eq. 15)."""
    return theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)


def rotate(x_BNTH: jax.Array, angles: Angles | None) -> jax.Array:
    """Rotates the pairs (i, i + R/2) of the first R entries of queries or keys by their position's angles."""
    if angles is None:
        return x_BNTH
    cos, sin = angles
    half = cos.shape[-1]
    a, b, rest = jnp.split(x_BNTH.astype(jnp.float32), [half, 2 * half], -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1).astype(x_BNTH.dtype)


def rope_angles(cfg: ResolvedModel, positions_BT: jax.Array) -> Angles:
    """Returns the angles of rotary embeddings with the frequencies that `cfg` asks for, times the factor on queries and
    keys that some scalings have."""
    width = round(cfg.head_dim * cfg.rope_fraction) if cfg.kv_latent_dim is None else cfg.rotary_dim
    frequencies = rotary_frequencies(width, cfg.rope_theta)
    row = choose(ROPE_SCALINGS, cfg.rope_scaling, 'model.rope_scaling')
    numbers = {name: getattr(cfg, name) for name in row.fields}
    length = jnp.max(positions_BT) + 1 if row.by_length else None
    found, factor = scaled(row, frequencies, numbers, cfg.max_len, length)
    cos, sin = rotary_angles(positions_BT, found)
    return (cos, sin) if factor == 1 else (cos * factor, sin * factor)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Returns slopes [N]: 2^(-8n/N) for powers of two; else those of the power below, and every other of the one above
    (Press et al. 2022, as their code does)."""

    def geometric(heads: int) -> list[float]:
        return [2.0 ** (-8.0 * n / heads) for n in range(1, heads + 1)]

    below = 2 ** int(math.log2(num_heads))
    return np.array(geometric(below) + geometric(2 * below)[::2][: num_heads - below])


def relative_bucket(distance: jax.Array, buckets: int, max_distance: int, bidirectional: bool) -> jax.Array:
    """Returns the bucket of each distance (query minus key): exact when near, logarithmic further on, the last one from
    `max_distance` (Raffel et al. 2020, 2.1). Bidirectional ones have half of the buckets for keys to the right."""
    first = jnp.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        first = jnp.where(distance < 0, buckets, 0)
        distance = jnp.abs(distance)
    distance = jnp.maximum(distance, 0)
    exact = buckets // 2
    far = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact) / math.log(max_distance / exact)
    far = jnp.minimum(exact + (far * (buckets - exact)).astype(distance.dtype), buckets - 1)
    return first + jnp.where(distance < exact, distance, far)


class Sinusoidal(nn.Module):
    cfg: ResolvedModel
    width: int

    def __call__(self, positions_BT: jax.Array) -> jax.Array:
        return sinusoidal(positions_BT, self.width).astype(self.cfg.dtype)


class TimingSignal(nn.Module):
    cfg: ResolvedModel
    width: int

    def __call__(self, positions_BT: jax.Array) -> jax.Array:
        return timing_signal(positions_BT + self.cfg.position_offset, self.width).astype(self.cfg.dtype)


class Learned(nn.Module):
    """One trained vector for each position (Gehring et al. 2017; Devlin et al. 2019)."""

    cfg: ResolvedModel
    width: int

    @nn.compact
    def __call__(self, positions_BT: jax.Array) -> jax.Array:
        cfg = self.cfg
        shape = (cfg.max_len + cfg.position_offset, self.width)
        init = partitioned(make_initializer(cfg, 'position', *shape[::-1]), 'positions', 'embed')
        table = constrain(self.param('table', init, shape, jnp.dtype(cfg.param_dtype)).astype(cfg.dtype), None, None)
        return lookup(table, jnp.maximum(positions_BT, 0) + cfg.position_offset)


class Alibi(nn.Module):
    """A penalty that grows linearly with the distance, with one slope per head (Press et al. 2022); symmetric."""

    cfg: ResolvedModel
    bidirectional: bool

    def __call__(self, query_positions_BT: jax.Array, key_positions_BS: jax.Array) -> jax.Array:
        slopes_N = jnp.asarray(alibi_slopes(self.cfg.num_heads), jnp.float32)
        distance_BTS = jnp.abs(query_positions_BT[:, :, None] - key_positions_BS[:, None, :]).astype(jnp.float32)
        return -slopes_N[None, :, None, None] * distance_BTS[:, None]


class Relative(nn.Module):
    """One trained scalar per bucket of distances and head (Raffel et al. 2020, 2.1)."""

    cfg: ResolvedModel
    bidirectional: bool

    @nn.compact
    def __call__(self, query_positions_BT: jax.Array, key_positions_BS: jax.Array) -> jax.Array:
        cfg = self.cfg
        shape = (cfg.relative_buckets, cfg.num_heads)
        init = partitioned(make_initializer(cfg, 'relative', cfg.emb_dim, cfg.num_heads), 'pos_buckets', 'heads')
        table = self.param('table', init, shape, jnp.dtype(cfg.param_dtype)).astype(jnp.float32)
        distance_BTS = query_positions_BT[:, :, None] - key_positions_BS[:, None, :]
        bucket_BTS = relative_bucket(distance_BTS, cfg.relative_buckets, cfg.relative_max_distance, self.bidirectional)
        return jnp.moveaxis(table[bucket_BTS], -1, 1)


class Position(NamedTuple):
    """A position encoding."""

    # module (cfg, width) from positions_BT to vectors that are added to the embeddings
    added: Callable[..., nn.Module] | None = None
    # function (cfg, positions_BT) -> (cosines, sines), [B, 1, T, R/2] each, float32, by which the pairs (i, i + R/2) of
    # queries and keys are rotated; cached keys are stored rotated, so an angle depends on its own position alone
    angles: Callable[[ResolvedModel, jax.Array], Angles] | None = None
    # module (cfg, bidirectional) from query and key positions to bias_BNTS, float32, added to the scores
    bias: Callable[..., nn.Module] | None = None
    sinusoids: bool = False  # its vectors are `sinusoidal`: the width is even, and layers that add coordinates add them
    fields: tuple[str, ...] = ()  # the fields of `Model` that it reads; one that no chosen row reads is refused

    @property
    def pairwise(self) -> bool:
        """Whether the encoding acts on pairs of a query and a key, and so applies to cross-attention too."""
        return self.angles is not None or self.bias is not None


def make_bias(cfg: ResolvedModel, stack: str, *, cross: bool, per_layer: bool) -> nn.Module | None:
    """Returns the position bias that all layers of a stack share, or with `per_layer` that of one layer; None where
    `cfg` has none there. A tower owns the shared one, attention the one of its layer.
    """
    bias = POSITIONS[cfg.position].bias
    if bias is None or per_layer != cfg.relative_per_layer or (cross and not cfg.cross_position):
        return None
    return bias(cfg, cross or stack == 'encoder')


ROPE_FIELDS = ('rope_theta', 'rope_fraction', 'rope_scaling')
RELATIVE_FIELDS = ('relative_buckets', 'relative_max_distance', 'relative_per_layer')

POSITIONS: dict[str | None, Position] = {
    'sinusoidal': Position(added=Sinusoidal, sinusoids=True),  # Vaswani et al. 2017
    'learned': Position(added=Learned, fields=('position_offset',)),  # Devlin et al. 2019
    'timing_signal': Position(added=TimingSignal, fields=('position_offset',)),  # Vaswani et al. 2018
    'rope': Position(angles=rope_angles, fields=ROPE_FIELDS),  # Su et al. 2021
    'alibi': Position(bias=Alibi),  # Press et al. 2022
    'relative': Position(bias=Relative, fields=RELATIVE_FIELDS),  # Raffel et al. 2020
    # Song et al. 2020, as their code does
    'learned_relative': Position(added=Learned, bias=Relative, fields=('position_offset', *RELATIVE_FIELDS)),
    None: Position(),
}
