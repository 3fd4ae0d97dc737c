"""A report as Markdown and as one self-contained HTML page, both from the template report.md.jinja.

In a value that the template prints, what stands between backquotes is code. What others wrote (names, values, errors)
is printed by `code` alone, which leaves no backquote in it.
"""

import json
import pathlib
import re
from collections.abc import Callable, Sequence

import jinja2
from markdown_it import MarkdownIt
from markupsafe import Markup

from tformer.lab.report import findings, prose, provenance
from tformer.lab.report.prose import Figure
from tformer.lab.report.report_data import Report

Draw = Callable[[str, str], str]  # (kind, which of it) -> an SVG element
MISSING = "The report has no drawings because matplotlib is not installed: `pip install 'tformer[report]'`"
FIGURES = 'figures'  # of a fenced block in the page's Markdown that holds [kind, which, caption] of each


def markdown(report: Report, drawn: bool = True, page: bool = False) -> str:
    """Returns the report as Markdown.

    Args:
      report: what is written.
      drawn: whether drawings can be made; if not, a line says so.
      page: for the HTML page, with figures and aligned columns.
    """

    def figures(listed: Sequence[Figure]) -> Markup:
        return Markup(f'~~~{FIGURES}\n{json.dumps(listed)}\n~~~' if page and drawn and listed else '')

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True, finalize=escaped, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    filters: dict[str, Callable[..., str]] = {
        'code': prose.code,
        'cell': lambda value: prose.code(value).replace('|', r'\|'),
        'typed': lambda value: Markup(prose.plain(value)),
        'quantity': prose.quantity,
        'probability': prose.probability,
    }
    environment.filters |= filters
    text = environment.get_template('report.md.jinja').render(
        report=report, findings=findings, prose=prose, provenance=provenance, figures=figures,
        missing=None if drawn else MISSING, right='---:' if page else '---',
    )  # fmt: skip
    text = re.sub(r'(?<=\S)\n(?=[^\s|#~[-])', ' ', text)
    return re.sub(r'\n{3,}', '\n\n', text).strip() + '\n'


def escaped(value: object) -> Markup:
    """Returns a value in which nothing but code is marked."""
    if isinstance(value, Markup):
        return value
    parts = prose.CODE.split('' if value is None else str(value))
    parts[::2] = [re.sub(r'([\\*\[]|<(?=\S))', r'\\\1', part) for part in parts[::2]]
    return Markup(''.join(f'`{part}`' if number % 2 else part for number, part in enumerate(parts)))


def page(text: str, draw: Draw) -> str:
    """Returns the HTML page of a report in Markdown: all of it is inline, and nothing in it runs.

    Args:
      text: of `markdown` for a page.
      draw: makes the figures.
    """
    parser = MarkdownIt('commonmark', {'html': False}).enable('table')

    def figures(renderer: object, tokens: Sequence, i: int, *_: object) -> str:
        drawn = (
            f'<figure>{draw(kind, which)}<figcaption>{parser.renderInline(caption)}</figcaption></figure>'
            for kind, which, caption in json.loads(tokens[i].content)
        )
        return f'<div class="figures">{"".join(drawn)}</div>\n'

    rules: dict[str, Callable[..., str]] = {
        'fence': figures,
        'code_inline': lambda _, tokens, i, *rest: f'<code>{_breakable(tokens[i].content)}</code>',
        'table_open': lambda *_: '<div class="table" tabindex="0"><table>\n',
        'table_close': lambda *_: '</table></div>\n',
    }
    for name, rule in rules.items():
        parser.add_render_rule(name, rule)
    title, *sections = re.split(r'^##? ', text, flags=re.MULTILINE)[1:]
    parts = [section.partition('\n') for section in sections]
    template = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent), autoescape=True, trim_blocks=True
    ).get_template('page.html.jinja')
    return template.render(
        title=title.strip().replace('`', ''),
        heading=Markup(parser.renderInline(title.strip())),
        sections=[
            {'key': re.sub(r'\W+', '-', name.lower()), 'title': name, 'body': Markup(parser.render(body))}
            for name, _, body in parts
        ],
    )


def _breakable(text: str) -> str:
    """Returns code as HTML; a long name may break after a comma or a slash."""
    return re.sub('([,/])', r'\1<wbr>', str(Markup.escape(text)))
