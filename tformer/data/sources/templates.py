"""Any task as text to text (Raffel et al. 2020, section 2.4): templates write a source and a target from a record."""

import string
from collections.abc import Mapping
from typing import Any

from tformer.config.run import Data
from tformer.data.sources.records import BadRecord, no_key


def names(config: Data) -> tuple[str, ...]:
    """Returns the columns or keys that data.source_template and data.target_template name; () without templates."""
    templates = [template for template in (config.source_template, config.target_template) if template is not None]
    fields = [name for template in templates for _, name, _, _ in string.Formatter().parse(template) if name]
    return tuple(dict.fromkeys(name.partition('[')[0] for name in fields))


def written(values: Mapping[str, Any], config: Data) -> dict[str, str]:
    """Returns the source and target that the templates write from plain values; a missing value is a `BadRecord`."""
    texts = {}
    for field, template in {'source': config.source_template, 'target': config.target_template}.items():
        try:
            texts[field] = (template or '').format_map(_Keys(values))
        except BadRecord:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise BadRecord(f'data.{field}_template={template!r}: {error}') from None
    return texts


class _Keys(dict[str, Any]):
    """The values of a record, or of a nested object in it."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if value is None:
            raise BadRecord(f'{key!r} is null')
        return _Keys(value) if isinstance(value, dict) else _Items(value) if isinstance(value, list) else value

    def __missing__(self, key: str) -> Any:
        raise no_key(key, self)


class _Items(list[Any]):
    """A list that is formatted with spaces between its items."""

    def __getitem__(self, place: Any) -> Any:
        if not isinstance(place, int) or place >= len(self):
            raise BadRecord(f'there is no item {place} in a list of {len(self)}')
        value = super().__getitem__(place)
        if value is None:
            raise BadRecord(f'item {place} of a list is null')
        return _Keys(value) if isinstance(value, dict) else _Items(value) if isinstance(value, list) else value

    def __str__(self) -> str:
        if None in self:
            raise BadRecord(f'item {self.index(None)} of a list is null')
        return ' '.join(map(str, self))
