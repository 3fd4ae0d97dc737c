"""Attention of blocks of queries: the values of `reference`, without the keys that no query of a block sees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_cases import CASES, Case, make, make_mask
from tformer.layers.blocked import blocked
from tformer.layers.kernels import ScoreOptions, reference
from tformer.layers.masks import AttentionMask


def by_array(q, k, v, mask, options):
    return reference(q, k, v, mask.array(), options)


def gradients(kernel, case, **options):
    """Returns a jitted function of the arrays and the mask: the gradients of a fixed weighting of the outputs, and the
    outputs, zeros at padding."""
    _, real = make_mask(case)

    @jax.jit
    def program(arrays, mask):
        def loss(arrays):
            given = ScoreOptions(
                0.25, softcap=case.softcap, sink_N=arrays.get('sink_N'), bias=arrays.get('bias'), **options
            )
            out = kernel(arrays['q'], arrays['k'], arrays['v'], mask, given)
            out = jnp.where(real[:, None, :, None], out, 0)
            return (out * np.random.default_rng(1).standard_normal(out.shape)).sum(), out

        return jax.grad(loss, has_aux=True)(arrays)

    return program


def with_bias(case, rows):
    arrays, ((T, S), (N, _)) = make(case), (case.lengths, case.heads)
    bias = np.random.default_rng(3).standard_normal((rows, N, T, S))
    return arrays | {'bias': jnp.asarray(bias, jnp.float32)}


def assert_near(case, arrays):
    mask, _ = make_mask(case)
    grads, out = gradients(blocked, case)(arrays, mask)
    expected_grads, expected = gradients(by_array, case)(arrays, mask)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, expected_grads[name], atol=2e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize('name', CASES)
def test_blocks_see_whom_the_array_says(name):
    assert_near(CASES[name], make(CASES[name]))


@pytest.mark.parametrize('rows', [1, 2])
@pytest.mark.parametrize('case', [Case(heads=(4, 2)), Case(lengths=(300, 300), heads=(2, 1), widths=(70,), window=70)])
def test_each_block_has_its_part_of_a_bias(case, rows):
    assert_near(case, with_bias(case, rows))


S = 384  # three blocks
PLACES_BS = jnp.broadcast_to(jnp.arange(S), (2, S))
TURNED_BS = PLACES_BS[:, ::-1]
WHOLE = AttentionMask(PLACES_BS, PLACES_BS, causal=True, order='behind')
ONE_BLOCK = {
    'a prefix of more than a block': WHOLE.replace(prefix_BS=PLACES_BS < 200),
    'positions that count down': AttentionMask(TURNED_BS, TURNED_BS, causal=True),
    'a window of positions that count down': AttentionMask(
        TURNED_BS, TURNED_BS, window=jnp.int32(150), widths=(150,), causal=True
    ),
    'tokens of hypotheses': AttentionMask(
        jnp.full((2, S), S), PLACES_BS, visible_BTS=(PLACES_BS % 7 > 1)[:, None] & (PLACES_BS % 5 > 0)[..., None],
        causal=True, order='behind',
    ),
}  # fmt: skip


@pytest.mark.parametrize('name', ONE_BLOCK)
def test_what_places_do_not_tell_is_one_block(name):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 2, S, 8))
    found, expected = (kernel(q, k, v, ONE_BLOCK[name], ScoreOptions(0.3)) for kernel in (blocked, by_array))
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.slow
def test_dropout_draws_for_each_block_and_of_one_block_as_the_reference():
    rate, options = 0.25, ScoreOptions(0.3, dropout_rate=0.25, dropout_key=jax.random.key(1))
    q, k = jax.random.normal(jax.random.key(0), (2, 2, 2, S, 8))
    v = jnp.broadcast_to(jnp.eye(S), (2, 2, S, S))  # so that the outputs are the probabilities
    full = AttentionMask(PLACES_BS, PLACES_BS)
    np.testing.assert_allclose(blocked(q, k, v, full, options), by_array(q, k, v, full, options), atol=1e-6)
    near = WHOLE.replace(window=jnp.int32(129), widths=(129,))  # so that the second block has as many keys as the third
    dropped, plain = (np.asarray(blocked(q, k, v, near, each)) for each in (options, ScoreOptions(0.3)))
    sees, kept = plain > 0, dropped > 0
    np.testing.assert_allclose(dropped[kept], plain[kept] / (1 - rate), rtol=1e-5)
    assert abs(kept[sees].mean() - (1 - rate)) < 5 * (rate * (1 - rate) / sees.sum()) ** 0.5
    second, third = (kept[:, :, 128 * i : 128 * i + 128, 128 * i - 128 : 128 * i + 128] for i in (1, 2))
    assert (second != third).any(), 'each block has draws of its own'


@pytest.mark.parametrize(
    'case, most',
    [
        (Case(lengths=(1024, 1024)), (1 + 1 / 8) / 2),  # the triangle, and half a block in each
        (Case(lengths=(1024, 1024), widths=(128,), window=128), 2 / 8),  # a block and what is before it
        (Case(lengths=(1024, 1024), causal=False, widths=(65,), window=65), 2 / 8),
    ],
)
def test_keys_that_no_query_of_a_block_sees_cost_nothing(case, most):
    def costs(kernel):
        compiled = gradients(kernel, case).lower(make(case), make_mask(case)[0]).compile()
        return compiled.cost_analysis()['flops'], compiled.memory_analysis().temp_size_in_bytes

    for found, whole in zip(costs(blocked), costs(by_array), strict=True):
        assert found < (most + 0.08) * whole
