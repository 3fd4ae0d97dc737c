"""Whether each field of a config has an effect.

A field that the user states where it has none is an error. One that stands in a recipe is dropped with a line, so that
a recipe can be changed by a single field.
"""

import dataclasses
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from tformer import config as config_lib
from tformer.checks import inherited, model_fields, run_fields
from tformer.checks.choices import check_choices
from tformer.config import Config, override, parts, stated_in_parts, values
from tformer.errors import UserError

DEFAULTS = values(Config())


def complain(line: str) -> None:
    """Prints a line to the standard error."""
    print(line, file=sys.stderr, flush=True)


def settle(config: Config, stated: Collection[str] = (), say: Callable[[str], object] = complain) -> Config:
    """Returns `config` with the model that train.init_model asks for, and fields without effect at their defaults.

    Args:
      config: as a recipe makes it and the user changes it.
      stated: the dotted fields that the user states.
      say: is called with a line about the dropped fields.

    Raises:
      UserError: a stated field has no effect, a part of a mixture sets a field that has none, a key of a table is
        unknown, or as `inherited.with_model`.
    """
    given, config = config, inherited.with_model(config, stated)
    lent = config_lib.difference(given, config)
    check_choices(config)
    _check_parts(config)
    dropped: list[str] = []
    while found := _without_effect(config):
        for name, words in found.items():
            value = values(config)[name]
            if name in stated:
                raise UserError(_line(name, value, words))
            if name not in lent:
                dropped.append(f'{name}={value} (it applies where {words})')
        config = override(config, {name: DEFAULTS[name] for name in found})
    if dropped:
        say(f'dropped from the config, as it has no effect here: {"; ".join(dropped)}')
    return config


def _check_parts(config: Config) -> None:
    for number, (part, stated) in enumerate(zip(parts(config.data), stated_in_parts(config.data), strict=False)):
        own = dataclasses.replace(config, data=part)
        rules = run_fields.rules(own)
        for name, value in stated.items():
            applies, words = rules.get(f'data.{name}', (lambda c: True, ''))
            if not applies(own):
                raise UserError(_line(f'data.mixture[{number}]: {name}', value, words))


def settled(config: Config) -> Config:
    """Returns `settle(config)` without a line, for the config of a run that an earlier version wrote."""
    return settle(config, say=lambda line: None)


def load(spec: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """Returns the config of `FILE[:argument]` with overrides applied, without the fields that have no effect then.

    Raises:
      UserError: as `config.load` and `settle`, or train.init_model lacks its train.init_from.
    """
    config = settle(config_lib.load(spec, overrides), overrides or {})
    inherited.check_known(config)
    return config


def _line(name: str, value: object, words: str) -> str:
    return f'{name}={value} has no effect here: it applies where {words}'


def with_effect(config: Config, names: Iterable[str]) -> list[str]:
    """Returns those of the dotted fields that have an effect in a config, whatever their values are."""
    rules = run_fields.rules(config)
    return [name for name in names if _elsewhere(config, name, rules) is None]


def _without_effect(config: Config) -> dict[str, str]:
    """Returns the fields that have no effect and differ from their defaults, each with where it applies, in words."""
    rules = run_fields.rules(config)
    changed = [name for name, value in values(config).items() if value != DEFAULTS[name]]
    found = {name: _elsewhere(config, name, rules) for name in changed if not _is_derived(config, name)}
    return {name: words for name, words in found.items() if words is not None}


def _elsewhere(config: Config, name: str, rules: Mapping[str, run_fields.Rule]) -> str | None:
    """Returns where a field applies, in words, if it has no effect in this config; else None."""
    section, _, field = name.partition('.')
    words = model_fields.elsewhere(config.model, field) if section == 'model' else None
    if words is None and name in rules and not rules[name][0](config):
        words = rules[name][1]
    return words


def _is_derived(config: Config, name: str) -> bool:
    """Returns whether a field has the value that its default, None, stands for."""
    section, _, field = name.partition('.')
    if name == 'data.encoder_length':
        return config.data.encoder_length == config.data.length
    return section == 'model' and model_fields.as_derived(config.model, field)
