"""Keep the C allocator from asking the kernel for memory at every TLS read.

Theory: uvloop reads a TLS record into a block of 256 KiB, which it then cuts to size, and holds another one for each
connection. By default glibc may serve such blocks by mmap, and it gives the end of its heap back as soon as that is free:
then each read costs system calls and fresh pages. Which of these happens depends on what was freed before, so figures moved
from one start to the next. Measured at its worst: two mmaps, an mremap and an munmap a handshake, 0.29 ms of 0.82.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # mallopt(3)
LARGEST_FROM_HEAP = 1 << 20
KEPT_FREE = 16 << 20
"""Bytes at the end of the heap that are kept for the next ones in need."""
GROWN_AT_ONCE = 1 << 20


def keep_blocks() -> bool:
    """For the life of the process; False where there is no mallopt (musl, macOS), which changes nothing else."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    wanted = {_MMAP_THRESHOLD: LARGEST_FROM_HEAP, _TRIM_THRESHOLD: KEPT_FREE, _TOP_PAD: GROWN_AT_ONCE}
    return all(mallopt(what, size) == 1 for what, size in wanted.items())
