"""What begins every worker process that makes data."""

import multiprocessing
import os
import signal
import threading


def follow(index: int = 0, count: int = 1) -> None:
    """Lets a worker process ignore interrupts, and exit once the process that it works for has ended.

    That process may have ended before this is called, so its number is not to be asked for.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
