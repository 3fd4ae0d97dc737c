"""Position encodings by value, on positions that do not count from 0."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tformer.config import Model
from tformer.layers import positions, rope_scalings
from tformer.layers.resolved import resolve_model


def config(**fields):
    return resolve_model(Model(emb_dim=16, num_heads=2, max_len=16, **fields))


def turned(x, at, **fields):
    """One head x [8] at a position."""
    angles = positions.rope_angles(config(position='rope', **fields), jnp.full((1, 1), at))
    return np.asarray(positions.rotate(jnp.asarray(x, jnp.float32)[None, None, None], angles))[0, 0, 0]


def unit(i):
    return np.eye(8)[i]


# --------------------------------------------------------------------------------------------------- rotary
def test_a_part_of_a_head_rotates_its_first_entries_at_the_frequencies_of_a_head_of_that_size():
    """Black et al. 2022: of 8 entries the first 4 are two pairs, (0, 2) and (1, 3), at 1 and 100^-(2/4) = 0.1."""
    partly = functools.partial(turned, at=3, rope_fraction=0.5, rope_theta=100.0)
    cos, sin = np.cos([3, 0.3]), np.sin([3, 0.3])
    np.testing.assert_allclose(partly(unit(0)), [cos[0], 0, sin[0], 0, 0, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(partly(unit(1)), [0, cos[1], 0, sin[1], 0, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(partly(unit(2)), [-sin[0], 0, cos[0], 0, 0, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(partly(unit(3)), [0, -sin[1], 0, cos[1], 0, 0, 0, 0], atol=1e-6)
    for i in range(4, 8):
        np.testing.assert_array_equal(partly(unit(i)), unit(i))


def test_a_whole_head_has_the_frequencies_of_the_paper():
    """Su et al. 2021, eq. 15: theta^(-2i/8) is 1, 0.1, 0.01 and 0.001 at theta = 10,000."""
    for i, angle in enumerate((5.0, 0.5, 0.05, 0.005)):
        expected = np.cos(angle) * unit(i) + np.sin(angle) * unit(i + 4)
        np.testing.assert_allclose(turned(unit(i), 5), expected, atol=1e-6)


def test_linear_scaling_brings_positions_closer_together():
    """Chen et al. 2023: position 12 of a context of three times the length turns as position 4 did."""
    x = np.arange(1.0, 9.0)
    found = turned(x, 12, rope_scaling='linear', rope_factor=3.0)
    np.testing.assert_allclose(found, turned(x, 4), atol=1e-5)


def test_llama3_scaling_keeps_fast_pairs_and_brings_the_positions_of_slow_ones_closer_together():
    """Turns in 64 positions at theta = 10^6: 10.2, 0.32, 0.01, ...: the first pair stays, the others turn a fourth."""
    x = np.arange(1.0, 9.0)
    fields = {'rope_theta': 1e6, 'rope_trained_len': 64}
    found = turned(x, 12, rope_scaling='llama3', rope_factor=4.0, **fields)
    far, near = turned(x, 12, **fields), turned(x, 3, **fields)
    np.testing.assert_allclose(found, [far[0], *near[1:4], far[4], *near[5:]], atol=1e-5)
    assert np.abs(far - near).max() > 1


def test_yarn_keeps_fast_pairs_stretches_slow_ones_and_ramps_by_their_numbers():
    """Peng et al. 2023, 3.2: at theta = 10^4 the pairs of a head of 8 turn 100, 10, 1 and 0.1 times in 2 pi 100
    positions; with 10 and 1 for the ends, pair 1 stays and pairs 2 and 3 are divided. Half way lies the mean."""
    frequencies, trained = positions.rotary_frequencies(8, 10_000.0), 2 * math.pi * 100
    numbers = {'factor': 4.0, 'trained_len': trained, 'round_ramp': False}
    found = rope_scalings.yarn_scaling(frequencies, fast_turns=10.0, slow_turns=1.0, **numbers)
    np.testing.assert_allclose(found, [1, 0.1, 0.01 / 4, 0.001 / 4], rtol=1e-9)
    found = rope_scalings.yarn_scaling(frequencies, fast_turns=10.0, slow_turns=0.1, **numbers)
    np.testing.assert_allclose(found, [1, 0.1, 0.01 * (1 + 1 / 4) / 2, 0.001 / 4], rtol=1e-9)
    numbers['round_ramp'] = True  # to pairs 0 and 3, where the ends are 0.5 and 2.5
    found = rope_scalings.yarn_scaling(frequencies, fast_turns=100 * 10**-0.5, slow_turns=10**-0.5, **numbers)
    np.testing.assert_allclose(found, [1, 0.1 * (2 / 3 + 1 / 12), 0.01 * (1 / 3 + 2 / 12), 0.001 / 4], rtol=1e-9)


def test_a_ramp_of_yarn_may_end_behind_the_last_pair():
    """At theta = 10^4 a head of 8 has turns 10^-i in 2 pi positions; 10^-5 would be those of pair 5, so from pair 0
    the ramp has come to 3/5 at pair 3. From pair 7 on, the last number of the head's entries, it is cut."""
    frequencies, scaled = positions.rotary_frequencies(8, 10_000.0), rope_scalings.yarn_scaling
    for slow, end in ((1e-5, 5), (1e-9, 7)):
        found = scaled(frequencies, 2.0, 2 * math.pi, fast_turns=1.0, slow_turns=slow, round_ramp=False)
        ramp = np.arange(4) / end
        np.testing.assert_allclose(found / frequencies, 1 - ramp / 2, rtol=1e-9)


