"""The costs of an arm and the Pareto front of arms."""

import dataclasses
import math
import types

import pytest

from small_sweeps import TINY
from tformer.lab.report import costs
from tformer.lab.report.costs import front
from tformer.lab.report.results import DONE, UNFINISHED, Run
from tformer.lab.sweep import matching


@pytest.mark.parametrize('lower', [True, False])
def test_an_arm_that_another_beats_in_one_and_equals_in_the_other_is_not_on_the_front(lower):
    sign = 1 if lower else -1
    spent = {'cheap': 1.0, 'same cost': 1.0, 'dear': 2.0, 'same mean': 3.0, 'twin': 2.0, 'unknown': None, 'failed': 0.5}
    means = {'cheap': 5.0, 'same cost': 6.0, 'dear': 3.0, 'same mean': 3.0, 'twin': 3.0, 'unknown': 0.0}
    means = {arm: sign * mean for arm, mean in means.items()} | {'failed': math.nan}
    assert front(spent, means, lower) == {'cheap', 'dear', 'twin'}


def test_a_cost_is_the_mean_of_finished_runs_and_of_others_only_where_none_is_finished(monkeypatch):
    monkeypatch.setattr(costs.matching, 'num_parameters', lambda config: 7)

    def run(state: str, *steps: tuple[int, float], seconds: float | None = None) -> Run:
        log = [{'step': step, 'train/tokens': 10 * step, 'train/tokens_per_second': rate} for step, rate in steps]
        fields = dict.fromkeys(Run.__dataclass_fields__) | {'state': state, 'log': log, 'scored': {'test': 4}}
        return Run(**fields | {'seconds': seconds})

    done = run(DONE, (4, 100.0), (8, 300.0), seconds=6.0), run(DONE, (4, 200.0), (12, 900.0), seconds=0.0)
    begun, never = run(UNFINISHED, (4, 1e6), seconds=99.0), run(UNFINISHED)
    results = types.SimpleNamespace(arms={'a': [*done, begun, never], 'b': [begun, never], 'c': [never]})
    found = costs.costs(results, 'test/loss')
    assert found['a'] == costs.Costs(7, tokens=100, flops=None, steps=10, seconds=6, scored=4, tokens_per_second=250)
    assert found['a'].scored_early and found['a'].per_step('tokens') == 10 and found['a'].per_step('flops') is None
    assert (found['b'].tokens, found['b'].steps, found['b'].seconds) == (40, 4, None)
    told = dataclasses.replace(done[0], parameters=5.0)  # by its results
    assert costs.costs(types.SimpleNamespace(arms={'a': [told]}), 'test/loss')['a'].parameters == 5
    assert found['c'] == costs.Costs() and not found['c'].scored_early
    assert not any(costs.Costs(steps=steps, scored=40).scored_early for steps in (None, 10, 40))  # as of a cut log


def test_fields_that_change_no_shape_share_the_count_of_parameters() -> None:
    """The shapes of a model in which all of them differ are those without, and are not looked for again."""
    plain = matching.sized(TINY).model
    values = {name: getattr(plain, name) for name in matching.SHAPELESS}
    assert set(map(type, values.values())) == {float}
    changed = dataclasses.replace(plain, **{name: value / 2 + 0.1 for name, value in values.items()})
    assert all(getattr(changed, name) != value for name, value in values.items())
    own = matching._of_shapes.__wrapped__(changed, 'causal_lm')
    assert str(own) == str(matching._parameters(plain, 'causal_lm'))
    before = matching._of_shapes.cache_info().misses
    assert matching._parameters(changed, 'causal_lm') is matching._parameters(plain, 'causal_lm')
    assert matching._of_shapes.cache_info().misses == before
