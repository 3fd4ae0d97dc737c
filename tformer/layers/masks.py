"""Who may attend to whom, from positions, segments and prefix alone: in training, packing and decoding."""

import jax
import jax.numpy as jnp


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
