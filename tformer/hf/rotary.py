"""The rotary embedding in config.json: `rope_parameters`, or the `rope_theta` and `rope_scaling` of earlier files."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from tformer.config import Model
from tformer.errors import UserError, choose
from tformer.hf.fields import Field, HubConfig

# rope_type -> ours
TYPES: dict[str, str | None] = {name: name for name in ('linear', 'llama3', 'dynamic', 'yarn', 'longrope')}
TYPES |= {'default': None}
PHI3_TYPES = {'default': None, **dict.fromkeys(('longrope', 'su', 'yarn'), 'longrope')}  # as early files call it
TRAINED = 'original_max_position_embeddings'


def rotary(
    theta: str = 'rope_theta',
    partial: str | None = None,
    default: Mapping[str, Any] | None = None,
    types: Mapping[str, str | None] = TYPES,
) -> Field:
    """Returns the correspondence of a rotary embedding that is the same in every layer.

    Args:
      theta: the field of earlier files with the base of the frequencies.
      partial: that with the share of each head that is turned; None: the family turns whole heads.
      default: what `rope_parameters` is where a file says nothing of it.
      types: the family's `rope_type`s -> ours.
    """

    def read(hub: HubConfig) -> dict[str, Any]:
        new, old = hub.section('rope_parameters'), hub.section('rope_scaling')
        if new is not None and old is not None:
            raise UserError('config.json: rope_parameters and rope_scaling are both given; valid: one of them')
        nothing = {} if hub.get('rope_parameters') == {} else default  # an empty object says: no stretch
        given = new or old or nothing or {}
        rope = HubConfig({'rope_theta': hub[theta], **given}, {'model_type': 'rope_parameters'})
        if partial is not None:
            share = _share(rope.pop('partial_rotary_factor', None), hub, partial)
            return {**_read_scaling(rope, hub, types), 'rope_fraction': _whole_dims(hub, share)}
        if rope.pop('partial_rotary_factor', 1) not in (None, 1) or hub.get('partial_rotary_factor') not in (None, 1):
            raise UserError('config.json: partial_rotary_factor has no counterpart in this family; valid: 1.0')
        return _read_scaling(rope, hub, types)

    def write(model: Model) -> dict[str, Any]:
        share = {} if partial is None else {'partial_rotary_factor': model.rope_fraction}
        # Dynamic scaling has no other trained length, and beside them one of longrope has the last word.
        name = {'dynamic': 'max_position_embeddings', 'longrope': TRAINED}.get(str(model.rope_scaling))
        lengths = {} if name is None else {name: model.rope_trained_len}
        return {'rope_parameters': {**_write_scaling(model), **share}, **lengths}

    return Field(read, write)


def layered_rotary(
    pattern: Callable[[HubConfig], tuple[str, ...]], theta: str = 'rope_theta', local: str = 'rope_local_base_freq'
) -> Field:
    """Returns the correspondence of a rotary embedding with a base of its own in sliding layers.

    Args:
      pattern: `model.attention_pattern` of a config.json.
      theta: the field of earlier files with the base of the frequencies.
      local: likewise of sliding layers.
    """

    def read(hub: HubConfig) -> dict[str, Any]:
        both = hub.section('rope_parameters') or HubConfig({}, {})
        earlier: Mapping[str, Any] = hub.section('rope_scaling') or {}
        wide = {'rope_theta': hub[theta], **(both.section('full_attention') or {}), **earlier}
        near = {'rope_theta': hub[local], **(both.section('sliding_attention') or {})}
        others = both.keys() - {'full_attention', 'sliding_attention', 'model_type'}
        if (
            others
            or near.get('rope_type', 'default') != 'default'
            or near.keys() - {'rope_type', 'rope_theta', 'model_type'}
        ):
            raise UserError(
                'config.json: rope_parameters must have full_attention, and an unscaled sliding_attention; '
                'others have no counterpart'
            )
        if wide.get('truncate', True) is not True:  # which the hub's library does not look for among those of a layer
            raise UserError(
                f'config.json: truncate={wide["truncate"]!r} has no counterpart in this family; valid: True'
            )
        base = near['rope_theta'] if 'local' in pattern(hub) else None
        return {**_read_scaling(HubConfig(wide, {'model_type': 'rope_parameters'}), hub), 'local_rope_theta': base}

    def write(model: Model) -> dict[str, Any]:
        near = {'rope_type': 'default', 'rope_theta': model.local_rope_theta or 10_000.0}
        return {'rope_parameters': {'full_attention': _write_scaling(model), 'sliding_attention': near}}

    return Field(read, write)


def _share(inside: Any, hub: HubConfig, partial: str) -> Any:
    """Returns the share of a head that is turned, which a file has inside of the rotary parameters, beside them, or
    twice: the hub's library adds it inside and keeps it beside when it writes an earlier file again."""
    beside = hub.nullable(partial)
    if inside and partial in hub.given and beside not in (None, inside):
        raise UserError(f'config.json: {partial}={beside!r} is another in rope_parameters; valid: {inside!r}')
    return inside or hub[partial]


def _whole_dims(hub: HubConfig, share: Any) -> Any:
    """Returns the share of a head that is turned, which must be a whole number of its entries."""
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise UserError(f'config.json: partial_rotary_factor={share!r} must be above 0 and at most 1')
    size = hub.get('head_dim') or hub.size('hidden_size') // hub.size('num_attention_heads')
    if type(size) is not int or round(size * share) != int(size * share):
        raise UserError(f'config.json: partial_rotary_factor={share!r} of head_dim={size!r} is not a whole number')
    return share


