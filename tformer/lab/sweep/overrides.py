"""Lists of overrides, composed by pure functions.

A sweep file defines `get_sweep()`:

    from tformer.lab.sweep import Sweep, grid, product, seeds

    def get_sweep():
        return Sweep('../g2p.py:demo', product(grid({'model.norm': ['layernorm', 'rmsnorm']}), seeds(3)))
"""

import itertools
import math
import numbers
import random
from collections.abc import Iterable, Mapping
from typing import Any

from tformer.errors import UserError
from tformer.lab.sweep.distributions import Distribution

Overrides = dict[str, Any]  # dotted fields and their values

SEED = 'train.seed'
MOST = 100_000  # trials of a sweep


# ------------------------------------------------------------------------------------------------- lists of overrides


def grid(values: Mapping[str, Iterable[Any]]) -> list[Overrides]:
    """Returns every combination of the fields' values; the last field varies fastest."""
    return product(*([{field: value} for value in _listed(field, values)] for field in values))


def zipped(values: Mapping[str, Iterable[Any]]) -> list[Overrides]:
    """Returns the fields' first values, their second ones, and so on; all fields must have equally many."""
    columns = {field: _listed(field, values) for field in values}
    if len({len(column) for column in columns.values()}) > 1:
        counts = ', '.join(f'{len(column)} of {field}' for field, column in columns.items())
        raise UserError(f'zipped: every field needs equally many values, not {counts}')
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def chain(*lists: Iterable[Overrides]) -> list[Overrides]:
    """Concatenates the lists."""
    return [dict(overrides) for each in lists for overrides in as_dicts(each)]


def product(*lists: Iterable[Overrides]) -> list[Overrides]:
    """Returns every choice of one of each list, joined; the last list varies fastest. No two may set the same field."""
    joined = []
    listed = [as_dicts(each) for each in lists]
    _few('product', math.prod(map(len, listed)))
    for parts in itertools.product(*listed):
        fields = [field for part in parts for field in part]
        if twice := [field for field in fields if fields.count(field) > 1]:
            raise UserError(f'product: {twice[0]} is set by two of its lists')
        joined.append({field: value for part in parts for field, value in part.items()})
    return joined


def one_at_a_time(baseline: Overrides, values: Mapping[str, Iterable[Any]]) -> list[Overrides]:
    """Returns the baseline, and the baseline with one field changed, for each field and each of its values."""
    changed = [{**baseline, field: value} for field in values for value in _listed(field, values)]
    return [dict(baseline), *changed]


def seeds(count: int, first: int = 0) -> list[Overrides]:
    """Returns `count` values of train.seed. By `product` every arm gets the same, so that arms compare pairwise."""
    _few('seeds', count)
    return [{SEED: seed} for seed in range(first, first + count)]


def sample(distributions: Mapping[str, Distribution], count: int, seed: int = 0) -> list[Overrides]:
    """Returns `count` draws of each field's value, independent of each other (Bergstra & Bengio 2012).

    A draw depends only on the seed, its field and its number: more draws, or another field, do not change it.
    """
    _few('sample', count)
    for field, of in distributions.items():
        if not callable(of):
            raise UserError(f'sample: {field}={of!r} is none of uniform(), log_uniform(), integers(), choice()')
    return [draw(distributions, number, seed) for number in range(count)]


def draw(distributions: Mapping[str, Distribution], number: int, seed: int = 0) -> Overrides:
    """Returns draw `number` of a sample."""
    return {field: of(random.Random(f'{seed} {field} {number}').random()) for field, of in distributions.items()}


def as_dicts(overrides: Iterable[Overrides]) -> list[Overrides]:
    """Returns a list of overrides, and refuses a single dict."""
    listed = list(overrides) if isinstance(overrides, Iterable) else [None]
    if isinstance(overrides, Mapping) or not all(isinstance(each, Mapping) for each in listed):
        raise UserError(f'expected a list of dicts, not {overrides!r}')
    return listed


def _listed(field: str, values: Mapping[str, Iterable[Any]]) -> list[Any]:
    """Returns the values of a field, and refuses a single string."""
    if isinstance(values[field], str) or not isinstance(values[field], Iterable):
        raise UserError(f'{field}: expected a list of values, not {values[field]!r}')
    if not (listed := list(values[field])):
        raise UserError(f'{field}: its list of values is empty')
    return listed


def _few(name: str, count: int) -> None:
    if not isinstance(count, numbers.Integral):
        raise UserError(f'{name}: {count!r} is not an integer')
    if count > MOST:
        raise UserError(f'{name}: {count:,} trials are more than a sweep can have: {MOST:,}')
