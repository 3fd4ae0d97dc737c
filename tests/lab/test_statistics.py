"""Statistics are SciPy's and the books', lie at their stated rates on simulated runs, and say what they leave out."""

import math
import warnings

import numpy as np
import pytest
from sacrebleu.metrics import BLEU
from scipy import stats

import judged_again
from tformer.errors import UserError
from tformer.lab.statistics import comparison, curves, family, noise, power, resampling
from tformer.lab.statistics.comparison import compare


@pytest.fixture(autouse=True)
def warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        yield


def runs(values, first=0):
    return {first + i: value for i, value in enumerate(values)}


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


# -------------------------------------------------------------------------------------------------- by hand
def test_pairs_by_hand():
    """Differences -0.1, -0.2, -0.3: sd 0.1, error 0.1 / sqrt 3, t^2 = 12; of two degrees p = 1 - t / sqrt(t^2 + 2).

    t at 0.975 is 4.302653, Hedges' factor Gamma(1) / Gamma(1/2) = 1 / sqrt pi.
    """
    found = compare({'a': 3.0, 'b': 3.2, 'c': 3.1}, {'c': 3.4, 'a': 3.1, 'b': 3.4}, resamples=99)
    assert (found.test, found.n, found.n_baseline, found.failed, found.unmatched) == ('paired t', 3, 3, 0, 0)
    assert found.difference == pytest.approx(-0.2)
    assert found.sd == pytest.approx(0.1)
    assert found.p == pytest.approx(1 - math.sqrt(12 / 14))
    assert found.interval == pytest.approx((-0.2 - 0.2484138, -0.2 + 0.2484138))
    assert found.effect == pytest.approx(-2 / math.sqrt(math.pi))
    assert found.bootstrap is None
    assert compare([3.0, 3.2, 3.1], np.array([3.1, 3.4, 3.4])) == found


def test_other_seeds_by_hand():
    """Variances 1 and 4: error^2 = 5/3, df = (5/3)^2 / ((1/3)^2 / 2 + (4/3)^2 / 2) = 50/17, pooled sd sqrt 2.5.

    Hedges' factor of four degrees is Gamma(2) / (sqrt 2 Gamma(3/2)) = sqrt(2 / pi).
    """
    found = compare(runs([1, 2, 3]), runs([2, 4, 6], first=10))
    assert (found.test, found.n, found.n_baseline, found.unmatched) == ('Welch t', 3, 3, 0)
    assert (found.difference, found.sd) == pytest.approx((-2, math.sqrt(5)))
    half = stats.t.ppf(0.975, 50 / 17) * math.sqrt(5 / 3)
    assert found.interval == pytest.approx((-2 - half, -2 + half))
    assert found.effect == pytest.approx(-2 / math.sqrt(2.5) * math.sqrt(2 / math.pi))
    more = compare(runs([1, 2, 3]), runs([2, 4, 6, 8, 10], first=10))  # pooled variance (2 * 1 + 4 * 10) / 6 = 7
    assert more.effect == pytest.approx(-4 / math.sqrt(7) * comparison.unbiased(6))
    assert comparison.unbiased(6) == pytest.approx(1 - 3 / (4 * 6 - 1), abs=0.002)  # his approximation


def test_one_run_by_hand():
    """5 against 1, 2, 3: t^2 = 9 / (1 + 1/3), two degrees. On either side, with or without its seed in common."""
    p = 1 - math.sqrt(6.75 / 8.75)
    for seed in (0, 7):
        found = compare({seed: 5}, runs([1, 2, 3]))
        assert (found.test, found.n, found.n_baseline, found.unmatched) == ('one-run t', 1, 3, 0)
        assert (found.difference, found.sd, found.p) == pytest.approx((3, math.sqrt(2), p))
        half = 4.30265273 * math.sqrt(4 / 3)
        assert found.interval == pytest.approx((3 - half, 3 + half))
        other = compare(runs([1, 2, 3]), {seed: 5})
        assert (other.n, other.n_baseline, other.difference, other.p) == (3, 1, -3, pytest.approx(p))


