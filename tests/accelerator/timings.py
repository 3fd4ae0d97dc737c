"""Times tformer on an accelerator, in alternation with torch where it sees the same GPU; prints a table in Markdown.

    python tests/accelerator/timings.py [--table=FILE] [--tiny]

Train steps with their share of the peak (MFU), generation with its share of the memory's bandwidth, trials under vmap
against one after another, and the data pipeline against what a step reads. --tiny is a rehearsal on a CPU. Each side is
a process of its own that keeps its program; blocks of the two take turns. `make accelerator` runs this.
"""

import argparse
import contextlib
import datetime
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from workloads import TINY, WORKLOADS, Workload, tokens

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]


class Amount(NamedTuple):
    """How much is timed."""

    pairs: int = 5  # blocks of each side
    steps: int = 10  # in a block of train steps
    trial_steps: int = 100  # of each trial, in a block
    shapes: Mapping[str, Workload] = MappingProxyType(WORKLOADS)
    flags: tuple[str, ...] = ()  # of the processes


FULL, REHEARSAL = Amount(), Amount(2, 1, 2, MappingProxyType(TINY), ('tiny',))


class Row(NamedTuple):
    """A line of the table: what tformer does in a second, beside another."""

    what: str
    rate: str
    share: str = ''  # of the device's peak
    other: str = ''
    ratios: Sequence[float] = ()

    def markdown(self) -> str:
        ratio = ''
        if self.ratios:
            ratio = f'{statistics.median(self.ratios):.2f}'
            if len(self.ratios) > 1:
                ratio += f' ({min(self.ratios):.2f} to {max(self.ratios):.2f})'
        return f'| {self.what} | {self.rate} | {self.share} | {self.other} | {ratio} |'


