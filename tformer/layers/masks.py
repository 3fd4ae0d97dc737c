"""Who may attend to whom, from positions and segments alone: in training, packing and decoding."""

import jax
import jax.numpy as jnp


def attention_mask(
    query_positions_BT: jax.Array,
    key_positions_BS: jax.Array,
    query_segments_BT: jax.Array | None = None,
    key_segments_BS: jax.Array | None = None,
    *,
    causal: bool,
) -> jax.Array:
    """Returns mask_BTS, True where query t may see key s.

    Args:
      query_positions_BT: position of each query; -1 is padding.
      key_positions_BS: position of each key; -1 is padding, which nobody sees.
      query_segments_BT: with packing, which example each query belongs to.
      key_segments_BS: likewise for the keys.
      causal: no key after the query's own position is seen.
    """
    queries_BT1, keys_B1S = query_positions_BT[:, :, None], key_positions_BS[:, None, :]
    mask_BTS = jnp.broadcast_to(keys_B1S >= 0, jnp.broadcast_shapes(queries_BT1.shape, keys_B1S.shape))
    if causal:
        mask_BTS &= queries_BT1 >= keys_B1S
    if query_segments_BT is not None and key_segments_BS is not None:
        mask_BTS &= query_segments_BT[:, :, None] == key_segments_BS[:, None, :]
    return mask_BTS