def test_holm_by_hand():
    """Sorted 0.005 0.01 0.03 0.04 times 4 3 2 1 = 0.02 0.03 0.06 0.04; the last is raised to 0.06."""
    assert family.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert family.holm([0.9, 0.8]) == pytest.approx([1, 1])
    assert family.holm([0.2]) == pytest.approx([0.2])
    assert family.holm([]).shape == (0,)
    assert family.holm([math.nan, 0.01, 0.02]) == pytest.approx([math.nan, 0.03, 0.04], nan_ok=True)


def test_noise_floor_by_hand():
    """Of 1, 2, 3, 4: sd^2 = 5/3; chi-square of 3 degrees at 0.025 and 0.975: 0.2157953, 9.348404; t is 3.182446."""
    floor = noise.noise_floor([1, 2, math.nan, 3, 4])
    assert (floor.n, floor.failed, floor.mean) == (4, 1, 2.5)
    assert floor.sd == pytest.approx(math.sqrt(5 / 3))
    assert floor.sd_interval == pytest.approx((math.sqrt(5 / 9.348404), math.sqrt(5 / 0.2157953)))
    half = 3.182446 * math.sqrt(5 / 12)
    assert floor.interval == pytest.approx((2.5 - half, 2.5 + half))
    assert floor.detectable == pytest.approx(floor.sd * power.detectable_effect(4, paired=False))
    assert noise.noise_floor([1, 2, 3, 4], seeds=64).detectable == pytest.approx(floor.sd * 0.5, rel=0.01)
    alone = noise.noise_floor({3: 7.0, 4: None})
    assert (alone.n, alone.failed, alone.mean, alone.sd_interval) == (1, 1, 7.0, None)
    assert math.isnan(alone.sd)
    assert noise.noise_floor({}).n == 0
    huge = noise.noise_floor([1e300, 2e300, 3e300])
    assert (huge.mean, huge.sd) == pytest.approx((2e300, 1e300))


# ---------------------------------------------------------------------------------------------- as SciPy's are
@pytest.mark.parametrize('n', [2, 3, 10, 40])
def test_t_tests_are_scipys(n):
    a, b = normal(n, 2, n) * [[1.0], [3.0]] + [[0.7], [0.0]]
    found, expected = compare(a, b, alpha=0.1, resamples=0), stats.ttest_rel(a, b)
    assert (found.p, found.interval) == (
        pytest.approx(expected.pvalue),
        pytest.approx(tuple(expected.confidence_interval(0.9))),
    )
    found, expected = compare(runs(a), runs(b[:-1], 100), 0.1, 0), stats.ttest_ind(a, b[:-1], equal_var=n == 2)
    assert (found.p, found.interval) == (
        pytest.approx(expected.pvalue),
        pytest.approx(tuple(expected.confidence_interval(0.9))),
    )
    assert found.test == ('one-run t' if n == 2 else 'Welch t')


def test_bootstrap_is_close_to_scipys_for_many_runs():
    a, b = np.random.default_rng(0).gamma(2.0, size=(2, 300))
    for found, groups in (
        (compare(a, b), (a - b,)),
        (compare(runs(a), runs(b, 1000)), (a, b)),
    ):
        expected = stats.bootstrap(
            groups,
            lambda *g, axis=-1: g[0].mean(axis) - sum(each.mean(axis) for each in g[1:]),
            method='BCa',
            vectorized=True,
            rng=np.random.default_rng(1),
        ).confidence_interval
        width = expected.high - expected.low
        assert found.bootstrap == pytest.approx((expected.low, expected.high), abs=0.04 * width)
        assert found.bootstrap != found.interval


def test_bootstrap_is_seeded_and_none_for_few():
    a, b = normal(3, 2, 6)
    assert compare(a, b) == compare(a, b) != compare(a, b, seed=1)
    for n, paired, other in ((2, False, False), (3, False, True), (4, True, True)):
        assert (compare(a[:n], b[:n]).bootstrap is not None) == paired
        assert (compare(runs(a[:n]), runs(b[:n], 10)).bootstrap is not None) == other
    assert compare(runs(a[:2]), runs(b, 10)).bootstrap is None
    assert compare([0.0, 0, 0, 1], [0.0, 0, 0, 0]).bootstrap is None  # (3/4)^4 of the resamples are constant


