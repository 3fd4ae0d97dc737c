"""Regular expressions as automata over the bytes of UTF-8: what Python's `re.fullmatch` matches.

The standard library parses them. What an automaton cannot tell is refused: references to groups, looking ahead or
behind, flags. `^` and `$` may stand at the ends, where they change nothing.
"""

import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from re import _constants, _parser  # type: ignore[attr-defined]  # in every version since 3.11
from typing import Any, NamedTuple

import numpy as np

from tformer.errors import UserError

Span = tuple[int, int]  # the first and the last code point, or byte
Items = Sequence[tuple[Any, Any]]  # (what it is, what belongs to it) one after the other, as `re`'s parser gives them


class OfBytes(NamedTuple):
    """A deterministic automaton over bytes, which begins in state 0."""

    next_QB: np.ndarray  # int32 [Q, 256]; -1: none may come
    accepting_Q: np.ndarray  # where a text may end


_MOST = 50_000  # states
_LAST, _SURROGATES = sys.maxunicode, (0xD800, 0xDFFF)  # the latter have no bytes
_OTHERS = {
    _constants.AT: 'the ends of words, nor ^ and $ inside',
    _constants.GROUPREF: 'what a group matched',
    _constants.GROUPREF_EXISTS: 'whether a group matched',
    _constants.ASSERT: 'what stands before or behind',
    _constants.ASSERT_NOT: 'what stands before or behind',
    _constants.ATOMIC_GROUP: 'which way was taken',
    _constants.POSSESSIVE_REPEAT: 'which way was taken',
}
_ANCHORS = _constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING, _constants.AT_END, _constants.AT_END_STRING


def automaton(pattern: str) -> OfBytes:
    """Returns the automaton of a regular expression.

    Raises:
      UserError: it is none, or needs more than an automaton can tell, or too many states. The line does not name it.
    """
    return of_items(items_of(pattern)[1])


def of_items(items: Items) -> OfBytes:
    """Returns the automaton of what `re`'s parser makes of a regular expression; raises as `automaton`."""
    states = _States()
    begin = states.new()
    return states.determined(begin, states.sequence(items, begin))


def items_of(pattern: str) -> tuple[bool, Items, bool]:
    """Returns whether a regular expression begins with ^, what it matches behind, and whether it ends with $.

    Raises:
      UserError: it is none, or has flags.
    """
    try:
        parsed = _parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(f'it is not a regular expression: {str(error) or "it nests too deep"}') from error
    if parsed.state.flags & ~re.UNICODE:
        raise UserError('flags are not supported')
    items = [*parsed]
    size = len(items)
    while items and items[0][0] is _constants.AT and items[0][1] in _ANCHORS[:2]:
        del items[0]
    begins, size = len(items) < size, len(items)
    while items and items[-1][0] is _constants.AT and items[-1][1] in _ANCHORS[2:]:
        del items[-1]
    return begins, items, len(items) < size


class _States:
    """A nondeterministic automaton (Thompson 1968): moves by a span of bytes, and by none."""

    def __init__(self) -> None:
        self.moves: list[list[tuple[Span, int]]] = []
        self.free: list[list[int]] = []

    def new(self) -> int:
        if len(self.moves) >= 10 * _MOST:
            raise UserError(f'it has more than {10 * _MOST:,} states')
        self.moves.append([])
        self.free.append([])
        return len(self.moves) - 1

    def sequence(self, items: Items, begin: int) -> int:
        """Adds what one item after another matches; returns the state behind it."""
        for kind, given in items:
            if (spans := spans_of(kind, given)) is not None:
                begin = self.characters(spans, begin)
            elif kind in _ITEMS:
                begin = _ITEMS[kind](self, given, begin)
            else:
                raise UserError(f'an automaton cannot tell {_OTHERS.get(kind, str(kind))}')
        return begin

    def characters(self, spans: Sequence[Span], begin: int) -> int:
        end = self.new()
        for low, high in spans:
            for path in _paths(low, high):
                state = begin
                for span in path[:-1]:
                    self.moves[state].append((span, self.new()))
                    state = self.moves[state][-1][1]
                self.moves[state].append((path[-1], end))
        return end

    def branch(self, given: tuple[None, Sequence[Any]], begin: int) -> int:
        end = self.new()
        for items in given[1]:
            self.free[self.sequence(items, begin)].append(end)
        return end

    def group(self, given: tuple[int | None, int, int, Any], begin: int) -> int:
        _, added, removed, items = given
        if added or removed:
            raise UserError('flags are not supported')
        return self.sequence(items, begin)

    def repeat(self, given: tuple[int, Any, Any], begin: int) -> int:
        least, most, items = given
        for _ in range(least):
            begin = self.sequence(items, begin)
        if most is _constants.MAXREPEAT:
            loop = self.new()  # so that nothing else leads into the loop's middle
            self.free[begin].append(loop)
            self.free[self.sequence(items, loop)].append(loop)
            begin = loop
            most = least
        end = self.new()
        self.free[begin].append(end)
        for _ in range(most - least):
            begin = self.sequence(items, begin)
            self.free[begin].append(end)
        return end

    def closed(self, states: Sequence[int]) -> frozenset[int]:
        """Returns the states that are reached from these by no byte."""
        found, waiting = set(states), [*states]
        while waiting:
            for after in self.free[waiting.pop()]:
                if after not in found:
                    found.add(after)
                    waiting.append(after)
        return frozenset(found)

    def determined(self, begin: int, end: int) -> OfBytes:
        """Returns the deterministic automaton (Rabin and Scott 1959), whose states are sets of states."""
        numbers = {self.closed([begin]): 0}
        rows: list[np.ndarray] = []
        waiting = [*numbers]
        for states in waiting:  # which grows
            moves = [*itertools.chain.from_iterable(map(self.moves.__getitem__, states))]
            edges = sorted({edge for (low, high), _ in moves for edge in (low, high + 1)})  # between them all is alike
            places = {edge: place for place, edge in enumerate(edges)}
            after: list[set[int]] = [set() for _ in edges]
            for (low, high), target in moves:
                for place in range(places[low], places[high + 1]):
                    after[place].add(target)
            row = np.full(256, -1, np.int32)
            closed: dict[frozenset[int], frozenset[int]] = {}
            for (start, stop), targets in zip(itertools.pairwise(edges), map(frozenset, after), strict=False):
                if targets:
                    if targets not in closed:
                        closed[targets] = self.closed([*targets])
                    reached = closed[targets]
                    if reached not in numbers:
                        numbers[reached] = len(numbers)
                        waiting.append(reached)
                    row[start:stop] = numbers[reached]
            rows.append(row)
            if len(numbers) > _MOST:
                raise UserError(f'it has more than {_MOST:,} states')
        return OfBytes(np.stack(rows), np.array([end in states for states in numbers]))


