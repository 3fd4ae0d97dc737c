"""Rungs: where they are, which arms go on past them, and that nothing is counted twice."""

import dataclasses
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayed_search import found_for
from tformer.errors import UserError
from tformer.lab.sweep import asha, hyperband, median
from tformer.lab.sweep.decisions import Draw, Drawn, Over, RunState, Train, Waiting, decide
from tformer.lab.sweep.rungs import Arm, leader

LAST = 3
VALUE = st.one_of(st.integers(0, 5).map(float), st.just(math.inf))
RULES = [asha(), asha(reduction=2), hyperband(), median(), median(rungs=3, reduction=5)]


@st.composite
def arms(draw):
    """Arms whose values end at their first inf, at any rungs, some of them on their way to the next one."""
    found = []
    for number in range(draw(st.integers(1, 14))):
        values = draw(st.lists(VALUE, max_size=LAST + 1))
        ends = [rung for rung, value in enumerate(values) if value == math.inf]
        values = values[: ends[0] + 1] if ends else values
        found.append(Arm(number, dict(enumerate(values)), bool(values) and draw(st.booleans())))
    return found


def test_rungs_are_evaluations_before_the_end_by_powers_of_the_reduction():
    assert asha().steps(2700, 100) == (100, 300, 900, 2700)
    assert asha(rungs=2, reduction=4).steps(1600, 1) == (100, 400, 1600)
    assert asha().steps(1000, 50) == (50, 150, 350, 1000)  # rounded up to evaluations
    assert asha().steps(100, 20) == (20, 40, 100)  # two that fall together are one
    assert median().steps(400, 10) == (100, 200, 300, 400)
    assert asha(rungs=2000).steps(90, 10) == (10, 30, 90)  # none is at step 0
    for rule, every in ((asha(), 100), (median(), 200)):
        with pytest.raises(UserError, match=r'rungs need earlier evaluations: one each .00 steps of 100; set'):
            rule.steps(100, every)


@pytest.mark.parametrize('rule', [asha, hyperband, median])
def test_a_rule_without_rungs_or_reduction_is_refused(rule):
    with pytest.raises(UserError, match=f'{rule.__name__.lower()}: rungs=0 must be positive'):
        rule(rungs=0)
    with pytest.raises(UserError, match='reduction=1 must be at least 2'):
        rule(reduction=1)
    for fields in ({'rungs': 2.5}, {'reduction': 2.5}, {'rungs': True}, {'rungs': '3'}, {'rungs': 10**9}):
        (name, number) = next(iter(fields.items()))
        with pytest.raises(UserError, match=f'^{rule.__name__.lower()}: {name}={number!r} is not an integer up to '):
            rule(**fields)


def test_the_best_third_of_a_rung_goes_on_and_the_highest_rung_comes_first():
    rule, values = asha(), [0.5, 0.2, 0.9, 0.1, 0.8, 0.7]
    there = [Arm(number, {0: value}) for number, value in enumerate(values)]
    assert rule.next(there, LAST) == 3
    there[3] = Arm(3, {0: 0.1}, is_busy=True)
    assert rule.next(there, LAST) == 1
    there[1] = Arm(1, {0: 0.2}, is_busy=True)
    assert rule.next(there, LAST) is None
    assert rule.next(there[:5], LAST) is None  # a third of five is one
    for number, value in ((1, 0.4), (3, 0.3)):
        there[number] = Arm(number, {0: values[number], 1: value})
    assert rule.next(there, LAST) is None
    there += [Arm(6, {0: 0.05, 1: 0.35})]
    assert rule.next(there, LAST) == 3  # the best of three at rung 1, before any at rung 0
    more = [*there, Arm(7, {0: 0.01}), Arm(8, {0: 1.0})]  # one of the best three of nine, paused at rung 0
    assert rule.next(more, LAST) == 3
    more[3] = Arm(3, {0: 0.1, 1: 0.3}, is_busy=True)
    assert rule.next(more, LAST) == 7
    assert rule.next([*there[:3], Arm(3, {0: 0.1, 1: 0.3, 2: 0.3}), *there[4:]], LAST) is None


