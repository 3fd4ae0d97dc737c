"""Who may attend to whom, from positions, segments and prefix alone: in training, packing and decoding."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tformer.distributed import hlo
from tformer.errors import UserError

# How the tokens of a row stand, as whoever builds the batches knows it: within a segment (a row, where nothing is
# packed) positions rise by one from token to token, padding stands behind or in front of the row, and a prefix at the
# beginning of its segment; `zigzag` is the order of `ring_attention.balance`, of rows that were padded behind.
Order = Literal['behind', 'front', 'zigzag']

HIDDEN = jnp.iinfo(jnp.int32).min  # the segment of keys that nobody sees

_order = jax.make_user_context(default_value=None)  # part of jit's cache key, like the mesh


def ordered(order: Order | None) -> contextlib.AbstractContextManager[Any]:
    """A context whose caller vouches for the order of the tokens in all rows that models read in it; None: unknown.

    Kernels that skip blocks rely on it. Sources of an encoder are padded behind in every order.
    """
    return _order(order)


def known_order() -> Order | None:
    """Returns the order that the current context vouches for."""
    order: Order | None = _order.value
    return order


@dataclasses.dataclass(frozen=True)
class Sight:
    """How many places of a row a query sees before and after its own; None: all."""

    before: int | None = None
    after: int | None = None

    def __call__(self, queries: Any, keys: Any) -> Any:
        """Returns whether queries at some places see keys at others."""
        seen = queries == queries if self.after is None else keys - queries <= self.after
        return seen if self.before is None else seen & (queries - keys <= self.before)


class AttentionMask(flax.struct.PyTreeNode):
    """Which queries see which keys, without an array [B, T, S]: the arguments of `attention_mask`, and a window.

    Where the order is known, the mask is that of the tokens' places in the row, which is static, and of `segments`.
    """

    query_positions_BT: jax.Array
    key_positions_BS: jax.Array
    query_segments_BT: jax.Array | None = None
    key_segments_BS: jax.Array | None = None
    prefix_BS: jax.Array | None = None
    window: jax.Array | None = None  # of `within_window`; None: no window
    visible_BTS: jax.Array | None = None  # False where query t must not see key s besides; None: nothing besides
    causal: bool = flax.struct.field(pytree_node=False, default=False)
    # what `window` is: a number, or in some layers None, no window
    widths: tuple[int | None, ...] = flax.struct.field(pytree_node=False, default=(None,))
    # of all layers, the share that has the window
    narrow: float = flax.struct.field(pytree_node=False, default=1.0)
    order: Order | None = flax.struct.field(pytree_node=False, default=None)
    # whether queries and keys are the same tokens, so that each that is not padding sees itself
    within: bool = flax.struct.field(pytree_node=False, default=False)

    def array(self) -> jax.Array:
        """Returns mask_BTS, True where query t sees key s."""
        segments = self.query_segments_BT, self.key_segments_BS
        mask_BTS = attention_mask(
            self.query_positions_BT, self.key_positions_BS, *segments, self.prefix_BS, causal=self.causal
        )
        if self.window is not None:
            mask_BTS &= within_window(self.query_positions_BT, self.key_positions_BS, self.window)
        return mask_BTS if self.visible_BTS is None else mask_BTS & self.visible_BTS

    @property
    def static(self) -> bool:
        """Whether places and segments are the mask, so that positions need not be compared."""
        placed = self.order is not None or (not self.causal and self.window is None)
        return placed and self.visible_BTS is None

    def sight(self, width: Any) -> Sight:
        """Returns what a query sees in a window of this width, of which None is none."""
        reach = None if width is None else width - 1
        return Sight(reach, 0 if self.causal else reach)

    @property
    def shares_by_width(self) -> dict[int | None, float]:
        """The widths that the window has in some layers, and in which share of them."""
        if self.window is None or len(self.widths) == 1:
            return {None if self.window is None else self.widths[0]: 1.0}
        (width,) = (each for each in self.widths if each is not None)
        return {width: self.narrow, None: 1 - self.narrow}

    def by_width(self, attend: Callable[[Sight], jax.Array]) -> jax.Array:
        """Returns what `attend` makes of the sight that a static mask's window gives."""
        if len(self.shares_by_width) == 1:
            return attend(self.sight(*self.shares_by_width))
        width, _ = self.shares_by_width
        narrow, wide = (functools.partial(attend, self.sight(each)) for each in (width, None))
        found: jax.Array = hlo.cond(self.shares_by_width[width], self.window == width, narrow, wide)
        return found

    def reach(self) -> jax.Array | None:
        """Returns the last place that each query sees, [B, T], where a prefix lets it see places after its own."""
        if self.prefix_BS is None or not self.causal:
            return None
        prefix_BS, own_BS = self.prefix_BS, self.segments()[1]
        places_BS = jnp.broadcast_to(jnp.arange(prefix_BS.shape[1]), prefix_BS.shape)
        goes_on_BS = prefix_BS[:, 1:] & (own_BS[:, 1:] == own_BS[:, :-1])
        ends_BS = prefix_BS & ~jnp.pad(goes_on_BS, ((0, 0), (0, 1)))
        last_BS = jax.lax.cummin(jnp.where(ends_BS, places_BS, places_BS.shape[1]), axis=1, reverse=True)
        return jnp.where(prefix_BS, last_BS, places_BS)[:, : self.query_positions_BT.shape[1]]

    def segments(self) -> tuple[jax.Array, jax.Array]:
        """Returns segments_BT and segments_BS: a query and a key of different ones never see each other."""
        queries_BT, keys_BS = self.query_segments_BT, self.key_segments_BS
        if queries_BT is None or keys_BS is None:
            queries_BT, keys_BS = jnp.zeros_like(self.query_positions_BT), jnp.zeros_like(self.key_positions_BS)
        return queries_BT, jnp.where(self.key_positions_BS >= 0, keys_BS, HIDDEN)

    def sees(self) -> jax.Array:
        """Returns mask_BT of a static mask, True where a query is not padding and sees a key."""
        real_BT = self.query_positions_BT >= 0
        if self.within or self.causal or self.window is not None:  # of self-attention
            return real_BT
        queries_BT, keys_BS = self.segments()
        if self.key_segments_BS is None:
            return real_BT & (keys_BS != HIDDEN).any(-1, keepdims=True)
        return real_BT & (queries_BT[:, :, None] == keys_BS[:, None, :]).any(-1)


