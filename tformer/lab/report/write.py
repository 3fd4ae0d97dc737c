"""Writes a report into the directory of its runs."""

import pathlib
import re
from collections.abc import Mapping

from tformer import atomic
from tformer.data import stores
from tformer.data.store_copies import shown
from tformer.errors import UserError
from tformer.lab.report import drawing, explore, plots, render, tables
from tformer.lab.report.report_data import Report

MARKDOWN, PAGE = 'report.md', 'report.html'


def write(report: Report, export: str | pathlib.Path | None = None) -> str:
    """Writes report.md and report.html; returns the findings in words, and what was written.

    The same runs give the same bytes if the report has no times or no run was repeated. `export` is a directory for
    each drawing as SVG, PDF and PNG, and each table as CSV and LaTeX.

    Raises:
      UserError: a file cannot be written.
    """
    home, drawn = report.results.home, drawing.installed()
    drawings: dict[tuple[str, str], str] = {}

    def draw(kind: str, which: str, caption: str) -> str:
        if drawn:
            drawings[kind, which] = drawing.titled(plots.svg(report, kind, which), caption)
        return drawings.get((kind, which), '')

    files: dict[pathlib.Path, str | bytes] = {
        home / MARKDOWN: shown(render.markdown(report, drawn)),
        home / PAGE: shown(render.page(render.markdown(report, drawn, page=True), draw, explore.data(report))),
    }
    said = list(map(shown, files))
    try:
        if export is not None:
            stores.require_local(export, written=True)
            pathlib.Path(export).mkdir(parents=True, exist_ok=True)
            files |= (exported := _exported(report, pathlib.Path(export), drawings))
            said.append(f'{export}: {len(exported)} files of drawings and tables')
        for file, text in files.items():
            atomic.write(file, text)
    except OSError as error:
        raise UserError(f'{error.filename}: {error.strerror}') from error
    lines = [line for part in ('arms', 'tasks', 'reached') for line in render.sentences(report, part)] + (
        [] if drawn else [render.MISSING]
    )
    return '\n'.join([*(line.replace('`', '') for line in lines), *said])


def _exported(
    report: Report, place: pathlib.Path, drawings: Mapping[tuple[str, str], str]
) -> dict[pathlib.Path, str | bytes]:
    """Returns the files of the drawings, of which the SVG elements are given, and of the tables with all arms."""
    files: dict[pathlib.Path, str | bytes] = {}
    for (kind, which), svg in drawings.items():
        name = re.sub(r'\W+', '-', f'{kind} {which}'.strip())
        files[place / f'{name}.svg'] = drawing.standalone(svg)
        files |= {place / f'{name}.{form}': plots.file(report, kind, which, form) for form in drawing.FORMS}
    for exact, form, text in ((True, 'csv', tables.csv_text), (False, 'tex', tables.latex)):
        for table in tables.tables(render.markdown(report, most=None, page=True, exact=exact)):
            files[place / f'{table.name}.{form}'] = text(table)
    return files
