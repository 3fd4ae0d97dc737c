"""No statistic depends on the order of runs, their unit or which side is called the baseline, for random runs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tformer.lab.scaling_laws import isoflop, power_law
from tformer.lab.statistics import comparison, curves, family, noise
from tformer.lab.statistics.comparison import Comparison, compare

SEEDS = st.integers(0, 2**32 - 1)
FEW = settings(max_examples=25)


def near(value, **more):
    return pytest.approx(value, rel=1e-6, abs=1e-9, nan_ok=True, **more)


def drawn(seed: int) -> tuple[dict[int, float], dict[int, float]]:
    """Two arms of 1 to 6 runs, which share some of their seeds, or none."""
    rng = np.random.default_rng(seed)
    first = rng.choice([0, 0, 2, 10])
    sizes = rng.integers(1, 7, 2) if rng.random() < 0.5 else rng.integers(2, 7, 1).repeat(2)
    make = lambda start, size: {int(start) + i: float(x) for i, x in enumerate(rng.normal(1, 1, size))}  # noqa: E731
    return make(0, sizes[0]), make(first, sizes[1])


def flipped(ends):
    return None if ends is None else near((-ends[1], -ends[0]))


def numbers(found: Comparison) -> tuple:
    return found.test, found.n + found.n_baseline, found.failed, found.unmatched


@FEW
@given(SEEDS)
def test_sides_that_are_swapped_have_the_negative_difference_and_the_same_p(seed: int) -> None:
    arm, baseline = drawn(seed)
    one, other = compare(arm, baseline, resamples=0), compare(baseline, arm, resamples=0)
    assert numbers(one) == numbers(other) and (one.n, one.n_baseline) == (other.n_baseline, other.n)
    assert (other.difference, other.effect) == (near(-one.difference), near(-one.effect))
    assert (other.p, other.sd, other.interval) == (near(one.p), near(one.sd), flipped(one.interval))


@FEW
@given(SEEDS, st.randoms(use_true_random=False))
def test_neither_the_order_nor_the_names_of_seeds_matter(seed: int, shuffle) -> None:
    arm, baseline = drawn(seed)
    found, names = compare(arm, baseline, resamples=0), {i: f'seed {-i}' for i in range(20)}
    for side in (arm, baseline):
        items = list(side.items())
        shuffle.shuffle(items)
        side.clear()
        side.update({names[i]: value for i, value in items})
    again = compare(arm, baseline, resamples=0)
    assert numbers(again) == numbers(found)
    assert (again.difference, again.sd, again.p) == (near(found.difference), near(found.sd), near(found.p))


@FEW
@given(SEEDS, st.floats(-5, 5), st.floats(0.1, 50), st.booleans())
def test_a_shift_of_all_runs_changes_nothing_and_a_factor_the_unit_alone(seed, shift, factor, negative) -> None:
    arm, baseline = drawn(seed)
    factor = -factor if negative else factor
    moved = [{seed: factor * value + shift for seed, value in side.items()} for side in (arm, baseline)]
    one, other = compare(arm, baseline, resamples=0), compare(*moved, resamples=0)
    assert numbers(one) == numbers(other)
    assert (other.difference, other.sd) == (near(factor * one.difference), near(abs(factor) * one.sd))
    assert (other.p, other.effect) == (near(one.p), near(one.effect * np.sign(factor)))
    if one.interval is not None:
        assert other.interval == near(tuple(sorted(factor * end for end in one.interval)))


@FEW
@given(SEEDS)
def test_the_interval_excludes_zero_exactly_if_p_is_below_alpha(seed: int) -> None:
    found = compare(*drawn(seed), resamples=0)
    if found.interval is not None:
        assert found.interval[0] <= found.difference <= found.interval[1]
        assert (found.interval[0] > 0 or found.interval[1] < 0) == (found.p < 0.05)


PS = arrays.arrays(np.float64, st.integers(1, 8), elements=st.floats(0, 1))


@given(PS, st.floats(0.001, 0.5))
def test_holm_rejects_as_the_procedure_that_steps_down(p: np.ndarray, alpha: float) -> None:
    """The smallest p against alpha / m, the next against alpha / (m - 1), until one is not rejected (Holm 1979)."""
    rejected = np.zeros(len(p), bool)
    for step, index in enumerate(np.argsort(p, kind='stable')):
        if p[index] * (len(p) - step) > alpha:
            break
        rejected[index] = True
    adjusted = family.holm(p)
    assert ((adjusted <= alpha) == rejected).all()
    assert (adjusted >= p).all() and (adjusted <= np.minimum(len(p) * p, 1)).all()


@given(PS, st.randoms(use_true_random=False))
def test_holm_does_not_see_the_order(p: np.ndarray, shuffle) -> None:
    order = list(range(len(p)))
    shuffle.shuffle(order)
    np.testing.assert_array_equal(family.holm(p[order]), family.holm(p)[order])


def table_of(seed: int, shared: bool) -> dict[str, dict[int, float]]:
    """A baseline and three arms of four runs; one size of table, so that the draws of the largest t are made once."""
    values = np.random.default_rng(seed).normal([[0], [0], [2], [-3]], size=(4, 4))
    return {
        name: {i + 10 * k * (not shared): float(x) for i, x in enumerate(values[k])} for k, name in enumerate('bxyz')
    }


@FEW
@given(SEEDS, st.booleans(), st.permutations('bxyz'), st.permutations(range(4)))
def test_verdicts_do_not_depend_on_the_order_of_arms_and_seeds(seed, shared, arms, order) -> None:
    table = table_of(seed, shared)
    mixed = {name: {list(table[name])[i]: list(table[name].values())[i] for i in order} for name in arms}
    found, again = family.verdicts(table, 'b', True), family.verdicts(mixed, 'b', True)
    assert found.keys() == again.keys()
    for name, verdict in found.items():
        assert (again[name].label, again[name].method) == (verdict.label, verdict.method)
        # Of four draws in a hundred thousand, rounding decides on which side of a t they lie.
        assert again[name].p == pytest.approx(verdict.p, abs=4e-5)
        assert (again[name].difference, again[name].interval) == (near(verdict.difference), near(verdict.interval))


@FEW
@given(SEEDS, st.booleans(), st.floats(-2, 2))
def test_higher_is_better_is_lower_is_better_of_the_negative(seed: int, shared: bool, shift: float) -> None:
    table = table_of(seed, shared)
    negative = {name: {i: shift - value for i, value in runs.items()} for name, runs in table.items()}
    found, again = family.verdicts(table, 'b', True), family.verdicts(negative, 'b', False)
    for name, verdict in found.items():
        assert (again[name].label, again[name].method) == (verdict.label, verdict.method)
        assert again[name].p == pytest.approx(verdict.p, abs=4e-5)
        assert again[name].interval == flipped(verdict.interval)
        better = {'better': verdict.difference < 0, 'worse': verdict.difference > 0}
        assert better.get(verdict.label, True)


@FEW
@given(SEEDS)
def test_a_table_is_sorted_and_has_every_arm_once(seed: int) -> None:
    table = table_of(seed, True)
    for lower in (True, False):
        first, *rows = comparison.summary(table, 'b', lower, resamples=0)
        means = [row.runs.mean for row in rows]
        assert first.arm == 'b' and sorted(row.arm for row in rows) == ['x', 'y', 'z']
        assert means == sorted(means, reverse=not lower)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8, unique=True), st.floats(-5, 5), st.floats(0.1, 20))
def test_a_noise_floor_moves_with_its_runs(values: list[float], shift: float, factor: float) -> None:
    floor = noise.noise_floor(values)
    moved = noise.noise_floor([factor * value + shift for value in [None, *reversed(values)] if value is not None])
    loose = {'rel': 1e-5, 'abs': 1e-5}
    assert moved.mean == pytest.approx(factor * floor.mean + shift, **loose)
    assert moved.sd == pytest.approx(factor * floor.sd, **loose)
    assert moved.interval == pytest.approx(tuple(factor * end + shift for end in floor.interval), **loose)
    assert moved.sd_interval == pytest.approx(tuple(factor * end for end in floor.sd_interval), **loose)


CURVES = st.tuples(
    st.lists(st.integers(1, 50), min_size=2, max_size=6), st.lists(st.floats(0.1, 1), min_size=6, max_size=6)
).map(lambda both: (np.cumsum(both[0]).astype(float), 10 - np.cumsum(both[1])[: len(both[0])]))


@given(CURVES, st.floats(0, 1))
def test_a_falling_curve_is_at_y_where_it_first_reaches_it(curve, share: float) -> None:
    x, y = curve
    wanted = y[0] + share * (y[-1] - y[0])
    assert curves.at(curve, curves.first_reach(curve, wanted, True)) == pytest.approx(wanted)
    assert curves.first_reach((x, -y), -wanted, False) == pytest.approx(curves.first_reach(curve, wanted, True))
    assert curves.first_reach((3 * x, y), wanted, True) == pytest.approx(3 * curves.first_reach(curve, wanted, True))


@given(CURVES, st.floats(0.01, 1), st.floats(0.1, 10))
def test_one_is_as_much_faster_as_the_other_is_slower(curve, share: float, slower: float) -> None:
    x, y = curve
    wanted, other = y[0] + share * (y[-1] - y[0]), (slower * x, y)
    assert curves.speed_up(curve, other, wanted, True) == pytest.approx(slower)
    assert curves.speed_up(other, curve, wanted, True) == pytest.approx(1 / slower)


@FEW
@given(SEEDS, st.floats(0.01, 100), st.floats(0.01, 100))
def test_a_power_law_keeps_its_exponent_in_any_units_and_order(seed: int, of_x: float, of_y: float) -> None:
    """y = k x^e, so c y = c k / a^e (a x)^e. The inverse law of exact points has the exponent 1 / e."""
    rng = np.random.default_rng(seed)
    x, exponent = np.geomspace(1, 1e4, 7), rng.uniform(0.2, 2) * rng.choice([-1, 1])
    y = 3 * x**exponent * np.exp(0.1 * rng.normal(size=7))
    order, law = rng.permutation(7), power_law.regress(x, y)
    moved = power_law.regress(of_x * x[order], of_y * y[order])
    assert moved.exponent == near(law.exponent) and moved.exponent_interval == near(law.exponent_interval)
    assert moved.k == near(of_y * law.k / of_x**law.exponent)
    exact = power_law.regress(x, 3 * x**exponent)
    assert (exact.k, exact.exponent) == (near(3), near(exponent))
    assert power_law.regress(3 * x**exponent, x).exponent == near(1 / exponent)


@FEW
@given(SEEDS, st.integers(1, 5))
def test_budgets_are_those_that_the_runs_were_made_of(seed: int, count: int) -> None:
    """Each within 3 % of its nominal FLOPs, in any order and unit."""
    rng = np.random.default_rng(seed)
    made = rng.permutation(np.arange(count).repeat(4))
    flops = 10.0**made * rng.uniform(0.97, 1.03, len(made))
    assert isoflop.budgets(flops * 10 ** rng.uniform(0, 20)).tolist() == made.tolist()


@FEW
@given(SEEDS, st.floats(0.1, 10), st.floats(0.1, 10))
def test_profiles_keep_their_exponent_in_any_units_and_order(seed: int, of_N: float, of_C: float) -> None:
    """Parabolas in log N whose bottoms follow 2 C^0.6, with noise."""
    rng = np.random.default_rng(seed)
    C = np.repeat([1e3, 1e4, 1e5], 6)
    away = np.tile(np.linspace(-1, 1, 6), 3)
    N = 2 * C**0.6 * np.exp(away)
    loss = 3 + away**2 + 0.01 * rng.normal(size=18)
    order, found = rng.permutation(18), isoflop.profiles(N, N, loss, flops=C)
    moved = isoflop.profiles(of_N * N[order], N[order], 7 * loss[order], flops=of_C * C[order])
    assert found.law.exponent == pytest.approx(0.6, abs=0.02) and moved.law.exponent == near(found.law.exponent)
    for one, other in zip(found.minima, moved.minima, strict=True):
        assert (other.N, other.loss, other.flops) == (near(of_N * one.N), near(7 * one.loss), near(of_C * one.flops))
        assert other.N_interval == near(tuple(of_N * end for end in one.N_interval))
