"""The printed form of configs: their differences from the defaults."""

import dataclasses
from typing import Any


def differences(section: Any) -> str:
    """Returns the call that makes a config dataclass, with the fields that differ from their defaults.

    >>> Config(model=Model(norm='rmsnorm'))
    Config(model=Model(norm='rmsnorm'))
    """
    values = [(field.name, getattr(section, field.name), field.default) for field in dataclasses.fields(section)]
    stated = ', '.join(f'{name}={value!r}' for name, value, default in values if value != default)
    return f'{type(section).__name__}({stated})'
