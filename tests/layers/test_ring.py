"""What the ring leaves out: blocks of keys that no query of a block sees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tformer.config import Mesh
from tformer.distributed import meshes
from tformer.layers.kernels import ScoreOptions
from tformer.layers.parallel import ring_attention, ring_kernels


def test_a_block_is_busy_where_a_query_sees_a_key(monkeypatch):
    """Two devices have four blocks of two tokens. In a causal mask the blocks above the diagonal are empty; padding in
    the last block and a packed row empty others, but only where they are empty in every row."""
    given = []

    def stop(options, inputs):
        given.append(inputs.busy_QR)
        return jnp.zeros((*inputs.q_BKGTH.shape[:-1], inputs.v_BKSU.shape[-1]))

    monkeypatch.setattr(ring_attention, 'attention', stop)
    places = np.arange(8)
    causal = places[:, None] >= places
    apart = causal & ((places[:, None] < 4) == (places < 4))
    x = jnp.ones((2, 1, 8, 4))
    with jax.set_mesh(meshes.make_mesh(Mesh(context=2), jax.devices()[:2])):
        for mask in ([causal, causal], [apart, apart], [apart, causal]):
            ring_attention.ring(x, x, x, jnp.asarray(np.stack(mask)), ScoreOptions(1.0))
    lower = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    halves = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    np.testing.assert_array_equal(np.stack(given), np.array([lower, halves, lower], bool))


@pytest.mark.parametrize('devices', [2, 4])
def test_the_share_of_turns_in_which_halves_of_a_ring_meet(devices):
    """Of 4 n pairs of halves that a device has, a causal mask leaves 2 n + 1; a window of a half its own and the one
    before, which is 4 n - 1 of all 4 n^2; without order the device of the last tokens has most, and the others wait."""
    n, blocks = devices, np.arange(2 * devices)
    balanced = ring_attention.zigzag(2 * n, n)
    causal, window = lambda own, other: own >= other, lambda own, other: (own >= other) & (own - other <= 1)
    everything = ring_kernels._shares(balanced, n, lambda own, other: own == own)
    np.testing.assert_array_equal(everything, np.ones((2, 2)))
    np.testing.assert_allclose(ring_kernels._shares(balanced, n, causal).sum(), (2 * n + 1) / n)
    least = ring_kernels._shares(balanced, n, window).sum()
    assert (4 * n - 1) / n**2 <= least <= 4
    assert ring_kernels._shares(blocks, n, causal).sum() > (2 * n + 1) / n
