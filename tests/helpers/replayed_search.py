"""A search that one worker makes on known curves, within a budget of steps.

    python tests/helpers/replayed_search.py DIR

takes the curves of DIR, where a search without rungs has trained its arms to their ends, in many orders, and prints
what successive halving and chance find on average for the same steps.
"""

import json
import math
import pathlib
import random
import statistics
import sys
from collections.abc import Callable, Sequence

from tformer.lab.sweep import asha
from tformer.lab.sweep.decisions import Draw, Drawn, RunState, Train, decide
from tformer.lab.sweep.rungs import Rule, leader

ORDERS = 300


def found_for(
    rule: Rule | None,
    curves: Sequence[Callable[[int], float]],
    budget: float,
    steps: Sequence[int] = (10, 30, 90, 270),
) -> tuple[int, int]:
    """Returns (the number of the best arm that is found within a budget of steps, the steps spent).

    `curves` are functions of the step, in the order in which their arms are drawn, and `steps` the rungs.
    """
    ends, reached, spent = (steps if rule else steps[-1:]), list[list[float]](), 0
    while True:
        arms = [Drawn.of(number, [RunState(dict(enumerate(values)))], 0) for number, values in enumerate(reached)]
        step = decide(arms, rule, len(ends) - 1, len(curves), is_spent=spent >= budget)
        if isinstance(step, Draw):
            reached.append([])
        elif isinstance(step, Train):
            spent += ends[step.rung] - [0, *ends][step.rung]
            reached[step.number].append(curves[step.number](ends[step.rung]))
        else:
            best = leader([each.arm for each in arms])
            assert best is not None
            return best, spent


def curves_of(home: pathlib.Path, metric: str = 'valid/loss') -> list[Callable[[int], float]]:
    """Returns the best value so far, by step, of each searched arm that has ended."""
    found = []
    for draw in json.loads((home / 'search.json').read_text())['draws']:
        place = home / draw['arm'] / 'seed_0'
        if (place / 'result.json').exists():
            rows = map(json.loads, (place / 'metrics.jsonl').read_text().splitlines())
            values = {row['step']: row[metric] for row in rows if row.get(metric) is not None}
            found.append(lambda end, values=values: min(v for step, v in values.items() if step <= end))
    return found


def main(directory: str) -> None:
    curves, rule, rng = curves_of(pathlib.Path(directory)), asha(rungs=2), random.Random(0)
    steps = rule.steps(270, 30)
    print(f'{len(curves)} arms, the best {min(curve(270) for curve in curves):.3f}; means over {ORDERS} orders')
    for budget in (3, 5, 7, math.inf):
        found: dict[str, list[float]] = {'asha': [], 'chance': [], 'runs': []}
        for _ in range(ORDERS):
            order = rng.sample(curves, len(curves))
            best, spent = found_for(rule, order, budget * 270, steps)
            by_chance, _ = found_for(None, order, spent, steps)
            found['asha'].append(order[best](270))
            found['chance'].append(order[by_chance](270))
            found['runs'].append(spent / 270)
        print('  '.join(f'{name} {statistics.mean(values):.3f}' for name, values in found.items()))


if __name__ == '__main__':
    main(*sys.argv[1:])
