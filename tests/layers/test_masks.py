"""Who sees whom, on four tokens and by hand."""

import jax.numpy as jnp
import numpy as np

from tformer.layers.masks import attention_mask, within_window

PLACES = jnp.array([[0, 1, 2, 3]])


def rows(text: str) -> np.ndarray:
    """Returns the mask of a picture: a row for each query, x where it sees the key."""
    return np.array([[[letter == 'x' for letter in row] for row in text.split()]])


def test_a_window_ends_on_both_sides():
    np.testing.assert_array_equal(within_window(PLACES, PLACES, jnp.array(2)), rows('xx.. xxx. .xxx ..xx'))
    np.testing.assert_array_equal(within_window(PLACES, PLACES, jnp.array(1)), rows('x... .x.. ..x. ...x'))


def test_a_prefix_of_two_is_seen_by_all_and_nothing_else_before_its_turn():
    prefix = jnp.array([[True, True, False, False]])
    mask = attention_mask(PLACES, PLACES, prefix_BS=prefix, causal=True)
    np.testing.assert_array_equal(mask, rows('xx.. xx.. xxx. xxxx'))


def test_two_packed_examples_and_padding_see_their_own_past():
    positions, segments = jnp.array([[0, 1, 0, -1]]), jnp.array([[1, 1, 2, 0]])
    mask = attention_mask(positions, positions, segments, segments, causal=True)
    np.testing.assert_array_equal(mask[:, :3], rows('x... xx.. ..x.'))
    mask = attention_mask(positions, positions, segments, segments, causal=False)
    np.testing.assert_array_equal(mask[:, :3], rows('xx.. xx.. ..x.'))