def _read_scaling(rope: HubConfig, hub: HubConfig, types: Mapping[str, str | None] = TYPES) -> dict[str, Any]:
    """Returns our fields of one set of rotary parameters."""
    rope.was_read |= {'rope_type', 'type', 'model_type'}
    kind = rope.get('rope_type', rope.get('type', 'default'))
    scaling = choose(types, str(kind), 'config.json: rope_type')
    found = {'rope_theta': rope['rope_theta'], 'rope_scaling': scaling}
    if scaling in ('linear', 'llama3', 'dynamic'):
        found['rope_factor'] = rope['factor']
    if scaling in ('llama3', 'yarn', 'longrope'):
        found['rope_trained_len'] = _trained_len(rope, hub)
    found |= READERS[scaling](rope, hub)
    if others := [name for name, value in rope.items() if name not in rope.was_read and value is not None]:
        raise UserError(f'config.json: {", ".join(others)} of the rotary embedding have no counterpart')
    return found


def _trained_len(rope: HubConfig, hub: HubConfig) -> int:
    """Returns the length before the stretch, which a file has inside of the rotary parameters or beside them."""
    inside, beside = rope.get(TRAINED), hub.get(TRAINED)
    rope.was_read.add(TRAINED)
    hub.was_read.add(TRAINED)
    if None not in (inside, beside) and inside != beside:
        raise UserError(f'config.json: original_max_position_embeddings is given twice; valid: {inside}')
    name = 'max_position_embeddings' if inside is None and beside is None else TRAINED
    return HubConfig({name: hub.get(name) if inside is None else inside}, {}).size(name)


def _llama3(rope: HubConfig, hub: HubConfig) -> dict[str, Any]:
    if (rope['low_freq_factor'], rope['high_freq_factor']) != (1, 4):
        raise UserError('config.json: low_freq_factor and high_freq_factor other than 1 and 4 have no counterpart')
    return {}


def _dynamic(rope: HubConfig, hub: HubConfig) -> dict[str, Any]:
    trained = hub.size('max_position_embeddings')
    if rope.get(TRAINED, trained) != trained:
        raise UserError(
            'config.json: original_max_position_embeddings of dynamic rotary embeddings has no counterpart; '
            f'valid: max_position_embeddings={trained}'
        )
    rope.was_read.add(TRAINED)
    return {'rope_trained_len': trained, 'max_len': int(trained * rope.number('factor', 1))}


def _yarn(rope: HubConfig, hub: HubConfig) -> dict[str, Any]:
    names = ('beta_fast', 'beta_slow', 'attention_factor', 'factor', 'mscale', 'mscale_all_dim')
    rope.was_read |= {*names, 'truncate'}
    given = {name: rope.get(name) for name in names}
    stretch = given['factor']
    if stretch is None:
        stretch = hub.size('max_position_embeddings') / _trained_len(rope, hub)
    factor = given['attention_factor']
    if factor is None and given['mscale'] and given['mscale_all_dim']:
        over, under = (yarn_scale(stretch, rope.number(name)) for name in ('mscale', 'mscale_all_dim'))
        factor = over / under
    return {
        'rope_factor': stretch,
        'rope_fast_turns': given['beta_fast'] or 32.0,
        'rope_slow_turns': given['beta_slow'] or 1.0,
        'rope_round_ramp': rope.get('truncate', True) or False,
        'rope_attention_factor': factor,
    }


def yarn_scale(stretch: float, share: float) -> float:
    """Returns 1 + 0.1 share ln(stretch), YaRN's factor on queries and keys where `share` is 1."""
    return 0.1 * share * math.log(max(stretch, 1)) + 1


def _longrope(rope: HubConfig, hub: HubConfig) -> dict[str, Any]:
    rope.was_read |= {'factor', 'attention_factor'}
    trained, factor = _trained_len(rope, hub), rope.get('attention_factor')
    ours = hub.size('max_position_embeddings') / trained
    if factor is None and rope.get('factor') not in (None, ours):
        factor = math.sqrt(1 + math.log(max(rope.number('factor'), 1)) / math.log(trained))
    lists = {f'rope_{length}_factors': rope[f'{length}_factor'] for length in ('short', 'long')}
    for name, numbers in lists.items():
        if not isinstance(numbers, list) or any(type(number) not in (int, float) for number in numbers):
            raise UserError(f'config.json: {name.removeprefix("rope_")[:-1]}={numbers!r} is not a list of numbers')
    return {'rope_attention_factor': factor, **{name: tuple(map(float, numbers)) for name, numbers in lists.items()}}


READERS: dict[str | None, Callable[[HubConfig, HubConfig], dict[str, Any]]] = {
    None: lambda rope, hub: {},
    'linear': lambda rope, hub: {},
    'llama3': _llama3,
    'dynamic': _dynamic,
    'yarn': _yarn,
    'longrope': _longrope,
}


def _write_scaling(model: Model) -> dict[str, Any]:
    """The inverse of `_read_scaling`."""
    kind, rope = model.rope_scaling, {'rope_type': model.rope_scaling or 'default', 'rope_theta': model.rope_theta}
    if kind in ('linear', 'llama3', 'dynamic', 'yarn'):
        rope['factor'] = model.rope_factor
    if kind in ('llama3', 'yarn', 'longrope'):
        rope[TRAINED] = model.rope_trained_len
    if kind == 'llama3':
        rope |= {'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
    if kind == 'yarn':
        rope |= {'beta_fast': model.rope_fast_turns, 'beta_slow': model.rope_slow_turns}
        rope |= {'truncate': model.rope_round_ramp}
    if kind == 'longrope':
        rope |= {'short_factor': list(model.rope_short_factors), 'long_factor': list(model.rope_long_factors)}
    if kind in ('yarn', 'longrope') and model.rope_attention_factor is not None:
        rope['attention_factor'] = model.rope_attention_factor
    return rope


ROTARY = rotary()