def attention_mask(
    query_positions_BT: jax.Array,
    key_positions_BS: jax.Array,
    query_segments_BT: jax.Array | None = None,
    key_segments_BS: jax.Array | None = None,
    prefix_BS: jax.Array | None = None,
    *,
    causal: bool,
) -> jax.Array:
    """Returns mask_BTS, True where query t may see key s.

    Args:
      query_positions_BT: position of each query; -1 is padding.
      key_positions_BS: position of each key; -1 is padding, which nobody sees.
      query_segments_BT: with packing, which example each query belongs to.
      key_segments_BS: likewise for the keys.
      prefix_BS: keys that earlier queries see too (prefix LM: Liu et al. 2018; Raffel et al. 2020, 3.2.1).
      causal: no key after the query's own position is seen, the prefix excepted.
    """
    queries_BT1, keys_B1S = query_positions_BT[:, :, None], key_positions_BS[:, None, :]
    mask_BTS = jnp.broadcast_to(keys_B1S >= 0, jnp.broadcast_shapes(queries_BT1.shape, keys_B1S.shape))
    if causal:
        earlier_BTS = queries_BT1 >= keys_B1S
        mask_BTS &= earlier_BTS if prefix_BS is None else earlier_BTS | prefix_BS[:, None, :]
    if query_segments_BT is not None and key_segments_BS is not None:
        mask_BTS &= query_segments_BT[:, :, None] == key_segments_BS[:, None, :]
    return mask_BTS


def within_window(query_positions_BT: jax.Array, key_positions_BS: jax.Array, window: jax.Array) -> jax.Array:
    """Returns mask_BTS, True where query and key are fewer than `window` positions apart.

    With a causal mask a query sees `window` positions, its own included; in an encoder window - 1 to each side besides
    its own. (The window w of Beltagy et al. 2020, 3.1, has w / 2 to each side: it is 2 (window - 1).)
    """
    distance_BTS = query_positions_BT[:, :, None] - key_positions_BS[:, None, :]
    return jnp.abs(distance_BTS) < window


def check_order(batch: Mapping[str, Any]) -> None:
    """Raises a `UserError` where the rows of a batch (numpy arrays) are not in the order `behind`."""
    for side in ('', 'encoder_'):
        positions_BT = batch.get(f'{side}positions')
        if positions_BT is None:
            continue
        rows_BT, places_BT = np.indices(positions_BT.shape)
        segments_BT = batch.get(f'{side}segment_ids', np.zeros_like(positions_BT))
        prefix_BT = batch.get('prefix') if not side else None
        real_BT = positions_BT >= 0
        examples = np.stack([rows_BT, segments_BT, places_BT - positions_BT], -1)[real_BT]
        counted = len(np.unique(examples, axis=0)) == len(np.unique(examples[:, :2], axis=0))
        behind = not (real_BT[:, 1:] & ~real_BT[:, :-1]).any()
        same_BT = real_BT[:, 1:] & (segments_BT[:, 1:] == segments_BT[:, :-1])
        first = prefix_BT is None or not (same_BT & prefix_BT[:, 1:] & ~prefix_BT[:, :-1]).any()
        if not (counted and behind and first):
            raise UserError(
                f'{side}positions of the batch must count up in each row or segment, padding (-1) stand behind, and a '
                'prefix first; other batches need model.attention_kernel=chunked'
            )
