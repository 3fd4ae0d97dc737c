"""The style of the drawings of a report: SVG inside a page, with its text as text and the colours of the page.

matplotlib may be absent: it is imported only by the functions that need it.
"""

import html
import importlib.util
import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tformer.lab.report import prose

# Okabe & Ito's colours without yellow and black: colour-blind readers can tell them apart, on light and dark pages.
COLOURS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9')
DASHES = ('-', '--', '-.', ':')
MARKERS = 'osD^vP*X'
INK, FAINT = '#010203', '#040506'  # placeholders for the page's own colours, which differ between light and dark mode
PAGE = {INK: 'var(--ink)', FAINT: 'var(--line)'}
FILE_COLOURS = (('#1c1f26', '#dfe2e8'), ('#e9ebf0', '#2c313d'))  # of ink and grid lines in a file: light, dark
GREY = '#808080'  # of arms that are not among the best
LONGEST = 44  # characters of a label
WIDTH, HEIGHT = 5.4, 3.3  # inches, without the legend
LINE = 0.21  # inches per line of the legend

STYLE: dict[Any, Any] = {
    'svg.fonttype': 'none',
    'text.parse_math': False,
    'font.family': 'sans-serif',
    'font.size': 10,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.grid': True,
    'axes.axisbelow': True,
    'axes.formatter.use_mathtext': False,
    'axes.unicode_minus': False,
    'legend.frameon': False,
    'legend.handlelength': 3.2,
    'figure.facecolor': 'none',
    'axes.facecolor': 'none',
    'savefig.facecolor': 'none',
    'grid.color': FAINT,
    'grid.linewidth': 0.8,
    **{f'{name}.color': INK for name in ('text', 'xtick', 'ytick')},
    **{f'axes.{name}': INK for name in ('edgecolor', 'labelcolor')},
}
PAPER = {'grid.color': FILE_COLOURS[0][1], **{f'{name}.facecolor': 'white' for name in ('figure', 'axes', 'savefig')}}
FORMS: dict[str, dict[Any, Any]] = {'pdf': {**PAPER, 'pdf.fonttype': 42}, 'png': {**PAPER, 'savefig.dpi': 200}}
DATED: dict[str, dict[str, Any]] = {'svg': {'Date': None}, 'pdf': {'CreationDate': None}, 'png': {'Software': None}}


def installed() -> bool:
    """Returns whether matplotlib is installed."""
    return importlib.util.find_spec('matplotlib') is not None


def rendered(draw: Callable[[Any], None], salt: str, form: str = 'svg') -> bytes:
    """Returns the figure, WIDTH by HEIGHT inches, that `draw` fills, as a file: 'svg', or one of FORMS on white.

    The same drawing gives the same bytes. The ids of an SVG's parts depend on `salt`, which must differ within a page.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**STYLE, **FORMS.get(form, {}), 'svg.hashsalt': salt}):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout='constrained')
        draw(figure)
        file = io.BytesIO()
        with warnings.catch_warnings():  # an SVG file has letters as text, and readers have their own fonts
            warnings.filterwarnings('ignore', 'Glyph .* missing from', UserWarning)
            figure.savefig(file, format=form, metadata=DATED[form])
    return file.getvalue()


def titled(svg: str, title: str) -> str:
    """Returns an element that tells readers who do not see it what it shows."""
    told = html.escape(title)
    return re.sub(r'<svg([^>]*)>', lambda found: f'<svg{found[1]} role="img"><title>{told}</title>', svg, count=1)


def inline(text: str) -> str:
    """Returns an SVG file as an element of a page: without metadata and addresses, and in the page's colours.

    Places are rounded to hundredths of a point.
    """
    text = text[text.index('<svg') :]
    text = re.sub(r'<metadata>.*?</metadata>\s*', '', text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', '', text)
    text = re.sub(r'<g id="[^"]*"', '<g', text)
    text = re.sub(r'\s+(width|height)="[\d.]+pt"', '', text, count=2)
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r'(\.\d\d)\d+', r'\1', path[0]), text)
    for colour, of_page in PAGE.items():
        text = text.replace(colour, of_page)
    return re.sub(r'\n\s*', '\n', text).strip()


def standalone(svg: str) -> str:
    """Returns an element of a page as an SVG file, whose colours follow the reader's light or dark mode."""
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    light, dark = (f':root {{ --ink: {ink}; --line: {line}; }}' for ink, line in FILE_COLOURS)
    style = f'<style>{light} @media (prefers-color-scheme: dark) {{ {dark} }}</style>'
    return re.sub(r'<svg([^>]*)>', rf'<svg {names}\1>\n{style}', svg, count=1) + '\n'


