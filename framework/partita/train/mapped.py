"""Files in memory as tensors."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path

import torch

FREE = 0.9  # share of the available memory that one file may take


def map_file(path: str, size: int) -> torch.Tensor:
    """The file as a tensor of `size` bytes that is written by being changed; space is reserved. Raises OSError where there is none."""
    if not size:
        Path(path).touch()
        return torch.empty(0, dtype=torch.uint8)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        there = os.fstat(handle).st_size
        available = available_memory()
        if available is not None and size - there > FREE * available:
            raise OSError(errno.ENOMEM, f"{size - there:,} bytes are needed and {available:,} available")
        os.ftruncate(handle, size)
        os.posix_fallocate(handle, 0, size)  # a write to a file system in memory that is full would end the process
        return torch.frombuffer(mmap.mmap(handle, size), dtype=torch.uint8)
    finally:
        os.close(handle)


def available_memory() -> int | None:
    """Bytes of host memory that can still be had (Linux)."""
    with contextlib.suppress(OSError, StopIteration):
        row = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable"))
        return int(row.split()[1]) << 10
    return None
