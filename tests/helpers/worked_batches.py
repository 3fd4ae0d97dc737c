"""Batches that two processes make, `python worked_batches.py all|one`: SIGTERM to all workers, or SIGKILL to one."""

import multiprocessing
import os
import signal
import sys
import types

import numpy as np

from tformer.data.batches import pipeline


class Made:
    """Batches that are longer than what a pipe holds."""

    training = True

    def batch(self, step: int, share: tuple[int, int] = (0, 1)) -> dict[str, np.ndarray]:
        return {'inputs': np.full((256, 1024), step, np.int32)}


def main(which: str) -> None:
    config = types.SimpleNamespace(data=types.SimpleNamespace(num_workers=2, num_threads=1, prefetch=4))
    batches = pipeline.iterate(Made(), 0, config)  # type: ignore[arg-type]
    found = [int(next(batches)['inputs'][0, 0]) for _ in range(3)]
    workers = multiprocessing.active_children()
    for each in workers[: None if which == 'all' else 1]:
        os.kill(each.pid or 0, signal.SIGTERM if which == 'all' else signal.SIGKILL)
    found += [int(next(batches)['inputs'][0, 0]) for _ in range(40)]
    batches.close()
    print(len(workers), found == [*range(43)])


if __name__ == '__main__':
    main(sys.argv[1])
