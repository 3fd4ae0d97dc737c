"""What a sweep would run, before it does."""

import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

from tformer.config import Config
from tformer.errors import UserError
from tformer.lab.sweep import manifest, matching
from tformer.lab.sweep.trials import Trial, error_of, is_done

T = TypeVar('T')


def plan(trials: Sequence[Trial], directory: str | pathlib.Path | None, parallel: int = 1) -> str:
    """Returns a table of the trials: parameters, FLOPs and tokens of each, what it is off, and how far it is.

    The time of one that has not run is that of those that have, by their FLOPs. FLOPs and tokens are of full
    batches: padding, of which only the data tell, counts.

    Raises:
      UserError: as `manifest.check`.
    """
    home = None if directory is None else pathlib.Path(directory)
    if home is not None:
        manifest.check(trials, home)
    seconds = {} if home is None else manifest.times(home)
    flops = {trial.directory: _known(matching.num_flops, trial.config) for trial in trials}
    done = {name for name in flops if home is not None and is_done(home / name)}
    rates = [seconds[name] / (flops[name] or 1.0) for name in done if seconds.get(name)]
    rows, left = [('trial', 'parameters', 'FLOPs at most', 'tokens at most', 'matched', 'state')], 0.0
    begun = {name for name in flops if home is not None and (home / name / 'config.json').is_file()}
    for trial in trials:
        name = trial.directory
        tokens = _known(matching.num_tokens, trial.config)
        parameters = _known(matching.num_parameters, trial.config)
        state = ''
        if name in done:
            state = f'done, {seconds[name]:,.0f} s' if seconds.get(name) else 'done'
        elif rates:
            left += (expected := statistics.median(rates) * (flops[name] or 1.0))
            state = f'{"begun; " if name in begun else ""}about {expected:,.0f} s'
        if home is not None and name not in done and (error := error_of(home / name)) is not None:
            state = f'failed: {error}'
        rows.append((
            name,
            '-' if parameters is None else f'{parameters:,}',
            '-' if flops[name] is None else f'{flops[name]:.4g}',
            '-' if tokens is None else f'{tokens:,}',
            ', '.join(f'{quantity} {off:+.3f} %' for quantity, off in trial.mismatch_percent.items()),
            state,
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ['  '.join(f'{cell:<{width}}' for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    total = f'; about {left / parallel / 60:,.1f} minutes are left' if rates else ''
    return '\n'.join([*lines, f'{len(trials)} trials, {len(done)} of them done{total}'])


def _known(measured: Callable[[Config], T], stated: Config) -> T | None:
    """Returns an amount, None where only the data tell."""
    try:
        return measured(stated)
    except UserError:
        return None
