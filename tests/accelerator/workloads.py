"""What is timed on an accelerator, and how a process that times it talks with the one that compares."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Workload(NamedTuple):
    """The shape of a model, and of what a step trains on or a call generates."""

    family: str
    layers: int  # of each stack
    width: int
    heads: int
    hidden: int  # width inside the feed-forward
    vocabulary: int
    rows: int
    length: int  # of a row, either side; also of a prompt
    new_tokens: int = 0  # that a call generates
    beams: int = 1


WORKLOADS = {
    'gpt2_124m': Workload('decoder', 12, 768, 12, 3072, 50_304, 32, 1024, new_tokens=256),
    'bert_base': Workload('encoder', 12, 768, 12, 3072, 30_522, 64, 512),
    'mt_base': Workload('encoder_decoder', 6, 512, 8, 2048, 37_000, 256, 64, new_tokens=64, beams=4),
}
TINY = {  # for a rehearsal on a CPU
    name: each._replace(
        layers=2, width=32, heads=2, hidden=64, vocabulary=96, rows=4, length=16, new_tokens=min(each.new_tokens, 8)
    )
    for name, each in WORKLOADS.items()
}
SMALL = {  # for a CPU
    'gpt_small': Workload('decoder', 6, 384, 6, 1536, 8192, 8, 256, new_tokens=128),
    'mt_small': Workload('encoder_decoder', 4, 256, 4, 1024, 8192, 32, 48, new_tokens=48, beams=4),
}
TINY_ON_CPU = {
    name: each._replace(layers=1, width=32, heads=2, hidden=64, vocabulary=96, rows=4, length=8, new_tokens=4)
    for name, each in SMALL.items()
}


def tokens(workload: Workload, kind: str) -> int:
    """Returns the tokens of a train step, both sides, or those that a call generates."""
    if kind == 'generate':
        return workload.rows * workload.new_tokens
    return workload.rows * workload.length * (2 if workload.family == 'encoder_decoder' else 1)


def serve(facts: Mapping[str, Any], blocks: Mapping[str, Callable[[int], object]]) -> None:
    """Prints facts as a line of JSON; then, for each line `BLOCK TIMES` that comes, the seconds that the block takes.

    What libraries print goes to standard error.
    """
    with os.fdopen(os.dup(1), 'w', buffering=1) as answers, contextlib.redirect_stdout(sys.stderr):
        answers.write(json.dumps(facts) + '\n')
        for line in sys.stdin:
            name, times = line.split()
            began = time.perf_counter()
            blocks[name](int(times))
            answers.write(f'{time.perf_counter() - began}\n')


def median_seconds(call: Callable[[], object], times: int = 3) -> float:
    """Returns the median time of a call that waits for its device, after one unmeasured."""
    call()
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)[times // 2]
