"""Memory that the C library keeps for reuse. Training frees and takes the same large blocks on every step; given back to the system and
taken again, each page of them is zeroed and mapped anew. While a run is built it is the other way round: between states that stay, what
was needed for a moment leaves holes, which for a model of 540 MB came to 150.
"""

from __future__ import annotations

import ctypes
import os
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
LARGEST = 64 * 2**20  # bytes of a block that is kept; larger ones are mapped, and their pages cost little beside their use
KEPT = 256 * 2**20  # bytes kept at the end of the heap
SMALL = 2**20  # bytes of a block that is given back when it is freed


def keep_freed_memory(largest: int = LARGEST, kept: int = KEPT) -> None:
    """Have glibc keep freed blocks, where it is the C library and the user has not set it otherwise (MALLOC_*_THRESHOLD_).

    largest: bytes of a block that is kept. kept: bytes in all, at the end of the heap. Both below 2 GiB.
    """
    _set(largest, kept)


def return_freed_memory() -> None:
    """Have glibc give freed blocks back, until `keep_freed_memory`."""
    _set(SMALL, SMALL)


def _set(mapped: int, kept: int) -> None:
    if sys.platform != "linux" or any(f"MALLOC_{name}_THRESHOLD_" in os.environ for name in ("TRIM", "MMAP")):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, mapped)
        mallopt(TRIM_THRESHOLD, kept)
