"""Tier `file`: a folder on a fast local disk, by direct I/O (Rajbhandari et al. 2021, ZeRO-Infinity, section 6.3)."""

from __future__ import annotations

import logging
import mmap
import time
from pathlib import Path
from typing import Any

import torch

from partita.errors import PartitaError
from partita.state.tiers import Pending, TierRequest, aligned_empty
from partita.state.tiers.tier import BLOCK
from partita_offload.direct import DirectFile

log = logging.getLogger("partita")
TRIAL = 32 << 20  # bytes that are written and read to find the bandwidth


class FileStore:
    """See `partita.state.tiers.Store`. Lies at `start` of the file."""

    def __init__(self, file: DirectFile, start: int, numel: int, dtype: torch.dtype) -> None:
        self._file, self._start = file, start
        self.numel, self.dtype = numel, dtype
        self._map: Any = None

    def on(self, device: torch.device) -> torch.Tensor | None:
        """Nowhere: it has to be read."""
        return None

    def read(self, lo: int, into: torch.Tensor) -> Pending:
        """See `Store`."""
        return self._file.read(self._start + lo * self.dtype.itemsize, into)

    def write(self, lo: int, source: torch.Tensor) -> Pending:
        """See `Store`."""
        return self._file.write(self._start + lo * self.dtype.itemsize, source)

    def mapped(self) -> torch.Tensor:
        """The file's pages: the system brings them in and throws them out as memory allows."""
        if self._map is None:
            # a mapping begins on a page of the machine, which may be larger than a block
            base = self._start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            size = self._start - base + self.numel * self.dtype.itemsize
            memory = mmap.mmap(self._file.handle, size, offset=base)
            self._map = (memory, torch.frombuffer(memory, dtype=self.dtype, count=self.numel, offset=self._start - base))
        tensor: torch.Tensor = self._map[1]
        return tensor

    def flush(self) -> None:
        """Write changed pages, and let them go."""
        if self._map is not None:
            self._map[0].flush()
            self._map[0].madvise(mmap.MADV_DONTNEED)


class FileTier:
    """See `partita.state.tiers.Tier`. bandwidth: bytes per second found at the start, {"write": ..., "read": ...}."""

    def __init__(self, request: TierRequest) -> None:
        if request.path is None:
            raise PartitaError("states go to files, but there is no folder for them. Set offload.path.")
        self._file = DirectFile(Path(request.path))
        self._rank = request.rank
        self._next = 0
        self.bandwidth: dict[str, float] = {}

    def reserve(self, size: int) -> None:
        """Take the space, and measure. The free space is checked; it can't be taken by others later."""
        self._file.grow(_whole(size) + BLOCK * 1024)
        self._measure(min(TRIAL, self._file.size // BLOCK * BLOCK))
        if self._file.buffered and self._rank == 0:
            log.warning("offload.path: %s; states go through the page cache, which takes memory and time", self._file.buffered)
        if self._rank == 0:
            rates = ", ".join(f"{kind}s {rate / 1e9:.2f} GB/s" for kind, rate in self.bandwidth.items())
            moved = size / self.bandwidth["read"] + size / self.bandwidth["write"]
            how = "buffered" if self._file.buffered else "direct"
            log.info(
                "states in files: %s, %s I/O, %s; to read and write them once takes a rank %.3g s",
                self._file.folder,
                how,
                rates,
                moved,
            )

    def _measure(self, size: int) -> None:
        memory = aligned_empty(size, torch.uint8).zero_()
        for kind, action in (("write", self._file.write), ("read", self._file.read)):
            began = time.perf_counter()
            action(0, memory).settle()
            self.bandwidth[kind] = size / (time.perf_counter() - began)

    def allocate(self, numel: int, dtype: torch.dtype) -> FileStore:
        """A store; the file was filled with zeros when its space was taken."""
        size = _whole(numel * dtype.itemsize)
        if self._next + size > self._file.size:
            self._file.grow(self._next + size - self._file.size)
        store = FileStore(self._file, self._next, numel, dtype)
        self._next += size
        return store

    def close(self) -> None:
        """The file had no name, so nothing stays."""
        self._file.close()


def _whole(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
