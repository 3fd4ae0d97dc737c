"""Makes the C library keep freed memory: on a CPU, returning it can cost more time than the arithmetic."""

import ctypes
import sys

# From glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8


def keep_memory() -> None:
    """Tells glibc's malloc to reuse freed memory for large arrays, so that training steps cause no page faults.

    Without glibc it does nothing. It does not affect the allocator of an accelerator.
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
