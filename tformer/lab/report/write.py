"""Writes the report of a directory into it."""

import pathlib
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
) -> str:
    """Writes DIRECTORY/report.md and report.html; returns what they found and where they are, in words.

    The arguments are those of `report_data.report`. The same runs give the same bytes, where `timing` is off or no run
    was made again.

    Raises:
      UserError: as `results.read` and `report_data.report`.
    """
    found = results.read(directory)
    report = report_data.report(found, metric, baseline, alpha, timing, reach)
    drawn = drawing.installed()
    files = {
        MARKDOWN: render.markdown(report, drawn),
        PAGE: render.page(
            render.markdown(report, drawn, page=True), lambda kind, which: plots.svg(report, kind, which)
        ),
    }
    for name, text in files.items():
        atomic.write(found.home / name, text)
    lines = [*findings.arms(report), *findings.reached(report), *([] if drawn else [render.MISSING])]
    return '\n'.join([*(line.replace('`', '') for line in lines), *(str(found.home / name) for name in files)])
