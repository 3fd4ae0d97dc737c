"""The printed form of configs: their differences from the defaults."""

import dataclasses
from typing import Any


class Section:
    """A config dataclass, which prints as the call that makes it, with the fields that differ from their defaults.

    >>> Config(model=Model(norm='rmsnorm'))
    Config(model=Model(norm='rmsnorm'))
    """

    def __repr__(self) -> str:
        fields: Any = dataclasses.fields(self)  # type: ignore[arg-type]
        values = [(field.name, getattr(self, field.name), field.default) for field in fields]
        stated = ', '.join(f'{name}={value!r}' for name, value, default in values if value != default)
        return f'{type(self).__name__}({stated})'
