"""The table that `tformer sweep --dry_run` prints: the trials of a sweep, their sizes and how far each has come."""

import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from tformer.config import Config
from tformer.errors import UserError
from tformer.lab.sweep import jobs, manifest, matching
from tformer.lab.sweep.trials import Trial, error_of, is_done

T = TypeVar('T')
HEAD = ('trial', 'parameters', 'FLOPs at most', 'tokens at most', 'matched', 'state')


def plan(trials: Sequence[Trial], directory: str | pathlib.Path | None, parallel: int = 1, together: int = 1) -> str:
    """Returns a table of the trials: parameters, FLOPs, tokens, mismatch and state of each.

    FLOPs and tokens are of full batches: how much of them is padding depends on the data. The time of a trial that has
    not run is estimated from the FLOPs and times of those that have; `parallel` processes will run at once. With
    `together`, the number of the program that will train each trial is told, counted among the programs that are left.
    """
    if parallel < 1:
        raise UserError(f'--parallel={parallel} must be positive')
    home = None if directory is None else pathlib.Path(directory)
    if home is not None:
        manifest.check(trials, home)
    seconds = {} if home is None else manifest.times(home)
    flops = {trial.directory: _known(matching.num_flops, trial.config) for trial in trials}
    done = {name for name in flops if home is not None and is_done(home / name)}
    expected = _expected_seconds(flops, seconds, done)
    left = [trial for trial in trials if trial.directory not in done]
    groups = jobs.programs(home, left, trials, together)
    program = {trial.directory: str(number) for number, group in enumerate(groups, start=1) for trial in group}
    rows: list[tuple[str, ...]] = [HEAD if together == 1 else (*HEAD, 'program')]
    for trial in trials:
        name, parameters = trial.directory, _known(matching.num_parameters, trial.config)
        tokens = _known(matching.num_tokens, trial.config)
        rows.append((
            name,
            '-' if parameters is None else f'{parameters:,}',
            '-' if flops[name] is None else f'{flops[name]:.4g}',
            '-' if tokens is None else f'{tokens:,}',
            ', '.join(f'{quantity} {percent:+.3f} %' for quantity, percent in trial.mismatch_percent.items()),
            '' if home is None else _state(home / name, seconds.get(name), expected.get(name)),
            *([] if together == 1 else ['' if name in done else program[name]]),
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ['  '.join(f'{cell:<{width}}' for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    minutes = sum(expected.values()) / parallel / 60
    more = '' if together == 1 else f'; {len(groups)} programs'
    more += f'; about {minutes:,.1f} minutes are left' if expected else ''
    return '\n'.join([*lines, f'{len(trials)} trials, {len(done)} of them done{more}'])


def _expected_seconds(
    flops: Mapping[str, float | None], seconds: Mapping[str, float], done: set[str]
) -> dict[str, float]:
    """Returns the estimated seconds of each trial that is not done; nothing if no finished trial has its time."""
    rates = [seconds[name] / (flops[name] or 1.0) for name in done if seconds.get(name)]
    return {name: statistics.median(rates) * (flops[name] or 1.0) for name in flops if name not in done and rates}


def _state(place: pathlib.Path, seconds: float | None, expected: float | None) -> str:
    """Returns how far a trial is: done, failed, or how long it may take."""
    if is_done(place):
        return f'done, {seconds:,.0f} s' if seconds else 'done'
    if (error := error_of(place)) is not None:
        return f'failed: {error}'
    if expected is None:
        return ''
    begun = 'begun; ' if (place / 'config.json').is_file() else ''
    return f'{begun}about {expected:,.0f} s'


def _known(measured: Callable[[Config], T], stated: Config) -> T | None:
    """Returns an amount, or None if it depends on the data."""
    try:
        return measured(stated)
    except UserError:
        return None
