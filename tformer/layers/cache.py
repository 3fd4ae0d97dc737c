"""Keys and values seen so far: cache in, cache out."""

import flax.struct
import jax
import jax.numpy as jnp

from tformer.layers.resolved import ResolvedModel


class KeyValues(flax.struct.PyTreeNode):
    """Keys and values of one layer `[B, K, S, H]`, or of a stack of them `[L, B, K, S, H]`."""

    k: jax.Array
    v: jax.Array

    def extend(self, k_BKTH: jax.Array, v_BKTH: jax.Array, index: jax.Array) -> 'KeyValues':
        """Returns this layer's keys and values with T more written at slot `index`."""
        k = jax.lax.dynamic_update_slice_in_dim(self.k, k_BKTH.astype(self.k.dtype), index, axis=2)
        v = jax.lax.dynamic_update_slice_in_dim(self.v, v_BKTH.astype(self.v.dtype), index, axis=2)
        return KeyValues(k, v)


class Cache(flax.struct.PyTreeNode):
    """The state that decoding carries between calls."""

    own: KeyValues  # the decoder's keys and values, stacked over layers, S slots
    positions_BS: jax.Array  # position held in each slot; -1 is empty or padding, which the mask hides
    index: jax.Array  # slots written so far, the same for all rows
    prefix_BS: jax.Array  # slots that earlier tokens of the same call see too (prefix LM)
    cross: KeyValues | None = None  # the encoder's keys and values for each decoder layer; None without an encoder
    encoder_positions_BS: jax.Array | None = None  # of the encoder's tokens; None without an encoder

    def place(self, positions_BT: jax.Array, prefix_BT: jax.Array | None = None) -> 'Cache':
        """Returns the cache with the positions of T new tokens in the next slots, and the index moved past them."""
        prefix_BT = jnp.zeros(positions_BT.shape, bool) if prefix_BT is None else prefix_BT
        update = jax.lax.dynamic_update_slice_in_dim
        return self.replace(
            positions_BS=update(self.positions_BS, positions_BT, self.index, axis=1),
            prefix_BS=update(self.prefix_BS, prefix_BT, self.index, axis=1),
            index=self.index + positions_BT.shape[1],
        )

    def back(self, tokens: int) -> 'Cache':
        """Returns the cache with its last `tokens` slots free again."""
        return self.replace(index=self.index - tokens)

    def repeat(self, times: int) -> 'Cache':
        """Returns the cache with each row repeated `times` times, side by side (beams)."""

        def rows(axis: int, tree: object) -> object:
            return jax.tree.map(lambda x: jnp.repeat(x, times, axis=axis), tree)

        return self.replace(
            own=rows(1, self.own),
            positions_BS=rows(0, self.positions_BS),
            prefix_BS=rows(0, self.prefix_BS),
            cross=rows(1, self.cross),
            encoder_positions_BS=rows(0, self.encoder_positions_BS),
        )

    def take(self, rows_B: jax.Array) -> 'Cache':
        """Returns the cache with the decoder's rows reordered. Rows move among the beams of one input only, so that the
        encoder's part stays."""
        own = jax.tree.map(lambda x: jnp.take(x, rows_B, axis=1), self.own)
        positions_BS, prefix_BS = (jnp.take(x, rows_B, axis=0) for x in (self.positions_BS, self.prefix_BS))
        return self.replace(own=own, positions_BS=positions_BS, prefix_BS=prefix_BS)


def empty_cache(cfg: ResolvedModel, batch: int, slots: int) -> Cache:
    """Returns a cache of `slots` free slots for `batch` rows of a decoder stack."""
    shape = (cfg.num_decoder_layers, batch, cfg.num_kv_heads, slots)
    own = KeyValues(jnp.zeros((*shape, cfg.head_dim), cfg.dtype), jnp.zeros((*shape, cfg.value_dim), cfg.dtype))
    positions_BS, prefix_BS = jnp.full((batch, slots), -1, jnp.int32), jnp.zeros((batch, slots), bool)
    return Cache(own, positions_BS, jnp.zeros((), jnp.int32), prefix_BS)