# ------------------------------------------------------------------------------------------------------- power
@pytest.mark.parametrize(
    ('effect', 'paired', 'alpha', 'chance', 'n'),
    [
        (0.5, False, 0.05, 0.8, 64),  # Cohen 1988, table 2.4.1
        (0.8, False, 0.05, 0.8, 26),
        (1.0, False, 0.05, 0.8, 17),
        (0.5, False, 0.05, 0.9, 86),  # 85 there, by his approximation
        (0.5, False, 0.01, 0.8, 96),
        (0.5, True, 0.05, 0.8, 34),
        (0.2, True, 0.05, 0.8, 199),
        (0.8, True, 0.05, 0.8, 15),
    ],
)
def test_seeds_needed_are_the_tables(effect, paired, alpha, chance, n):
    assert power.seeds_needed(effect, paired, alpha, chance) == n
    assert power.seeds_needed(-effect, paired, alpha, chance) == n
    assert power.power(effect, n - 1, paired, alpha) < chance <= power.power(effect, n, paired, alpha)
    assert power.detectable_effect(n, paired, alpha, chance) == pytest.approx(effect, rel=0.04)


def test_power_at_its_ends():
    assert power.power(0, 5) == pytest.approx(0.05)
    for effect in np.arange(0.5, 6, 0.1):  # where SciPy's tails underflow
        assert power.power(-effect, 100) == power.power(effect, 100) > 0.99
        assert power.power(effect, 100) <= 1 and power.power(effect, 5000) == pytest.approx(1)
    assert power.power(0, 5, paired=False, alpha=0.2) == pytest.approx(0.2)
    assert power.seeds_needed(math.inf) == power.seeds_needed(-math.inf) == power.seeds_needed(100) == 2
    assert power.seeds_needed(0) is power.seeds_needed(math.nan) is power.seeds_needed(0.001) is None
    assert power.detectable_effect(1) == math.inf
    assert power.power(power.detectable_effect(2), 2) == pytest.approx(0.8)


def test_power_is_what_simulated_runs_show():
    for n, effect, paired in ((3, 2.5, True), (5, 2.0, False)):
        a, b = normal(n, 2, n, 20_000)
        test = stats.ttest_1samp(a + effect, 0) if paired else stats.ttest_ind(a + effect, b)
        assert np.mean(test.pvalue <= 0.05) == pytest.approx(power.power(effect, n, paired), abs=0.014)


# ---------------------------------------------------------------------------------------- what was left out
def test_failed_runs_are_left_out_with_their_partners_and_counted():
    arm = {0: 1.0, 1: math.nan, 2: 2.0, 3: 4.0, 9: 7.0}
    baseline = {0: 0.5, 1: 3.0, 2: None, 3: 1.0, 4: math.inf, 5: 8.0}
    found = compare(arm, baseline)
    assert (found.test, found.n, found.failed, found.unmatched) == ('paired t', 2, 3, 4)  # 2, 9 and 1, 5
    assert found.n + found.n_baseline + found.failed + found.unmatched == len(arm) + len(baseline)
    kept = compare({0: 1.0, 3: 4.0}, {0: 0.5, 3: 1.0})
    assert (found.difference, found.p, found.interval) == (kept.difference, kept.p, kept.interval)
    none = compare({0: math.nan, 1: None}, {0: 1.0, 1: 2.0})
    assert (none.test, none.n, none.n_baseline, none.failed, none.interval) == ('none', 0, 2, 2, None)
    assert math.isnan(none.p) and math.isnan(none.difference)


def test_no_noise_is_no_verdict():
    """Two equal differences out of a coarse metric are no proof, though a t test says p = 0."""
    same = compare([0.7, 0.8], [0.7, 0.8])
    assert (same.p, same.interval, same.difference) == (1, (0, 0), 0)
    for arm, baseline in (([0.7, 0.8], [0.5, 0.6]), ([0.3], [0.2]), (np.float32([0.9, 0.1]), np.float32([0.8, 0.0]))):
        found = compare(arm, baseline)
        assert (math.isnan(found.p) or found.p == 0.5) and found.interval is None and found.bootstrap is None
        assert found.difference == pytest.approx(arm[0] - baseline[0])
        assert family.verdicts({'a': arm, 'b': baseline}, 'b', True)['a'].label == 'too few runs'
    assert compare([0.7, 0.8001], [0.5, 0.6]).p < 0.001


