"""Writes tables, statistics and plots of a sweep, or of any directory of workdirs.

    tformer report DIR [--metric=SPLIT/NAME] [--baseline=ARM] [--alpha=0.05] [--reach=NAME=VALUE] [--timing=false]
    tformer report DIR1 DIR2 ...
    tformer report DIR --export=FILES

The report is DIR/report.md and the self-contained page DIR/report.html. That of several directories compares all their
arms, and stands in the directory that they lie in. --export also writes each plot as SVG, PDF and PNG, and each table
as CSV and LaTeX, into the directory FILES.
"""

import pathlib
from collections.abc import Sequence

import jax

from tformer import commands
from tformer.errors import UserError
from tformer.lab.report import report_data, results, write

SHARED_FLAGS = ('metric', 'baseline', 'alpha', 'reach', 'timing')
FLAGS: dict[str, commands.Flag] = {'export': ('string', None, 'a directory for each plot and each table as files')}
ARGUMENTS = 'DIR...'
ENVIRONMENT = {'OPENBLAS_NUM_THREADS': '1'}  # its threads take longer to meet than the products of a report


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    if overrides:
        raise UserError('report takes no --config')
    if not arguments:
        raise UserError('report takes one directory or several: tformer report DIR')
    jax.config.update('jax_platforms', 'cpu')  # it only counts parameters, so it takes no accelerator
    print(report(arguments, flags.metric, flags.baseline, flags.alpha, flags.timing, flags.reach, flags.export))


def report(
    directory: str | pathlib.Path | Sequence[str | pathlib.Path],
    metric: str | None = None,
    baseline: str | None = None,
    alpha: float = 0.05,
    timing: bool = True,
    reach: Sequence[str] = (),
    export: str | pathlib.Path | None = None,
) -> str:
    """Writes report.md and report.html of a sweep, or of any directory of workdirs; returns the findings in words.

        >>> print(tformer.report('runs/norms', baseline='norm=rmsnorm'))

    Args:
      directory: of the sweep, or of the workdirs; or several, whose arms are compared in the directory they lie in.
      metric: that decides, SPLIT/NAME; None: test/loss, or valid/loss.
      baseline: the arm that the others are compared with; None: the first.
      alpha: the accepted probability of any false positive among all arms.
      timing: whether to include the section of measured times.
      reach: also report when runs reach these values, such as 'valid/accuracy=0.99'.
      export: a directory for each plot as SVG, PDF and PNG, and each table as CSV and LaTeX.

    Raises:
      UserError: there is nothing to report, or an argument names what does not exist.
    """
    directories = [directory] if isinstance(directory, str | pathlib.Path) else directory
    found = report_data.report(results.read_several(directories), metric, baseline, alpha, timing, reach)
    return write.write(found, export)