def test_yarn_scales_queries_and_keys_by_a_tenth_of_the_logarithm_and_one():
    """Peng et al. 2023, eq. 22; the hub's files may say another factor."""
    x, fields = np.arange(1.0, 9.0), {'rope_scaling': 'yarn', 'rope_factor': math.e**2, 'rope_trained_len': 64}
    for given, factor in ((None, 1.2), (3.0, 3.0)):
        found = turned(x, 7, **fields, rope_attention_factor=given)
        np.testing.assert_allclose(np.linalg.norm(found), factor * np.linalg.norm(x), rtol=1e-5)


def test_dynamic_scaling_is_none_up_to_the_trained_length_and_stretches_the_slowest_pair_beyond():
    """Peng et al. 2023, B.1: at twice the trained length and a factor of 3 the slowest of the pairs slows down by
    3 * 2 - 2 = 4, as linear scaling by 4 would, and the fastest stays."""
    frequencies = positions.rotary_frequencies(8, 10_000.0)
    for length in (32, 64):
        found = rope_scalings.dynamic_scaling(frequencies, 3.0, 64, jnp.asarray(length))
        np.testing.assert_allclose(found, frequencies, rtol=1e-6)
    found = rope_scalings.dynamic_scaling(frequencies, 3.0, 64, jnp.asarray(128))
    np.testing.assert_allclose(found, frequencies * 4 ** -np.array([0, 1 / 3, 2 / 3, 1]), rtol=1e-6)


def test_longrope_divides_by_the_short_list_up_to_the_trained_length_and_by_the_long_one_beyond():
    """Ding et al. 2024; and sqrt(1 + ln s / ln L) of a context s times as long as L."""
    frequencies, lists = np.array([1.0, 0.1]), {'short_factors': (1.0, 2.0), 'long_factors': (4.0, 5.0)}
    for length, expected in ((64, [1.0, 0.05]), (65, [0.25, 0.02])):
        found = rope_scalings.longrope_scaling(frequencies, 64, **lists, length=jnp.asarray(length))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert math.isclose(rope_scalings.longrope_attention(64**2, 1.0, 64), 2**0.5)
    assert rope_scalings.longrope_attention(64, 1.0, 64) == 1


# ---------------------------------------------------------------------------------------------------- biases
@pytest.mark.parametrize('bidirectional', [False, True])
def test_alibi_takes_the_slope_times_the_distance_from_the_score(bidirectional):
    """Press et al. 2022, figure 3: of eight heads the first takes 1/2, 1, 3/2, ... and the last 1/256, 2/256, ..."""
    cfg = resolve_model(Model(emb_dim=16, num_heads=8))
    queries, keys = jnp.asarray([[7, 9]]), jnp.asarray([[4, 7, 8]])
    found = positions.Alibi(cfg, bidirectional).apply({}, queries, keys)
    assert found.shape == (1, 8, 2, 3)
    np.testing.assert_array_equal(found[0, 0], [[-1.5, 0, -0.5], [-2.5, -1, -0.5]])
    np.testing.assert_array_equal(found[0, 7] * 256, [[-3, 0, -1], [-5, -2, -1]])
    np.testing.assert_array_equal(found[0], [found[0, 0] * 2.0**-n for n in range(8)])


