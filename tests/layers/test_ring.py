"""What the ring leaves out: blocks of keys that no query of a block sees, and the way home of keys and values."""

import collections

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from tformer.config import Mesh
from tformer.distributed import meshes
from tformer.layers.kernels import ScoreOptions
from tformer.layers.masks import AttentionMask
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

    def sees(own, other, width):
        return own == own if width is None else (own >= other) & (own - other < width)

    def shares(order, **layers):
        widths = {'full': None, 'causal': 2 * n, 'window': 2}
        return ring_kernels._shares(order, n, {widths[name]: part for name, part in layers.items()}, sees)

    np.testing.assert_array_equal(shares(balanced, full=1.0), np.ones((2, 2)))
    np.testing.assert_allclose(shares(balanced, causal=1.0).sum(), (2 * n + 1) / n)
    least = shares(balanced, window=1.0)
    assert (4 * n - 1) / n**2 <= least.sum() <= 4
    assert shares(blocks, causal=1.0).sum() > (2 * n + 1) / n
    mixed = shares(balanced, window=0.75, causal=0.25)
    np.testing.assert_allclose(mixed, 0.75 * least + 0.25 * shares(balanced, causal=1.0))


@pytest.mark.parametrize('order', ['behind', 'zigzag'])
@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('window', [3, 2**31 - 1])
def test_a_layer_meets_the_blocks_that_its_own_window_reaches(monkeypatch, order, causal, window):
    """Of a stack with layers of both kinds. The sum over blocks that each count 1 is their number."""
    counted = ring_kernels.PAIRS['triton']._replace(
        forward=lambda q, k, v, *rest: (jnp.zeros((*q.shape[:3], v.shape[-1])), jnp.zeros(q.shape[:3]))
    )
    monkeypatch.setitem(ring_kernels.PAIRS, 'triton', counted)
    place = np.arange(16)
    if order == 'zigzag':
        place = np.asarray(jnp.take(jnp.arange(16), ring_attention.zigzag(16, 2)))
    places = jnp.asarray(place)[None]
    mask = AttentionMask(
        places, places, window=jnp.int32(window), causal=causal, widths=(3, None), narrow=0.5, order=order
    )
    x = jnp.ones((1, 1, 16, 4))
    with jax.set_mesh(meshes.make_mesh(Mesh(context=2), jax.devices()[:2])):
        plan = ring_kernels.Plan('triton', ScoreOptions(1.0))
        *_, lse_BNT = jax.jit(lambda: ring_kernels._forward(plan, x, x, x, mask, None, (None, None))[1])()
    seen = np.asarray(mask.array())[0].reshape(4, 4, 4, 4).any((1, 3))
    np.testing.assert_allclose(np.exp(lse_BNT)[0, 0], np.repeat(seen.sum(1), 4), rtol=1e-6)


def passed_on(jaxpr):
    """Returns the bytes that a device passes on by dtype."""
    total = collections.Counter()
    for each in jaxpr.eqns:
        times = each.params['length'] if each.primitive.name == 'scan' else 1
        for inner in jax.extend.core.jaxprs_in_params(each.params):
            total.update({dtype: times * size for dtype, size in passed_on(inner).items()})
        if each.primitive.name == 'ppermute':
            for x in each.invars:
                total[x.aval.dtype.name] += x.aval.size * x.aval.dtype.itemsize
    return total


@pytest.mark.parametrize('kernel', [None, 'triton'])
@pytest.mark.parametrize('devices', [2, 4])
def test_gradients_alone_are_passed_on_in_the_last_turn(kernel, devices):
    """Keys and values make n - 1 hops forward and as many backward, in their own two bytes; their gradients as many in
    four bytes, and one more home in two."""
    length = 128 * devices
    places, x = jnp.arange(length)[None], jnp.ones((1, 2, length, 8), jnp.bfloat16)
    mask = AttentionMask(places, places, order='behind')

    def out(q, k, v):
        if kernel is None:
            return ring_attention.ring(q, k, v, mask.array(), ScoreOptions(1.0))
        return ring_kernels.ring(kernel, q, k, v, mask, ScoreOptions(1.0), interpret=True)

    def backward(q, k, v):
        return jax.vjp(out, q, k, v)[1](x)

    with jax.set_mesh(meshes.make_mesh(Mesh(context=devices), jax.devices()[:devices])):
        forward, both = (passed_on(jax.make_jaxpr(function)(x, x, x).jaxpr) for function in (out, backward))
    hop = 2 * x.nbytes / devices  # of a device's keys and values
    narrow, wide = (devices - 1) * hop, (devices - 1) * 2 * hop
    assert (forward['bfloat16'], forward['float32']) == (narrow, 0)
    assert (both['bfloat16'], both['float32']) == (2 * narrow + hop, wide)
