"""The tables of a report as files: CSV for programs, LaTeX (booktabs) for papers."""

import csv
import dataclasses
import io
import re
from collections.abc import Sequence
from typing import NamedTuple

from markdown_it import MarkdownIt

from tformer.lab.report import prose, render

SPREAD = ' ± sd'  # ends the name of a column of means with their standard deviations
NUMBER = re.compile(r'[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?')
_MEAN = f'({NUMBER.pattern})(?: ± ({NUMBER.pattern}))?'
PARTS = {  # of cells that say several things, each in a column of its own
    re.compile(_MEAN): ('mean', 'sd'),
    re.compile(f'({NUMBER.pattern})(?: to ({NUMBER.pattern}))?'): ('low', 'high'),
    re.compile(f'{_MEAN}(?:, ({NUMBER.pattern}) (.+))?'): ('mean', 'sd', 'difference', 'verdict'),
}
ESCAPES = {
    '\\': r'\textbackslash{}', '~': r'\textasciitilde{}', '^': r'\textasciicircum{}', '±': r'$\pm$',
    '<': r'\textless{}', '>': r'\textgreater{}', '"': r'\char34{}', '|': r'\textbar{}', '…': r'\dots{}',
    **{each: f'\\{each}' for each in '&%$#_{}'},
}  # fmt: skip


class Cell(NamedTuple):
    text: str
    code: bool  # whether all of it is code: a name or a value that others wrote


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a report."""

    name: str  # of its section, with a number from the second one of a section on
    section: str
    columns: Sequence[str]
    right: Sequence[bool]  # of each column, whether it is set to the right
    rows: Sequence[Sequence[Cell]]


def tables(text: str) -> list[Table]:
    """Returns the tables of a report, whose Markdown is that of `render.markdown` for a page."""
    tokens = iter(MarkdownIt('commonmark', {'html': False}).enable('table').parse(text))
    found, section, counts = list[Table](), '', dict[str, int]()
    rows: list[list[Cell]] = []
    right: list[bool] = []
    for token in tokens:
        if token.type == 'heading_open':
            section = next(tokens).content
        elif token.type == 'table_open':
            rows, right = [], []
        elif token.type == 'tr_open':
            rows.append([])
        elif token.type in ('th_open', 'td_open'):
            if token.type == 'th_open':
                right.append('right' in str(token.attrGet('style')))
            parts = next(tokens).children or []
            shown = ''.join(part.content for part in parts)
            rows[-1].append(Cell(shown.strip(), {part.type for part in parts if part.content} == {'code_inline'}))
        elif token.type == 'table_close':
            counts[section] = counts.get(section, 0) + 1
            name = render.key(section) + (f'-{counts[section]}' if counts[section] > 1 else '')
            found.append(Table(name, section, [cell.text for cell in rows[0]], right, rows[1:]))
    return found


def csv_text(table: Table) -> str:
    """Returns a table as CSV: bare numbers, nothing where a number is unknown, and the `PARTS` of cells in columns."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator='\n')
    patterns = [_pattern([row[i] for row in table.rows]) for i in range(len(table.columns))]
    names = list[str]()
    for name, pattern in zip(table.columns, patterns, strict=True):
        whole = name.removesuffix(f', mean{SPREAD}').removesuffix(f'mean{SPREAD}')
        names += [f'{whole}, {end}'.removeprefix(', ') for end in PARTS[pattern]] if pattern else [name]
    writer.writerow(names)
    for row in table.rows:
        values = list[str]()
        for cell, pattern in zip(row, patterns, strict=True):
            parts = _parts(cell.text, pattern) if pattern else [cell.text]
            values += [part if cell.code else _bare(part) for part in parts]
        writer.writerow(values)
    return file.getvalue()


def _pattern(cells: Sequence[Cell]) -> re.Pattern[str] | None:
    """Returns the first of `PARTS` that every cell of a column has, and one has whole; None in other columns."""
    for pattern in PARTS:
        found = [pattern.fullmatch(cell.text) for cell in cells if cell.text != prose.NONE]
        if not any(cell.code for cell in cells) and all(found) and any(each and each[pattern.groups] for each in found):
            return pattern
    return None


def _parts(text: str, pattern: re.Pattern[str]) -> list[str]:
    found = pattern.fullmatch(text)
    return [part or '' for part in found.groups()] if found else [''] * pattern.groups


def _bare(text: str) -> str:
    """Returns a number without what separates its thousands, '' for one that is not known, and other text as it is."""
    if text == prose.NONE:
        return ''
    return text.replace(',', '') if NUMBER.fullmatch(text) else text


def latex(table: Table) -> str:
    r"""Returns a table as LaTeX, for a document with \usepackage{booktabs}."""

    def line(cells: Sequence[str]) -> str:
        return ' & '.join(cells) + r' \\'

    def shown(cell: Cell) -> str:
        if cell.code:
            return rf'\texttt{{{escaped(prose.brief(cell.text))}}}'
        return re.sub(r'(?<![\w-])-(?=\d)', '$-$', escaped('--' if cell.text == prose.NONE else cell.text))

    body = [line([shown(cell) for cell in row]) for row in table.rows]
    return '\n'.join(
        [
            rf'\begin{{tabular}}{{{"".join("r" if right else "l" for right in table.right)}}}',
            r'\toprule',
            line([escaped(name) for name in table.columns]),
            r'\midrule',
            *body,
            r'\bottomrule',
            r'\end{tabular}',
            '',
        ]
    )


def escaped(text: str) -> str:
    """Returns text as LaTeX shows it, whatever it holds."""
    return ''.join(ESCAPES.get(character, character) for character in text)
