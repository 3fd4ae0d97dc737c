"""Runs the trials of a sweep file, resumes by itself, and ends with their report.

    tformer sweep --config=FILE[:argument] --workdir=DIR [--parallel=K | --per_device=K] [--together=N] [--processes=N]
                  [flags of `tformer report`]
    tformer sweep --config=FILE[:argument] --workdir=DIR --executor=slurm|kubernetes [--workers=N]
                  [--resources=KEY=VALUE,...]
    tformer sweep --config=FILE[:argument] --workdir=DIR --dry_run

Each trial trains in DIR/ARM/seed_N. The same command on several hosts that share DIR works on one sweep. --dry_run
prints the trials and runs none.
"""

import difflib
import functools
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from tformer import commands, config
from tformer.commands import report
from tformer.config import Config
from tformer.errors import UserError, choose, nearest
from tformer.lab.report import learning, report_data
from tformer.lab.sweep import executors, manifest, plan, runner, trials
from tformer.lab.sweep.leases import Leases
from tformer.lab.sweep.runner import Placement
from tformer.lab.sweep.search_jobs import SearchJobs
from tformer.lab.sweep.searches import Search

SHARED_FLAGS = ('config', 'workdir', 'transform', 'metric', 'baseline', 'alpha', 'reach', 'timing')
FLAGS: dict[str, commands.Flag] = {
    'dry_run': ('bool', False, 'print the trials and run none'),
    'parallel': ('int', None, 'how many trials, or groups of them, train at once on a host; default: 1'),
    'per_device': ('int', None, 'how many train at once on each GPU or TPU of a host'),
    'together': ('int', 1, 'how many trials one program trains at most, if they differ in numbers alone'),
    'processes': ('int', 1, 'how many processes of a host train each trial'),
    'executor': ('string', 'local', 'where trials run: local, slurm or kubernetes'),
    'workers': ('int', 1, 'how many workers another executor starts'),
    'resources': ('list', [], 'what a worker gets of another executor, as KEY=VALUE'),
    'join': ('bool', False, 'be a worker of a sweep that another command began: write no report, wait for no other'),
}


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    jax.config.update('jax_platforms', 'cpu')  # of this process, which computes nothing: the devices are the trials'
    spec = commands.needed(flags, 'config')
    where = Placement(flags.parallel, flags.per_device, flags.together, flags.transform, flags.processes, flags.join)
    where.check()
    executor = choose(executors.EXECUTORS, flags.executor, '--executor')
    resources = _resources(flags.resources)
    if flags.workers < 1:
        raise UserError(f'--workers={flags.workers} must be positive')
    report_data.check_alpha(flags.alpha)
    learning.targets(flags.reach)
    check = functools.partial(_check_report, flags.metric, flags.baseline)
    if flags.dry_run:
        made = _loaded(spec, flags.workdir, overrides, where)
        check(made)
        if made.search is not None:
            print(made.search.plan(flags.workdir))
        print(plan.plan(made.trials, flags.workdir, flags.parallel or 1, flags.together))
        return
    workdir = commands.needed(flags, 'workdir')
    passed = [f'--{name}={flags[name].value}' for name in PASSED_ON if flags[name].value != flags[name].default]
    command = ['sweep', '--join', *_command_line(spec, overrides), f'--workdir={workdir}', *passed]
    work = executors.Work(
        here=lambda: _sweep(spec, workdir, overrides, where, check),
        claim=lambda: _claim(spec, workdir, overrides, check),
        arguments=command,
        home=pathlib.Path(workdir),
        workers=flags.workers,
        resources=resources,
    )
    code = executor(work)
    if executor is executors.local and not flags.join:
        print(report.report(workdir, flags.metric, flags.baseline, flags.alpha, flags.timing, flags.reach))
    if code:
        sys.exit(code)


SPLITS = ('test', 'valid')  # that trials are scored on
PASSED_ON = ('parallel', 'per_device', 'together', 'transform', 'processes')  # to workers elsewhere


def sweep(
    spec: str,
    workdir: str | pathlib.Path,
    overrides: Mapping[str, str] | None = None,
    parallel: int | None = None,
    together: int = 1,
    transform: str | None = None,
    **placement: Any,
) -> int:
    """Runs the trials of a sweep file that are not done, each in a workdir of its own.

        >>> tformer.sweep('configs/sweeps/norms.py', 'runs/norms', parallel=2)
        >>> print(tformer.report('runs/norms'))

    The sweep file is FILE[:argument], and the overrides are fields of its base config. `parallel` processes train at
    once, each trial after trial; one program trains at most `together` trials, if they differ in numbers alone, which
    share it by `transform`, vmap or map (None: map on a CPU, else vmap). The `placement` may have `per_device`
    processes on each accelerator in place of `parallel`, and `processes` that train each trial. A trial that fails
    leaves its error in its workdir, and the others go on.

    Returns 0 if all trials are done, 2 if all that failed were mistakes in the config or the data, otherwise 1.

    Raises:
      UserError: the sweep file or an arm has a mistake, or the workdir holds another sweep.
      Stopped: by a signal; the running trials have saved what they had.
    """
    where = Placement(parallel=parallel, together=together, transform=transform, **placement)
    return _sweep(spec, workdir, overrides or {}, where)


