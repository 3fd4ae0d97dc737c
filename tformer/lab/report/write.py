"""Writes the report of a directory into it."""

import pathlib
from collections.abc import Sequence

from tformer import atomic
from tformer.lab.report import document, page, plots, report_data, results, sections
from tformer.lab.report.document import Figure, Line
from tformer.lab.report.drawing import installed

MARKDOWN, PAGE = 'report.md', 'report.html'
MISSING = "The drawings are left out, for matplotlib is not installed: `pip install 'tformer[report]'`"


def write(
    directory: str | pathlib.Path,
    metric: str | None = None,
    baseline: str | None = None,
    alpha: float = 0.05,
    timing: bool = True,
    reach: Sequence[str] = (),
) -> str:
    """Writes DIRECTORY/report.md and report.html; returns what they found and where they are, in prose.

    The arguments are those of `report_data.report`. The same runs give the same bytes, where `timing` is off or no run
    was made again.

    Raises:
      UserError: as `results.read` and `report_data.report`.
    """
    found = results.read(directory)
    report = report_data.report(found, metric, baseline, alpha, timing, reach)
    whole, drawn = sections.document(report), installed()

    def draw(figure: Figure) -> str | None:
        return plots.svg(report, figure.kind, figure.of) if drawn else None

    if not drawn:
        findings, *rest = whole.sections
        noted = findings._replace(blocks=[*findings.blocks, Line(MISSING)])
        whole = whole._replace(sections=[noted, *rest])
    for name, text in ((MARKDOWN, document.markdown(whole)), (PAGE, page.page(whole, draw))):
        atomic.write(found.home / name, text)
    lines = [block for block in whole.sections[0].blocks if isinstance(block, document.List)]
    told = [item for each in lines for item in each.items] + ([] if drawn else [MISSING])
    return '\n'.join(
        [*(item.replace('`', '') for item in told), *(str(found.home / name) for name in (MARKDOWN, PAGE))]
    )
