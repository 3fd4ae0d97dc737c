"""Fair comparisons: a field of each arm is adjusted until its parameters, FLOPs or tokens are the baseline's."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from tformer import config
from tformer.config import Config, Data, Model, Train
from tformer.data.batches import mixture
from tformer.data.batches.packing import BATCHING
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.errors import UserError, choose
from tformer.model import build
from tformer.objectives import OBJECTIVES
from tformer.training import flops, setup, workdir
from tformer.training.dummy_batch import assumed, vocabulary_is_alphabet
from tformer.training.state import abstract_variables, count_parameters
from tformer.training.teacher import make_teacher

SHAPELESS = (  # fields of a model that change no parameter's shape, so that arms of a search share their count
    'dropout_rate attention_dropout_rate activation_dropout_rate head_dropout_rate init_scale '
    'balance_weight router_z_weight norm_epsilon rope_theta'
).split()
DEFAULTS = Model()
OF_ROWS = 'model.family', 'train.objective'  # fields besides those of the data that change the tokens of a row


@dataclasses.dataclass(frozen=True)
class Match:
    """A quantity in which all arms should equal one of them, and the integer field that is adjusted for it."""

    quantity: str  # a key of `QUANTITIES`
    field: str  # dotted name; the quantity must grow with it
    multiple: int = 1  # the field's values are multiples of this
    to: str = 'baseline'  # the arm that is not adjusted


def sized(stated: Config) -> Config:
    """Returns `stated` resolved: with the vocabulary of its data where that is an alphabet, else as `assumed`."""
    if not vocabulary_is_alphabet(stated):
        return assumed(stated)
    return setup.resolve_config(stated, _tokenizers(stated.model.family, stated.data, stated.train.objective), 1)


@functools.lru_cache(maxsize=64)
def _tokenizers(family: str, data: Data, objective: str) -> Tokenizers:
    stated = Config(model=Model(family=family), data=data, train=Train(objective=objective))
    return workdir.new_tokenizers(stated, mixture.load(stated, 'train'))


def num_parameters(stated: Config) -> int:
    """Returns how many parameters the model of a config has; a vocabulary of data that do not load is a `UserError`."""
    resolved = sized(stated)
    return count_parameters(_parameters(resolved.model, resolved.train.objective))


def num_tokens(stated: Config) -> int:
    """Returns the tokens of a run whose batches are full, on both sides, with padding; `UserError` as `num_flops`."""
    return _num_steps(stated) * sum(rows * length for rows, length in _shapes(stated).values())


def num_flops(stated: Config) -> float:
    """Returns the operations of a run whose batches are full, forward and backward (`accounting.model_flops`).

    Raises:
      UserError: the run's length is given in epochs, or as `num_parameters`.
    """
    resolved, steps = sized(stated), _num_steps(stated)
    batch = {name: jax.ShapeDtypeStruct(shape, 'int32') for name, shape in _shapes(stated).items()}
    params = _parameters(resolved.model, resolved.train.objective)
    taught = make_teacher(resolved, batch)
    return steps * flops.step_flops(resolved, params, batch, taught)


def _parameters(model: Model, objective: str) -> Any:
    """Returns the abstract parameters, boxed with their logical names."""
    return _of_shapes(dataclasses.replace(model, **{name: getattr(DEFAULTS, name) for name in SHAPELESS}), objective)


@functools.lru_cache(maxsize=1024)
def _of_shapes(model: Model, objective: str) -> Any:
    tokens = jax.ShapeDtypeStruct((1, 8), 'int32')
    batch = {'inputs': tokens, 'encoder_inputs': tokens, 'weights': tokens}
    return abstract_variables(build(model), OBJECTIVES[objective], batch)['params']


def _shapes(stated: Config) -> dict[str, tuple[int, int]]:
    """Returns the shapes [rows, length] of what the stacks read in a step."""
    data, sides = stated.data, {'inputs': stated.data.length}
    if stated.model.family == 'encoder_decoder':
        sides['encoder_inputs'] = data.encoder_length or data.length
    rows = stated.train.batch_size if data.batch_tokens is None else max(1, data.batch_tokens // max(sides.values()))
    return {name: (rows, length) for name, length in sides.items()}


def _num_steps(stated: Config) -> int:
    if stated.train.num_steps is None:
        raise UserError(
            'its length is given by train.num_epochs, whose number of steps depends on the data: set train.num_steps'
        )
    return stated.train.num_steps


def match_all(arms: Mapping[str, Config], match: Match) -> dict[str, Config]:
    """Returns the config of each arm with the field adjusted.

    An arm that has the quantity already stays as it is.

    Raises:
      UserError: an unknown quantity, field or arm, or a field that does not change the quantity.
    """
    measured = choose(QUANTITIES, match.quantity, 'Match.quantity')
    if choose(config.field_types(), match.field, 'Match.field') not in (int, int | None):
        raise UserError(f'Match.field={match.field} is not an integer')
    if match.multiple < 1:
        raise UserError(f'Match.multiple={match.multiple} must be positive')
    target = measured(to := choose(arms, match.to, 'Match.to'))
    matched = {}
    for name, stated in arms.items():
        try:
            if match.quantity != 'parameters':
                _known_to_be_full(to, stated, match)
            if measured(stated) != target:
                section, field = match.field.split('.')
                number = (getattr(getattr(stated, section), field) or 0) // match.multiple

                def at(number: int, stated: Config = stated) -> Config:
                    return config.override(stated, {match.field: number * match.multiple})

                stated = at(nearest(lambda number: measured(at(number)), target, max(1, number)))
            matched[name] = stated
        except UserError as error:
            raise UserError(f'{name}: {match}: {error}') from error
    return matched


def misses(arms: Mapping[str, Config], match: Match) -> dict[str, float]:
    """Returns by how many percent each arm is above or below the quantity of the arm `match.to`."""
    measured = QUANTITIES[match.quantity]
    target = measured(arms[match.to])
    return {name: 100 * (measured(stated) / target - 1) for name, stated in arms.items()}


def _known_to_be_full(to: Config, stated: Config, match: Match) -> None:
    """Raises a `UserError` if the arms may have different shares of padding, which depend on the data."""
    # Padding costs FLOPs, but it does not count as tokens.
    full, known = [name for name, how in BATCHING.items() if how.packs], "use 'pack', which fills its rows"
    if match.quantity != 'tokens':
        full, known = [*full, 'pad'], "use 'pad' or 'pack'"
    differing = {match.field, *config.difference(to, stated)} - {'data.batch_tokens'}
    fields = sorted(name for name in differing if name.startswith('data.') or name in OF_ROWS)
    for batching in (to.data.batching, stated.data.batching):
        if fields and batching not in full:
            raise UserError(
                f'with {fields[0]} and data.batching={batching!r} the amount of padding is unknown; {known}'
            )


def nearest(measured: Callable[[int], float], target: float, start: int = 1) -> int:
    """Returns the positive number at which a rising function is nearest to `target`.

    It searches between two numbers on either side, in turn by linear interpolation and by bisection. A flat function is
    a `UserError`.
    """
    measured = functools.cache(measured)
    if measured(start) == measured(2 * start):
        raise UserError('changing the field does not change the quantity')
    below = above = start
    while measured(above) < target:
        below, above = above, 2 * above
    while below > 0 and measured(below) > target:
        below, above = below // 2, below
    line = True
    while above - below > 1:
        middle = (below + above) // 2
        if line and below > 0:  # most quantities are nearly linear
            share = (target - measured(below)) / (measured(above) - measured(below))
            middle = min(max(int(below + share * (above - below)), below + 1), above - 1)
        below, above = (middle, above) if measured(middle) < target else (below, middle)
        line = not line
    return above if below == 0 or measured(above) - target < target - measured(below) else below


QUANTITIES: dict[str, Callable[[Config], float]] = {
    'parameters': num_parameters,
    'flops': num_flops,
    'tokens': num_tokens,
}