def test_runs_without_spread_are_judged_by_all_orders():
    """Ten runs that are all right against ten that are all wrong; scipy enumerates the orders."""
    right, wrong = dict.fromkeys(range(10), 1.0), dict.fromkeys(range(10), 0.0)
    paired = compare(right, wrong)
    assert (paired.test, paired.p) == ('permutation', 2**-9)
    for ours, theirs in ((4, 4), (3, 5)):
        found = compare(dict.fromkeys(range(ours), 1.0), dict.fromkeys(range(10, 10 + theirs), 0.0))
        test = stats.permutation_test(
            (np.ones(ours), np.zeros(theirs)), lambda a, b, axis: a.mean(axis) - b.mean(axis), n_resamples=np.inf,
            vectorized=True,
        )  # fmt: skip
        exact = 2 if ours == theirs else 1
        assert found.p == pytest.approx(exact / math.comb(ours + theirs, ours)) and found.p <= test.pvalue + 1e-12
    labels = {row.arm: row.label for row in comparison.summary({'b': wrong, 'a': right}, 'b', lower_is_better=False)}
    assert labels == {'b': 'baseline', 'a': 'better'}
    few = comparison.summary({'b': dict.fromkeys(range(3), 0.0), 'a': dict.fromkeys(range(3), 1.0)}, 'b', False)
    assert few[1].label == 'noise unknown' and few[1].verdict.p == 2 / math.comb(6, 3)


def test_a_few_common_seeds_among_many_are_no_pairs():
    """Two in common of ten a side: by them alone a difference of five standard deviations is within noise."""
    rng = np.random.default_rng(0)
    baseline = dict(enumerate(rng.normal(2, 0.1, 10)))
    arm = {8 + i: value for i, value in enumerate(rng.normal(2.5, 0.1, 10))}
    found = compare(arm, baseline)
    assert (found.test, found.n, found.n_baseline, found.unmatched) == ('Welch t', 10, 10, 0) and found.p < 1e-6
    assert compare({i: baseline[i] + 1 + 0.1 * i for i in range(3)}, baseline).test == 'paired t'


def test_which_runs_are_pairs_must_be_said():
    for arm, baseline in (([1, 2], [1, 2, 3]), ([1, 2], {0: 1, 1: 2}), ({0: 1, 1: 2}, np.ones(2))):
        with pytest.raises(UserError, match='must be'):
            compare(arm, baseline)


# --------------------------------------------------------------------------------------------------- the rates
def near_rate(hits, rate, sides=4):
    """Whether the share of hits is within so many standard errors of the rate."""
    return abs(np.mean(hits) - rate) <= sides * math.sqrt(rate * (1 - rate) / len(hits))


@pytest.mark.slow
@pytest.mark.parametrize('n', [3, 5, 10])
def test_equal_arms_are_called_different_at_the_stated_rate(n):
    """Runs of one seed share half their variance. Welch's test of few, equally noisy runs is below 0.05."""
    repeats = 3000
    shared, a, b, other = normal(n, 4, repeats, n)
    for test, size, ours, theirs, first in (
        ('paired t', n, a + shared, b + shared, 0),
        ('Welch t', n, a, b, n),
        ('one-run t', 1, a, other, n),
    ):
        called, covered = [], []
        for x, y in zip(ours[:, :size], theirs, strict=True):
            found = compare(runs(x), runs(y, first), resamples=0)
            assert found.test == test
            called.append(found.p <= 0.05)
            covered.append(found.interval[0] <= 0 <= found.interval[1])
        assert called == [not inside for inside in covered]
        assert near_rate(called, {3: 0.035, 5: 0.044, 10: 0.048}[n] if test == 'Welch t' else 0.05), test


