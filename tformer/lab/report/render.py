"""A report as Markdown and as one self-contained HTML page, both from the template report.md.jinja.

In a value that the template prints, text between backquotes is code. Names, values and errors that others wrote are
printed only by `code`, which leaves no backquote in them.
"""

import json
import math
import pathlib
import re
import shlex
from collections.abc import Callable, Sequence

import jinja2
from markdown_it import MarkdownIt
from markupsafe import Markup

from tformer.lab.report import prose
from tformer.lab.report.report_data import Report
from tformer.lab.statistics import family, power

Figure = tuple[str, str, str]  # a key of `plots.DRAWINGS`, which one of its kind, and its caption
Draw = Callable[[str, str], str]  # (kind, which of it) -> an SVG element
MISSING = "The report has no drawings because matplotlib is not installed: `pip install 'tformer[report]'`"
FIGURES = 'figures'  # names a fenced block of the page's Markdown that holds [kind, which, caption] of each figure
LOADER = jinja2.FileSystemLoader(pathlib.Path(__file__).parent)


def _environment(escape: bool) -> jinja2.Environment:
    made = jinja2.Environment(
        loader=LOADER, autoescape=escape, finalize=escaped if escape else None,
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    filters: dict[str, Callable[..., str]] = {
        'code': prose.code,
        'cell': lambda value: prose.code(value).replace('|', r'\|'),
        'typed': lambda value: Markup(prose.plain(value)),
        'command': shlex.join,
        'quantity': prose.quantity,
        'probability': prose.probability,
        'number': prose.number,
        'coefficient': prose.coefficient,
        'rounded': prose.rounded,
    }
    made.filters |= filters
    made.tests['finite'] = math.isfinite
    made.globals |= {'prose': prose, 'most_seeds': f'{power.MOST:,}', 'least': family.LEAST}
    return made


def _joined(text: str) -> str:
    """Returns Markdown with the lines of a paragraph joined, and empty lines in a row made one."""
    text = re.sub(r'(?<=\S)\n(?=[^\s|#~[-])', ' ', text)
    return re.sub(r'\n{3,}', '\n\n', text).strip() + '\n'


def sentences(report: Report, name: str) -> list[str]:
    """Returns the lines of one macro of findings.md.jinja, e.g. 'arms', with names between backquotes."""
    text = getattr(_environment(escape=False).get_template('findings.md.jinja').module, name)(report)
    return [line.removeprefix('- ') for line in _joined(text).splitlines() if line]


def markdown(report: Report, drawn: bool = True, page: bool = False) -> str:
    """Returns the report as Markdown, for a `page` with figures and aligned columns; it says if none can be `drawn`."""

    def figures(listed: Sequence[Figure]) -> Markup:
        return Markup(f'~~~{FIGURES}\n{json.dumps(listed)}\n~~~' if page and drawn and listed else '')

    template = _environment(escape=True).get_template('report.md.jinja')
    missing, right = None if drawn else MISSING, '---:' if page else '---'
    return _joined(template.render(report=report, figures=figures, missing=missing, right=right))


def escaped(value: object) -> Markup:
    """Returns a value in which nothing but code is marked."""
    if isinstance(value, Markup):
        return value
    parts = prose.CODE.split('' if value is None else str(value))
    parts[::2] = [re.sub(r'([\\*\[]|<(?=\S))', r'\\\1', part) for part in parts[::2]]
    return Markup(''.join(f'`{part}`' if number % 2 else part for number, part in enumerate(parts)))


def page(text: str, draw: Draw) -> str:
    """Returns the HTML page of a report: all of it is inline, and nothing in it runs. `text` is that of `markdown`."""
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
    return jinja2.Environment(loader=LOADER, autoescape=True, trim_blocks=True).get_template('page.html.jinja').render(
        title=title.strip().replace('`', ''),
        heading=Markup(parser.renderInline(title.strip())),
        sections=[
            {'key': re.sub(r'\W+', '-', name.lower()), 'title': name, 'body': Markup(parser.render(body))}
            for name, _, body in parts
        ],
    )  # fmt: skip


def _breakable(text: str) -> str:
    """Returns code as HTML; a long name may break after a comma or a slash."""
    return re.sub('([,/])', r'\1<wbr>', str(Markup.escape(text)))
