"""The sections of a report that say where its numbers come from: configs, failures, and the commands."""

import pathlib
import shlex

from tformer.errors import UserError
from tformer.lab.report import prose
from tformer.lab.report.document import Block, Code, Line, Table, code
from tformer.lab.report.report_data import Report
from tformer.lab.report.results import FAILED, UNFINISHED, Results
from tformer.lab.sweep import trials
from tformer.training import checkpoint


def changes(report: Report) -> list[Block]:
    """Returns the fields in which each arm differs from the baseline."""
    rows = [
        [code(arm), code(field), code(there), code(here)]
        for arm in report.arms
        for field, (there, here) in report.differences.get(arm, {}).items()
    ]
    return [Table(['arm', 'field', 'baseline', 'arm has'], rows)] if rows else []


def trouble(report: Report) -> list[Block]:
    """Returns the trials without a result."""
    home = report.results.home
    rows = [
        [
            code(run.directory),
            run.state,
            code((run.error or '').partition('\n')[0]) if run.error else '',
            code(log) if log.is_file() else prose.NONE,
        ]
        for run in report.results.runs
        if run.state in (FAILED, UNFINISHED)
        for log in [home / run.directory / trials.LOG]
    ]
    return [Table(['trial', 'state', 'error', 'log'], rows)] if rows else []


def commands(report: Report) -> list[Block]:
    """Returns what to type: of the whole sweep, and of one run of each arm."""
    home, blocks = report.results.home, list[Block]()
    if report.results.command is not None:
        blocks += [Line('All trials; those that are done are not done again:'), Code([report.results.command])]
    lines = []
    for arm in report.arms:
        first = report.results.arms[arm][0]
        again = home.with_name(f'{home.name}_again') if home.name else pathlib.Path('again')
        flags = [f'--config={home / first.directory / first.file}', f'--workdir={again / first.directory}']
        lines.append(shlex.join(['tformer', 'train', *flags]))
    blocks += [
        Line('One run of each arm, into a fresh directory (`--config.train.seed=N` is another seed):'),
        Code(lines),
    ]
    blocks += [Line('This report:'), Code([_report(report)])]
    if found := versions(report.results):
        listed = prose.joined([f'{code(name)} {value}' for name, value in found])
        blocks.append(Line(f'Made with {listed}.'))
    return blocks


def _report(report: Report) -> str:
    flags = [f'--metric={report.metric}', f'--baseline={report.baseline}', f'--alpha={report.alpha:g}']
    flags += [f'--reach={",".join(f"{each.name}={each.value:g}" for each in report.reaches)}'] if report.reaches else []
    flags += ['--timing=false'] if report.timing is None else []
    return shlex.join(['tformer', 'report', str(report.results.home), *flags])


def versions(results: Results) -> list[tuple[str, str]]:
    """Returns (package, its versions) as the checkpoints that are left say."""
    found: dict[str, set[str]] = {}
    for run in results.runs:
        workdir = results.home / run.directory
        try:
            steps = checkpoint.steps(workdir)
            made = checkpoint.read_metadata(workdir, max(steps))['versions'] if steps else {}
        except (UserError, KeyError):
            continue
        for name, version in made.items():
            found.setdefault(name, set()).add(str(version))
    return [(name, prose.joined([code(value) for value in sorted(values)])) for name, values in sorted(found.items())]
