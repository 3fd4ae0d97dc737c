"""The cache of decoding on numbers that say where they come from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tformer.layers.cache import Cache, KeyValues

LAYERS, ROWS, SLOTS = 2, 2, 4


@pytest.fixture
def cache() -> Cache:
    """A cache of two rows, whose keys are 100 layer + 10 row + slot, and whose first two slots are written."""
    key = 100 * np.arange(LAYERS)[:, None, None] + 10 * np.arange(ROWS)[:, None] + np.arange(SLOTS)
    keys = jnp.asarray(key[:, :, None, :, None], jnp.float32)
    positions = jnp.array([[0, 1, -1, -1], [-1, 0, -1, -1]])
    prefix = jnp.array([[True, False, False, False], [False, True, False, False]])
    encoder = jnp.array([[0, 1, 2], [0, -1, -1]])
    return Cache(KeyValues(keys, -keys), positions, jnp.array(2), prefix, KeyValues(keys, keys), encoder)


def test_the_beams_of_a_row_lie_side_by_side(cache):
    beams = cache.repeat(2)
    assert beams.own.k[1, :, 0, 3, 0].tolist() == beams.cross.k[1, :, 0, 3, 0].tolist() == [103, 103, 113, 113]
    assert beams.positions_BS[:, 0].tolist() == [0, 0, -1, -1]
    assert beams.prefix_BS[:, 0].tolist() == [True, True, False, False]
    assert beams.encoder_positions_BS[:, 2].tolist() == [2, 2, -1, -1]


def test_a_row_takes_its_keys_positions_and_prefix_along_and_the_encoder_stays(cache):
    taken = cache.take(jnp.array([1, 1]))
    assert taken.own.v[0, :, 0, 0, 0].tolist() == [-10, -10]
    assert taken.positions_BS[:, 0].tolist() == [-1, -1]
    assert taken.prefix_BS[:, 1].tolist() == [True, True]
    jax.tree.map(np.testing.assert_array_equal, (taken.cross, taken.index), (cache.cross, cache.index))
    assert taken.encoder_positions_BS.tolist() == cache.encoder_positions_BS.tolist()


def test_new_tokens_stand_in_the_next_slots_and_a_token_may_be_taken_back(cache):
    placed = cache.place(jnp.array([[2], [1]]), jnp.array([[True], [False]]))
    assert placed.positions_BS.tolist() == [[0, 1, 2, -1], [-1, 0, 1, -1]]
    assert placed.prefix_BS.tolist() == [[True, False, True, False], [False, True, False, False]]
    assert int(placed.index) == 3
    assert int(placed.back(1).index) == 2
    new = jnp.full((ROWS, 1, 1, 1), 7.0)
    layer = KeyValues(cache.own.k[0], cache.own.v[0]).extend(new, -new, cache.index)
    assert layer.k[:, 0, :, 0].tolist() == [[0, 1, 7, 3], [10, 11, 7, 13]]
    assert layer.v[:, 0, :, 0].tolist() == [[0, -1, -7, -3], [-10, -11, -7, -13]]


def test_tokens_outside_a_prefix_are_in_none(cache):
    assert cache.place(jnp.array([[2], [1]])).prefix_BS[:, 2].tolist() == [False, False]
