"""Whether no value fits two JSON schemas, as far as it is plain from what they say."""

import urllib.parse
from collections.abc import Mapping
from typing import Any

_EVERY = frozenset({'null', 'boolean', 'integer', 'number', 'string', 'array', 'object'})


def place(whole: Any, name: str) -> Any:
    """Returns what stands at a place of a file, '#/$defs/NAME' (RFC 6901); a `LookupError` says that nothing does."""
    found = whole
    for part in urllib.parse.unquote(name).split('/')[1:]:
        part = part.replace('~1', '/').replace('~0', '~')
        if isinstance(found, list) and part.isdecimal():
            found = found[int(part)]
        elif isinstance(found, dict):
            found = found[part]
        else:
            raise LookupError(name)
    return found


_DEPTH = 8  # of what is compared


def apart(whole: Any, a: Any, b: Any, depth: int = _DEPTH) -> bool:
    """Returns whether two schemas of a file are known to have no value in common.

    They are, by their types, by the values of const and enum, or by a property that both require.
    """
    if not depth:  # references may contain themselves
        return False
    depth -= 1
    a, b = _without_reference(whole, a), _without_reference(whole, b)
    if a is False or b is False:
        return True
    if not isinstance(a, dict) or not isinstance(b, dict):
        return False
    for one, other in ((a, b), (b, a)):
        for name in ('anyOf', 'oneOf'):
            if name in one and all(apart(whole, option, other, depth) for option in one[name]):
                return True
    if _types(a).isdisjoint(_types(b)):
        return True
    values, others = _values(a), _values(b)
    if values is not None and others is not None:
        return not any(_same(x, y) for x in values for y in others)
    if _types(a) & _types(b) != {'object'} or values is not None or others is not None:
        return False
    both = {*a.get('required', [])} & {*b.get('required', [])} & {*a.get('properties', {})} & {*b.get('properties', {})}
    return any(apart(whole, a['properties'][name], b['properties'][name], depth) for name in both)


def _without_reference(whole: Any, schema: Any) -> Any:
    for _ in range(_DEPTH):
        if isinstance(schema, dict) and '$ref' in schema:
            schema = place(whole, schema['$ref'])
    return schema


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    return schema['enum'] if 'enum' in schema else [schema['const']] if 'const' in schema else None


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Returns the types of the values that fit; of all numbers, the integers are a type of their own."""
    values = _values(schema)
    if values is not None:
        return set(map(_type, values))
    stated = schema.get('type', _EVERY)
    found = {stated} if isinstance(stated, str) else {*stated}
    return found | {'integer'} if 'number' in found else found


def _type(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return 'integer' if value == int(value) else 'number'
    kinds = {bool: 'boolean', str: 'string', list: 'array', dict: 'object'}
    return kinds.get(type(value), 'null')


def _same(x: Any, y: Any) -> bool:
    """Returns whether two values are equal in JSON, where true is not 1, and 1 is 1.0."""
    if isinstance(x, list) and isinstance(y, list):
        return len(x) == len(y) and all(map(_same, x, y))
    if isinstance(x, dict) and isinstance(y, dict):
        return x.keys() == y.keys() and all(_same(value, y[name]) for name, value in x.items())
    return _type(x) == _type(y) and x == y
