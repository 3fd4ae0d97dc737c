"""JSON schemas as regular expressions: the texts of the values that fit, in the order of their properties.

A keyword is obeyed whole or refused by name: none is passed over, so each text that is written fits. Some values that
fit are not written: properties that no name stands for, escapes of characters that stand for themselves, and what
nests deeper than `_DEPTH` and `_TURNS`.
"""

import functools
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tformer.decode import json_items, json_numbers, json_overlaps, regular
from tformer.decode.json_items import SPACE, either, exactly, listed, matching, text_of, times
from tformer.decode.regular import Items, OfBytes
from tformer.errors import UserError, nearest


def automaton(schema: Any) -> OfBytes:
    """Returns the automaton of the values that fit a schema (draft 2020-12).

    Raises:
      UserError: it has a keyword that is not supported, or a value that a keyword does not take.
    """
    return regular.of_items(_fitting(_Place(schema, entered=('#',), found={}), schema))


class _Nothing(UserError):
    """No value fits. Where others may stand in its place, these are written."""


class _Place(NamedTuple):
    """Where a schema stands."""

    whole: Any  # the schema of the file
    path: str = '#'
    entered: tuple[str, ...] = ()  # references that led here
    found: dict[tuple[str, ...], Items | None] | None = (
        None  # what the last of some references stands for behind others
    )

    def under(self, *names: object) -> '_Place':
        return self._replace(path='/'.join([self.path, *map(str, names)]))

    def refused(self, why: str, kind: type[UserError] = UserError) -> UserError:
        return kind(f'at {self.path}: {why}')


# ----------------------------------------------------------------------------------------------------------- types
def _integer(at: _Place, schema: Mapping[str, Any]) -> Items:
    lows = [math.ceil(schema['minimum'])] if 'minimum' in schema else []
    lows += [math.floor(schema['exclusiveMinimum']) + 1] if 'exclusiveMinimum' in schema else []
    highs = [math.floor(schema['maximum'])] if 'maximum' in schema else []
    highs += [math.ceil(schema['exclusiveMaximum']) - 1] if 'exclusiveMaximum' in schema else []
    low, high = max(lows, default=None), min(highs, default=None)
    return _patterns(at, json_numbers.integers(low, high), f'no integer is from {low} to {high}')


def _number(at: _Place, schema: Mapping[str, Any]) -> Items:
    lows = [(schema[name], name.startswith('e')) for name in ('minimum', 'exclusiveMinimum') if name in schema]
    highs = [(schema[name], not name.startswith('e')) for name in ('maximum', 'exclusiveMaximum') if name in schema]
    low, above = max(lows, default=(None, False))
    high, within = min(highs, default=(None, True))
    try:
        patterns = json_numbers.reals(low, high, above=above, below=not within)
    except ValueError as error:
        raise at.refused(str(error)) from error
    return _patterns(at, patterns, f'no number of {json_numbers.DIGITS} digits is within the bounds')


def _patterns(at: _Place, patterns: Sequence[str], otherwise: str) -> Items:
    if not patterns:
        raise at.refused(otherwise, _Nothing)
    return either([*map(matching, patterns)])


def _string(at: _Place, schema: Mapping[str, Any]) -> Items:
    pattern, form = schema.get('pattern'), schema.get('format')
    if sum(('pattern' in schema, 'format' in schema, not schema.keys().isdisjoint({'minLength', 'maxLength'}))) > 1:
        raise at.refused('pattern, format and a length are supported one at a time')
    inside = times(*_bounds(at, schema, 'minLength', 'maxLength'), json_items.CHARACTER)
    if form is not None:
        if form not in json_items.FORMATS:
            raise at.refused(f'format={form!r} is not supported{nearest(form, json_items.FORMATS)}')
        inside = json_items.in_string(matching(json_items.FORMATS[form]))
    elif pattern is not None:
        begins, items, ends = regular.items_of(pattern)
        more = times(0, None, json_items.CHARACTER)
        inside = [*([] if begins else more), *json_items.in_string(items), *([] if ends else more)]
    return [*exactly('"'), *inside, *exactly('"')]


def _bounds(at: _Place, schema: Mapping[str, Any], least: str, most: str) -> tuple[int, int | None]:
    low, high = schema.get(least, 0), schema.get(most)
    if high is not None and high < low:
        raise at.refused(f'{least}={low} is above {most}={high}')
    return low, high


def _array(at: _Place, schema: Mapping[str, Any]) -> Items:
    least, most = _bounds(at, schema, 'minItems', 'maxItems')
    first = schema.get('prefixItems')
    if first is None:
        item = _if_any(at.under('items'), schema.get('items', True)) if most != 0 else []
        if item is None and least:
            raise at.refused(f'no value fits items, and minItems={least}', _Nothing)
        inside = [] if item is None else listed(least, most, item)
    else:
        if not least <= len(first) <= (len(first) if most is None else most):
            raise at.refused(f'prefixItems has {len(first)} values, which minItems and maxItems do not take')
        each = [_fitting(at.under('prefixItems', place), one) for place, one in enumerate(first)]
        inside = json_items.joined(each)
    return [*exactly('['), *SPACE, *inside, *SPACE, *exactly(']')]


