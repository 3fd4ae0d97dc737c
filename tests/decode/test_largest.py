"""The largest of many numbers, by blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tformer.decode.largest import BLOCK, largest

ROWS = {
    'odd length': lambda rng: rng.normal(size=(3, 40 * BLOCK + 7)),
    'whole blocks': lambda rng: rng.normal(size=(3, 40 * BLOCK)),
    'many ties': lambda rng: rng.integers(0, 3, (3, 40 * BLOCK + 7)),
    'ties in all blocks': lambda rng: np.zeros((3, 40 * BLOCK + 7)),
    'fewer finite numbers than are asked for': lambda rng: np.where(rng.random((3, 40 * BLOCK + 7)) < 1e-3, 1, -np.inf),
    'none finite': lambda rng: np.full((3, 40 * BLOCK + 7), -np.inf),
    'all in one block': lambda rng: np.where(np.arange(40 * BLOCK + 7) // BLOCK == 5, 1.0, rng.random((3, 1)) - 2),
    'too few blocks': lambda rng: rng.normal(size=(3, 2 * BLOCK)),
}


@pytest.mark.parametrize('rows', ROWS)
def test_they_and_their_places_are_those_of_a_stable_sort(rows) -> None:
    x_BN = ROWS[rows](np.random.default_rng(0)).astype(np.float32)
    values, places = jax.jit(largest, static_argnums=1)(jnp.asarray(x_BN), 8)
    order = np.argsort(-x_BN, axis=1, kind='stable')[:, :8]
    np.testing.assert_array_equal(places, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x_BN, order, 1))
