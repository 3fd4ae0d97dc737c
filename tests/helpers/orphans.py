"""A worker whose process is gone before it begins to watch it: `python orphans.py DIRECTORY` starts one and waits."""

import multiprocessing
import pathlib
import sys
import time

import lives
from tformer.data import worker


def work(place: pathlib.Path) -> None:
    (place / 'begun').touch()
    while not (place / 'go').exists():
        time.sleep(0.01)
    worker.follow()
    time.sleep(2 * lives.HANG)


if __name__ == '__main__':
    process = multiprocessing.get_context('spawn').Process(target=work, args=(pathlib.Path(sys.argv[1]),))
    process.start()
    print(process.pid, flush=True)
    process.join()
