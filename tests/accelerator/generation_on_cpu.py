"""Times generation on a CPU beside transformers (on torch) and CTranslate2; prints a table in Markdown.

    python tests/accelerator/generation_on_cpu.py [--pairs=5] [--int8] [--tiny]

Models of the same shapes with random weights, in float32, on all cores; each text has the same number of tokens. With
--int8 tformer and CTranslate2 compute products by integers of eight bits. Each library is a process of its own, and
their calls take turns. Libraries that are not installed are left out.
"""

import argparse
import statistics

import timings
from workloads import SMALL, TINY_ON_CPU, tokens


def rows(name: str, pairs: int, tiny: bool, int8: bool = False) -> list[timings.Row]:
    """Returns a row for each other library."""
    own, *others = (f'{library}_int8' if int8 else library for library in ('tformer', 'ctranslate2'))
    commands = [('cpu_side', library, name) for library in (own, 'transformers', *others)]
    workload = (TINY_ON_CPU if tiny else SMALL)[name]
    with timings.sides(*commands, flags=('tiny',) if tiny else ()) as found:
        seconds = timings.alternate([(side, 'calls', 1) for side, _ in found], pairs)
        versions = [facts['version'] for _, facts in found]
    how = 'greedy' if workload.beams == 1 else f'{workload.beams} beams'

    def row(times: list[float], version: str) -> timings.Row:
        ratios = [other / own for own, other in zip(seconds[0], times, strict=True)]
        own, other = (tokens(workload, 'generate') / statistics.median(each) for each in (seconds[0], times))
        return timings.Row(f'{name}, {how}', f'{own:,.0f} tokens/s', '', f'{other:,.0f} tokens/s, {version}', ratios)

    return [row(*each) for each in zip(seconds[1:], versions[1:], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--pairs', type=int, default=5, help='calls of each library')
    parser.add_argument('--int8', action='store_true', help='products by integers of eight bits')
    parser.add_argument('--tiny', action='store_true', help='tiny shapes, for a rehearsal')
    given = parser.parse_args()
    print('| what | tformer | | beside it | ratio (least to most) |', '| --- | --- | --- | --- | --- |', sep='\n')
    for row in (row for name in SMALL for row in rows(name, given.pairs, given.tiny, given.int8)):
        print(row.markdown(), flush=True)


if __name__ == '__main__':
    main()
