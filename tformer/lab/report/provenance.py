"""Where the numbers of a report come from: the commands that make them again, and the versions."""

import pathlib
import shlex

from tformer.errors import UserError
from tformer.lab.report import prose
from tformer.lab.report.report_data import Report
from tformer.lab.report.results import Results
from tformer.training import checkpoint


def train_commands(report: Report) -> list[str]:
    """Returns for each arm what trains one run of it into a fresh directory."""
    home, commands = report.results.home, []
    for arm in report.arms:
        first = report.results.arms[arm][0]
        again = home.with_name(f'{home.name}_again') if home.name else pathlib.Path('again')
        flags = [f'--config={home / first.directory / first.file}', f'--workdir={again / first.directory}']
        commands.append(shlex.join(['tformer', 'train', *flags]))
    return commands


def report_command(report: Report) -> str:
    """Returns what writes the report."""
    flags = [f'--metric={report.metric}', f'--baseline={report.baseline}', f'--alpha={report.alpha:g}']
    flags += [f'--reach={",".join(f"{each.name}={each.value:g}" for each in report.reaches)}'] if report.reaches else []
    flags += ['--timing=false'] if report.timing is None else []
    return shlex.join(['tformer', 'report', str(report.results.home), *flags])


def versions(results: Results) -> list[str]:
    """Returns each package and its versions, as the checkpoints that are left say."""
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
    return [
        f'{prose.code(name)} {prose.joined([prose.code(value) for value in sorted(values)])}'
        for name, values in sorted(found.items())
    ]