def test_alibi_slopes_of_twelve_heads_are_eight_of_eight_and_four_of_sixteen():
    """Press et al. 2022, as their code does: every other slope of sixteen heads, from the first."""
    between = [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    np.testing.assert_allclose(positions.alibi_slopes(12), [2.0**-n for n in range(1, 9)] + between)
    np.testing.assert_allclose(positions.alibi_slopes(1), [2.0**-8])


def test_relative_buckets_of_one_direction_begin_where_the_formula_says():
    """Raffel et al. 2020: 16 exact ones, then 16 whose first distances are 16 * 8^(i/16), rounded up."""
    first = [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    expected = list(range(16)) + [16 + i for i, (a, b) in enumerate(zip(first, [*first[1:], 129], strict=True))
                                  for _ in range(b - a)]  # fmt: skip
    found = positions.relative_bucket(jnp.arange(-2, 200), 32, 128, bidirectional=False)
    assert found.tolist() == [0, 0, *expected, *[31] * (200 - 129)]


def test_relative_buckets_of_both_directions_keep_the_upper_half_for_keys_to_the_right():
    """Of 32, 8 are exact on each side, then 8 whose first distances are 8 * 16^(i/8), rounded up."""
    first = [8, 12, 16, 23, 32, 46, 64, 91]
    left = list(range(8)) + [8 + i for i, (a, b) in enumerate(zip(first, [*first[1:], 129], strict=True))
                             for _ in range(b - a)]  # fmt: skip
    found = positions.relative_bucket(jnp.arange(-128, 129), 32, 128, bidirectional=True).tolist()
    assert found[128:] == left and found[:128] == [16 + x for x in left[:0:-1]]


def test_the_bias_of_a_relative_position_is_the_buckets_number_for_the_head():
    cfg = config(position='relative', relative_buckets=4, relative_max_distance=8)
    table = jnp.arange(8.0).reshape(4, 2)  # bucket b of head n has 2 b + n
    queries, keys = jnp.asarray([[5]]), jnp.asarray([[5, 4, 2, 6, 20]])
    one_way = positions.Relative(cfg, False).apply({'params': {'table': table}}, queries, keys)
    np.testing.assert_array_equal(one_way[0, :, 0], [[0, 2, 4, 0, 0], [1, 3, 5, 1, 1]])
    both = positions.Relative(cfg, True).apply({'params': {'table': table}}, queries, keys)
    np.testing.assert_array_equal(both[0, 0, 0], [0, 2, 2, 6, 6])


@pytest.mark.parametrize(
    ('stack', 'cross', 'both'), [('encoder', False, True), ('decoder', False, False), ('decoder', True, True)]
)
def test_a_bias_looks_both_ways_but_in_a_decoder_at_itself(stack, cross, both):
    cfg = config(position='relative', cross_position=True)
    assert positions.make_bias(cfg, stack, cross=cross, per_layer=False).bidirectional == both
    assert positions.make_bias(cfg, stack, cross=cross, per_layer=True) is None
    alone = config(position='relative')
    assert (positions.make_bias(alone, stack, cross=cross, per_layer=False) is None) == cross


# ------------------------------------------------------------------------------------------- added vectors
def test_a_learned_position_is_the_row_behind_the_offset():
    table = jnp.arange(18 * 3.0).reshape(18, 3)
    layer = positions.Learned(config(position='learned', position_offset=2), 3)
    found = layer.apply({'params': {'table': table}}, jnp.asarray([[0, 5, -1]]))
    np.testing.assert_array_equal(found[0], table[np.array([2, 7, 2])])  # padding has the row of position 0
    shapes = jax.eval_shape(layer.init, jax.random.key(0), jnp.zeros((1, 1), int))
    assert jax.tree.leaves(shapes)[0].shape == (18, 3)


def test_sinusoids_are_those_of_the_position_and_not_of_the_place():
    """Vaswani et al. 2017, 3.5, at positions 7 and 3 of width 6: frequencies 1, 10,000^-(1/3) and 10,000^-(2/3)."""
    found = positions.Sinusoidal(config(), 6).apply({}, jnp.asarray([[7, 3]]))[0]
    for row, position in zip(found, (7, 3), strict=True):
        angles = [position * 10_000 ** (-i / 3) for i in range(3)]
        expected = [f(angle) for angle in angles for f in (np.sin, np.cos)]
        np.testing.assert_allclose(row, expected, atol=1e-6)
