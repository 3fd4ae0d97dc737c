"""What is watched as text: a line about all, a table of the arms, curves as small bars."""

import datetime
import math
from collections.abc import Mapping, Sequence

from tformer.lab.live.trial import RUNNING, LiveTrial
from tformer.lab.live.watched import ArmLine, Watched, arm_lines, counts, is_broken, mean_curve
from tformer.lab.report import prose
from tformer.lab.report.report_data import TRAIN, VALID

BARS, ASCII_BARS = '▁▂▃▄▅▆▇█', '_.-=+*#@'
WIDTH = 20  # bars of a curve
PEEKED = 'peeked'  # a label before all trials have ended
Cells = tuple[str, ...]


def headline(watched: Watched) -> str:
    """Returns how many trials are in each state, and the time that is left."""
    states = ', '.join(f'{number} {state}' for state, number in counts(watched.trials).items())
    left = watched.seconds_left()
    more = '' if left is None else f'; {duration(left)} left'
    return f'{prose.plain(str(watched.home))}: {prose.count(len(watched.trials), "trial")}: {states}{more}'


def about_verdicts(watched: Watched) -> str:
    """Returns what the labels are worth; '' where there are none."""
    if not watched.verdicts():
        return ''
    by = f'by {prose.named(watched.metric)} against {prose.plain(watched.baseline)}'
    if watched.is_ended:
        return f'verdicts {by}'
    return f'peeked {by}: labels that are looked at before all trials have ended are false more often'


def table(watched: Watched, bars: str = BARS) -> list[Cells]:
    """Returns the head of the table and a row for each arm, which begins with its name as it is."""
    lines, trials = arm_lines(watched), watched.by_arm()  # which finds the metric
    verdicts = 'verdict' if watched.is_ended else PEEKED
    head = ('arm', 'trials', 'step', 'train loss', 'valid loss', 'curve', prose.named(watched.metric) or '-', verdicts)
    return [head, *(_row(line, trials[line.arm], bars) for line in lines)]


def _row(line: ArmLine, trials: Sequence[LiveTrial], bars: str) -> Cells:
    states = ', '.join(f'{number} {state}' for state, number in line.counts.items())
    of = f'/{line.num_steps:,}' if line.num_steps else ''
    mean, label = prose.NONE, prose.NONE
    if line.row is not None and line.mean is not None:
        mean, label = prose.number(line.mean, '.4g'), line.row.label
    shown = next((name for name in (VALID, TRAIN) if len(mean_curve(trials, name, 3)[0]) > 2), TRAIN)
    return (
        line.arm,
        states,
        f'{line.step:,.0f}{of}',
        prose.number(line.train, '.4g'),
        prose.number(line.valid, '.4g'),
        sparkline(mean_curve(trials, shown, WIDTH)[1], bars),
        mean,
        label,
    )


def aligned(rows: Sequence[Cells]) -> list[str]:
    """Returns rows as lines whose columns are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ['  '.join(f'{cell:<{width}}' for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def sparkline(values: Sequence[float], bars: str = BARS) -> str:
    """Returns finite values as a row of bars, the smallest and the largest as the lowest and the highest bar."""
    if not values:
        return ''
    low, high = min(values), max(values)
    most = len(bars) - 1
    return ''.join(bars[round((value - low) / (high - low) * most) if high > low else 0] for value in values)


def duration(seconds: float) -> str:
    """Returns a time to come in words, such as 'about 3 minutes'."""
    if seconds < 90:
        return f'about {math.ceil(seconds)} seconds'
    if seconds < 90 * 60:
        return f'about {round(seconds / 60)} minutes'
    if seconds < 48 * 3600:
        return f'about {seconds / 3600:.1f} hours'
    return f'about {seconds / 86400:.1f} days'


def broken(trials: Sequence[LiveTrial]) -> list[str]:
    """Returns a line for each trial that failed or cannot be read."""
    return [
        f'{prose.plain(trial.directory)}: {trial.state}: {prose.plain(trial.error or "")}'
        for trial in trials
        if is_broken(trial)
    ]


def whole(watched: Watched, bars: str = BARS) -> str:
    """Returns all that is known now, as lines."""
    rows = [(prose.plain(arm), *cells) for arm, *cells in table(watched, bars)]
    lines = [headline(watched), *filter(None, [about_verdicts(watched)]), '', *aligned(rows)]
    return '\n'.join([*lines, *(['', *faults] if (faults := broken(watched.trials)) else [])])


def changes(watched: Watched, before: Mapping[str, str]) -> list[str]:
    """Returns a line for each trial whose state is not that of `before`, which is by directory."""
    found = []
    for trial in watched.trials:
        if before.get(trial.directory) != trial.state:
            scores = [f'{name} {trial.scores[name]:.4g}' for name in trial.scores if name.endswith('/loss')]
            more = scores or ([trial.error] if trial.error else [])
            if trial.state == RUNNING and trial.step:
                more = [f'from step {trial.step:,}']
            found.append(f'{prose.plain(trial.directory)}: {", ".join([trial.state, *map(prose.plain, more)])}')
    return found


def now() -> str:
    return datetime.datetime.now().strftime('%H:%M:%S')
