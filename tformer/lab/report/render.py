"""A report as Markdown and as one self-contained HTML page, both from the template report.md.jinja.

In a value that the template prints, text between backquotes is code. Names, values and errors that others wrote are
printed only by `code`, which leaves no backquote in them.
"""

import base64
import functools
import hashlib
import itertools
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
Draw = Callable[[str, str, str], str]  # (kind, which of it, caption without marks) -> an SVG element, or ''
MISSING = (
    'There are few drawings, and none without JavaScript, because matplotlib is not installed: '
    "`pip install 'tformer[report]'`"
)
EXPLORED = ('forest', 'curves', 'pareto', 'fields')  # kinds that the page's script draws itself
SHOWN = 20  # rows of a table that are not folded
COLUMNS = (5, 7, 9)  # columns that a narrow screen, a wider one and any other show unasked, as page.css says
FIGURES = 'figures'  # names a fenced block of the page's Markdown that holds [kind, which, caption] of each figure
FOLDER = pathlib.Path(__file__).parent
LOADER = jinja2.FileSystemLoader(FOLDER)


@functools.cache
def _environment(escape: bool, exact: bool = False) -> jinja2.Environment:
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
        'probability': prose.exactly if exact else prose.probability,
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


def markdown(
    report: Report, drawn: bool = True, page: bool = False, most: int | None = prose.LISTED, exact: bool = False
) -> str:
    """Returns the report as Markdown, for a `page` with figures and aligned columns; it says if few can be `drawn`.

    Tables after the first have the baseline and the best other arms, `most` in all; None: all. If `exact`, they have
    all digits of probabilities.
    """

    def figures(listed: Sequence[Figure]) -> Markup:
        shown = [figure for figure in listed if drawn or figure[0] in EXPLORED]
        return Markup(f'~~~{FIGURES}\n{json.dumps(shown)}\n~~~' if page and shown else '')

    template = _environment(escape=True, exact=exact).get_template('report.md.jinja')
    missing, right = None if drawn else MISSING, '---:' if page else '---'
    return _joined(template.render(report=report, figures=figures, missing=missing, right=right, most=most))


def escaped(value: object) -> Markup:
    """Returns a value in which nothing but code is marked."""
    if isinstance(value, Markup):
        return value
    parts = prose.CODE.split('' if value is None else str(value))
    parts[::2] = [re.sub(r'([\\*\[]|<(?=\S))', r'\\\1', part) for part in parts[::2]]
    return Markup(''.join(f'`{part}`' if number % 2 else part for number, part in enumerate(parts)))


def page(text: str, draw: Draw, data: str = '{}') -> str:
    """Returns the HTML page of a report: all of it is inline, and no script but page.js runs in it.

    Args:
      text: that of `markdown`.
      draw: gives the still drawings.
      data: that of `explore.data`, which the script draws anew.
    """
    parser = MarkdownIt('commonmark', {'html': False}).enable('table')

    def figures(renderer: object, tokens: Sequence, i: int, *_: object) -> str:
        drawn = (
            f'<figure data-kind="{Markup.escape(kind)}" data-of="{Markup.escape(which)}">'
            f'{draw(kind, which, caption.replace("`", ""))}'
            f'<figcaption>{parser.renderInline(caption)}</figcaption></figure>'
            for kind, which, caption in json.loads(tokens[i].content)
        )
        return f'<div class="figures">{"".join(drawn)}</div>\n'

    rules: dict[str, Callable[..., str]] = {
        'fence': figures,
        'code_inline': lambda _, tokens, i, *rest: _code(tokens[i].content),
        'table_open': lambda *_: '<div class="table" tabindex="0"><table>\n',
        'table_close': lambda *_: '</table></div>\n',
    }
    for name, rule in rules.items():
        parser.add_render_rule(name, rule)
    title, *sections = re.split(r'^##? ', text, flags=re.MULTILINE)[1:]
    parts = [section.partition('\n') for section in sections]

    def body(text: str, name: str) -> Markup:
        return Markup(folded(parser.render(text).replace('± ', '±&nbsp;'), key(name)))

    style, script = (Markup((FOLDER / f'page.{kind}').read_text()) for kind in ('css', 'js'))
    return jinja2.Environment(loader=LOADER, autoescape=True, trim_blocks=True).get_template('page.html.jinja').render(
        style=style,
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=Markup(data),
        title=title.strip().replace('`', ''),
        heading=Markup(parser.renderInline(title.strip())),
        sections=[
            {'key': key(name), 'title': name, 'body': body(text, name)} for name, _, text in parts
        ],
    )  # fmt: skip


def key(section: str) -> str:
    """Returns what a section's title is called in addresses and the names of files."""
    return re.sub(r'\W+', '-', section.lower())


def folded(body: str, key: str) -> str:
    """Returns HTML of the section `key` whose long tables show their first rows until readers ask for more.

    That takes no script. The columns after the first ones are shown on request as well, by what the screen holds.
    """
    number = itertools.count()

    def table(found: re.Match) -> str:
        head, rows = found[1], re.findall(r'<tr>.*?</tr>\n', found[2], flags=re.DOTALL)
        name, boxes, more = f'{key}-{next(number)}', '', ''
        if len(rows) > SHOWN + 4:
            boxes += f'<input type="checkbox" id="m{name}" class="unfold">'
            boxes += f'<label for="m{name}">all {len(rows):,} rows</label>'
            more = f'<tbody class="more">\n{"".join(rows[SHOWN:])}</tbody>\n'
            rows = rows[:SHOWN]
        columns = len(re.findall('<th[ >]', head))
        if over := ' '.join(f'over-{most}' for most in COLUMNS if columns > most):
            boxes += f'<input type="checkbox" id="w{name}" class="widen {over}">'
            boxes += f'<label for="w{name}">all {columns} columns</label>'
        boxes = f'<div class="options">{boxes}</div>' if boxes else ''
        return f'<div class="held">{boxes}{head}<tbody>\n{"".join(rows)}</tbody>\n{more}</table></div></div>'

    whole = r'(<div class="table" tabindex="0"><table>\n.*?)<tbody>\n(.*?)</tbody>\n</table></div>'
    return re.sub(whole, table, body, flags=re.DOTALL)


def _code(text: str) -> str:
    """Returns code as HTML; a long name may break after `,`, `/` and `=`, and its long numbers are in its title."""
    brief = prose.brief(text)
    title = '' if brief == text else f' title="{Markup.escape(text)}"'
    shown = re.sub('([,/=])', r'\1<wbr>', str(Markup.escape(brief)))
    return f'<code{title}>{shown}</code>'