def _object(at: _Place, schema: Mapping[str, Any]) -> Items:
    properties, required = schema.get('properties', {}), schema.get('required', [])
    if unnamed := [name for name in required if name not in properties]:
        raise at.refused(f'required={unnamed[0]!r} is not in properties')

    def pair(key: Items, value: Items) -> Items:
        return [*key, *SPACE, *exactly(':'), *SPACE, *value]

    others = schema.get('additionalProperties', True)
    if not properties and others is not False:
        free = _if_any(at.under('additionalProperties'), others)
        inside = [] if free is None else listed(0, None, pair(_string(at, {}), free))
    else:
        read = {name: _fitting if name in required else _if_any for name in properties}
        values = {name: read[name](at.under('properties', name), value) for name, value in properties.items()}
        pairs = [(pair(text_of(name), x), name in required) for name, x in values.items() if x is not None]
        inside = json_items.some_of(pairs)
    return [*exactly('{'), *SPACE, *inside, *SPACE, *exactly('}')]


_DEPTH = 2  # of arrays and objects in each other, where any value fits
_TURNS, _WAYS = 3, 1000  # of a reference in itself, and in which references are in each other


def _anything(depth: int = _DEPTH) -> Items:
    plain = [TYPES[name].items(_Place(None), {}) for name in ('null', 'boolean', 'number', 'string')]
    if not depth:
        return either(plain)
    item = _anything(depth - 1)
    pairs = listed(0, None, [*_string(_Place(None), {}), *SPACE, *exactly(':'), *SPACE, *item])
    nested = [('[', listed(0, None, item), ']'), ('{', pairs, '}')]
    return either([*plain, *([*exactly(a), *SPACE, *inside, *SPACE, *exactly(b)] for a, inside, b in nested)])


class _Takes(NamedTuple):
    """The values of a keyword."""

    words: str
    fits: Callable[[Any], bool]


class _Type(NamedTuple):
    """A type of JSON."""

    items: Callable[[_Place, Mapping[str, Any]], Items]  # of a schema that has keywords of this type alone
    kinds: tuple[type, ...]  # of its values in Python
    keywords: Mapping[str, _Takes] = {}


_NUMBER = _Takes('a number from -1e308 to 1e308', lambda value: type(value) in (int, float) and abs(value) <= 1e308)
_COUNT = _Takes('an integer of at least 0', lambda value: type(value) is int and value >= 0)
_TEXT = _Takes('a text', lambda value: isinstance(value, str))
_NAMES = _Takes('a list of names', lambda value: isinstance(value, list) and all(isinstance(x, str) for x in value))
_LIST = _Takes('a list of at least one', lambda value: isinstance(value, list) and len(value) > 0)
_MAPPING = _Takes('an object', lambda value: isinstance(value, dict))
_SCHEMA = _Takes('a schema', lambda value: isinstance(value, dict | bool))
_ENDS = ('minimum', 'maximum', 'exclusiveMinimum', 'exclusiveMaximum')

TYPES = {
    'null': _Type(lambda at, schema: exactly('null'), (type(None),)),
    'boolean': _Type(lambda at, schema: matching('true|false'), (bool,)),
    'integer': _Type(_integer, (int,), dict.fromkeys(_ENDS, _NUMBER)),
    'number': _Type(_number, (int, float), dict.fromkeys(_ENDS, _NUMBER)),
    'string': _Type(_string, (str,), {'minLength': _COUNT, 'maxLength': _COUNT, 'pattern': _TEXT, 'format': _TEXT}),
    'array': _Type(_array, (list,), {'items': _SCHEMA, 'prefixItems': _LIST, 'minItems': _COUNT, 'maxItems': _COUNT}),
    'object': _Type(_object, (dict,), {'properties': _MAPPING, 'required': _NAMES, 'additionalProperties': _SCHEMA}),
}
_KEYWORDS = {name: takes for kind in TYPES.values() for name, takes in kind.keywords.items()}
_NOTES = (
    *('title', 'description', 'default', 'examples', 'deprecated', 'readOnly', 'writeOnly'),
    *('$schema', '$id', '$comment', '$defs', 'definitions'),
)


# ---------------------------------------------------------------------------------------------------------- schemas
def _fitting(at: _Place, schema: Any) -> Items:
    """Returns the texts of the values that fit a schema."""
    if schema is True:
        return _anything()
    if schema is False:
        raise at.refused('no value fits false', _Nothing)
    if not isinstance(schema, dict):
        raise at.refused(f'{json.dumps(schema)[:40]} is not a schema')
    if '$id' in schema and at.path != '#':
        raise at.refused("'$id' is not supported inside a schema")
    given = {name: value for name, value in schema.items() if name not in _NOTES}
    for name, read in _WHOLE.items():
        if name in given:
            beside = given.keys() - {name, *(['type'] if name in ('const', 'enum') else [])}
            if beside:
                raise at.refused(f'{min(beside)!r} beside {name!r} is not supported')
            return read(at, given)
    types = _types(at, given)
    if not types:
        return _anything()
    own = [(TYPES[name], {key: given[key] for key in given if key in TYPES[name].keywords}) for name in types]
    return _either([functools.partial(kind.items, at, keywords) for kind, keywords in own])