@pytest.mark.parametrize('n', [5, 10])
def test_intervals_cover_the_truth(n):
    """The bootstrap's of skewed runs too, where percentiles of means would fall to 0.8 and below."""
    truth, repeats = 2.0, 600
    covered = {'bootstrap': [], 'skewed': [], 'sd': [], 'mean': []}
    skew = np.random.default_rng(n).gamma(1.0, size=(repeats, n)) - 1
    for x, g in zip(normal(n, repeats, n), skew, strict=True):
        floor = noise.noise_floor(3 * x + truth)
        covered['sd'].append(floor.sd_interval[0] <= 3 <= floor.sd_interval[1])
        covered['mean'].append(floor.interval[0] <= truth <= floor.interval[1])
        for name, values in (('bootstrap', x), ('skewed', g)):
            low, high = compare(values, np.zeros(n), 0.05, 799).bootstrap
            covered[name].append(low <= 0 <= high)
    assert near_rate(covered['sd'], 0.95) and near_rate(covered['mean'], 0.95)
    assert 0.92 <= np.mean(covered['bootstrap']) <= 0.985
    assert 0.89 <= np.mean(covered['skewed']) <= 0.985


# ------------------------------------------------------------------------------------------------- the summary
ARMS = {
    'wide': runs([1.95, 2.03, 2.0, 1.98, math.nan]),
    'base': runs([3.0, 3.1, 3.05, 3.02, 2.99]),
    'same': runs([3.0, 3.09, 3.07, 3.01, 3.0]),
    'worse': runs([4.0, 4.13, 4.02, 4.05, 3.96]),
    'gone': runs([math.nan] * 5),
    'once': {77: 3.02},
}


@pytest.mark.parametrize('lower', [True, False])
def test_summary(lower):
    rows = comparison.summary(ARMS, 'base', lower)
    order = ['wide', 'same', 'once', 'worse']
    means = {row.arm: row.runs.mean for row in rows}
    assert means['once'] < means['same']
    order = ['wide', 'once', 'same', 'worse']
    assert [row.arm for row in rows] == ['base', *(order if lower else order[::-1]), 'gone']
    by_name = {row.arm: row for row in rows}
    labels = {'wide': 'better', 'worse': 'worse'} if lower else {'wide': 'worse', 'worse': 'better'}
    labels |= {'base': 'baseline', 'same': 'within noise', 'once': 'too few runs', 'gone': 'worse'}
    if lower:
        labels['wide'] = 'fails more often'
    assert {name: row.label for name, row in by_name.items()} == labels
    assert by_name['base'].comparison is None and by_name['wide'].runs.failed == 1
    assert by_name['gone'].runs.failed == 5 and by_name['gone'].verdict.seeds is None
    for row in rows[1:]:
        assert repr(row.comparison) == repr(compare(ARMS[row.arm], ARMS['base']))
    verdicts = family.verdicts(ARMS, 'base', lower)  # some of them hold a nan, which equals nothing
    assert {name: repr(row.verdict) for name, row in by_name.items() if name != 'base'} == {
        name: repr(verdict) for name, verdict in verdicts.items()
    }
    unfinished = comparison.summary(ARMS, 'base', lower, ended=False)
    assert {row.label for row in unfinished[1:]} == {'not yet'} and math.isnan(unfinished[1].verdict.p)
    with pytest.raises(UserError, match="did you mean 'base'"):
        comparison.summary(ARMS, 'bas', lower)
    assert [row.arm for row in comparison.summary({'base': ARMS['base']}, 'base', lower)] == ['base']


# ---------------------------------------------------------------------------------------------- generated text
def bleu(totals):
    """Papineni et al. 2002 of sacrebleu's statistics [..., 10]: lengths, then four matches, then four counts."""
    precisions = totals[..., 2:6] / totals[..., 6:]
    brevity = np.minimum(1, np.exp(1 - totals[..., 1] / totals[..., 0]))
    return 100 * brevity * np.exp(np.log(precisions).mean(-1))


def corpora(n=40):
    rng = np.random.default_rng(0)
    references = [rng.choice(list('abcdefgh'), rng.integers(8, 15)).tolist() for _ in range(n)]
    change = lambda words, share: [w if rng.random() > share else 'z' for w in words]  # noqa: E731
    return [[' '.join(change(words, share)) for words in references] for share in (0.15, 0.2, 0.0)]


