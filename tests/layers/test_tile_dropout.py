"""Dropout inside of kernels: what is drawn, and that kernels drop it, forward and backward, alone and on meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_cases import CASES, Case, make, make_mask
from tformer.config import Mesh
from tformer.distributed import meshes, sharding
from tformer.layers import kernels
from tformer.layers.accelerators import mosaic, tile_dropout, triton
from tformer.layers.kernels import ScoreOptions
from tformer.layers.parallel import ring_attention, ring_kernels

KEY, RATE = jax.random.key(3), 0.3
ASKED = {'mosaic': 'flash', 'triton': 'cudnn'}  # on the way to the kernels of rings that drop
KERNELS = {'mosaic': mosaic.mosaic, 'triton': triton.triton}


def kept_of(drawn_BN3, T, S):
    """Returns which weights remain, kept_BNTS."""
    one = functools.partial(tile_dropout.kept, queries=jnp.arange(T)[:, None], keys=jnp.arange(S)[None])
    return np.asarray(jax.jit(jax.vmap(jax.vmap(one)))(drawn_BN3))


def z_scores(mean, rate, count):
    """Returns how many standard deviations means of `count` draws are from what they should be."""
    return (mean - (1 - rate)) / (rate * (1 - rate) / count) ** 0.5


# ------------------------------------------------------------------------------------------------ the draws
@pytest.mark.parametrize('rate', [0.1, 0.5, 0.9])
def test_weights_are_kept_with_their_probability_along_each_axis(rate):
    kept = kept_of(tile_dropout.draw(rate, KEY, 4, 6), 192, 320)
    for axes in [(0, 1, 2, 3), (0, 1, 2), (0, 1, 3), (2, 3), (0, 3), (1, 2)]:
        z = z_scores(kept.mean(axes), rate, np.prod([kept.shape[axis] for axis in axes]))
        assert np.abs(z).max() < 5 and (z.size < 100 or np.std(z) == pytest.approx(1, abs=0.2)), axes


def test_no_two_rows_columns_or_heads_are_alike():
    """Pairs of draws at any distance along any axis agree as often as independent ones do."""
    kept = kept_of(tile_dropout.draw(0.5, KEY, 3, 4), 256, 256)
    agree = [np.mean(kept == np.roll(kept, by, axis)) for axis in range(4) for by in range(1, kept.shape[axis])]
    agree += [np.mean(kept == np.roll(kept, (by, by), (2, 3))) for by in (1, 2, 64, 128)]  # along the diagonals
    agree += [np.mean(kept == kept.swapaxes(2, 3))]
    # A pair that is counted twice makes the deviation larger by the root of two.
    assert np.abs(z_scores(np.array(agree), 0.5, kept.size)).max() < 5 * 2**0.5


def test_every_pattern_of_eight_neighbours_is_as_frequent_as_the_others():
    kept = kept_of(tile_dropout.draw(0.5, KEY, 4, 4), 256, 512)
    for axis in (2, 3):
        eights = np.moveaxis(kept, axis, -1).reshape(-1, 8)
        counts = np.bincount(np.packbits(eights, axis=1)[:, 0], minlength=256)
        expected = len(eights) / 256
        chi_square = np.sum((counts - expected) ** 2 / expected)  # of 255 degrees of freedom
        assert abs(chi_square - 255) < 5 * (2 * 255) ** 0.5


def test_a_rate_may_be_traced_and_all_or_hardly_anything_be_kept():
    def share(rate):
        return jnp.mean(tile_dropout.kept(tile_dropout.draw(rate, KEY, 1, 1)[0, 0], *jnp.ogrid[:64, :64]))

    found = jax.jit(jax.vmap(share))(jnp.array([0.0, 0.25, 1 - 2**-24]))
    assert found[0] == 1 and found[2] == 0 and found[1] == pytest.approx(0.75, abs=0.05)
    assert float(tile_dropout.scale(tile_dropout.draw(0.0, KEY, 1, 1)[0, 0])) == 1
    assert float(tile_dropout.scale(tile_dropout.draw(0.25, KEY, 1, 1)[0, 0])) == pytest.approx(4 / 3)
    assert tile_dropout.draw(None, KEY, 1, 1) is None and tile_dropout.draw(0.5, None, 1, 1) is None


# ------------------------------------------------------------------------------------------------ in a kernel
def run(attend, case, arrays=None):
    """Returns the outputs at tokens and the gradients of a fixed weighting of them."""
    arrays, (mask, real) = make(case) if arrays is None else arrays, make_mask(case)

    @jax.jit
    def program(arrays, mask):
        def loss(arrays):
            out = jnp.where(real[:, None, :, None], attend(arrays, mask), 0)
            return (out * np.random.default_rng(1).standard_normal(out.shape)).sum(), out

        grads, out = jax.grad(loss, has_aux=True)(arrays)
        return {'out': out, **grads}

    return jax.device_get(program(arrays, mask))


def by_kernel(kernel, case, arrays, mask, rate=RATE, key=KEY):
    sink_N = arrays.get('sink_N')
    options = ScoreOptions(0.25, softcap=case.softcap, sink_N=sink_N, dropout_rate=rate, dropout_key=key)
    return KERNELS[kernel](arrays['q'], arrays['k'], arrays['v'], mask, options, interpret=True)


def by_hand(case, kept_BNTS, rate, arrays, mask):
    """Attention whose probabilities are multiplied by what is kept of them."""
    options, mask_BTS = ScoreOptions(0.25, softcap=case.softcap, sink_N=arrays.get('sink_N')), mask.array()
    probs_BKGTS = kernels.probabilities(arrays['q'], arrays['k'], mask_BTS, options)
    probs_BKGTS *= kept_BNTS.reshape(probs_BKGTS.shape) / (1 - rate)
    return kernels.seen(kernels.attend(probs_BKGTS, arrays['v'], case.heads[0]), mask_BTS)


def assert_near(found, wanted):
    for name, x in wanted.items():
        np.testing.assert_allclose(found[name], x, atol=3e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize('kernel', KERNELS)
@pytest.mark.parametrize(
    'name',
    [
        'groups',
        'packed in several blocks',
        'softcap and sink',
        pytest.param('several blocks', marks=pytest.mark.proof),
        pytest.param('across', marks=pytest.mark.proof),
        pytest.param('window and prefix', marks=pytest.mark.proof),
    ],
)
def test_a_kernel_drops_what_is_drawn_forward_and_backward(name, kernel):
    case = CASES[name]
    (N, _), (T, S) = case.heads, case.lengths
    kept_BNTS = kept_of(tile_dropout.draw(RATE, KEY, 2, N), T, S)
    wanted = run(functools.partial(by_hand, case, kept_BNTS, RATE), case)
    assert_near(run(functools.partial(by_kernel, kernel, case), case), wanted)


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.parametrize('kernel', KERNELS)
def test_every_mesh_draws_the_same_numbers(kernel):
    case, mesh = CASES['groups'], Mesh(data=2, tensor=4, rules='fsdp_tp')
    attend = functools.partial(by_kernel, kernel, case)
    alone = run(attend, case)
    with sharding.placed(meshes.make_mesh(mesh), mesh):
        assert_near(run(attend, case, jax.device_get(make(case))), alone)


@pytest.mark.slow
@pytest.mark.parametrize('kernel', KERNELS)
def test_trials_with_rates_of_their_own_share_a_program(kernel):
    case = Case(lengths=(70, 70), heads=(2, 2))
    arrays, (mask, _) = make(case), make_mask(case)
    rates, keys = jnp.array([0.1, 0.6]), jax.random.split(KEY, 2)
    attend = functools.partial(by_kernel, kernel, case, arrays, mask)
    together = jax.jit(jax.vmap(attend))(rates, keys)
    for found, rate, key in zip(together, (0.1, 0.6), keys, strict=True):
        np.testing.assert_allclose(found, attend(rate, key), atol=1e-5)


@pytest.mark.proof
@pytest.mark.parametrize('kernel', KERNELS)
def test_a_ring_drops_what_is_drawn_for_each_pair_of_blocks(kernel):
    length, ways = 1024, 4
    case = Case(order='zigzag', lengths=(length, length), heads=(2, 1), sizes=(8, 8))
    order, arrays, (mask, real) = ring_attention.zigzag(length, ways), make(case), make_mask(case)
    arrays = {name: jnp.take(x, order, 2) for name, x in arrays.items()}
    mask = jax.tree.map(lambda x: jnp.take(x, order, 1) if x.ndim else x, mask)
    blocks, size, drawn = 2 * ways, length // (2 * ways), tile_dropout.draw(RATE, KEY, 2, 2)
    rows = [
        [kept_of(tile_dropout.of_block(drawn, jnp.int32(own * blocks + other)), size, size) for other in range(blocks)]
        for own in range(blocks)
    ]
    in_order = np.concatenate([np.concatenate(row, 3) for row in rows], 2)
    kept_BNTS = in_order[:, :, order][:, :, :, order]
    weights = np.where(real[:, order][:, None, :, None], np.random.default_rng(1).standard_normal((2, 2, length, 8)), 0)

    def both(attend):
        def value(arrays):
            out = attend(arrays, mask)
            return (out * weights).sum(), out

        grads, out = jax.jit(jax.grad(value, has_aux=True))(arrays)
        return jax.device_get({'out': np.where(weights, out, 0), **grads})

    def ring(arrays, mask):
        options = ScoreOptions(0.25, dropout_rate=RATE, dropout_key=KEY)
        assert ring_kernels.pick(ASKED[kernel], arrays['q'].shape[2], arrays['k'].shape[2], mask, options) == kernel
        return ring_kernels.ring(kernel, arrays['q'], arrays['k'], arrays['v'], mask, options, interpret=True)

    wanted, mesh = both(functools.partial(by_hand, case, kept_BNTS, RATE)), Mesh(data=2, context=ways)
    wanted['out'] = np.where(weights, wanted['out'], 0)
    with sharding.placed(meshes.make_mesh(mesh), mesh):
        assert_near(both(ring), wanted)
