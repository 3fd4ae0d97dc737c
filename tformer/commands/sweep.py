"""Runs the trials of a sweep file, resumes by itself, and ends with their report.

    tformer sweep --config=FILE[:argument] --workdir=DIR [--parallel=K] [--together=N] [flags of `tformer report`]
    tformer sweep --config=FILE[:argument] --workdir=DIR --dry_run | --array

Each trial trains in DIR/ARM/seed_N. --dry_run prints the trials and runs none. --array writes the list of trials that
launch/slurm_array.sbatch takes, and runs none.
"""

import pathlib
import sys
from collections.abc import Mapping, Sequence

import jax

from tformer import commands
from tformer.commands import report
from tformer.lab.sweep import manifest, plan, runner, trials

SHARED_FLAGS = ('config', 'workdir', 'transform', 'metric', 'baseline', 'alpha', 'reach', 'timing')
FLAGS = {
    'dry_run': ('bool', False, 'print the trials and run none'),
    'array': ('bool', False, 'write the list for launch/slurm_array.sbatch and run none'),
    'parallel': ('int', 1, 'how many processes run at once'),
    'together': ('int', 1, 'how many trials one program trains at most, if they differ in numbers alone'),
}


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    jax.config.update('jax_platforms', 'cpu')  # of this process, which computes nothing: the devices are the trials'
    spec = commands.needed(flags, 'config')
    if flags.dry_run:
        print(plan.plan(trials.load(spec, overrides)[1], flags.workdir, flags.parallel))
        return
    workdir, kept = commands.needed(flags, 'workdir'), _command_line(spec, overrides)
    if flags.array:
        base, made = trials.load(spec, overrides)
        manifest.check(made, pathlib.Path(workdir))
        print(runner.array(base, made, workdir, flags.together, flags.transform, kept))
        return
    code = sweep(spec, workdir, overrides, flags.parallel, flags.together, flags.transform)
    print(report.report(workdir, flags.metric, flags.baseline, flags.alpha, flags.timing, flags.reach))
    if code:
        sys.exit(code)


def sweep(
    spec: str,
    workdir: str | pathlib.Path,
    overrides: Mapping[str, str] | None = None,
    parallel: int = 1,
    together: int = 1,
    transform: str | None = None,
) -> int:
    """Runs the trials of a sweep file that are not done, each in a process that trains in a workdir of its own.

        >>> tformer.sweep('configs/sweeps/norms.py', 'runs/norms', parallel=2)
        >>> print(tformer.report('runs/norms'))

    The sweep file is FILE[:argument], and the overrides are fields of its base config. `parallel` processes run at
    once; one program trains at most `together` trials, if they differ in numbers alone, which share it by `transform`,
    vmap or map (None: map on a CPU, else vmap). A trial that fails leaves its error in its workdir, and the others go
    on.

    Returns 0 if all trials are done, 2 if all that failed were mistakes in the config or the data, otherwise 1.

    Raises:
      UserError: the sweep file or an arm has a mistake, or the workdir holds another sweep.
      Stopped: by a signal; the running trials have saved what they had.
    """
    base, made = trials.load(spec, overrides)
    manifest.check(made, pathlib.Path(workdir))
    kept = _command_line(spec, overrides or {})
    return runner.sweep(base, made, workdir, parallel, together, transform, arguments=kept)


def _command_line(spec: str, overrides: Mapping[str, str]) -> Sequence[str]:
    return [f'--config={spec}', *(f'--config.{name}={value}' for name, value in overrides.items())]