def _without(spans: Sequence[Span]) -> list[Span]:
    """Returns the code points outside of spans."""
    edges = [-1, *itertools.chain.from_iterable(_joined(spans)), _LAST + 1]
    return [(low + 1, high - 1) for low, high in zip(edges[::2], edges[1::2], strict=True) if low + 1 < high]


def common(*each: Sequence[Span]) -> list[Span]:
    """Returns the code points that stand in all of several lists of spans."""
    return _without([span for spans in each for span in _without(spans)])


def _joined(spans: Sequence[Span]) -> list[Span]:
    found: list[Span] = []
    for low, high in sorted(spans):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found


def spans_of(kind: Any, given: Any, flags: int = 0) -> list[Span] | None:
    """Returns the code points that one of `Items` matches, None: it is not about one character."""
    if kind not in _CHARACTERS:
        return None
    return _joined(_CHARACTERS[kind](given, flags))


def _members(items: Items, flags: int) -> list[Span]:
    """Returns the code points of a set in brackets."""
    found: list[Span] = []
    for kind, given in items:
        if kind is _constants.LITERAL:
            found.append((given, given))
        elif kind is _constants.RANGE:
            found.append(given)
        elif kind is _constants.CATEGORY:
            found += _category(_CATEGORIES[given], flags)
    return _without(found) if items[0][0] is _constants.NEGATE else found


@functools.cache
def _category(escape: str, flags: int) -> list[Span]:
    """Returns the code points that an escape such as \\w matches."""
    text = ''.join(map(chr, range(_LAST + 1)))
    return [(match.start(), match.end() - 1) for match in re.finditer(f'{escape}+', text, flags)]


_CATEGORIES = {
    getattr(_constants, f'CATEGORY_{kind}{name}'): escape if not kind else escape.upper()
    for name, escape in (('DIGIT', r'\d'), ('SPACE', r'\s'), ('WORD', r'\w'))
    for kind in ('', 'NOT_')
}


def _paths(low: int, high: int) -> Iterator[list[Span]]:
    """Yields sequences of spans of bytes that together are the UTF-8 of all code points from low to high."""
    first, last = _SURROGATES
    if low <= last and high >= first:
        if low < first:
            yield from _paths(low, first - 1)
        if high > last:
            yield from _paths(last + 1, high)
        return
    for most in (0x7F, 0x7FF, 0xFFFF):  # of one, two and three bytes
        if low <= most < high:
            yield from _paths(low, most)
            yield from _paths(most + 1, high)
            return
    for bits in (6, 12, 18) if high > 0x7F else ():
        rest = (1 << bits) - 1  # what the last bytes say must be all of it where those before differ
        if low & ~rest != high & ~rest:
            if low & rest:
                yield from _paths(low, low | rest)
                yield from _paths((low | rest) + 1, high)
                return
            if high & rest != rest:
                yield from _paths(low, (high & ~rest) - 1)
                yield from _paths(high & ~rest, high)
                return
    yield [*zip(chr(low).encode(), chr(high).encode(), strict=True)]


# kind of an item -> the code points that it matches, of what belongs to it and flags of `re`
_CHARACTERS: dict[Any, Callable[[Any, int], list[Span]]] = {
    _constants.LITERAL: lambda given, flags: [(given, given)],
    _constants.NOT_LITERAL: lambda given, flags: _without([(given, given)]),
    _constants.ANY: lambda given, flags: _without([(10, 10)]),
    _constants.IN: _members,
}

_ITEMS: dict[Any, Callable[[_States, Any, int], int]] = {
    _constants.BRANCH: _States.branch,
    _constants.SUBPATTERN: _States.group,
    _constants.MAX_REPEAT: _States.repeat,
    _constants.MIN_REPEAT: _States.repeat,
}


def intersection(one: OfBytes, other: OfBytes) -> OfBytes:
    """Returns the automaton of the texts that both accept.

    Raises:
      UserError: it needs too many states.
    """
    pairs, rows = [(0, 0)], []
    number = {(0, 0): 0}
    for first, second in pairs:  # which grows
        targets = zip(one.next_QB[first].tolist(), other.next_QB[second].tolist(), strict=True)
        row = []
        for pair in targets:
            if min(pair) >= 0 and pair not in number:
                number[pair] = len(pairs)
                pairs.append(pair)
            row.append(number.get(pair, -1))
        rows.append(row)
        if len(pairs) > _MOST:
            raise UserError(f'both together have more than {_MOST:,} states')
    return OfBytes(np.array(rows, np.int32), np.array([one.accepting_Q[a] and other.accepting_Q[b] for a, b in pairs]))