# ------------------------------------------------------------------------------------------------------------- parts


def look(i: int) -> dict[str, Any]:
    """Returns the colour, dash and marker of the i-th line."""
    return {
        'color': COLOURS[i % len(COLOURS)],
        'linestyle': DASHES[i // len(COLOURS) % len(DASHES)],
        'marker': MARKERS[i % len(MARKERS)],
    }


def short(label: str) -> str:
    """Returns a label, shortened in its numbers and in the middle if it is long."""
    label = prose.brief(label)
    return label if len(label) <= LONGEST else f'{label[: LONGEST // 2]}…{label[-LONGEST // 2 + 1 :]}'


def dots(axes: Any, x: np.ndarray, y: np.ndarray, colour: str, label: str | None = None) -> None:
    """Draws many points as one path, of round strokes almost without length, which is a short text in an SVG file."""
    from matplotlib import patches, path

    places = np.repeat(np.stack([x, y], 1), 2, axis=0)
    places[1::2, 0] += 1e-6 * (np.ptp(x) or 1.0)
    strokes = path.Path(places, [path.Path.MOVETO, path.Path.LINETO] * len(x))
    strokes.should_simplify = False
    axes.add_patch(patches.PathPatch(strokes, edgecolor=colour, linewidth=4, alpha=0.6, capstyle='round', label=label))
    axes.update_datalim(places)
    axes.autoscale_view()


def ring(axes: Any, x: float, y: float, colour: str) -> None:
    axes.plot([x], [y], 'o', markersize=12, fillstyle='none', color=colour)


def finish(
    figure: Any, axes: Any, xlabel: str, ylabel: str, x: Sequence[float] | np.ndarray = (),
    y: Sequence[float] | np.ndarray = (),
) -> None:  # fmt: skip
    """Labels the axes, of which `x` and `y` are the values as in `plainly`, and adds the legend and room for it."""
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    plainly(axes.xaxis, x)
    plainly(axes.yaxis, y)
    legend(figure, axes)


def legend(figure: Any, axes: Any) -> None:
    """Adds the legend below, and room for it."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 1 if max(map(len, labels), default=0) > LONGEST // 2 else 2
    figure.set_size_inches(
        figure.get_size_inches()[0], figure.get_size_inches()[1] + LINE * math.ceil(len(labels) / columns)
    )
    figure.legend(handles, labels, loc='outside lower center', ncols=columns)


def plainly(axis: Any, values: Sequence[float] | np.ndarray = ()) -> None:
    """Labels an axis in plain numbers, and makes it logarithmic where positive values span a decade."""
    from matplotlib import ticker

    decades = spans(values)
    if decades:
        axis.axes.set_xscale('log') if axis.axis_name == 'x' else axis.axes.set_yscale('log')
        axis.set_minor_formatter(ticker.NullFormatter())
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _tick(value)))
    if not decades:
        axis.set_major_locator(ticker.MaxNLocator(6))


def spans(values: Sequence[float] | np.ndarray) -> bool:
    """Returns whether the finite values are positive and span a decade, so that their axis is logarithmic."""
    finite = np.array([value for value in values if math.isfinite(value)])
    return len(finite) > 0 and bool(finite.min() > 0 and finite.max() >= 10 * finite.min())


def few_ticks(values: Sequence[float] | np.ndarray) -> Any:
    """Returns the places of at most four ticks, for a narrow axis."""
    from matplotlib import ticker

    if not spans(values):
        return ticker.MaxNLocator(3)
    return ticker.LogLocator(subs=(1.0,) if max(values) >= 100 * min(values) else (1.0, 3.0), numticks=4)


def _tick(value: float) -> str:
    return f'{value:,.0f}' if 1000 <= abs(value) < 1e6 and float(value).is_integer() else f'{value:.6g}'