class Side:
    """A process that answers; its facts are the first answer."""

    def __init__(self, script: str, *arguments: str):
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
        environment = {**os.environ, 'PYTHONPATH': paths, 'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}
        if arguments[-1:] == REHEARSAL.flags:
            environment |= {'JAX_PLATFORMS': 'cpu', 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'}
        command = [sys.executable, str(HERE / f'{script}.py'), *arguments]
        self.name = f'{script} {" ".join(arguments)}'
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildProcessError(f'{self.name} ended with {self._process.wait()}; its error stands above')
        return json.loads(line)

    def seconds(self, block: str, times: int = 1) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f'{block} {times}\n')
        self._process.stdin.flush()
        return float(self.answer())

    def close(self) -> None:
        """Ends the process, which ends by itself where it has nothing more to read."""
        try:
            self._process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def say(line: str) -> None:
    print(f'timings: {line}', file=sys.stderr, flush=True)


@contextlib.contextmanager
def sides(*commands: tuple[str, ...], flags: tuple[str, ...] = ()) -> Iterator[list[tuple[Side, dict[str, Any]]]]:
    """Gives processes with their facts, that compile beside each other.

    All but the first may be absent, or fail: a line says why.

    Raises:
      ChildProcessError: the first has failed.
    """
    with contextlib.ExitStack() as contexts:
        opened = [Side(*command, *flags) for command in commands]
        for side in opened:
            contexts.callback(side.close)
        found = [(opened[0], opened[0].answer())]
        for side in opened[1:]:
            try:
                facts = side.answer()
            except ChildProcessError as error:
                facts = {'absent': str(error)}
            if 'absent' in facts:
                say(f'{side.name} is left out: {facts["absent"]}')
            else:
                found.append((side, facts))
        yield found


def alternate(asked: Sequence[tuple[Side, str, int]], pairs: int) -> list[list[float]]:
    """Returns the seconds of each side's blocks, which take turns."""
    found: list[list[float]] = [[] for _ in asked]
    for _ in range(pairs):
        for times, (side, block, count) in zip(found, asked, strict=True):
            times.append(side.seconds(block, count))
    return found


def percent(part: float, whole: float | None) -> str:
    return '' if not whole else f'{100 * part / whole:.1f} %'


def peer(seconds: list[list[float]], facts: list[dict[str, Any]], work: float) -> tuple[str, list[float]]:
    """Returns (torch's rate in words, the ratios of tformer's rate to it) where there is a second side."""
    if len(seconds) == 1:
        return '', []
    ratios = [other / own for own, other in zip(*seconds, strict=True)]
    return f'{work / statistics.median(seconds[1]):,.0f} tokens/s, torch {facts[1]["torch"]}', ratios


# ------------------------------------------------------------------------------------------------ the parts
def train_row(name: str, amount: Amount) -> tuple[Row, dict[str, Any], float]:
    """Returns (the row of a workload's train steps, tformer's facts, its tokens per second)."""
    with sides(*(('tformer_side', 'train', name), ('torch_side', 'train', name)), flags=amount.flags) as both:
        seconds = alternate([(side, 'steps', amount.steps) for side, _ in both], amount.pairs)
        facts = [each for _, each in both]
    median, work = statistics.median(seconds[0]), amount.steps * tokens(amount.shapes[name], 'train')
    share = percent(amount.steps * facts[0]['flops'] / median, facts[0]['peak_flops'])
    row = Row(f'train {name}', f'{work / median:,.0f} tokens/s', share and f'MFU {share}', *peer(seconds, facts, work))
    return row, facts[0], work / median


def generate_row(name: str, amount: Amount) -> Row:
    with sides(*(('tformer_side', 'generate', name), ('torch_side', 'generate', name)), flags=amount.flags) as both:
        seconds = alternate([(side, 'calls', 1) for side, _ in both], amount.pairs)
        facts = [each for _, each in both]
    workload, median, own = amount.shapes[name], statistics.median(seconds[0]), facts[0]
    work, steps = tokens(workload, 'generate'), workload.new_tokens - 1
    read = steps * (own['params_bytes'] + own['cache_bytes'])
    share = percent(read / max(median - own['first_token_s'], 1e-9), own['peak_bandwidth'])
    how = 'greedy' if workload.beams == 1 else f'beam {workload.beams}'
    shown = share and f'bandwidth {share}'
    return Row(f'generate {name}, {how}', f'{work / median:,.0f} tokens/s', shown, *peer(seconds, facts, work))


def trials_row(name: str, amount: Amount) -> Row:
    steps = amount.trial_steps
    with sides(('tformer_side', 'trials', name), flags=amount.flags) as [(side, facts)]:
        together, alone = alternate([(side, 'together', steps), (side, 'alone', steps)], amount.pairs)
    count = facts['trials']
    rates = [f'{count * steps / statistics.median(seconds):,.0f} steps/s' for seconds in (together, alone)]
    ratios = [slow / fast for fast, slow in zip(together, alone, strict=True)]
    return Row(f'{count} trials under vmap', rates[0], '', f'{rates[1]}, one after another', ratios)


def data_row(name: str, amount: Amount, eaten: float) -> Row:
    """`eaten`: the tokens per second that the train step reads."""
    with sides(('tformer_side', 'data', name), flags=amount.flags) as [(_, facts)]:
        made = facts['worker_tokens_per_s']
    beside = f'{eaten:,.0f} tokens/s read by the step'
    return Row(f'data for {name}', f'{made:,.0f} tokens/s, one worker', '', beside, [made / eaten])


def measure(amount: Amount) -> tuple[dict[str, Any], list[Row], list[str]]:
    """Returns (facts of the machine, the rows, the parts that failed)."""
    rows, failed = [], []
    machine: dict[str, Any] = {'device': 'unknown', 'jax': 'unknown'}
    first, eaten = next(iter(WORKLOADS)), 0.0

    def part(what: str, run: Callable[[], Any]) -> Any:
        say(what)
        try:
            found = run()
            say((found if isinstance(found, Row) else found[0]).markdown())
            return found
        except (ChildProcessError, BrokenPipeError) as error:
            say(str(error))
            failed.append(what)

    for name in WORKLOADS:
        if found := part(f'train {name}', functools.partial(train_row, name, amount)):
            row, machine, rate = found
            rows.append(row)
            eaten = rate if name == first else eaten
    others = {
        f'generate {name}': functools.partial(generate_row, name, amount)
        for name, workload in WORKLOADS.items()
        if workload.new_tokens
    }
    others['trials under vmap'] = functools.partial(trials_row, first, amount)
    if eaten:
        others['data'] = functools.partial(data_row, first, amount, eaten)
    rows += [row for what, run in others.items() if (row := part(what, run))]
    return machine, rows, failed


def table(machine: Mapping[str, Any], rows: Sequence[Row], amount: Amount, date: datetime.date) -> str:
    """Returns the table in Markdown, under a line with the date and the machine."""
    lines = [
        f'{date}, one {machine["device"]}, jax {machine["jax"]}, bfloat16; medians of {amount.pairs} blocks.',
        '',
        '| what | tformer | share of the peak | beside it | ratio (least to most) |',
        '| --- | --- | --- | --- | --- |',
    ]
    return '\n'.join([*lines, *(row.markdown() for row in rows)]) + '\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--table', type=pathlib.Path, help='a file to write the table to')
    parser.add_argument('--tiny', action='store_true', help='tiny shapes, for a rehearsal on a CPU')
    given = parser.parse_args()
    amount = REHEARSAL if given.tiny else FULL
    machine, rows, failed = measure(amount)
    text = table(machine, rows, amount, datetime.date.today())
    print(text, flush=True)
    if given.table is not None:
        given.table.parent.mkdir(parents=True, exist_ok=True)
        given.table.write_text(text)
    for what in failed:
        say(f'failed: {what}')
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(main())
