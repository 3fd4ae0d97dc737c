"""Jinja's sandbox for the chat templates of the hub, in which a template also ends, and fills no memory.

A template is a program of whoever made the model. Jinja keeps it away from files, modules and Python's internals; here
it also has so many turns of loops and calls of macros, and so many characters that its operations read and make.
"""

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

import jinja2
from jinja2 import nodes, parser, sandbox, visitor
from jinja2.ext import Extension


class Environment(sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with the steps and the characters that the text which is being written has taken."""

    intercepted_binops = frozenset({'+', '*', '**', '%'})
    steps = 0
    characters = 0

    def begin(self) -> None:
        """Begins another text."""
        self.steps = self.characters = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise jinja2.TemplateError(f'it takes more than {_MOST_STEPS:,} steps')

    def charge(self, name: str, count: int) -> None:
        """Counts the characters, or the entries of lists, that an operation reads and makes.

        Raises:
          jinja2.TemplateError: they are too many, in one operation or in all of a text.
        """
        self.characters += count
        if count > _LONGEST or self.characters > _MOST_CHARACTERS:
            raise jinja2.TemplateError(f'{name} makes too much of its operands')

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.charge(operator, SIZES[operator](left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        bound = getattr(called, '__wrapped__', called)  # which Jinja wraps for `format`
        owner, name = getattr(bound, '__self__', None), getattr(bound, '__name__', '')
        if isinstance(owner, str):
            if name == 'join':
                args = tuple(_whole(each) for each in args)
            self.charge(name, len(owner) + _size(name, owner, *args, **kwargs))
        return super().call(context, called, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _PADDING and super().is_safe_attribute(obj, attr, value)

    def joined(self, *parts: Any) -> str:
        """Returns what `~` makes of its operands."""
        self.charge('~', sum(map(_length, parts)))
        return ''.join(map(str, parts))

    def written(self, value: Any) -> str:
        """Returns a value as the text that the template puts out."""
        if not isinstance(value, str):
            self.charge('the text', _length(value))
        return str(value)

    def concat(self, parts: Iterable[str]) -> str:
        """Returns what a template, a macro or a block has put out."""
        found = []
        for part in parts:
            self.charge('the text', len(part))
            found.append(part)
        return ''.join(found)

    def charged(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a filter that counts what it reads and makes."""
        first = int(hasattr(function, 'jinja_pass_arg'))  # the context or the environment, which Jinja puts in front

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            given = [_whole(each) if place == first else each for place, each in enumerate(args)]
            own = given[first:]
            if name == 'join' and own:  # as the method, of the text between
                own = [kwargs.get('d', own[1] if len(own) > 1 else ''), own[0]]
            self.charge(name, sum(len(each) for each in own if isinstance(each, Sized)) + _size(name, *own, **kwargs))
            return function(*given, **kwargs)

        return counted

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Joins().visit(super()._parse(source, name, filename))
        blocks: list[Any] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
        for block in blocks:
            call = nodes.Call(nodes.EnvironmentAttribute('step'), [], [], None, None)
            block.body.insert(0, nodes.ExprStmt(call).set_lineno(block.lineno))
        return tree


class _Joins(visitor.NodeTransformer):
    """Makes each `~` of a template a call of `Environment.joined`: Jinja does not let it be intercepted."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        parts = [self.visit(part) for part in node.nodes]
        return nodes.Call(nodes.EnvironmentAttribute('joined'), parts, [], None, None).set_lineno(node.lineno)


class _Generation(Extension):
    """The block {% generation %}, which marks answers for the hub's trainer, as its content alone."""

    tags: set[str] = {'generation'}  # noqa: RUF012

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(('name:endgeneration',), drop_needle=True)


_MOST_STEPS = 1_000_000
_LONGEST = 10_000_000  # characters of a text, entries of a list
_MOST_CHARACTERS = 100_000_000  # of all operations
_MOST_BITS = 64  # as an exponent
# Methods that pad to any width, or put any text in place of a character.
_PADDING = ('center', 'ljust', 'rjust', 'zfill', 'expandtabs', 'to_bytes', 'format_map', 'translate')
_UNUSED = ('batch', 'center', 'pprint', 'slice', 'sum', 'urlize', 'wordwrap', 'xmlattr')  # filters, likewise


# -------------------------------------------------------------------------------- how much an operation makes at most
def _length(value: Any) -> int:
    """Returns about how many characters a value has as a text; what is beyond `_LONGEST` is not counted."""
    found, left = 0, [value]
    while left and found <= _LONGEST:
        each = left.pop()
        if isinstance(each, str | bytes):
            found += len(each)
        elif isinstance(each, Mapping):
            found += 4 * len(each) + 2
            left += [*each, *each.values()]
        elif isinstance(each, list | tuple | set | frozenset):
            found += 2 * len(each) + 2
            left += each
        else:
            found += each.bit_length() // 3 + 1 if isinstance(each, int) else 8
    return found


def _whole(value: Any) -> Any:
    """Returns the list of what an iterator gives, which can be counted; any other value as it is."""
    return list(value) if hasattr(value, '__next__') else value


def _size(name: str, *args: Any, **kwargs: Any) -> int:
    """Returns how much a method or a filter makes; what does not grow, or is called wrongly, makes nothing."""
    try:
        return SIZES[name](*args, **kwargs) if name in SIZES else 0
    except TypeError:  # which the call itself says better
        return 0


def _bits(number: Any) -> int:
    return number.bit_length() if isinstance(number, int) else 0


def _product(left: Any, right: Any) -> int:
    sizes = [len(each) if isinstance(each, Sized) else each for each in (left, right)]
    if isinstance(left, Sized) or isinstance(right, Sized):
        return int(max(0, sizes[0] * sizes[1]))
    return _bits(left) + _bits(right)


def _replaced(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    return len(text) + str(text).count(str(old)) * len(str(new))


def _indented(text: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    return (str(text).count('\n') + 1) * (width if isinstance(width, int) else len(width))


def _formatted(text: Any, *args: Any, **kwargs: Any) -> int:
    """A width stands in the text, or is another value."""
    text = str(text)
    if re.search(r'\d{4}|%[-+ #0]*\*|\.\*|\{[^}]*\{', text):
        return _LONGEST + 1
    return len(text) + sum(map(text.count, '%{')) * (1000 + _length([args, kwargs]))


def _dumped(value: Any, *_: Any, indent: Any = None, separators: Any = (), **__: Any) -> int:
    width = indent if isinstance(indent, int) else len(indent or '')
    return _length(value) * (1 + width + _length(separators))


# An operator, a method of texts or a filter -> the characters that it makes of its operands.
SIZES: dict[str, Callable[..., int]] = {
    '+': lambda left, right: len(left) + len(right) if isinstance(left, Sized) and isinstance(right, Sized) else 0,
    '*': _product,
    '**': lambda base, power: _bits(base) * power if power <= _MOST_BITS else _LONGEST + 1,
    '%': lambda left, right: _formatted(left, right) if isinstance(left, str) else 0,
    'replace': _replaced,
    'join': lambda between, parts, *_, **__: _length(parts) + len(between) * len(parts),
    'indent': _indented,
    'format': _formatted,
    'string': _length,
    'tojson': _dumped,
}


# ------------------------------------------------------------------------------------------------- what templates call
def environment() -> Environment:
    """Returns an environment with the functions that the hub's templates call."""
    made = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, 'jinja2.ext.loopcontrols'])
    made.finalize = made.written
    made.filters['tojson'] = _json
    made.filters = {name: made.charged(name, each) for name, each in made.filters.items() if name not in _UNUSED}
    del made.globals['lipsum']  # as much text as is asked for
    made.globals |= {'raise_exception': _refuse, 'strftime_now': _now}
    return made


def _json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Writes JSON as it is, without the escapes for HTML of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    """Returns the time in a form of `strftime`; one of any width is refused."""
    if re.search(r'%[^a-zA-Z%]*\d', form):
        raise jinja2.TemplateError('strftime_now takes no width')
    return datetime.datetime.now().strftime(form)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
