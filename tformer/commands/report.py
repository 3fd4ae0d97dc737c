"""Writes tables, statistics and plots of a sweep, or of any directory of workdirs.

    tformer report DIR [--metric=SPLIT/NAME] [--baseline=ARM] [--alpha=0.05] [--reach=NAME=VALUE] [--timing=false]
    tformer report DIR --figures=FIGURES

The report is DIR/report.md and the self-contained page DIR/report.html. --figures also writes each plot as an SVG file
into the directory FIGURES.
"""

import pathlib
from collections.abc import Sequence

import jax

from tformer import commands
from tformer.errors import UserError
from tformer.lab.report import report_data, results, write

SHARED_FLAGS = ('metric', 'baseline', 'alpha', 'reach', 'timing')
FLAGS: dict[str, commands.Flag] = {'figures': ('string', None, 'a directory for the plots as SVG files')}
ARGUMENTS = 'DIR'


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    if overrides:
        raise UserError('report takes no --config')
    if len(arguments) != 1:
        raise UserError(f'report takes one directory, not {len(arguments)}: tformer report DIR')
    jax.config.update('jax_platforms', 'cpu')  # it only counts parameters, so it takes no accelerator
    print(report(arguments[0], flags.metric, flags.baseline, flags.alpha, flags.timing, flags.reach, flags.figures))


def report(
    directory: str | pathlib.Path,
    metric: str | None = None,
    baseline: str | None = None,
    alpha: float = 0.05,
    timing: bool = True,
    reach: Sequence[str] = (),
    figures: str | pathlib.Path | None = None,
) -> str:
    """Writes report.md and report.html of a sweep, or of any directory of workdirs; returns the findings in words.

        >>> print(tformer.report('runs/norms', baseline='norm=rmsnorm'))

    Args:
      directory: of the sweep, or of the workdirs.
      metric: that decides, SPLIT/NAME; None: test/loss, or valid/loss.
      baseline: the arm that the others are compared with; None: the first.
      alpha: the accepted probability of any false positive among all arms.
      timing: whether to include the section of measured times.
      reach: also report when runs reach these values, such as 'valid/accuracy=0.99'.
      figures: a directory that the plots are also written to, each as an SVG file.

    Raises:
      UserError: there is nothing to report, or an argument names what does not exist.
    """
    found = report_data.report(results.read(directory), metric, baseline, alpha, timing, reach)
    return write.write(found, figures)
