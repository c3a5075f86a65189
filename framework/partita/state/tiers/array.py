"""One state of one shard: its first elements on the device, the rest in a tier."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from partita.state.tiers.lane import Lane
from partita.state.tiers.tier import Done, Pending, Store


class Array:
    """Elements [0, near.numel()) are `near`, the others `far` (None: there are no others)."""

    def __init__(self, near: torch.Tensor, far: Store | None = None) -> None:
        self.near, self.far = near, far
        self.numel = near.numel() + (far.numel if far is not None else 0)
        self.dtype = near.dtype

    def read(self, into: torch.Tensor) -> Pending:
        """Start to copy all elements to `into`."""
        keep = self.near.numel()
        into[:keep].copy_(self.near)
        return self.far.read(0, into[keep:]) if self.far is not None else Done()

    def write(self, source: torch.Tensor) -> Pending:
        """Start to take all elements from `source`."""
        keep = self.near.numel()
        self.near.copy_(source[:keep])
        return self.far.write(0, source[keep:]) if self.far is not None else Done()

    def whole(self) -> torch.Tensor:
        """All elements in one tensor on the device: `near` itself where that is all."""
        if self.far is None:
            return self.near
        out = torch.empty(self.numel, dtype=self.dtype, device=self.near.device)
        self.read(out).wait()
        return out

    def spans(self, lo: int, hi: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Elements [lo, hi) as views of memory: (lo, hi, tensor) of each part. An empty range gives one empty part."""
        keep = self.near.numel()
        if lo < keep or self.far is None or lo == hi:
            yield lo, min(hi, keep) if hi > lo else hi, self.near[min(lo, keep) : min(hi, keep)]
        if hi > keep and hi > lo and self.far is not None:
            start = max(lo, keep)
            yield start, hi, self.far.mapped()[start - keep : hi - keep]

    def flush(self) -> None:
        """After use of spans."""
        if self.far is not None:
            self.far.flush()


class Resident:
    """A tensor of the device as a `Store`: for compute elsewhere, which has to copy it."""

    def __init__(self, tensor: torch.Tensor, lane: Lane) -> None:
        self._tensor, self._lane = tensor, lane
        self.numel, self.dtype = tensor.numel(), tensor.dtype

    def on(self, device: torch.device) -> torch.Tensor | None:
        """See `Store`."""
        return self._tensor if self._tensor.device.type == device.type else None

    def read(self, lo: int, into: torch.Tensor) -> Pending:
        """See `Store`."""
        return self._lane.copy(into, self._tensor[lo : lo + into.numel()])

    def write(self, lo: int, source: torch.Tensor) -> Pending:
        """See `Store`."""
        return self._lane.copy(self._tensor[lo : lo + source.numel()], source)

    def mapped(self) -> torch.Tensor:
        """See `Store`."""
        return self._tensor

    def flush(self) -> None:
        """See `Store`."""