def _sweep(
    spec: str,
    workdir: str | pathlib.Path,
    overrides: Mapping[str, str],
    where: Placement,
    check: 'Check' = lambda loaded: None,
) -> int:
    check(loaded := _loaded(spec, workdir, overrides, where))
    base, made, search = loaded
    return runner.sweep(base, made, workdir, where, _command_line(spec, overrides), search)


class _Loaded(NamedTuple):
    base: Config
    trials: list[trials.Trial]  # of a search those so far
    search: SearchJobs | None


Check = Callable[[_Loaded], None]  # raises a `UserError` before anything trains


def _check_report(metric: str | None, baseline: str | None, loaded: _Loaded) -> None:
    """Raises a `UserError` where the report of the sweep cannot have this metric or baseline, as far as it is known.

    Of a search the arms so far are known, of which its own baseline is the first; some metrics depend on the data.
    """
    if baseline is not None:
        report_data.check_baseline(baseline, list(dict.fromkeys(trial.name for trial in loaded.trials)))
    if metric is None:
        return
    from tformer.evaluation import scorer  # slow to import

    settings = {'evaluate.examples_while_training': 1}  # the text of final scores is generated in any case
    scores = {name for each in loaded.trials for name in scorer.score_names(config.override(each.config, settings))}
    known = sorted(f'{split}/{name.partition("/")[2]}' for name in scores for split in SPLITS)
    split, _, name = metric.partition('/')
    if not name or split not in SPLITS:
        raise UserError(f'--metric={metric} is not SPLIT/NAME, with {" or ".join(SPLITS)}{nearest(metric, known)}')
    is_longer = any(metric.startswith(f'{each}_') for each in known)
    if metric not in known and not is_longer and difflib.get_close_matches(metric, known, cutoff=0.8):
        raise UserError(f'--metric={metric} will be in no result{nearest(metric, known)}')


def _loaded(
    spec: str, workdir: str | pathlib.Path | None, overrides: Mapping[str, str], where: Placement | None = None
) -> _Loaded:
    """Returns what a sweep file declares."""
    base, sweep = trials.opened(spec, overrides)
    with trials.beginning(spec):
        made = trials.listed(base, sweep, overrides)
        if not isinstance(sweep.arms, Search):
            return _Loaded(base, made, None)
        if where is not None and where.together > 1:
            raise UserError(f'--together={where.together}: the arms of a search train one by one')
        search = SearchJobs(sweep.arms, base, sweep.match)
        _check_searched(sweep.arms.metric, search.base)
        return _Loaded(search.base, search.listed(None if workdir is None else pathlib.Path(workdir)), search)


def _check_searched(metric: str, base: Config) -> None:
    """Raises a `UserError` where no evaluation will have the metric of a search; names may go on with a class's."""
    from tformer.evaluation import scorer  # slow to import

    known = [*scorer.score_names(base), *scorer.score_names(base, ['a plain tag'])]
    if not any(metric.startswith(f'{each}_') for each in known):
        choose(dict.fromkeys(known), metric, 'search: metric')


def _claim(spec: str, workdir: str, overrides: Mapping[str, str], check: Check) -> int:
    """Writes the trials to the sweep's directory; returns how many are not done."""
    check(loaded := _loaded(spec, workdir, overrides))
    base, made, search = loaded
    held = Leases(pathlib.Path(workdir) / runner.LEASES)
    session = manifest.enter(base, made, held, arguments=_command_line(spec, overrides))
    if session is not None:
        session.release(done=True)
    left = sum(not trials.is_done(pathlib.Path(workdir) / trial.directory) for trial in made)
    return left if search is None else max(left, search.search.trials)


def _resources(given: Sequence[str]) -> dict[str, str]:
    """Returns --resources by name. Raises a `UserError` where one is not KEY=VALUE."""
    found = {}
    for each in given:
        name, equals, value = each.partition('=')
        if not equals:
            raise UserError(f'--resources: {each!r} is not KEY=VALUE')
        found[name] = value
    return found


def _command_line(spec: str, overrides: Mapping[str, str]) -> Sequence[str]:
    return [f'--config={spec}', *(f'--config.{name}={value}' for name, value in overrides.items())]
