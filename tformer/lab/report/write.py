"""Writes the report of a directory into it."""

import pathlib
import re
from collections.abc import Sequence

from tformer import atomic
from tformer.lab.report import drawing, findings, plots, render, report_data, results

MARKDOWN, PAGE = 'report.md', 'report.html'


def write(
    directory: str | pathlib.Path,
    metric: str | None = None,
    baseline: str | None = None,
    alpha: float = 0.05,
    timing: bool = True,
    reach: Sequence[str] = (),
    figures: str | pathlib.Path | None = None,
) -> str:
    """Writes DIRECTORY/report.md and report.html; returns the findings in words, and the names of the files.

    The same runs give the same bytes if `timing` is off or no run was repeated. All arguments but the first and the
    last are those of `report_data.report`.

    Args:
      directory: of a sweep, or of any workdirs.
      figures: a directory that the drawings are also written to, each as an SVG file.

    Raises:
      UserError: as `results.read` and `report_data.report`.
    """
    found = results.read(directory)
    report = report_data.report(found, metric, baseline, alpha, timing, reach)
    drawn = drawing.installed()
    drawings: dict[str, str] = {}

    def draw(kind: str, which: str) -> str:
        drawings[re.sub(r'\W+', '-', f'{kind} {which}'.strip())] = svg = plots.svg(report, kind, which)
        return svg

    files = {
        found.home / MARKDOWN: render.markdown(report, drawn),
        found.home / PAGE: render.page(render.markdown(report, drawn, page=True), draw),
    }
    if figures is not None:
        pathlib.Path(figures).mkdir(parents=True, exist_ok=True)
        files |= {pathlib.Path(figures, f'{name}.svg'): drawing.standalone(svg) for name, svg in drawings.items()}
    for file, text in files.items():
        atomic.write(file, text)
    lines = [*findings.arms(report), *findings.reached(report), *([] if drawn else [render.MISSING])]
    return '\n'.join([*(line.replace('`', '') for line in lines), *map(str, files)])
