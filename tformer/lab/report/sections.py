"""The report as a document: which sections it has, in which order."""

from tformer.lab.report import amounts, comparisons, provenance, words
from tformer.lab.report.computed import Report
from tformer.lab.report.document import Block, Document, Line, List, Section, code


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
    blocks: list[Block] = [Line(words.headline(report)), List(words.findings(report))]
    blocks += [Line(told) for told in (words.limited(report), words.scored(report)) if told]
    if report.reaches:
        blocks.append(List(words.reached(report)))
    if report.lacking:
        listed = words.joined([code(directory) for directory in report.lacking])
        blocks.append(Line(f'Done, but without {words.named(report.metric)}: {listed}.'))
    return blocks
