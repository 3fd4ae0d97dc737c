"""Pieces of JSON as regular expressions: characters in texts, formats."""

import itertools
import json
import re
from collections.abc import Sequence
from re import _constants  # type: ignore[attr-defined]  # in every version since 3.11
from typing import Any

from tformer.decode import regular
from tformer.decode.regular import Items


def matching(pattern: str) -> Items:
    """Returns the texts that match a regular expression."""
    return regular.items_of(pattern)[1]


def exactly(text: str) -> Items:
    """Returns one text."""
    return matching(re.escape(text))


def either(options: Sequence[Items]) -> Items:
    """Returns the texts of several."""
    return [(_constants.BRANCH, (None, options))]


def times(least: int, most: int | None, items: Items) -> Items:
    """Returns texts one after the other, from `least` to `most` times; None: without an end."""
    return [(_constants.MAX_REPEAT, (least, _constants.MAXREPEAT if most is None else most, items))]


SPACE = matching('[ ]?')
COMMA = [*SPACE, *exactly(','), *SPACE]


def listed(least: int, most: int | None, item: Items) -> Items:
    """Returns from `least` to `most` items, between commas."""
    if most == 0:
        return []
    further = times(max(least - 1, 0), None if most is None else most - 1, [*COMMA, *item])
    return [*item, *further] if least else times(0, 1, [*item, *further])


def joined(each: Sequence[Items]) -> Items:
    """Returns items between commas."""
    return [item for place, items in enumerate(each) for item in ([*COMMA, *items] if place else items)]


def some_of(pairs: Sequence[tuple[Items, bool]]) -> Items:
    """Returns pairs in their order, between commas, of which some may be left out."""
    behind: Items = []  # pairs that follow one
    first: Items = []  # the same where none is before
    for items, needed in reversed(pairs):
        begun = [*items, *behind]
        first = begun if needed else either([begun, first])
        further = [*COMMA, *items]
        behind = [*(further if needed else times(0, 1, further)), *behind]
    return first


def text_of(value: Any) -> Items:
    """Returns a value of JSON as the standard library writes it; a `ValueError` is of NaN and infinity."""
    return exactly(json.dumps(value, ensure_ascii=False, allow_nan=False))


_ESCAPED = {'"': '"', '\\': '\\', '\b': 'b', '\f': 'f', '\n': 'n', '\r': 'r', '\t': 't'}
_FIRST = 0x20  # of the characters that stand in a text of JSON as they are


def _character(spans: Sequence[regular.Span]) -> Items:
    """Returns what a character of some code points is in a text of JSON."""
    plain, escapes = [], []
    for low, high in spans:
        escapes += [exactly(f'\\{letter}') for char, letter in _ESCAPED.items() if low <= ord(char) <= high]
        edges = [
            max(low, _FIRST) - 1,
            *(ord(char) for char in '"\\' if max(low, _FIRST) <= ord(char) <= high),
            high + 1,
        ]
        plain += [(a + 1, b - 1) for a, b in itertools.pairwise(edges) if a + 1 < b]
    parts = [[(_constants.IN, [(_constants.RANGE, span) for span in plain])]] if plain else []
    return either([*parts, *escapes])


def in_string(items: Items) -> Items:
    """Returns what texts of a regular expression are between the quotes of JSON.

    Dialects differ in what escapes such as \\d and the point match: here it is what it is in all of them.
    """
    found: list[tuple[Any, Any]] = []
    for kind, given in items:
        every = [regular.spans_of(kind, given, flags) for flags in (re.ASCII, re.UNICODE)]
        if every[0] is not None and every[1] is not None:
            found += _character(regular.common(every[0], every[1], *([_ON_A_LINE] if kind is _constants.ANY else [])))
        elif kind is _constants.BRANCH:
            found += either([in_string(option) for option in given[1]])
        elif kind in (_constants.SUBPATTERN, _constants.MAX_REPEAT, _constants.MIN_REPEAT):
            found.append((kind, (*given[:-1], in_string(given[-1]))))
        else:
            found.append((kind, given))
    return found


_ON_A_LINE = [(0, 9), (11, 12), (14, 0x2027), (0x202A, 0x10FFFF)]  # ECMA-262, LineTerminator
CHARACTER = _character([(_FIRST, 0x7E), (0xA0, 0x10FFFF), *((ord(char), ord(char)) for char in '\b\f\n\r\t')])
_SECONDS = r'([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)'
_DATE = r'[1-9]\d{3}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))'
FORMATS = {
    'date': _DATE,
    'time': _SECONDS,
    'date-time': f'{_DATE}T{_SECONDS}',
    'uuid': '[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}',
    'email': r'[a-z0-9_+-]+(\.[a-z0-9_+-]+)*@([a-z0-9]+(-+[a-z0-9]+)*\.)+[a-z]{2,}',
}
