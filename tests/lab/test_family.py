"""Verdicts of families: false labels and power by simulation, SciPy's tests, and the rules on runs that failed or lack.

The simulated families of one case are decided at once: thousands take a fraction of a second.
"""

import math

import numpy as np
import pytest
from scipy import stats

from tformer.lab.statistics import family, power

FAMILIES = 1000
SHAPES = {
    'normal': lambda rng, size: rng.normal(size=size),
    'heavy': lambda rng, size: rng.standard_t(3, size=size),
    'outliers': lambda rng, size: rng.normal(size=size) * np.where(rng.random(size) < 0.1, 10, 1),
    'cauchy': lambda rng, size: rng.standard_cauchy(size),
    'skewed': lambda rng, size: np.exp(rng.normal(size=size)),
    'uniform': lambda rng, size: rng.random(size),
}


def layout(counts, disjoint=False):
    """Returns (arm, seed) of so many runs of each arm, the baseline first."""
    arm = np.repeat(np.arange(len(counts)), counts)
    return arm, np.arange(len(arm)) if disjoint else np.concatenate([np.arange(n) for n in counts])


def noise(shape, size):
    return SHAPES[shape](np.random.default_rng(7), size)


def rate(values, arm, seed, of=slice(None)):
    """Returns the share of families in which an arm of a slice gets a label at alpha 0.05."""
    return (family.decide(values, arm, seed).p[:, of].min(-1) <= 0.05).mean()


def margin(level):
    """Returns a level plus three standard errors of a share counted over FAMILIES."""
    return level + 3 * math.sqrt(level * (1 - level) / FAMILIES)


LAYOUTS = {
    '1 arm': layout([3] * 2),
    '1 arm, other seeds': layout([3] * 2, True),
    '2 arms': layout([3] * 3),
    '5 arms': layout([3] * 6),
    '5 arms, other seeds': layout([3] * 6, True),
    '20 arms': layout([3] * 21),
    '100 arms': layout([3] * 101),
    '5 arms, 10 seeds': layout([10] * 6),
    '20 arms, 5 seeds': layout([5] * 21),
    '10 against 3': layout([10, 3], True),
    '10 against 3, 5 arms': layout([10] + [3] * 5, True),
    '3 against 10, 5 arms': layout([3] + [10] * 5, True),
    '10 against 3, common seeds': layout([10] + [3] * 5),
    'all counts': layout([10, 3, 5, 4, 3, 8], True),
}


@pytest.mark.slow
@pytest.mark.parametrize('case', LAYOUTS)
@pytest.mark.parametrize('shape', SHAPES)
def test_equal_noise_of_any_shape_holds_the_level(shape, case):
    arm, seed = LAYOUTS[case]
    assert rate(noise(shape, (FAMILIES, len(arm))), arm, seed) <= margin(0.06)


@pytest.mark.slow
@pytest.mark.parametrize('case', LAYOUTS)
@pytest.mark.parametrize('stuck', [0.1, 0.2, 0.5])
def test_runs_in_two_clusters_hold_their_level(stuck, case):
    arm, seed = LAYOUTS[case]
    rng = np.random.default_rng(3)
    clusters = rng.random((FAMILIES, len(arm))) < stuck
    level = margin(0.11 if case == '100 arms' else 0.08)
    assert rate(10 * clusters + 0.1 * rng.normal(size=clusters.shape), arm, seed) <= level
    if case != '100 arms':
        assert rate(1.0 * clusters, arm, seed) <= level


LEVELS = {3: 0.2, 5: 0.15, 10: 0.1}


def unequal(n, K, seeds, larger, ratio):
    arm, seed = layout([n] * (K + 1), seeds == 'other')
    values = noise('normal', (FAMILIES, len(arm))) * np.where(np.isin(arm, larger), ratio, 1)
    if seeds == 'correlated':
        values += 3 * np.random.default_rng(1).normal(size=(FAMILIES, n))[:, seed]
    return rate(values, arm, seed)


