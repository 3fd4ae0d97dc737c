"""Scaling laws: known laws come back from synthetic runs, with intervals that hold them as often as they say."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from tformer.errors import UserError
from tformer.lab.scaling_laws import isoflop, power_law, scaling

TRUE = scaling.Law(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658)  # Besiroglu et al. 2024, table 1
NUMBERS = ('E', 'A', 'B', 'alpha', 'beta')


def made(count=240, noise=0.0, seed=0, law=TRUE):
    """Runs spread over sizes and tokens as in Hoffmann et al. 2022: N, D, loss."""
    rng = np.random.default_rng(seed)
    N, D = np.exp(rng.uniform(np.log([5e7, 5e8]), np.log([1.6e10, 1e12]), (count, 2)).T)
    return N, D, law.predict(N, D) * np.exp(noise * rng.standard_normal(count))


def profiled(noise=0.0, seed=0, budgets=(6e18, 3e19, 1e20, 6e20, 3e21)):
    """Nine sizes a budget, around its best: N, D, loss."""
    C = np.repeat(budgets, 9)
    N = TRUE.optimal(C)[0] * np.tile(np.geomspace(1 / 4, 4, 9), len(budgets))
    D = C / (6 * N)
    return N, D, TRUE.predict(N, D) * np.exp(noise * np.random.default_rng(seed).standard_normal(len(C)))


def curve(N, D=tuple(np.geomspace(5e8, 1e12, 200))):
    return N, 6 * N * np.array(D), TRUE.predict(N, np.array(D))


def close(law, other, rtol):
    np.testing.assert_allclose(dataclasses.astuple(law), dataclasses.astuple(other), rtol=rtol)


@pytest.fixture(scope='module')
def noisy():
    runs = made(noise=0.005)
    law = scaling.fit(*runs)
    return runs, law, scaling.bootstrap(*runs, law, resamples=200)


# ------------------------------------------------------------------------------------------------------ approach 3
def test_without_noise_the_law_comes_back():
    close(scaling.fit(*made()), TRUE, rtol=1e-6)


@pytest.mark.parametrize(
    'law', [scaling.Law(0.7, 30.0, 1e4, 0.2, 0.6), scaling.Law(3.0, 1e5, 40.0, 0.8, 0.25)], ids=['small', 'large']
)
def test_other_laws_come_back_too(law):
    close(scaling.fit(*made(100, law=law)), law, rtol=1e-4)


@pytest.mark.slow
def test_with_noise_each_number_lies_within_its_interval_and_the_interval_says_something(noisy):
    _, law, laws = noisy
    found = scaling.intervals(laws, flops=(1e21, 5.76e23))
    truth = {name: getattr(TRUE, name) for name in (*NUMBERS, 'size_exponent')}
    truth |= dict(zip('ND', TRUE.optimal((1e21, 5.76e23)), strict=True))
    assert found.keys() == truth.keys()
    for name, (low, high) in found.items():
        assert np.shape(low) == np.shape(truth[name])
        assert np.all(low < truth[name]) and np.all(truth[name] < high), name
    assert all(found[name][0] < getattr(law, name) < found[name][1] for name in NUMBERS)
    assert found['alpha'][1] - found['alpha'][0] < 0.1
    nearer, further = (found['N'][1] / found['N'][0]).tolist()
    assert 1 < nearer < further < 1.5  # what is extrapolated is known less well


@pytest.mark.slow
def test_the_bootstrap_has_a_seed_and_without_noise_no_width(noisy):
    runs, law, laws = noisy
    same, other = (scaling.bootstrap(*runs, law, resamples=3, seed=seed) for seed in (0, 1))
    np.testing.assert_array_equal(same.alpha, laws.alpha[:3])
    assert (same.alpha != other.alpha).all() and len(set(same.alpha)) == 3
    exact = scaling.bootstrap(*made(), TRUE, resamples=10)
    np.testing.assert_allclose(exact.alpha, TRUE.alpha, rtol=1e-6)


def test_the_bootstrap_finds_the_minimum_that_a_full_grid_of_starts_finds(noisy):
    (N, D, loss), _, laws = noisy
    rng = np.random.default_rng(0)
    for m in range(5):
        rows = rng.integers(len(N), size=len(N))
        full = scaling.fit(N[rows], D[rows], loss[rows])
        close(scaling.Law(*(getattr(laws, name)[m] for name in NUMBERS)), full, rtol=1e-4)


@pytest.mark.proof
def test_intervals_hold_the_truth_as_often_as_they_say():
    """At 80 %, 48 of 60 are expected, give or take 3.1; half as wide they would hold 29, twice as wide 59."""
    held = dict.fromkeys(('alpha', 'beta', 'size_exponent'), 0)
    for seed in range(60):
        runs = made(60, noise=0.005, seed=seed)
        laws = scaling.bootstrap(*runs, scaling.fit(*runs), resamples=40, seed=1000 + seed)
        for name, (low, high) in scaling.intervals(laws, level=0.8).items():
            if name in held:
                held[name] += low < getattr(TRUE, name) < high
    assert all(39 <= count <= 57 for count in held.values()), held


def test_the_objective_by_hand_is_a_sum_in_units_of_delta_squared():
    """One residual of half a delta weighs 1/8, one of three deltas 3 - 1/2."""
    theta = np.array([np.log(1), np.log(2), 1.0])  # 1 + 2 / x^1
    logs, log_loss = np.log([[1.0, 4.0]]), np.log([3.0, 1.5])
    value, _ = power_law.huber(theta, logs, log_loss - [0.5e-3, -3e-3])
    assert value == pytest.approx(1 / 8 + 2.5, rel=1e-9)


@pytest.mark.parametrize('delta', [power_law.DELTA, 0.1, np.inf])
def test_the_gradient_is_that_of_finite_differences(delta):
    N, D, loss = made(50, noise=0.3)
    logs = np.log([N / 1e9, D / 1e11])
    theta, step = np.array([0.6, -1.0, -1.5, 0.3, 0.4]), 1e-6
    _, gradient = power_law.huber(theta, logs, np.log(loss), delta)
    sides = [
        [power_law.huber(theta + s * row, logs, np.log(loss), delta)[0] for s in (step, -step)] for row in np.eye(5)
    ]
    np.testing.assert_allclose(gradient, np.diff(sides)[:, 0] / (-2 * step), rtol=1e-5)


def test_outliers_move_least_squares_and_not_huber():
    N, D, loss = made(noise=0.001)
    rows = np.random.default_rng(1).choice(len(N), 20, replace=False)
    loss[rows] *= 1.2  # diverged, or stopped half way
    robust, squares = scaling.fit(N, D, loss), scaling.fit(N, D, loss, delta=np.inf)
    assert abs(robust.E - TRUE.E) < 0.01 < 0.1 * abs(squares.E - TRUE.E) + 0.009
    for name in ('alpha', 'beta'):
        error, other = (abs(getattr(law, name) - getattr(TRUE, name)) for law in (robust, squares))
        assert error < other / 5, name


def test_the_optimal_sizes_are_those_of_a_search():
    for flops in (1e18, 5.76e23):
        for per_token in (6.0, 9.0):
            N = np.geomspace(1e6, 1e13, 2_000_001)
            D = flops / per_token / N
            best = TRUE.predict(N, D).argmin()
            np.testing.assert_allclose(TRUE.optimal(flops, per_token), (N[best], D[best]), rtol=1e-4)


def test_order_does_not_matter_and_units_move_only_their_coefficient(noisy):
    (N, D, loss), law, _ = noisy
    order = np.random.default_rng(0).permutation(len(N))
    close(scaling.fit(N[order], D[order], loss[order]), law, rtol=1e-5)
    millions = dataclasses.replace(law, A=law.A * 1e-6**law.alpha, B=law.B * 1e-9**law.beta)
    close(scaling.fit(N / 1e6, D / 1e9, loss), millions, rtol=1e-5)


def test_what_is_held_out_is_not_seen():
    N, D, loss = made(noise=0.001)
    largest = np.flatnonzero((N * D).max() / 1.5 < N * D)
    assert 0 < len(largest) < 20
    doubled = np.where((N * D).max() / 1.5 < N * D, 2 * loss, loss)
    law = scaling.fit(*(np.delete(values, largest) for values in (N, D, loss)))
    error = np.sqrt(np.mean(np.log(loss / law.predict(N, D))[largest] ** 2))
    assert scaling.held_out_error(N, D, loss) == pytest.approx(error) and error < 0.01
    assert scaling.held_out_error(N, D, doubled) == pytest.approx(np.log(2), abs=0.01)


# ------------------------------------------------------------------------------------------------- approaches 1, 2
def test_the_three_approaches_agree_on_the_exponent():
    runs = profiled(noise=0.001)
    exponents = [
        isoflop.envelope([curve(N) for N in np.geomspace(7e7, 1.6e10, 10)]).law.exponent,
        isoflop.profiles(*runs).law.exponent,
        scaling.fit(*runs).size_exponent,
    ]
    np.testing.assert_allclose(exponents, TRUE.size_exponent, atol=0.015)


def test_profiles_find_each_optimum_within_its_interval():
    N, D, loss = profiled(noise=0.002)
    found = isoflop.profiles(N, D, loss, level=0.99)
    assert [minimum.flops for minimum in found.minima] == pytest.approx([6e18, 3e19, 1e20, 6e20, 3e21])
    for minimum in found.minima:
        best, _ = TRUE.optimal(minimum.flops)
        low, high = minimum.N_interval
        assert low < best < high < 2 * low and low < minimum.N < high
        assert minimum.loss == pytest.approx(TRUE.predict(best, minimum.flops / 6 / best), rel=0.005)
    assert found.law.exponent_interval[0] < TRUE.size_exponent < found.law.exponent_interval[1]
    order = np.random.default_rng(0).permutation(len(N))
    again = isoflop.profiles(N[order], D[order], loss[order], flops=6 * (N * D)[order], level=0.99)
    assert again.law.exponent == pytest.approx(found.law.exponent, rel=1e-9)


def parabolas(noise, rng, offset=tuple(np.linspace(-1, 2, 7))):
    """Loss 3 + (log N/N_opt)^2 / 10 with N_opt = 1e7 C^0.5 at C = 1, 100, 10000."""
    C, offset = np.repeat([1.0, 100.0, 10000.0], len(offset)), np.tile(offset, 3)
    return 1e7 * C**0.5 * np.exp(offset), 3 + offset**2 / 10 + noise * rng.standard_normal(len(C)), C


def test_a_parabola_by_hand():
    N, loss, C = parabolas(0.0, np.random.default_rng(0))
    found = isoflop.profiles(N, N, loss, flops=C)
    assert [minimum.N for minimum in found.minima] == pytest.approx([1e7, 1e8, 1e9])
    assert [minimum.loss for minimum in found.minima] == pytest.approx([3, 3, 3])
    assert (found.law.k, found.law.exponent) == (pytest.approx(1e7), pytest.approx(0.5))
    assert found.law.k * 1e6**found.law.exponent == pytest.approx(1e10)


def test_intervals_of_minima_hold_the_truth_as_often_as_they_say_and_own_up_to_noise():
    rng, held, uneven = np.random.default_rng(0), 0, 3 * np.linspace(0, 1, 7) ** 3 - 1
    for _ in range(200):
        N, loss, C = parabolas(0.02, rng, uneven)
        for minimum, best in zip(isoflop.profiles(N, N, loss, flops=C, level=0.8).minima, (1e7, 1e8, 1e9), strict=True):
            held += minimum.N_interval[0] < best < minimum.N_interval[1]
    assert 0.76 < held / 600 < 0.84
    N, loss, C = parabolas(0.0, rng, np.linspace(-1, 2, 4))
    blurred = isoflop.profiles(N, N, loss + np.tile([-0.05, 0.15, -0.15, 0.05], 3), flops=C)
    assert blurred.minima[0].N_interval == (0, np.inf)


def test_at_the_ends_of_an_interval_the_slope_is_just_told_from_zero():
    N, loss, C = parabolas(0.02, np.random.default_rng(0), 3 * np.linspace(0, 1, 7) ** 3 - 1)
    (minimum, *_), runs = isoflop.profiles(N, N, loss, flops=C, level=0.9).minima, C == 1
    for end, sign in zip(minimum.N_interval, (-1, 1), strict=True):
        fitted, covariance = np.polyfit(np.log(N[runs] / end), loss[runs], 2, cov=True)
        assert fitted[1] / np.sqrt(covariance[1, 1]) == pytest.approx(sign * stats.t.ppf(0.95, 4))


def test_budgets_are_neighbours_by_flops():
    assert isoflop.budgets(np.array([3.1, 1.0, 3.0, 1.05, 9.0])).tolist() == [1, 0, 1, 0, 2]


LINES = [  # log loss falls by the slope a decade; sizes 1, 4, 16, 64 overtake at C = 10, 100, 1000
    (4.0**i, np.geomspace(0.1, 1e5, 400), lambda C, i=i: 10 ** (-0.1 * (i + 1) * np.log10(C) + 0.05 * i * (i + 1)))
    for i in range(4)
]


def test_an_envelope_by_hand():
    found = isoflop.envelope([(N, C, loss(C)) for N, C, loss in LINES])
    assert (found.flops[0], found.flops[-1]) == (pytest.approx(0.1), pytest.approx(1e5))
    for N, flops in ((1, 1.0), (4, 30.0), (16, 300.0), (64, 1e4)):
        place = np.searchsorted(found.flops, flops)
        assert found.N[place] == N
        best = min(loss(found.flops[place]) for _, _, loss in LINES)
        assert found.loss[place] == pytest.approx(best, rel=1e-3)
    assert found.law.exponent == pytest.approx(np.log10(4), abs=2e-3)  # from 2 at C = 10 to 32 at C = 1000
    sizes = found.law.k * np.array([10, 100, 1000]) ** found.law.exponent
    np.testing.assert_allclose(sizes, [2, 8, 32], rtol=0.01)


def test_a_curve_in_parts_is_the_curve_and_one_that_ends_was_not_overtaken():
    whole = [(N, C, loss(C)) for N, C, loss in LINES]
    N, C, loss = whole[1]
    parts = [*whole, (N, C[:250], loss[:250] * 1.1), (N, C[100:], loss[100:])]
    assert isoflop.envelope(parts).law == isoflop.envelope(whole).law
    ended = [(N, C[C < 50], loss[C < 50]) if N == 4 else (N, C, loss) for N, C, loss in whole]
    with pytest.raises(UserError, match='overtakings on the envelope: 2'):
        isoflop.envelope(ended)


# --------------------------------------------------------------------------------------------------- one variable
def test_a_power_law_by_hand_and_its_intervals():
    exact = power_law.regress([1, 10, 100], [3, 300, 30000])
    assert (exact.k, exact.exponent) == (pytest.approx(3), pytest.approx(2))
    x = np.geomspace(2, 1e4, 12)
    y = 5 * x**0.5 * np.exp(0.2 * np.random.default_rng(0).standard_normal(12))
    law, other = power_law.regress(x, y, level=0.9), stats.linregress(np.log(x), np.log(y))
    wide = stats.t.ppf(0.95, 10)
    assert law.exponent_interval == pytest.approx(
        (other.slope - wide * other.stderr, other.slope + wide * other.stderr)
    )


# ------------------------------------------------------------------------------------------------------- refusals
def spoilt(place, value):
    columns = [column.copy() for column in made(20)]
    columns[place][3] = value
    return columns


SQUARE = made(20)
ONE = np.ones(20)
REFUSED = {
    'too few runs': (lambda: scaling.fit(*made(5)), '5 runs are too few'),
    'lengths': (lambda: scaling.fit(SQUARE[0], SQUARE[1][:-1], SQUARE[2]), 'D has 19'),
    'NaN': (lambda: scaling.fit(*spoilt(2, np.nan)), r'loss\[3\]=nan'),
    'infinite': (lambda: scaling.fit(*spoilt(1, np.inf)), r'D\[3\]=inf'),
    'zero': (lambda: scaling.fit(*spoilt(0, 0)), r'N\[3\]=0 is not a positive'),
    'negative': (lambda: scaling.fit(*spoilt(2, -1.5)), r'loss\[3\]=-1.5'),
    'one size': (lambda: scaling.fit(ONE * 1e8, *SQUARE[1:]), r'N takes too few values \(1e\+08\)'),
    'two token counts': (lambda: scaling.fit(SQUARE[0], np.tile([1e9, 2e9], 10), SQUARE[2]), 'D takes too few'),
    'tied': (lambda: scaling.fit(SQUARE[0], 20 * SQUARE[0], SQUARE[2]), 'cannot be told apart'),
    'flat': (lambda: scaling.fit(*SQUARE[:2], 3 * ONE), 'loss takes too few'),
    'rising': (lambda: scaling.fit(*SQUARE[:2], SQUARE[0] ** 0.1), 'does not fall with N'),
    'lawless resamples': (lambda: scaling.bootstrap(*made(20, noise=0.5), TRUE, 20), 'of 20 resamples have no law'),
    'nothing left': (lambda: scaling.held_out_error(SQUARE[0], 1 / SQUARE[0], SQUARE[2]), '0 runs are too few'),
    'few points': (lambda: power_law.regress([1, 2], [1, 2]), 'x, y: 2 runs are too few'),
    'two budgets': (lambda: isoflop.profiles(*profiled(budgets=(1e19, 1e20))), '2 budgets are too few'),
    'no budgets': (lambda: isoflop.profiles(*made(240)), 'do not form separate budgets'),
    'few sizes': (lambda: isoflop.profiles(ONE, ONE, ONE, flops=2.0 ** np.arange(20)), 'needs 4 sizes or more, not 1'),
    'flops': (lambda: isoflop.profiles(*SQUARE, flops=-ONE), r'flops\[0\]=-1'),
    'falling flops': (lambda: isoflop.envelope([(1e8, [2, 1], [3, 3])]), 'do not rise'),
    'no curves': (lambda: isoflop.envelope([]), '0 runs'),
    'few curves': (
        lambda: isoflop.envelope([curve(1e8), curve(2e8), curve(4e8)]),
        'of 3 sizes, overtakings on the envelope: 2',
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize('case', REFUSED)
def test_refusals_are_one_clear_line(case):
    call, message = REFUSED[case]
    with pytest.raises(UserError, match=message) as error:
        call()
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('rows, which', [(slice(5, 9), 'smaller'), (slice(0, 4), 'larger')])
def test_a_minimum_outside_the_sizes_run_is_refused_and_says_where_to_look(rows, which):
    keep = np.arange(45).reshape(5, 9)
    keep = np.concatenate([keep[:2].ravel(), keep[2, rows], keep[3:].ravel()])
    with pytest.raises(UserError, match=f'budget 1e\\+20: the least loss lies outside .*; run {which} ones'):
        isoflop.profiles(*(column[keep] for column in profiled()))
