"""Any task as text to text (Raffel et al. 2020, 2.4): source and target written from what the data has."""

import string
from collections.abc import Mapping
from typing import Any

from tformer.config.run import Data
from tformer.data.fields import missing, text
from tformer.data.records import BadRecord, Record


def names(config: Data) -> tuple[str, ...]:
    """The columns or keys that data.source_template and data.target_template name; () where there are none."""
    templates = [template for template in (config.source_template, config.target_template) if template is not None]
    fields = [name for template in templates for _, name, _, _ in string.Formatter().parse(template) if name]
    return tuple(dict.fromkeys(name.partition('[')[0] for name in fields))


def record_of(values: Mapping[str, Any], config: Data) -> Record:
    """The source and target of plain values.

    Raises:
      BadRecord: a template names what the values lack.
    """
    assert config.source_template is not None and config.target_template is not None
    return {
        'source': _written(config.source_template, values, 'data.source_template'),
        'target': _written(config.target_template, values, 'data.target_template'),
    }


def _written(template: str, values: Mapping[str, Any], field: str) -> str:
    try:
        return text(template.format_map(_Keys(values)), field)
    except BadRecord:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BadRecord(f'{field}={template!r}: {error}') from None


class _Keys(dict[str, Any]):
    """The values of a record, or of a part of it."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if value is None:
            raise BadRecord(f'{key!r} is null')
        return _Keys(value) if isinstance(value, dict) else _Items(value) if isinstance(value, list) else value

    def __missing__(self, key: str) -> Any:
        raise BadRecord(missing(key, self))


class _Items(list[Any]):
    """A list that is written with spaces between its items."""

    def __getitem__(self, place: Any) -> Any:
        if not isinstance(place, int) or place >= len(self):
            raise BadRecord(f'no item {place} in a list of {len(self)}')
        value = super().__getitem__(place)
        return _Keys(value) if isinstance(value, dict) else _Items(value) if isinstance(value, list) else value

    def __str__(self) -> str:
        return ' '.join(map(str, self))

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)