@pytest.mark.parametrize('n', LEVELS)
@pytest.mark.parametrize('larger', [0, 1])
def test_unequal_noise_holds_its_level(larger, n):
    for K in (2, 5, 20):
        for ratio in (2, 5):
            assert unequal(n, K, 'shared', [larger], ratio) <= margin(LEVELS[n]), (K, ratio)


@pytest.mark.proof
@pytest.mark.parametrize('n', LEVELS)
@pytest.mark.parametrize('seeds', ['shared', 'correlated', 'other'])
def test_every_pattern_of_unequal_noise_holds_its_level(n, seeds):
    for K in (1, 2, 5, 20):
        for larger in ([0], [1], [1, 2], range(K // 2 + 1)):
            for ratio in (2, 3, 5, 10):
                assert unequal(n, K, seeds, larger, ratio) <= margin(LEVELS[n]), (K, larger, ratio)


@pytest.mark.parametrize(('arms', 'n'), [(1, 3), (5, 3), (5, 10)])
def test_of_twenty_thousand_families_of_equal_arms_one_in_twenty_gets_a_label(arms, n):
    """Three standard errors are half a percent here."""
    arm, seed = layout([n] * (arms + 1))
    found = rate(np.random.default_rng(3).normal(size=(20_000, len(arm))), arm, seed)
    assert found == pytest.approx(0.05, abs=3 * math.sqrt(0.05 * 0.95 / 20_000))


@pytest.mark.slow
@pytest.mark.parametrize('correlation', [0.0, 0.5, 0.9])
@pytest.mark.parametrize('n', [3, 5])
@pytest.mark.parametrize('K', [1, 2, 5, 20])
def test_power_is_near_that_of_dunnetts_test_with_seeds_as_blocks(K, n, correlation):
    """Which is computed here anew, from the two-way residuals of complete tables."""
    arm, seed = layout([n] * (K + 1))
    own = noise('normal', (FAMILIES, K + 1, n)) * math.sqrt(1 - correlation)
    values = own + math.sqrt(correlation) * np.random.default_rng(2).normal(size=(FAMILIES, 1, n))
    assert rate(values.reshape(FAMILIES, -1), arm, seed) <= margin(0.05)
    df = K * (n - 1)
    rng = np.random.default_rng(5)
    drawn = rng.normal(size=(50_000, K + 1))
    largest = abs(drawn[:, 1:] - drawn[:, :1]).max(1) / math.sqrt(2)
    critical = np.quantile(largest / np.sqrt(rng.chisquare(df, 50_000) / df), 0.95)
    for shift in (2, 3, 4):
        table = values.copy()
        table[:, 1] += shift * math.sqrt(1 - correlation)
        residuals = table - table.mean(-1, keepdims=True) - table.mean(-2, keepdims=True)
        residuals += table.mean((-1, -2), keepdims=True)
        error = np.sqrt((residuals**2).sum((-1, -2)) / df * 2 / n)
        t = abs(table[:, 1].mean(-1) - table[:, 0].mean(-1)) / error
        found = rate(table.reshape(FAMILIES, -1), arm, seed, slice(0, 1))
        assert found >= (t >= critical).mean() - 0.03, shift


@pytest.mark.slow
@pytest.mark.parametrize('n', [3, 5, 10])
@pytest.mark.parametrize('larger', [0, 1, 2])
def test_power_under_unequal_noise_is_near_that_of_welchs_test_with_holms_correction(larger, n):
    for K in (2, 5, 20):
        arm, seed = layout([n] * (K + 1))
        for ratio in (2, 5):
            values = noise('normal', (FAMILIES, len(arm))) * np.where(arm == larger, ratio, 1)
            values[:, arm == 1] += 4 if larger == 2 else 3 * ratio
            groups = values.reshape(FAMILIES, K + 1, n)
            p = stats.ttest_ind(groups[:, 1:], groups[:, :1], axis=-1, equal_var=False).pvalue
            welch = (family.holm(p)[:, 0] <= 0.05).mean()
            assert rate(values, arm, seed, slice(0, 1)) >= welch - (0.06 if n == 3 and K == 2 else 0.03), (K, ratio)


@pytest.mark.parametrize('shape', SHAPES)
def test_none_of_equal_arms_is_excluded_from_the_best_more_often_than_stated(shape):
    for n, arms in ((3, 3), (3, 6), (5, 12)):
        values = noise(shape, (FAMILIES, arms, n))
        order = values.mean(-1).argsort(-1)
        values = np.take_along_axis(values, order[..., None], 1).reshape(FAMILIES, -1)
        p = family.decide(values, *layout([n] * arms), any_pair=True).p
        assert (p.min(-1) <= 0.05).mean() <= margin(0.06)


# --------------------------------------------------------------------------------------------------- one table
def runs(values, first=0):
    return {first + i: float(value) for i, value in enumerate(values)}


def arms_of(seed=0, K=3, n=4, disjoint=False):
    values = np.random.default_rng(seed).normal(size=(K + 1, n))
    return {f'{i}': runs(row, 100 * i * disjoint) for i, row in enumerate(values)}


def test_p_is_scipys_dunnett_where_seeds_are_not_shared():
    arms = arms_of(disjoint=True)
    arms['2'] = {seed: value + 2 for seed, value in arms['2'].items()}
    groups = [list(each.values()) for each in arms.values()]
    expected = stats.dunnett(*groups[1:], control=groups[0], rng=np.random.default_rng(0))
    found = family.verdicts(arms, '0', True)
    assert {each.method for each in found.values()} == {'Dunnett'}
    own = [stats.ttest_ind(group, groups[0], equal_var=False).pvalue for group in groups[1:]]
    for each, p, alone in zip(found.values(), expected.pvalue, own, strict=True):
        assert each.p == pytest.approx(p, abs=0.004) or each.p == pytest.approx(alone, rel=1e-6)
    low, high = expected.confidence_interval(0.95)
    assert [each.interval for each in found.values()] == [
        pytest.approx(ends, abs=0.02) for ends in zip(low, high, strict=True)
    ]


def test_a_single_arm_with_common_seeds_is_tested_by_pairs():
    arms = arms_of(K=1, n=5)
    found, expected = family.verdicts(arms, '0', True)['1'], stats.ttest_rel(*(list(arms[i].values()) for i in '10'))
    assert found.p == pytest.approx(expected.pvalue, abs=0.003)
    assert found.interval == pytest.approx(tuple(expected.confidence_interval(0.95)), abs=0.03)
    effect = found.difference / np.std(np.subtract(*(list(arms[i].values()) for i in '10')), ddof=1)
    assert found.seeds == power.seeds_needed(effect, True, 0.05)


def test_runs_that_would_decide_are_of_a_test_that_allows_for_all_arms():
    """Bonferroni's share of alpha, by the pooled deviation of a run."""
    arms = arms_of(K=4, n=6, disjoint=True)
    found = family.verdicts(arms, '0', True)
    noise = math.sqrt(np.mean([np.var(list(each.values()), ddof=1) for each in arms.values()]))
    for each in found.values():
        assert each.method == 'Dunnett'
        needed = power.seeds_needed(each.difference / noise, False, 0.05 / 4)
        assert each.seeds == (needed and max(needed, family.LEAST))
    assert any(each.seeds for each in found.values())


def test_noise_that_differs_gives_welch_and_holm():
    arms = arms_of(K=3, n=10, disjoint=True)
    arms['3'] = {seed: 50 * value for seed, value in arms['3'].items()}
    arms['1'] = {seed: value + 2 for seed, value in arms['1'].items()}
    groups = [list(each.values()) for each in arms.values()]
    p = [stats.ttest_ind(group, groups[0], equal_var=False).pvalue for group in groups[1:]]
    found = family.verdicts(arms, '0', lower_is_better=False)
    assert [each.p for each in found.values()] == pytest.approx(family.holm(np.array(p)), rel=1e-6)
    assert found['1'].label == 'better' and {each.method for each in found.values()} == {'Welch and Holm'}
    expected = stats.ttest_ind(groups[1], groups[0], equal_var=False).confidence_interval(1 - 0.05 / 3)
    assert found['1'].interval == pytest.approx(tuple(expected), rel=1e-2)


def test_pooled_noise_sees_what_single_pairs_do_not():
    """Ten arms of three seeds, each two standard errors of its own pairs away, all 5 standard deviations."""
    arms = arms_of(seed=4, K=10, n=3)
    shifted = {name: {s: x + 5 * (name != '0') for s, x in each.items()} for name, each in arms.items()}
    labels = [each.label for each in family.verdicts(shifted, '0', True).values()]
    assert labels.count('worse') >= 9
    assert {each.label for each in family.verdicts(arms, '0', True).values()} == {'within noise'}


BASE = runs([1.00, 1.02, 0.98, 1.01])
GOOD = runs([0.50, 0.51, 0.47, 0.53])
NAN = math.nan


@pytest.mark.parametrize(
    ('arm', 'baseline', 'label'),
    [
        (GOOD, BASE, 'better'),
        (BASE, GOOD, 'worse'),
        (BASE, BASE, 'within noise'),
        (GOOD | {4: None}, BASE, 'fails more often'),
        (GOOD | {4: NAN}, BASE | {4: None}, 'better'),
        (GOOD | {4: NAN}, BASE | {4: None, 5: None}, 'better'),
        (BASE, GOOD | {4: math.inf}, 'baseline fails more often'),
        (BASE | {4: None}, GOOD, 'worse'),
        (dict.fromkeys(range(3)), BASE, 'worse'),
        ({0: NAN}, BASE, 'worse'),
        ({}, BASE, 'no result'),
        ({0: None}, {0: None}, 'no result'),
        (GOOD, {0: None}, 'too few runs'),
        (runs([0.5, 0.51]), BASE, 'too few runs'),
        (GOOD, runs([1.0, 1.1]), 'too few runs'),
        ({0: 0.5, 1: 0.5, 2: NAN, 3: NAN}, BASE, 'too few runs'),
        (runs([0.0] * 3), runs([1.0] * 3), 'noise unknown'),
        (runs([0.0] * 4), runs([1.0] * 4), 'better'),
        (runs([1.0] * 3), runs([1.0] * 3), 'within noise'),
    ],
)
@pytest.mark.parametrize('more', [False, True])
def test_labels_of_runs_that_failed_or_lack(arm, baseline, label, more):
    arms = {'b': baseline, 'a': arm} | ({'few': {0: 1.0}, 'gone': {}} if more else {})
    assert family.verdicts(arms, 'b', lower_is_better=True)['a'].label == label
    assert family.verdicts(arms, 'b', lower_is_better=True, ended=False)['a'].label == 'not yet'
    swapped = {'better': 'worse', 'worse': 'better'}
    mirrored = {name: {s: x if x is None else -x for s, x in each.items()} for name, each in arms.items()}
    higher = family.verdicts(mirrored, 'b', lower_is_better=False)['a']
    assert higher.label == label and swapped.get(label) != label


@pytest.mark.slow
@pytest.mark.parametrize('diverged', [0.2, 0.38, 0.6])
def test_an_arm_whose_worst_runs_diverge_is_not_better(diverged):
    rng = np.random.default_rng(0)
    for _ in range(300):
        n = int(rng.choice([3, 5, 10]))
        arms = {name: runs(rng.normal(size=n)) for name in 'bac'}
        limit = stats.norm.ppf(1 - diverged)
        arms['a'] = {seed: value if value < limit else NAN for seed, value in arms['a'].items()}
        found = family.verdicts(arms, 'b', lower_is_better=True)['a'].label
        assert found != 'better' or not any(math.isnan(value) for value in arms['a'].values())


def test_one_more_seed_of_one_arm_does_not_change_how_seeds_are_used():
    arm, seed = layout([4, 3, 3])
    assert family.shares_seeds(arm, seed) and not family.shares_seeds(*layout([4, 3, 3], True))
    assert not family.shares_seeds(np.array([0, 0, 0, 1, 1, 1]), np.array([0, 1, 2, 1, 2, 3]))


@pytest.mark.parametrize('scale', [1e-300, 1e-30, 1.0, 1e30, 1e200, 1e300])
@pytest.mark.parametrize('disjoint', [False, True])
def test_verdicts_do_not_depend_on_the_unit(scale, disjoint):
    arms = arms_of(K=3, n=5, disjoint=disjoint)
    arms['2'] = {seed: value + 9 for seed, value in arms['2'].items()}
    found = family.verdicts(arms, '0', True)
    arms = {name: {seed: scale * value for seed, value in each.items()} for name, each in arms.items()}
    scaled = family.verdicts(arms, '0', True)
    assert [each.label for each in scaled.values()] == ['within noise', 'worse', 'within noise']
    assert [each.p for each in scaled.values()] == pytest.approx([each.p for each in found.values()], rel=1e-3)
    assert scaled['2'].difference == pytest.approx(scale * found['2'].difference)


@pytest.mark.parametrize('huge', [1e3, 1e12, 1e30])
@pytest.mark.parametrize('n', [3, 5])
def test_a_run_that_diverged_to_a_finite_value_hides_no_other_arm(n, huge):
    arms = arms_of(seed=1, K=3, n=n)
    arms['2'] = {seed: value + 30 for seed, value in arms['2'].items()}
    arms['3'][1] = huge
    labels = [each.label for each in family.verdicts(arms, '0', True).values()]
    assert labels == ['within noise', 'worse', 'within noise']


def test_near_the_best():
    arms = {'a': runs([1.0, 1.1, 1.2]), 'b': runs([1.05, 1.1, 1.16]), 'c': runs([2.0, 2.1, 2.2]), 'd': {0: 1.0}}
    assert family.near_best(arms, 'a') == ['b']
    assert family.near_best(arms, 'd') == [] and family.near_best({'a': arms['a']}, 'a') == []


@pytest.mark.parametrize(('apart', 'near'), [(1.65, ['1']), (2.0, [])])
def test_near_the_best_allows_for_the_choice_of_it(apart, near):
    """Of eight arms 1.65 noises are few for Tukey's range, of any two of them, and many against a given baseline."""
    noise = np.array([-1.2, -0.5, 0.1, 0.6, 1.0])
    values = [noise + mean for mean in (0, apart, 6, 6, 6, 6, 6, 6)]
    arms = {str(i): {(i, j): value for j, value in enumerate(each)} for i, each in enumerate(values)}
    assert family.near_best(arms, '0') == near
    assert (stats.tukey_hsd(*values).pvalue[0, 1] > 0.05) == bool(near)
    assert stats.dunnett(*values[1:], control=values[0]).pvalue[0] < 0.05


def test_the_constant_that_arms_and_seeds_share_is_not_taken_for_an_effect() -> None:
    """Of hundreds of seeds its eigenvalue, which is 0, is rounded to more than the default of numpy's cut-off."""
    rng, n = np.random.default_rng(0), 500
    values, arm = rng.normal(2, 0.05, 2 * n), np.repeat([0, 1], n)
    seed = np.tile(np.arange(n), 2)
    design = np.concatenate([np.eye(2)[arm], np.eye(n)[seed]], 1)
    fit = family._fit(values, design, 2)
    assert fit.difference == pytest.approx([(values[n:] - values[:n]).mean()], abs=1e-12)
    assert fit.covariance == pytest.approx(np.array([[2 / n]])) and fit.freedom.sum() == pytest.approx(n - 1)
