"""Keys and values seen so far: cache in, cache out."""

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tformer.distributed import sharding
from tformer.layers.attention import windows
from tformer.layers.parallel import each_device
from tformer.layers.parallel.few_tokens import STEP
from tformer.layers.quantized import Quantized, quantize
from tformer.layers.resolved import ResolvedModel


class KeyValues(flax.struct.PyTreeNode):
    """Keys and values of one layer, of S tokens.

    Keys stand as the scores of a step read them, without a transposition: a token is a column. `Quantized` ones have a
    scale for each token and head.
    """

    k_BKHS: jax.Array | Quantized
    v_BKSU: jax.Array | Quantized

    @classmethod
    def of(cls, k_BKSH: jax.Array, v_BKSU: jax.Array) -> 'KeyValues':
        """Returns the keys and values as they are cached."""
        return cls(jnp.swapaxes(k_BKSH, 2, 3), v_BKSU)

    def pair(self) -> tuple[jax.Array | Quantized, jax.Array | Quantized]:
        """Returns (k_BKSH, v_BKSU), as attention takes them."""
        return jax.tree.map(lambda x: jnp.swapaxes(x, 2, 3), self.k_BKHS), self.v_BKSU

    def quantized(self) -> 'KeyValues':
        """Returns them as integers of eight bits."""
        assert not isinstance(self.k_BKHS, Quantized) and not isinstance(self.v_BKSU, Quantized)
        return KeyValues(quantize(self.k_BKHS, [2]), quantize(self.v_BKSU, [3]))

    @property
    def heads(self) -> int:
        """The heads that are held, of which some are repeated where `each_device.heads_to_split` says so."""
        return int(jax.tree.leaves(self)[0].shape[1])

    @property
    def slots(self) -> int:
        """The number of tokens that have room."""
        return int(jax.tree.leaves(self.v_BKSU)[0].shape[2])

    def with_heads(self, number: int) -> 'KeyValues':
        """Returns them with so many heads, each repeated equally often."""
        times = number // self.heads
        return self if times == 1 else jax.tree.map(lambda x: jnp.repeat(x, times, axis=1), self)

    def along_slots(self, function: Callable[..., jax.Array], *others: 'KeyValues') -> 'KeyValues':
        """Returns what a function makes of each array, those of others, and their axis of slots."""

        def along(axis: int, *parts: Any) -> Any:
            return jax.tree.map(lambda *arrays: function(*arrays, axis), *parts)

        each = (self, *others)
        return KeyValues(along(3, *(one.k_BKHS for one in each)), along(2, *(one.v_BKSU for one in each)))

    def extend(self, new: 'KeyValues', index: jax.Array, *, first: bool = False, around: bool = False) -> 'KeyValues':
        """Returns the keys and values with new ones written at slot `index`, or at that of each row; `first` says that
        there are none yet, `around` that the first slot follows the last one."""
        new = new.with_heads(self.heads)
        new = new.quantized() if isinstance(self.k_BKHS, Quantized) else new

        def put(x: jax.Array, added: jax.Array, axis: int) -> jax.Array:
            added = added.astype(x.dtype)
            if first:
                return _behind(added, x.shape[axis], axis, 0)
            if around:
                return _put_around(x, added, index, axis)
            if added.shape[axis] > STEP or not _split(x, axis):
                return _put(x, added, index, axis)
            for t in range(added.shape[axis]):  # of several slots XLA would write where the row is whole
                x = _put(x, jax.lax.slice_in_dim(added, t, t + 1, axis=axis), index + t, axis)
            return x

        return self.along_slots(put, new).apart()

    def apart(self) -> 'KeyValues':
        """Returns the same, whose slots the devices share that split the tokens of a row."""
        return self.along_slots(_apart)