@pytest.mark.parametrize('rule', RULES, ids=str)
@given(found=arms())
def test_who_goes_on_is_paused_finite_and_as_good_as_the_rule_asks(rule, found):
    number = rule.next(found, LAST)
    if number is None:
        return
    arm = found[number]
    value = arm.values[arm.rung]
    assert not arm.is_busy and arm.rung < LAST and math.isfinite(value)
    peers = [each for each in found if rule.first(each.number, LAST) == rule.first(number, LAST)]
    there = [each.values[arm.rung] for each in peers if arm.rung in each.values]
    if isinstance(rule, median):
        assert len(there) < rule.reduction or value <= statistics.median(there)
    else:
        assert sum(other < value for other in there) < len(there) // rule.reduction


@pytest.mark.parametrize('rule', RULES, ids=str)
@given(found=arms(), scale=st.sampled_from([0.5, 2.0, 1024.0]), order=st.randoms(use_true_random=False))
def test_the_rule_sees_ranks_alone_and_no_order(rule, found, scale, order):
    expected = rule.next(found, LAST)
    scaled = [dataclasses.replace(arm, values={k: scale * v + 1 for k, v in arm.values.items()}) for arm in found]
    order.shuffle(scaled)
    assert rule.next(scaled, LAST) == expected


@pytest.mark.parametrize('rule', RULES, ids=str)
@given(values=st.lists(st.floats(0, 1), min_size=1, max_size=30, unique=True))
def test_alone_a_rule_never_sends_more_than_its_share_on(rule, values):
    """All arms stand at rung 0 at once; those that go on stay busy."""
    there = [Arm(number, {0: value}) for number, value in enumerate(values)]
    went = []
    while (number := rule.next(there, LAST)) is not None:
        there[number] = dataclasses.replace(there[number], is_busy=True)
        went.append(number)
    best = sorted(range(len(values)), key=values.__getitem__)
    if type(rule) is asha:
        assert went == best[: len(values) // rule.reduction]
    if isinstance(rule, median):
        assert went == (best if len(values) < rule.reduction else best[: (len(values) + 1) // 2])


def test_hyperbands_brackets_get_their_shares_of_the_arms_from_the_beginning_on():
    rule = hyperband()
    brackets = [rule.first(number, LAST) for number in range(98)]
    assert [brackets[:49].count(bracket) for bracket in range(4)] == [27, 12, 6, 4]  # Li et al. 2018, table 1
    assert brackets[:49] == brackets[49:]
    assert [brackets[:13].count(bracket) for bracket in range(4)] == [7, 3, 2, 1]
    # An arm that begins late is not compared with those of other brackets.
    late, early = brackets.index(1), brackets.index(0)
    found = [Arm(late, {1: 0.0}), Arm(early, {0: 1.0, 1: 5.0})]
    assert rule.next(found, LAST) is None and asha().next(found, LAST) is None


@given(found=arms())
def test_the_leader_got_furthest_and_is_the_best_there(found):
    finite = [arm for arm in found if arm.values and math.isfinite(arm.values[arm.rung])]
    number = leader(found)
    if number is None:
        assert not finite
        return
    furthest = max(arm.rung for arm in finite)
    assert found[number].values[furthest] == min(arm.values[arm.rung] for arm in finite if arm.rung == furthest)


# ------------------------------------------------------------------------------------------------------- decisions


def drawn(number, *runs, first=0):
    return Drawn.of(number, runs, first)


def test_the_value_of_an_arm_is_the_mean_of_its_seeds_once_all_are_there():
    done, half = RunState({0: 1.0, 1: 0.5}), RunState({0: 3.0})
    assert drawn(0, done, half).arm == Arm(0, {0: 2.0}, is_busy=True)  # one of two is ahead
    assert drawn(0, done, RunState({0: 3.0, 1: 2.5})).arm == Arm(0, {0: 2.0, 1: 1.5})
    assert drawn(0, half, RunState({})).arm == Arm(0, {}, is_busy=True)
    assert drawn(0, half, RunState({0: math.nan})).arm == Arm(0, {0: math.inf})
    assert drawn(0, done, RunState({0: 3.0}, has_failed=True)).arm.values == {0: 2.0, 1: math.inf}
    assert drawn(0, RunState({0: 1.0, 1: 1.0}), first=1).arm.values == {1: 1.0}


def test_what_has_begun_is_finished_before_an_arm_goes_on_and_that_before_a_draw():
    rule = asha(reduction=2)
    paused = [drawn(0, RunState({0: 1.0})), drawn(1, RunState({0: 2.0}))]
    begun = drawn(2, RunState({0: 3.0}, has_begun=True))
    assert decide([*paused, begun], rule, LAST, 9, False) == Train(2, 0, 1)
    assert decide(paused, rule, LAST, 9, False) == Train(0, 0, 1)
    leased = [drawn(0, RunState({0: 1.0}, is_leased=True)), paused[1]]
    assert decide(leased, rule, LAST, 9, False) == Draw()
    assert decide(leased, rule, LAST, 2, False) == Waiting()
    assert decide([*paused, begun], rule, LAST, 9, True) == Over()
    assert decide(leased, rule, LAST, 9, True) == Waiting()
    assert decide([], None, 0, 1, False) == Draw()


def test_seeds_of_an_arm_train_one_after_the_other_and_a_failure_ends_the_arm():
    both = drawn(0, RunState({0: 1.0}), RunState({}))
    assert decide([both], None, 0, 1, False) == Train(0, 1, 0)
    assert decide([drawn(0, RunState({}, is_leased=True), RunState({}))], None, 0, 1, False) == Train(0, 1, 0)
    assert decide([drawn(0, RunState({}, has_failed=True), RunState({}))], None, 0, 1, False) == Over()


def test_where_no_arm_can_reach_the_end_the_best_goes_on_alone():
    two = [drawn(0, RunState({0: 2.0})), drawn(1, RunState({0: 1.0}))]
    assert decide(two, asha(), LAST, 2, False) == Train(1, 0, 1)
    assert decide([two[0], drawn(1, RunState({0: 1.0, 1: 1.0}))], asha(), LAST, 2, False) == Train(1, 0, 2)
    ended = drawn(1, RunState(dict.fromkeys(range(LAST + 1), 1.0)))
    assert decide([two[0], ended], asha(), LAST, 2, False) == Over()
    assert decide([drawn(0, RunState({0: math.nan}))], asha(), LAST, 1, False) == Over()


def test_an_arm_that_is_closed_counts_but_goes_nowhere():
    found = [drawn(number, RunState({0: float(number)})) for number in range(6)]
    assert decide(found, asha(), LAST, 6, False) == Train(0, 0, 1)
    assert decide(found, asha(), LAST, 6, False, closed={0}) == Train(1, 0, 1)
    assert decide([drawn(0, RunState({}))], None, 0, 1, False, closed={0}) == Over()


def test_a_repeated_draw_is_not_compared_twice():
    repeats = [Drawn.of(number, [RunState({0: 1.0})], 0, is_repeated=number > 0) for number in range(3)]
    assert decide(repeats, asha(), LAST, 4, False) == Draw()
    assert decide([drawn(n, RunState({0: 1.0})) for n in range(3)], asha(), LAST, 4, False) == Train(0, 0, 1)


# --------------------------------------------------------------------------------------------- at an equal budget


def bowl(rng):
    """A loss that falls to a bowl, whose optimum is 1 at rate 0: fast where the rate is great, and with noise."""
    rate, seed = rng.uniform(-2, 2), rng.random()

    def curve(step, noise=0.05):
        drawn = random.Random(f'{seed} {step}').gauss(0, noise) if noise else 0.0
        return 1 + rate**2 + 2 * math.exp(-step / 40 * 2**rate) + drawn

    return curve


def mean_miss(rule, budget, repeats=30):
    """Returns how far from the optimum the arms are on average that searches find for so many whole runs."""
    misses = []
    for repeat in range(repeats):
        rng = random.Random(repeat)
        curves = [bowl(rng) for _ in range(48)]
        best, spent = found_for(rule, curves, budget * 270)
        assert spent < (budget + 1) * 270
        misses.append(curves[best](270, noise=0.0) - 1)
    return statistics.mean(misses)


def test_for_the_same_steps_asha_finds_a_better_arm_than_chance_on_a_bowl_of_known_optimum():
    chance, halving = ({budget: mean_miss(rule, budget) for budget in (3, 6)} for rule in (None, asha()))
    assert all(halving[budget] < 0.5 * chance[budget] for budget in chance)
    assert halving[3] < chance[6]
