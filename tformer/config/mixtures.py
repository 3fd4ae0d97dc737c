"""The parts of a mixture of data, and the stages of its weights, read from their lines of text."""

import dataclasses
import math
import re
import shlex
from collections.abc import Iterable
from typing import Any

from tformer.config import convert
from tformer.config.run import Data
from tformer.errors import UserError, nearest

_LIST = """; on the command line values with commas need the form "('path=a columns=x,y', 'path=b')\""""


def parts(data: Data) -> tuple[Data, ...]:
    """Returns the parts of a mixture, each a `Data` of its own; a single one where there is no mixture.

    Raises:
      UserError: a part cannot be read, sets a field that parts do not have, or lacks a weight where others have one.
    """
    stated: Iterable[Any] = stated_in_parts(data)
    return tuple(dataclasses.replace(data, **values, mixture=()) for values in stated) or (data,)


def stated_in_parts(data: Data) -> list[dict[str, Any]]:
    """Returns the fields that each part of a mixture sets. Raises a `UserError` as `parts`."""
    own = [field.name for field in dataclasses.fields(Data)]
    own = own[: own.index('weight') + 1]  # where examples come from
    own.remove('mixture')
    types_ = convert.field_types()
    made = []
    for number, text in enumerate(data.mixture):
        values: dict[str, Any] = {}
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UserError(f'config.data.mixture[{number}]: {error}: {text}') from error
        for word in words:
            name, equals, value = word.partition('=')
            if name not in own or not equals:
                line = f'{word!r} is not FIELD=VALUE of a part{nearest(name, own)}'
                raise UserError(f'config.data.mixture[{number}]: {line}{_LIST}')
            if name in values:
                raise UserError(f'config.data.mixture[{number}] sets {name} twice{_LIST}')
            values[name] = convert.parse(types_[f'data.{name}'], value, f'data.mixture[{number}].{name}')
        made.append(values)
    weighted = [values.get('weight') is not None for values in made]
    if any(weighted) and not all(weighted):
        raise UserError(f'config.data.mixture[{weighted.index(False)}] has no weight, but others have one')
    return made


def stages(data: Data) -> list[tuple[int, tuple[float, ...]]]:
    """Returns the first step of each stage of data.mixture_stages, and the weight of each part from then on.

    Raises:
      UserError: a stage cannot be read, or does not fit the one before it or the mixture.
    """
    found: list[tuple[int, tuple[float, ...]]] = []
    for number, text in enumerate(data.mixture_stages):
        where = f'config.data.mixture_stages[{number}]'
        match = re.fullmatch(r'step=(\S+) weights=(\S+)', text)
        if not match:
            raise UserError(f"{where}={text!r} is not of the form 'step=1000 weights=3,1'")
        step = convert.parse(int, match[1], f'data.mixture_stages[{number}].step')
        weights = convert.parse(tuple[float, ...], match[2], f'data.mixture_stages[{number}].weights')
        least = found[-1][0] + 1 if found else 0
        if step < least:
            raise UserError(f'{where}: step={step} must be at least {least}: stages come one after the other')
        if len(weights) != len(data.mixture):
            raise UserError(f'{where}: {len(weights)} weights for {len(data.mixture)} parts of data.mixture')
        if not (0 < sum(weights) < math.inf and min(weights) >= 0):
            raise UserError(f'{where}: weights={match[2]} must be 0 or more each, and some above 0')
        found.append((step, weights))
    for part in range(len(data.mixture) if found and found[0][0] == 0 else 0):
        if not any(weights[part] for _, weights in found):
            raise UserError(f'config.data.mixture[{part}] is never seen: its weight is 0 in every stage')
    return found
