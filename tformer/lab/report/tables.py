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
PAIRS = {' ± ': ('mean', 'sd'), ' to ': ('low', 'high')}
NUMBER = re.compile(r'[+-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?')
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
    """Returns a table as CSV: bare numbers, nothing where a number is unknown, 'a ± b' and 'a to b' in two columns."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator='\n')
    pairs = [_pair([row[i] for row in table.rows]) for i in range(len(table.columns))]
    names = list[str]()
    for name, pair in zip(table.columns, pairs, strict=True):
        whole = name.removesuffix(f', mean{SPREAD}').removesuffix(f'mean{SPREAD}')
        names += [f'{whole}, {end}'.removeprefix(', ') for end in PAIRS[pair]] if pair else [name]
    writer.writerow(names)
    for row in table.rows:
        values = list[str]()
        for cell, pair in zip(row, pairs, strict=True):
            parts = cell.text.partition(pair)[::2] if pair else (cell.text,)
            values += [part if cell.code else _bare(part) for part in parts]
        writer.writerow(values)
    return file.getvalue()


def _pair(cells: Sequence[Cell]) -> str:
    """Returns what stands between the two numbers of every cell of a column that has them; '' in other columns."""
    for between in PAIRS:
        ends = [end for cell in cells if between in cell.text for end in cell.text.split(between)]
        numbers = ends + [cell.text for cell in cells if between not in cell.text and cell.text != prose.NONE]
        if ends and not any(cell.code for cell in cells) and all(map(NUMBER.fullmatch, numbers)):
            return between
    return ''


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
