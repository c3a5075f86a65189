"""What a tier is: memory outside of the device, in which states lie between uses (slot `tier`).

A tier gives out *stores*, flat arrays of one state each. A store can be read and written in the background, and it says on which
device compute may use it in place (the host tier: on the CPU; the file tier: nowhere).
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Protocol

import torch

HUGE = 2 << 20  # bytes of a huge page of most machines
MADV_HUGEPAGE = 14  # of Linux
BLOCK = 4096  # bytes; what direct I/O wants offsets, lengths and addresses to be multiples of


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """What this thread starts on the device afterwards finds the result (on a CPU: return when it is there). Raises what failed."""

    def settle(self) -> None:
        """Return when it is done, on every device. Raises what failed."""


class Done:
    """A transfer that has happened."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def settle(self) -> None:
        """Nothing to wait for."""


class Store(Protocol):
    """A flat array in a tier; all zero at first."""

    numel: int
    dtype: torch.dtype

    def on(self, device: torch.device) -> torch.Tensor | None:
        """The array itself, where compute on `device` may use it in place; None where it has to be read and written."""

    def read(self, lo: int, into: torch.Tensor) -> Pending:
        """Start to copy elements from `lo` on to `into` (1-D, on any device). lo * itemsize is a multiple of BLOCK."""

    def write(self, lo: int, source: torch.Tensor) -> Pending:
        """Start to copy `source` (1-D, on any device; unchanged until it is done) to elements from `lo` on.

        lo * itemsize is a multiple of BLOCK, and so is the length in bytes unless the write reaches the end of the store.
        """

    def mapped(self) -> torch.Tensor:
        """The array in this process's address space, for checkpoints. No read or write may be under way meanwhile."""

    def flush(self) -> None:
        """After use of `mapped`: what was written there reaches the tier, and memory that it took can be used otherwise."""


class Tier(Protocol):
    """Memory of one kind on one rank. Slot `tier`: a builder `(TierRequest) -> Tier`."""

    def reserve(self, size: int) -> None:
        """Make sure of `size` bytes, before the first `allocate`. Raises PartitaError with needed and free bytes and a remedy."""

    def allocate(self, numel: int, dtype: torch.dtype) -> Store:
        """A store."""

    def close(self) -> None:
        """Give everything back; also after errors. Stores are unusable then."""


@dataclass(frozen=True)
class TierRequest:
    """What the builder of a tier is told. device: of compute. path: plan.tiers.path. rank: global."""

    device: torch.device
    rank: int
    path: str | None = None


def aligned_empty(numel: int, dtype: torch.dtype, pinned: bool = False) -> torch.Tensor:
    """Uninitialised host memory at a multiple of BLOCK whose size in bytes is one too; viewed as `numel` elements.

    Large ones lie on huge pages where the system has them: direct I/O pins pages one by one, and takes 1.5 times as long with small ones.
    """
    size = -(-numel * dtype.itemsize // BLOCK) * BLOCK
    huge = size >= HUGE and not pinned
    align = HUGE if huge else BLOCK
    raw = torch.empty(size + align, dtype=torch.uint8, pin_memory=pinned)
    start = -raw.data_ptr() % align
    if huge and sys.platform == "linux":  # only advice: whether it is taken makes no difference to anything else
        ctypes.CDLL(None).madvise(ctypes.c_void_p(raw.data_ptr() + start), ctypes.c_size_t(size // HUGE * HUGE), MADV_HUGEPAGE)
    return raw[start : start + size].view(dtype)[:numel]