def test_corpus_bootstrap_is_that_of_the_examples_drawn_again():
    arm, baseline, references = corpora()
    scorer = BLEU(tokenize='none', smooth_method='none')
    stats_of = [np.array(scorer._extract_corpus_statistics(said, [references])) for said in (arm, baseline)]
    found = resampling.compare_corpora(*stats_of, bleu, resamples=50, seed=3)
    assert found.arm == pytest.approx(scorer.corpus_score(arm, [references]).score)
    assert found.baseline == pytest.approx(scorer.corpus_score(baseline, [references]).score)
    assert found.difference == pytest.approx(found.arm - found.baseline)

    drawn = np.random.default_rng(3).multinomial(len(arm), np.full(len(arm), 1 / len(arm)), size=50)
    differences = []
    for counts in drawn:
        again = [np.repeat(texts, counts).tolist() for texts in (arm, baseline, references)]
        scores = [scorer.corpus_score(said, [again[2]]).score for said in again[:2]]
        differences.append(scores[0] - scores[1])
    assert found.interval == pytest.approx(tuple(np.quantile(differences, [0.025, 0.975])))
    assert found.wins == np.mean(np.array(differences) > 0)
    losses = min(np.sum(np.array(differences) <= 0), np.sum(np.array(differences) >= 0))
    assert found.p == pytest.approx(min(2 * (losses + 1) / 51, 1))


def mean(totals):
    return totals[..., 0] / totals[..., 1]


def scored(values):
    return np.stack([values, np.ones_like(values)], -1)


def test_corpus_bootstrap_of_a_mean_is_its_t_interval(monkeypatch):
    a, b = normal(8, 2, 400) + np.array([[0.1], [0.0]])
    found = resampling.compare_corpora(scored(a), scored(b), mean, resamples=4000)
    expected = compare(a, b, resamples=0)
    assert found.interval == pytest.approx(expected.interval, abs=0.02)
    assert found.p == pytest.approx(expected.p, abs=0.03)
    monkeypatch.setattr(resampling, 'BLOCK', 7 * 400)  # by blocks, the same draws
    again = resampling.compare_corpora(scored(a), scored(b), mean, resamples=4000)
    assert again.p == found.p and again.interval == pytest.approx(found.interval, rel=1e-12)  # by other products


def test_corpus_bootstrap_of_one_system_against_itself():
    a = scored(normal(8, 30))
    found = resampling.compare_corpora(a, a, mean, resamples=100)
    assert (found.difference, found.interval, found.wins, found.p) == (0, (0, 0), 0.5, 1)
    with pytest.raises(UserError, match='same examples'):
        resampling.compare_corpora(a, a[1:], mean)
    with pytest.raises(UserError, match='same examples'):
        resampling.compare_corpora(a[:0], a[:0], mean)


def test_corpus_bootstrap_calls_equal_systems_different_at_the_stated_rate():
    rng, called = np.random.default_rng(1), []
    for repeat in range(600):
        a, b = rng.normal(size=(2, 60))
        called.append(resampling.compare_corpora(scored(a), scored(b), mean, resamples=300, seed=repeat).p <= 0.05)
    assert near_rate(called, 0.05)


# ------------------------------------------------------------------------------------------------------ curves
FAST = ([0, 100, 300], [4.0, 3.0, 2.0])
SLOW = ([0, 200, 400], [4.0, 3.0, 2.5])


def test_a_curve_between_its_points():
    assert [curves.at(FAST, x) for x in (0, 50, 100, 250, 300)] == [4.0, 3.5, 3.0, 2.25, 2.0]
    assert curves.at(([5], [1.0]), 5) == 1.0
    for x in (-1, 301, math.nan):
        with pytest.raises(UserError, match='0 to 300'):
            curves.at(FAST, x)


