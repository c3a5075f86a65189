"""Memory that the C library keeps for reuse. Training frees and takes the same large blocks on every step; given back to the system and
taken again, each page of them is zeroed and mapped anew.
"""

from __future__ import annotations

import ctypes
import os
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
LARGEST = 64 * 2**20  # bytes of a block that is kept; larger ones are mapped, and their pages cost little beside their use
KEPT = 256 * 2**20  # bytes kept at the end of the heap


def keep_freed_memory() -> None:
    """Have glibc keep freed blocks, where it is the C library and the user has not set it otherwise (MALLOC_*_THRESHOLD_)."""
    if sys.platform != "linux" or any(f"MALLOC_{name}_THRESHOLD_" in os.environ for name in ("TRIM", "MMAP")):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGEST)
        mallopt(TRIM_THRESHOLD, KEPT)