def _put(x: jax.Array, new: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    """Returns x with new entries from `index` on along an axis; an index [B] is that of each row."""
    if index.ndim:
        return jax.vmap(functools.partial(_put, axis=axis - 1))(x, new, index)
    return jax.lax.dynamic_update_slice_in_dim(x, new, index, axis)


def _put_around(x: jax.Array, new: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    """Returns what `_put` does, where the first entry follows the last one."""
    for t in range(new.shape[axis]):
        x = _put(x, jax.lax.slice_in_dim(new, t, t + 1, axis=axis), (index + t) % x.shape[axis], axis)
    return x


def _split(x: jax.Array, axis: int) -> tuple[str, ...]:
    """Returns the axes of the mesh that split slots."""
    return (each_device.split('length', x.shape[axis]) or ()) if each_device.splits() else ()


def _apart(x: jax.Array, axis: int) -> jax.Array:
    """Returns x, split along an axis as tokens are, and along others as XLA likes."""
    axes = _split(x, axis)
    if not axes:
        return x
    return sharding.divided(x, [axes if each == axis else P.UNCONSTRAINED for each in range(x.ndim)])


def _behind(x: jax.Array, size: int, axis: int, fill: int) -> jax.Array:
    """Returns x with `size` entries along an axis, the new ones behind the others."""
    more = [(0, size - x.shape[axis] if each == axis else 0) for each in range(x.ndim)]
    return jnp.pad(x, more, constant_values=fill)


Cached = tuple[KeyValues, ...]  # of each layer


class Near(flax.struct.PyTreeNode):
    """The slots of layers with a window: those that steps read, in a ring."""

    positions_BS: jax.Array  # as those of the `Cache`
    index: jax.Array  # the slot that is written next, of all rows or of each

    def place(self, positions_BT: jax.Array) -> 'Near':
        """Returns the slots with the positions of T new tokens, and the index moved past them."""
        index = (self.index + positions_BT.shape[1]) % self.positions_BS.shape[1]
        return Near(_put_around(self.positions_BS, positions_BT, self.index, axis=1), index)


class Cache(flax.struct.PyTreeNode):
    """The state that decoding carries between calls.

    The layers' arrays stay apart, so that each step writes into them in place. Hypotheses of one input share its row:
    each step adds a token of each, and `branches_BMS` says which slots are those of a hypothesis. So nothing of the
    cache moves when hypotheses are chosen, and the prompt and the encoder's output are held once.
    """

    own: Cached  # of each layer of the decoder, S slots
    positions_BS: jax.Array  # position held in each slot; -1 is empty or padding, which the mask hides
    index: jax.Array  # slots written so far, the same for all rows, or [B] where rows go on by themselves
    prefix_BS: jax.Array  # slots that earlier tokens of the same call see too (prefix LM)
    cross: Cached | None = None  # the encoder's, for each layer; None without an encoder
    encoder_positions_BS: jax.Array | None = None  # of the encoder's tokens; None without an encoder
    branches_BMS: jax.Array | None = None  # True at the slots that hypothesis m has; None: a row is one text
    near: Near | None = None  # the slots of layers with a window; None: they have those of the others
    # of each layer the slots that steps of up to STEP tokens read, None: all
    reaches: tuple[int | None, ...] = flax.struct.field(pytree_node=False, default=())

    @property
    def slots(self) -> int:
        """How many tokens of a row, hypotheses of it included, have room."""
        return self.positions_BS.shape[1]

    def place(self, positions_BT: jax.Array, prefix_BT: jax.Array | None = None) -> 'Cache':
        """Returns the cache with the positions of T new tokens in the next slots, and the index moved past them.

        Of a row with hypotheses the tokens are one of each, T = M.
        """
        prefix_BT = jnp.zeros(positions_BT.shape, bool) if prefix_BT is None else prefix_BT
        branches_BMS = self.branches_BMS
        if branches_BMS is not None:
            own_BMT = jnp.broadcast_to(
                jnp.eye(positions_BT.shape[1], dtype=bool), (*positions_BT.shape, branches_BMS.shape[1])
            )
            branches_BMS = _put(branches_BMS, own_BMT, self.index, axis=2)
        return self.replace(
            positions_BS=_put(self.positions_BS, positions_BT, self.index, axis=1),
            prefix_BS=_put(self.prefix_BS, prefix_BT, self.index, axis=1),
            branches_BMS=branches_BMS,
            index=self.index + positions_BT.shape[1],
            near=None if self.near is None else self.near.place(positions_BT),
        )

    def quantized(self) -> 'Cache':
        """Returns the cache, still empty, for integers of eight bits, and the encoder's keys and values as such."""
        shapes = jax.eval_shape(lambda own: tuple(layer.quantized() for layer in own), self.own)
        own: Any = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)  # XLA would fold them for minutes
        cross = None if self.cross is None else tuple(layer.quantized() for layer in self.cross)
        return self.replace(own=own, cross=cross)

    def by_row(self) -> 'Cache':
        """Returns the cache with an index of each row."""
        return self._moved(lambda index: jnp.broadcast_to(index, self.positions_BS.shape[:1]))

    def back(self, tokens: int | jax.Array) -> 'Cache':
        """Returns the cache with the last `tokens` slots, of each row if [B], free again.

        Until others are written there, their positions hide them from the tokens before.
        """
        return self._moved(lambda index: index - tokens)

    def rows(self) -> 'Cache':
        """Returns what the cache holds of each row, without the index."""
        return self._moved(lambda index: None)

    def at_first(self) -> 'Cache':
        """Returns the cache at its first slot."""
        return self._moved(lambda index: jnp.int32(0))

    def at(self, other: 'Cache') -> 'Cache':
        """Returns the cache with the index of another one."""
        near = None if self.near is None or other.near is None else self.near.replace(index=other.near.index)
        return self.replace(index=other.index, near=near)

    def _moved(self, move: Callable[[Any], Any]) -> 'Cache':
        near = None if self.near is None else self.near.replace(index=move(self.near.index))
        return self.replace(index=move(self.index), near=near)

    def with_gaps(self, tokens: int) -> 'Cache':
        """Returns the cache, still empty, for rows in which so many slots of padding may stand between tokens."""
        return self.replace(reaches=tuple(reach and _up(reach + tokens) for reach in self.reaches))

    @property
    def reach(self) -> int | None:
        """The slots that steps read of layers with a window; None: no layer has one."""
        return max((reach for reach in self.reaches if reach is not None), default=None)

    def for_steps(self, end: jax.Array | None = None) -> 'Cache':
        """Returns the cache whose layers with a window have the slots alone that steps read, in rings whose next slot
        is `end`; None: that of the cache, modulo theirs.

        From then on up to STEP tokens are added, or taken back, at a time. Hypotheses stand between each other's
        tokens: with them all layers have all slots.
        """
        slots = self._near_slots(self.slots)
        if slots is None or self.near is not None:
            return self
        return self._with_near(self.ring(slots, self.index % slots if end is None else end))

    def _near_slots(self, slots: int) -> int | None:
        """Returns the slots of layers with a window where others have so many; None: as many."""
        return self.reach if self.branches_BMS is None and self.reach is not None and self.reach < slots else None

    def _with_near(self, narrow: 'Cache') -> 'Cache':
        """Returns the cache whose layers with a window are those of another one, as `near` what that has of slots."""
        each = zip(self.reaches, self.own, narrow.own, strict=True)
        own = tuple(layer if reach is None else other for reach, layer, other in each)
        return self.replace(own=own, near=narrow.near or Near(narrow.positions_BS, narrow.index))

    def ring(self, slots: int, end: jax.Array) -> 'Cache':
        """Returns the cache as a ring of `slots` slots, in which what was written last stands before slot `end`.

        The first slots are left out where there are more; they hold padding.
        """
        place_S = (jnp.arange(slots) - end) % slots + self.index - slots
        index_S = place_S % self.positions_BS.shape[1]  # below 0: slots that nothing was written in
        own = tuple(layer.along_slots(lambda x, axis: jnp.take(x, index_S, axis=axis)) for layer in self.own)
        positions_BS, prefix_BS = (jnp.take(x, index_S, axis=1) for x in (self.positions_BS, self.prefix_BS))
        return self.replace(own=own, positions_BS=positions_BS, prefix_BS=prefix_BS, index=end)

    def wide(self, slots: int, encoder_slots: int | None = None) -> 'Cache':
        """Returns the cache with further free slots behind the others, `slots` in all.

        With `encoder_slots`, so many of the encoder's tokens have room.
        """
        own = tuple(layer.along_slots(lambda x, axis: _behind(x, slots, axis, 0)) for layer in self.own)
        positions_BS, prefix_BS = _behind(self.positions_BS, slots, 1, -1), _behind(self.prefix_BS, slots, 1, False)
        branches_BMS = None if self.branches_BMS is None else _behind(self.branches_BMS, slots, 2, False)
        wide = self.replace(own=own, positions_BS=positions_BS, prefix_BS=prefix_BS, branches_BMS=branches_BMS)
        if encoder_slots is None or self.encoder_positions_BS is None or self.cross is None:
            return wide
        cross = tuple(layer.along_slots(lambda x, axis: _behind(x, encoder_slots, axis, 0)) for layer in self.cross)
        return wide.replace(cross=cross, encoder_positions_BS=_behind(self.encoder_positions_BS, encoder_slots, 1, -1))

    def grown(self, slots: int, encoder_slots: int | None = None) -> 'Cache':
        """Returns what `wide` does of a cache of `for_steps`, with no more slots than steps read."""
        wide, near_slots = self.wide(slots, encoder_slots), self._near_slots(slots)
        if near_slots is None:
            return wide
        return wide._with_near(self if self.near is not None else self.wide(near_slots))

    def repeat(self, times: int) -> 'Cache':
        """Returns the cache with each row so many times, one after the other."""
        repeated: Cache = jax.tree.map(lambda x: jnp.repeat(x, times, axis=0), self.rows())
        return repeated.at(self)

    def branch(self, hypotheses: int) -> 'Cache':
        """Returns the cache for M hypotheses of each row, all of which begin with what it holds."""
        B, S = self.positions_BS.shape
        held_S = jnp.arange(S) < self.index
        return self.replace(branches_BMS=jnp.broadcast_to(held_S, (B, hypotheses, S)))

    def take(self, parents_BM: jax.Array) -> 'Cache':
        """Returns the cache in which hypothesis m of a row goes on from `parents_BM`."""
        assert self.branches_BMS is not None
        return self.replace(branches_BMS=jnp.take_along_axis(self.branches_BMS, parents_BM[:, :, None], axis=1))


def empty_cache(cfg: ResolvedModel, batch: int, slots: int) -> Cache:
    """Returns a cache of `slots` free slots for `batch` rows of a decoder stack."""
    heads = each_device.heads_to_split(cfg.num_kv_heads, cfg.num_heads)
    key_width, value_width = cfg.head_dim, cfg.value_dim
    if cfg.kv_latent_dim is not None:  # a rotary key and a latent, of all heads
        heads, key_width, value_width = 1, cfg.rotary_dim, cfg.kv_latent_dim

    def layer() -> KeyValues:
        k_BKHS = jnp.zeros((batch, heads, key_width, slots), cfg.dtype)
        return KeyValues(k_BKHS, jnp.zeros((batch, heads, slots, value_width), cfg.dtype))

    positions_BS, prefix_BS = jnp.full((batch, slots), -1, jnp.int32), jnp.zeros((batch, slots), bool)
    own = tuple(layer() for _ in range(cfg.num_decoder_layers))
    reaches = tuple(None if window is None else _up(window + STEP) for window in windows(cfg, len(own)))
    return Cache(own, positions_BS, jnp.zeros((), jnp.int32), prefix_BS, reaches=reaches)


def _up(slots: int) -> int:
    """Returns no fewer slots, of which accelerators read whole tiles."""
    multiple = 8 if slots < 128 else 128
    return -(-slots // multiple) * multiple