def test_curves_at_matched_cost():
    arms = {'fast': {0: FAST, 1: ([100, 250], [3.0, 2.5])}, 'slow': {0: SLOW, 1: None}}
    assert curves.shared_range([FAST, SLOW, ([100, 250], [3.0, 2.5])]) == (100, 250)
    x, values = curves.matched(arms)
    assert x == 250
    assert values['fast'] == {0: 2.25, 1: 2.5} and values['slow'][0] == 2.875 and math.isnan(values['slow'][1])
    assert comparison.summary(values, 'fast', True)[1].runs.failed == 1
    with pytest.raises(UserError, match='share no x: 0 to 300, 301 to 400'):
        curves.shared_range([FAST, ([301, 400], [1, 1])])
    with pytest.raises(UserError, match='there are none'):
        curves.matched({'fast': {0: None}})


def test_cost_of_a_matched_metric():
    """3.5 after 50 and 100; 2.5 after 200 and 400."""
    assert (curves.first_reach(FAST, 3.5, True), curves.first_reach(SLOW, 3.5, True)) == (50, 100)
    assert curves.speed_up(FAST, SLOW, 2.5, True) == 400 / 200
    assert curves.speed_up(SLOW, FAST, 2.5, True) == 0.5
    rising = ([0, 10, 20, 30], [0.1, 0.5, 0.3, 0.7])  # the first of three crossings
    assert curves.first_reach(rising, 0.4, False) == pytest.approx(7.5)
    assert curves.first_reach(rising, 0.1, False) == 0
    with pytest.raises(UserError, match=r'never reaches 1; its best is 2'):
        curves.first_reach(FAST, 1, True)
    with pytest.raises(UserError, match=r'its best is 0\.7'):
        curves.first_reach(rising, 0.8, False)
    with pytest.raises(UserError, match=r'better than 5 from its first point on, with 4 at 0'):
        curves.first_reach(FAST, 5, True)
    with pytest.raises(UserError, match='no factor'):
        curves.speed_up(FAST, SLOW, 4.0, True)


def test_a_curve_that_failed():
    gone = ([0, 10, 20, 30], [4.0, 3.0, math.nan, 2.0])
    assert curves.at(gone, 10) == 3.0 and curves.at(gone, 5) == 3.5 and math.isnan(curves.at(gone, 15))
    assert curves.first_reach(gone, 3.5, True) == 5
    with pytest.raises(UserError, match='failed before'):
        curves.first_reach(gone, 2.5, True)
    with pytest.raises(UserError, match='its best is none'):
        curves.first_reach(([0], [math.nan]), 2.5, True)


@pytest.mark.parametrize(
    ('x', 'y', 'message'),
    [
        ([0, 5, 5], [1, 2, 3], r'x\[2\]=5 after 5'),
        ([3, 1], [1, 2], r'x\[1\]=1 after 3'),
        ([math.nan, 1], [1, 2], r'x\[0\]=nan'),
        ([0, math.inf], [1, 2], r'x\[1\]=inf'),
        ([0, 1], [1], 'equally many x and y'),
        ([], [], 'at least one'),
    ],
)
def test_what_is_no_curve(x, y, message):
    with pytest.raises(UserError, match=message):
        curves.shared_range([(x, y)])


PAGE = """
# words

| arm (3 seeds each) | numbers | test loss | difference (95 % interval) | p | verdict |
| --- | --- | --- | --- | --- | --- |
| baseline | 8 | 2.000 ± 0.010 | | | |
| `a=1` | 4 | 1.900 ± 0.010 | -0.1 (-0.2 to 0.0) | 0.001 | within noise (9) |
| `b` | 2 | 2.002 ± 0.010 | +0.002 | 0.9 | within noise (over 10,000) |

| arm (3 seeds each) | test accuracy | difference | p | verdict |
| --- | --- | --- | --- | --- |
| baseline | 0.9 ± 0.1 | | | |
"""


def test_the_tables_of_a_page_are_judged_by_their_means_and_deviations():
    values = judged_again.runs(2.0, 0.1, 5)
    assert np.mean(values) == pytest.approx(2.0) and np.std(values, ddof=1) == pytest.approx(0.1)
    a, b = judged_again.judged(PAGE)
    assert (a.arm, a.told, a.label) == ('`a=1`', 'within noise', 'better') and a.percent == pytest.approx(5.0)
    assert (b.told, b.label) == ('within noise', 'within noise') and b.percent == pytest.approx(0.1)
