"""Writes a report into the directory of its runs."""

import pathlib
import re

from tformer import atomic
from tformer.lab.report import drawing, plots, render
from tformer.lab.report.report_data import Report

MARKDOWN, PAGE = 'report.md', 'report.html'


def write(report: Report, figures: str | pathlib.Path | None = None) -> str:
    """Writes report.md and report.html; returns the findings in words, and the names of the files.

    The same runs give the same bytes if the report has no times or no run was repeated. `figures` is a directory that
    the drawings are also written to, each as an SVG file.
    """
    home, drawn = report.results.home, drawing.installed()
    drawings: dict[str, str] = {}

    def draw(kind: str, which: str) -> str:
        drawings[re.sub(r'\W+', '-', f'{kind} {which}'.strip())] = svg = plots.svg(report, kind, which)
        return svg

    files = {
        home / MARKDOWN: render.markdown(report, drawn),
        home / PAGE: render.page(render.markdown(report, drawn, page=True), draw),
    }
    if figures is not None:
        pathlib.Path(figures).mkdir(parents=True, exist_ok=True)
        files |= {pathlib.Path(figures, f'{name}.svg'): drawing.standalone(svg) for name, svg in drawings.items()}
    for file, text in files.items():
        atomic.write(file, text)
    lines = render.sentences(report, 'arms') + render.sentences(report, 'reached') + ([] if drawn else [render.MISSING])
    return '\n'.join([*(line.replace('`', '') for line in lines), *map(str, files)])
