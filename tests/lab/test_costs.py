"""The Pareto front of arms."""

import math

import pytest

from tformer.lab.report.costs import front


@pytest.mark.parametrize('lower', [True, False])
def test_an_arm_that_another_beats_in_one_and_equals_in_the_other_is_not_on_the_front(lower):
    sign = 1 if lower else -1
    spent = {'cheap': 1.0, 'same cost': 1.0, 'dear': 2.0, 'same mean': 3.0, 'twin': 2.0, 'unknown': None, 'failed': 0.5}
    means = {'cheap': 5.0, 'same cost': 6.0, 'dear': 3.0, 'same mean': 3.0, 'twin': 3.0, 'unknown': 0.0}
    means = {arm: sign * mean for arm, mean in means.items()} | {'failed': math.nan}
    assert front(spent, means, lower) == {'cheap', 'dear', 'twin'}
