"""The families of the hub, and config.json to our `Model` and back by their tables."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from tformer import config
from tformer.config import OUTSIDE_THE_FUNCTION, Model
from tformer.errors import UserError, choose
from tformer.hf import bart, decoders, deepseek, encoders, gemma, llama, mixtures, modernbert, t5
from tformer.hf.fields import FIXED, OF_TRAINING, HubConfig, matches
from tformer.hf.rules import Family
from tformer.layers.resolved import resolve_model

FAMILIES: dict[str, Family] = {
    name: family
    for module in (encoders, modernbert, decoders, llama, gemma, mixtures, deepseek, t5, bart)
    for name, family in module.FAMILIES.items()
}


def model_of(hub_config: Mapping[str, Any], say: Callable[[str], None] = warnings.warn) -> Model:
    """Returns our model of a hub's config.json.

    Args:
      hub_config: its fields.
      say: is called with a line about fields that are not read and may change training.

    Raises:
      UserError: an unknown family, a field that is missing or null, or one whose value ours can't express or that
        nothing here reads.
    """
    kind = hub_config.get('model_type')
    family = choose(FAMILIES, str(kind), 'config.json: model_type')
    hub = HubConfig(hub_config, family.defaults)
    causal = {} if family.model['family'] == 'encoder' else {'is_causal': True}
    for name, value in {**FIXED, **causal, **family.fixed}.items():
        if name in hub_config and (hub.nullable(name) or None) != (value or None):
            raise UserError(f'config.json: {name}={hub_config[name]!r} has no counterpart here; valid: {value!r}')
    values, types = dict(family.model), config.field_types(Model)
    for field in family.fields:
        values |= field.read(hub)
    model = Model(**{name: config.coerce(types[name], value, f'model.{name}') for name, value in values.items()})
    for name, value in vars(model).items():
        if name.startswith('num_') and value is not None and value < 1:
            raise UserError(f'config.json: model.{name}={value} must be positive')
    unread = hub.unread(family.neutral)
    for name, value in unread.items():
        if value is not False and not matches(name, OF_TRAINING):
            raise UserError(f'config.json ({kind}): {name}={value!r} is not known here, and may change the numbers')
    if unread:
        say(f'config.json ({kind}): not read: {", ".join(f"{name}={value!r}" for name, value in unread.items())}')
    return model


def config_of(family: str, model: Model) -> dict[str, Any]:
    """Returns the config.json of a model, the inverse of `model_of`.

    Raises:
      UserError: the family cannot express the model, by the first field in which what it can express differs.
    """
    table, model = choose(FAMILIES, family, 'family'), resolve_model(model)
    found: dict[str, Any] = {'model_type': family, **table.fixed}
    try:
        for field in table.fields:
            found |= field.write(model)
        expressed = resolve_model(model_of(found))
    except UserError as error:
        raise UserError(f'{family}: {error}') from error
    for name, value in vars(model).items():
        if value != getattr(expressed, name) and name not in OUTSIDE_THE_FUNCTION:
            raise UserError(
                f'{family}: model.{name}={value!r} has no counterpart in the hub; valid: {getattr(expressed, name)!r}'
            )
    return found
