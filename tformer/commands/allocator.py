"""On a CPU the memory allocator can cost more than the arithmetic: keep freed memory instead of returning it."""

import ctypes
import sys

# From glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8


def keep_memory() -> None:
    """Tells glibc's malloc to serve large arrays from memory it already has, so that no step pays for page faults.

    Without glibc it does nothing. An accelerator has an allocator of its own, which this does not touch.
    """
    if not sys.platform.startswith('linux'):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_ARENA_MAX, 1)
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_TOP_PAD, 2**28)
