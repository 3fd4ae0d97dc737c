"""The report as a document: which sections it has, in which order."""

from tformer.lab.report import amounts, comparisons, prose, provenance
from tformer.lab.report.document import Block, Document, Line, List, Section, code
from tformer.lab.report.report_data import Report


def document(report: Report) -> Document:
    """Returns the whole report; sections that would be empty are left out."""
    sections = [
        Section('Findings', _findings(report)),
        Section('Against the baseline', comparisons.comparison(report)),
        Section('Along one field', amounts.response(report)),
        Section('Scaling law', amounts.scaling(report)),
        Section('Learning curves', comparisons.learning(report)),
        Section('Cost', amounts.cost(report)),
        Section('Every other metric', comparisons.others(report)),
        Section('Generated text', comparisons.texts(report)),
        Section('What each arm changes', provenance.changes(report)),
        Section('Failed and unfinished', provenance.trouble(report)),
        Section('Run it again', provenance.commands(report)),
        Section('Time', amounts.timing(report)),
    ]
    return Document(f'Report of {code(report.results.home)}', [section for section in sections if section.blocks])


def _findings(report: Report) -> list[Block]:
    blocks: list[Block] = [Line(prose.headline(report)), List(prose.findings(report))]
    blocks += [Line(told) for told in (prose.limited(report), prose.scored(report)) if told]
    if report.reaches:
        blocks.append(List(prose.reached(report)))
    if report.lacking:
        listed = prose.joined([code(directory) for directory in report.lacking])
        blocks.append(Line(f'Done, but without {prose.named(report.metric)}: {listed}.'))
    return blocks
