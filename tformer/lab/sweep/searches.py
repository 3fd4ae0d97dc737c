"""A search: what is drawn from which space, which arms go on, and what is run again before any verdict.

from tformer.lab.sweep import Sweep, asha, log_uniform, search

def get_sweep():
    space = {'optimizer.learning_rate': log_uniform(1e-4, 1e-1)}
    return Sweep('../g2p.py:demo', search(space, trials=27, rungs=asha()))
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from tformer import config
from tformer.checks import derived
from tformer.config import Config
from tformer.errors import UserError, choose, nearest
from tformer.evaluation import metrics
from tformer.lab.sweep import rungs as rungs_lib
from tformer.lab.sweep.distributions import Choice, Distribution, Range
from tformer.lab.sweep.draws import SAMPLERS
from tformer.lab.sweep.overrides import MOST, SEED, Overrides

BUDGETS = ('tokens', 'flops', 'hours')  # in which a search can be bounded, besides its trials
DIRECTIONS = {'minimize': True, 'maximize': False}
LEAST_CONFIRMED = 2  # runs, of which a noise is known


@dataclasses.dataclass(frozen=True)
class Search:
    """In the place of a sweep's lists of overrides: arms that are drawn one after the other, by what came before.

    The baseline is the sweep's base, changed by `baseline`. The best arm and the baseline are run again with `confirm`
    fresh seeds, and only these runs get verdicts: the best of many is partly lucky.
    """

    space: Mapping[str, Distribution]  # dotted fields, and `uniform`, `log_uniform`, `integers` or `choice`
    sampler: str = 'tpe'  # a key of `SAMPLERS`
    trials: int = 50  # how many arms are drawn at most
    direction: str | None = None  # minimize or maximize; None: as the metric wants
    metric: str = 'valid/loss'  # of the evaluations while an arm trains
    rungs: rungs_lib.Rule | None = None  # `asha()`, `hyperband()` or `median()`; None: every arm trains to its end
    confirm: int = 5  # fresh seeds of the best arm and of the baseline; 0: no verdicts
    budget: Mapping[str, float] = dataclasses.field(default_factory=dict)  # tokens, flops or hours of the search
    seeds: int = 1  # runs of an arm, whose mean is its value
    seed: int = 0  # of the sampler
    baseline: Overrides = dataclasses.field(default_factory=dict)  # of the sweep's base, in all arms

    def __post_init__(self) -> None:
        _check_space(self.space)
        choose(SAMPLERS, self.sampler, 'search: sampler')
        if self.direction is not None:
            choose(DIRECTIONS, self.direction, 'search: direction')
            if DIRECTIONS[self.direction] != metrics.lower_is_better(self.metric):
                wanted = next(name for name in DIRECTIONS if name != self.direction)
                raise UserError(f'search: direction={self.direction}: of {self.metric} one wants to {wanted}')
        if self.metric.partition('/')[0] != 'valid':
            raise UserError(f'search: metric={self.metric}: a search sees evaluations while arms train: valid/NAME')
        if not isinstance(self.rungs, rungs_lib.Rule | None):
            raise UserError(f'search: rungs={self.rungs!r} is none of asha(), hyperband(), median()')
        for name, least in (('trials', 1), ('seeds', 1), ('confirm', 0), ('seed', 0)):
            if type(number := getattr(self, name)) is not int or not least <= number <= MOST:
                raise UserError(f'search: {name}={number!r} is not an integer from {least} to {MOST:,}')
        if 0 < self.confirm < LEAST_CONFIRMED:
            raise UserError(f'search: confirm={self.confirm} tells no noise: at least {LEAST_CONFIRMED}, or 0 for none')
        if not isinstance(self.baseline, Mapping):
            raise UserError(f'search: baseline={self.baseline!r} is not a dict of fields')
        if not isinstance(self.budget, Mapping):
            raise UserError(f'search: budget={self.budget!r} is not a dict such as {{"hours": 2}}')
        for name, amount in self.budget.items():
            choose(dict.fromkeys(BUDGETS), name, 'search: budget')
            if not isinstance(amount, int | float) or isinstance(amount, bool) or not amount > 0:
                raise UserError(f'search: budget of {name}={amount!r} must be a positive number')

    @property
    def lower_is_better(self) -> bool:
        return metrics.lower_is_better(self.metric)

    def steps(self, base: Config) -> tuple[int | None, ...]:
        """Returns the steps of the rungs; the last, None, is the end of a run.

        Raises:
          UserError: the base gives its length in epochs, or has no evaluation early enough.
        """
        if self.rungs is None:
            return (None,)
        if base.train.num_steps is None:
            raise UserError('search: rungs need train.num_steps; train.num_epochs depends on the data')
        num_steps = base.train.num_steps
        every = derived.whole_steps(base.train.eval_every or num_steps, num_steps)
        return (*self.rungs.steps(num_steps, every)[:-1], None)

    def arm_seeds(self, base: Config) -> list[int]:
        """Returns the values of train.seed of the searched runs of an arm."""
        return [base.train.seed + number for number in range(self.seeds)]

    def fresh_seeds(self, base: Config) -> list[int]:
        """Returns those of the runs that confirm it, none of which an arm was chosen by."""
        return [base.train.seed + self.seeds + number for number in range(self.confirm)]

    def identity(self) -> dict[str, Any]:
        """Returns what makes two searches the same, as JSON values; more trials, budget or seeds continue one."""
        return {
            'space': {field: _described(of) for field, of in self.space.items()},
            'sampler': self.sampler,
            'metric': self.metric,
            'rungs': None if self.rungs is None else [type(self.rungs).__name__.lower(), *_numbers(self.rungs)],
            'seeds': self.seeds,
            'seed': self.seed,
        }


search = Search  # as a sweep file calls it


def _numbers(rule: rungs_lib.Rule) -> list[int]:
    return list(dataclasses.asdict(rule).values())


def _described(of: Distribution) -> Any:
    if isinstance(of, Range):
        return [of.low, of.high, *(name for name in ('log', 'whole') if getattr(of, name))]
    assert isinstance(of, Choice)
    return {'choice': [json.loads(json.dumps(option, default=repr)) for option in of.options]}


def _check_space(space: Mapping[str, Distribution]) -> None:
    if not isinstance(space, Mapping) or not space:
        raise UserError(f'search: the space is a dict of fields and their ranges, not {space!r}')
    types = config.field_types()
    for field, of in space.items():
        if field not in types:
            raise UserError(f'search: {field} is not a field{nearest(field, types)}')
        if field == SEED:
            raise UserError(f'search: {SEED} is not searched; seeds=N runs each arm with N of them')
        if not isinstance(of, Range | Choice):
            raise UserError(f'search: {field}={of!r} is none of uniform(), log_uniform(), integers(), choice()')
