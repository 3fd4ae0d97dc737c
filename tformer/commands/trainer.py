"""The warm process that trains job after job, as `tformer sweep` tells it by lines of JSON.

A job is {"homes": [WORKDIR, ...], "log": FILE, "transform": ..., "until": ..., "extensions": [FILE, ...]}. The answer
is {"code": ...}, the exit code that a process of its own would have had. What a job prints goes to its log.
"""

import gc
import json
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tformer.commands import failures
from tformer.config import extensions
from tformer.distributed import gpu_memory
from tformer.errors import Stopped, UserError
from tformer.training import program_cache

MOST_JOBS = 200  # a process is replaced after so many,
MOST_GROWTH = 2 * 2**30  # or after this growth of its memory since its first job, in bytes

Train = Callable[[Mapping[str, Any]], object]  # does a job


def serve(train: Train) -> None:
    """Answers the jobs on standard input, until it ends or a job leaves the process in a doubtful state.

    That is any end but a success or a user's mistake. Then the process exits with the job's code.
    """
    jobs, answers = os.fdopen(os.dup(0), 'r'), os.fdopen(os.dup(1), 'w', buffering=1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    gpu_memory.take()
    program_cache.keep()
    first = None
    for number, line in enumerate(jobs, start=1):
        job = json.loads(line)
        code, is_sound = _logged(job, train)
        gc.collect()
        memory = resident()
        first = first or memory
        ends = not is_sound or number >= MOST_JOBS or memory - first > MOST_GROWTH
        print(json.dumps({'code': code, 'ends': ends}), file=answers)
        if ends:
            sys.exit(code)


def _logged(job: Mapping[str, Any], train: Train) -> tuple[int, bool]:
    """Does a job with its log as standard output and error; returns (its exit code, whether others can follow it)."""
    sys.stdout.flush()
    before = os.dup(2)
    log = os.open(job['log'], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        extensions.import_files(job['extensions'])
        train(job)
        return 0, True
    except (Stopped, Exception) as error:
        code, text = failures.explain(error)
        if text is not None:
            print(f'tformer: {text}', file=sys.stderr, flush=True)
        return code, isinstance(error, UserError)
    finally:
        sys.stdout.flush()
        os.dup2(before, 1)
        os.dup2(before, 2)
        os.close(before)
        os.close(log)


def resident() -> int:
    """Returns the memory of this process in bytes; 0 where the system does not tell."""
    try:
        return int(pathlib.Path('/proc/self/statm').read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE')
    except OSError:
        return 0
