"""How often differences of some size are told from noise, in the tables of a page of results.

    python tests/helpers/judged_again.py docs/results.md

reads the tables of losses that have a baseline, means ± standard deviations and verdicts, judges each anew by
`statistics.comparison` (without blocks of seeds, which tables do not tell), and counts the labels by the size of the
difference in per cent of the baseline's loss.
"""

import itertools
import math
import pathlib
import re
import statistics
import sys
from collections.abc import Iterator
from typing import NamedTuple

from tformer.lab.statistics import comparison

BOUNDS = (0, 1, 2, 5, 10, math.inf)  # per cent
DECIDED = ('better', 'worse')
SPREAD = re.compile(r'(-?[\d.]+) ± ([\d.]+)$')


class Judged(NamedTuple):
    """A comparison of a table."""

    arm: str
    percent: float  # the size of the difference
    told: str  # its verdict there
    label: str  # by the present rule


def runs(mean: float, sd: float, number: int) -> list[float]:
    """Returns runs with exactly this mean and standard deviation."""
    scores = [statistics.NormalDist().inv_cdf((i + 0.5) / number) for i in range(number)]
    return [mean + sd * score / statistics.stdev(scores) for score in scores]


def tables(text: str) -> Iterator[tuple[int, list[tuple[str, float, float, str]]]]:
    """Yields (seeds, rows) of each table of losses; a row is its arm, mean, standard deviation and verdict."""
    for block in re.split(r'\n\s*\n', text):
        head, *lines = [[cell.strip() for cell in line.strip('| ').split(' | ')] for line in block.splitlines()]
        seeds = re.fullmatch(r'arm \((\d+) seeds each\)', head[0])
        column = next((i for i, name in enumerate(head) if re.fullmatch(r'test (loss|nll)( at \d+)?', name)), None)
        if seeds and column is not None and 'verdict' in head:
            found = [(line[0], SPREAD.match(line[column]), line[-1]) for line in lines[1:]]
            yield int(seeds[1]), [(arm, float(x[1]), float(x[2]), verdict) for arm, x, verdict in found if x]


def judged(text: str) -> list[Judged]:
    """Returns all comparisons of the tables in a page."""
    found = []
    for number, rows in tables(text):
        values = {  # each seed is of one arm alone
            arm: dict(enumerate(runs(mean, sd, number), number * place))
            for place, (arm, mean, sd, _) in enumerate(rows)
        }
        anew = {row.arm: row.label for row in comparison.summary(values, rows[0][0], True, resamples=0)}
        for arm, mean, _, verdict in rows[1:]:
            found.append(Judged(arm, 100 * abs(mean / rows[0][1] - 1), verdict.partition(' (')[0], anew[arm]))
    return found


if __name__ == '__main__':
    found = judged(pathlib.Path(sys.argv[1]).read_text())
    print('| difference, % of the loss | comparisons | better or worse there | by the present rule |')
    print('| --- | --- | --- | --- |')
    for low, high in itertools.pairwise(BOUNDS):
        of_size = [each for each in found if low <= each.percent < high]
        there, anew = (sum(label in DECIDED for label in labels) for labels in list(zip(*of_size, strict=True))[2:])
        print(f'| {low} to {high} | {len(of_size)} | {there} | {anew} |')
    for each in found:
        if each.told != each.label:
            print(f'{each.arm}: {each.told} there, {each.label} by the present rule ({each.percent:.1f} %)')