def _if_any(at: _Place, schema: Any) -> Items | None:
    """Returns what `_fitting` does; None where no value fits."""
    try:
        return _fitting(at, schema)
    except _Nothing:
        return None


def _either(options: Sequence[Callable[[], Items]]) -> Items:
    """Returns the texts of several that are made here, without those that no value fits; one at least has to."""
    found = []
    for make in options:
        try:
            found.append(make())
        except _Nothing as error:
            nothing = error
    if not found:
        raise nothing
    return either(found)


def _types(at: _Place, given: Mapping[str, Any]) -> list[str]:
    """Returns the types that a schema states, or the one whose keywords it has; none where it has neither."""
    stated = given.get('type', [])
    names: list[str] = stated if isinstance(stated, list) else [stated]
    if 'type' in given and not names:
        raise at.refused('type=[] must be a type or a list of at least one')
    for name in names:
        if not isinstance(name, str) or name not in TYPES:
            raise at.refused(f'type={json.dumps(name)[:40]} is unknown{nearest(name, TYPES)}')
    for name, value in given.items():
        takes = _KEYWORDS.get(name)
        if takes is None and name != 'type':
            raise at.refused(f'{name!r} is not supported{nearest(name, [*_KEYWORDS, *_WHOLE], listed=0)}')
        if takes is not None and not takes.fits(value):
            raise at.refused(f'{name}={json.dumps(value)[:40]} must be {takes.words}')
    keywords = given.keys() - {'type'}
    if not names and keywords:
        names = [name for name, kind in TYPES.items() if keywords <= kind.keywords.keys()]
    strange = keywords - {key for name in names for key in TYPES[name].keywords}
    if strange:
        raise at.refused(f'{min(strange)!r} is not of type {" or ".join(names) or "any: no type is stated"}')
    return names


def _values(at: _Place, given: Mapping[str, Any]) -> Items:
    """Returns the values of `enum` or `const`, which are of the type that is stated beside them."""
    values = given['enum'] if 'enum' in given else [given['const']]
    if not _LIST.fits(values):
        raise at.refused(f'enum={json.dumps(values)[:40]} must be {_LIST.words}')
    types = _types(at, {name: value for name, value in given.items() if name == 'type'})
    for value in values:
        if types and not any(type(value) in TYPES[name].kinds for name in types):
            raise at.refused(f'{json.dumps(value)[:40]} is not of type {" or ".join(types)}')
    return either(list(map(text_of, values)))


def _options(at: _Place, given: Mapping[str, Any], name: str) -> Items:
    options = given[name]
    if not _LIST.fits(options):
        raise at.refused(f'{name}={json.dumps(options)[:40]} must be {_LIST.words}')
    return _either([functools.partial(_fitting, at.under(name, place), each) for place, each in enumerate(options)])


def _one_of(at: _Place, given: Mapping[str, Any]) -> Items:
    """Returns the values of schemas of which no two fit one value."""
    found = _options(at, given, 'oneOf')
    for (a, first), (b, second) in itertools.combinations(enumerate(given['oneOf']), 2):
        if not json_overlaps.apart(at.whole, first, second):
            why = 'by their types, by const or enum, or by a required property with these'
            raise at.refused(f'oneOf: schemas {a} and {b} do not exclude each other {why}; anyOf allows both')
    return found


def _referred(at: _Place, given: Mapping[str, Any]) -> Items:
    """Returns what a reference to another place of the file stands for (RFC 6901)."""
    name = given['$ref']
    if not isinstance(name, str) or not (name == '#' or name.startswith('#/')):
        raise at.refused(f'$ref={json.dumps(name)[:80]} must be a place in the same file: "#/$defs/NAME"')
    assert at.found is not None
    key = (*sorted(at.entered), name)
    if key not in at.found:
        try:
            there = json_overlaps.place(at.whole, name)
        except LookupError:
            raise at.refused(f'$ref={name!r} is not there') from None
        if len(at.found) == _WAYS:
            raise at.refused(f'references are in each other in more than {_WAYS:,} ways')
        place = at._replace(path=name, entered=(*at.entered, name))
        at.found[key] = _if_any(place, there) if at.entered.count(name) <= _TURNS else None
    items = at.found[key]
    if items is None:
        raise at.refused(f'no value fits $ref={name!r}, or none in which it contains itself {_TURNS} times', _Nothing)
    return items


# keywords that say all of a value, beside which others are refused
_WHOLE: dict[str, Callable[[_Place, Mapping[str, Any]], Items]] = {
    'const': _values,
    'enum': _values,
    'anyOf': functools.partial(_options, name='anyOf'),
    'oneOf': _one_of,
    '$ref': _referred,
}
