"""A page before it is Markdown or HTML: sections of lines, lists, tables, code and figures.

In a line, what stands between backquotes is code. What others wrote (names, values, errors) comes into a line by `code`
alone, which leaves no backquote in it: the rest of a line is ours, and neither format needs to guess.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

CODE = re.compile(r'`([^`]*)`')
CONTROL = re.compile(r'[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+')


class Line(NamedTuple):
    """A paragraph."""

    text: str


class List(NamedTuple):
    """Lines with bullets."""

    items: Sequence[str]


class Table(NamedTuple):
    """Cells are lines; those of a column are as many as its head says."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class Code(NamedTuple):
    """What is typed into a shell."""

    lines: Sequence[str]


class Figure(NamedTuple):
    """A drawing, which pages alone have.

    Attributes:
      kind: a key of `plots.DRAWINGS`.
      of: which one of its kind.
      caption: a line.
    """

    kind: str
    of: str
    caption: str


Block = Line | List | Table | Code | Figure


class Section(NamedTuple):
    title: str
    blocks: Sequence[Block]


class Document(NamedTuple):
    title: str
    sections: Sequence[Section]


def plain(text: str) -> str:
    """Returns text in one line, without what a terminal or a page would obey."""
    return CONTROL.sub(' ', text).strip()


def code(text: object) -> str:
    """Returns what others wrote, as code in a line."""
    return '`' + (plain(str(text)).replace('`', "'") or ' ') + '`'


def markdown(document: Document) -> str:
    """Returns the document as Markdown, without its figures."""
    parts = [f'# {document.title}']
    for section in document.sections:
        parts += [f'## {section.title}', *(_block(block) for block in section.blocks if not isinstance(block, Figure))]
    return '\n\n'.join(parts) + '\n'


def _block(block: Block) -> str:
    match block:
        case Line(text):
            return _escaped(text)
        case List(items):
            return '\n'.join(f'- {_escaped(item)}' for item in items)
        case Table(head, rows):
            return '\n'.join([_row(head), _row(['---'] * len(head)), *map(_row, rows)])
        case Code(lines):
            return '\n'.join(f'    {plain(line)}' for line in lines)
    raise TypeError(block)


def _row(cells: Iterable[str]) -> str:
    return '| ' + ' | '.join(_escaped(cell).replace('|', '\\|') for cell in cells) + ' |'


def _escaped(text: str) -> str:
    """Returns a line in which nothing but code is marked."""
    parts = CODE.split(text)
    parts[::2] = [re.sub(r'([\\*\[]|<(?=\S))', r'\\\1', part) for part in parts[::2]]
    return ''.join(f'`{part}`' if number % 2 else part for number, part in enumerate(parts))
