"""The report as one self-contained HTML page."""

import html
import pathlib
import re
from collections.abc import Callable, Sequence

from tformer.lab.report.document import CODE, Block, Code, Document, Figure, Line, List, Section, Table

Draw = Callable[[Figure], str | None]  # an SVG element, or None where nothing can be drawn
BREAK = r'\1<wbr>'
NUMBER = re.compile(r'([-+<]? ?\d.*|-?)')  # a cell of a column of numbers


def page(document: Document, draw: Draw) -> str:
    """Returns the page: all of it inline, and nothing in it runs.

    Args:
      document: the report.
      draw: of its figures; those that it has no drawing of are left out.
    """
    parts = {
        'TITLE': _text(document.title.replace('`', '')),
        'HEADING': _line(document.title),
        'LINKS': ' '.join(f'<a href="#{_key(section)}">{_text(section.title)}</a>' for section in document.sections),
        'SECTIONS': '\n'.join(_section(section, draw) for section in document.sections),
    }
    template = pathlib.Path(__file__).with_suffix('.html').read_text(encoding='utf-8')
    return re.sub(r'\[\[([A-Z]+)\]\]', lambda match: parts[match[1]], template)


def _key(section: Section) -> str:
    return re.sub(r'\W+', '-', section.title.lower())


def _text(text: str) -> str:
    return html.escape(text, quote=True)


def _line(text: str) -> str:
    """Returns a line with its code marked; a long name may break after a comma or a slash."""
    parts = [_text(part) for part in CODE.split(text)]
    parts[1::2] = [f'<code>{re.sub("([,/])", BREAK, part)}</code>' for part in parts[1::2]]
    return ''.join(parts)


def _section(section: Section, draw: Draw) -> str:
    """Returns a section; figures that follow one another stand side by side where there is room."""
    parts: list[str] = []
    figures: list[str] = []
    for block in [*section.blocks, None]:
        if isinstance(block, Figure):
            if drawn := draw(block):
                caption = f'<figcaption>{_line(block.caption)}</figcaption>'
                figures.append(f'<figure>{drawn}{caption}</figure>')
            continue
        if figures:
            parts.append(f'<div class="figures">{"".join(figures)}</div>')
            figures = []
        if block is not None:
            parts.append(_block(block))
    body = '\n'.join(parts)
    return f'<section id="{_key(section)}">\n<h2>{_text(section.title)}</h2>\n{body}\n</section>'


def _block(block: Block) -> str:
    match block:
        case Line(text):
            return f'<p>{_line(text)}</p>'
        case List(items):
            return f'<ul>{"".join(f"<li>{_line(item)}</li>" for item in items)}</ul>'
        case Code(lines):
            return f'<pre>{_text(chr(10).join(lines))}</pre>'
        case Table(head, rows):
            return _table(head, rows)
    raise TypeError(block)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in a box that scrolls; columns of numbers are set to the right."""
    right = [all(map(NUMBER.fullmatch, column)) for column in zip(*rows, strict=True)]
    marks = [' class="n"' if each else '' for each in right] or [''] * len(head)
    top = ''.join(f'<th{mark}>{_line(cell)}</th>' for mark, cell in zip(marks, head, strict=True))
    body = ''.join(
        f'<tr>{"".join(f"<td{mark}>{_line(cell)}</td>" for mark, cell in zip(marks, row, strict=True))}</tr>'
        for row in rows
    )
    return f'<div class="table" tabindex="0"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
