"""Tier `host`: memory of the node. Pinned where there is an accelerator, so that copies run beside the compute."""

from __future__ import annotations

import torch

from partita.errors import PartitaError
from partita.state.tiers import Pending, TierRequest
from partita.state.tiers.lane import Lane


class HostStore:
    """See `partita.state.tiers.Store`. The CPU computes on it in place."""

    def __init__(self, tensor: torch.Tensor, lane: Lane) -> None:
        self._tensor, self._lane = tensor, lane
        self.numel, self.dtype = tensor.numel(), tensor.dtype

    def on(self, device: torch.device) -> torch.Tensor | None:
        """The array, for the CPU."""
        return self._tensor if device.type == "cpu" else None

    def read(self, lo: int, into: torch.Tensor) -> Pending:
        """See `Store`."""
        return self._lane.copy(into, self._tensor[lo : lo + into.numel()])

    def write(self, lo: int, source: torch.Tensor) -> Pending:
        """See `Store`."""
        return self._lane.copy(self._tensor[lo : lo + source.numel()], source)

    def mapped(self) -> torch.Tensor:
        """The array."""
        return self._tensor

    def flush(self) -> None:
        """Nothing to do."""


class HostTier:
    """See `partita.state.tiers.Tier`."""

    def __init__(self, request: TierRequest) -> None:
        self._pinned = request.device.type != "cpu"
        self._lane = Lane(request.device)
        self._reserved = 0

    def reserve(self, size: int) -> None:
        """Memory is taken store by store; `size` is told where that fails."""
        self._reserved = size

    def allocate(self, numel: int, dtype: torch.dtype) -> HostStore:
        """A store. Raises PartitaError where the node has no memory left."""
        try:
            return HostStore(torch.zeros(numel, dtype=dtype, pin_memory=self._pinned), self._lane)
        except RuntimeError as error:
            kind = "pinned memory" if self._pinned else "memory"
            raise PartitaError(
                f"offload to the host: {numel * dtype.itemsize:,} bytes of {kind} can't be had, of {self._reserved:,} that this "
                f"rank keeps there ({str(error).splitlines()[0]}). Use more ranks, a smaller offload.fraction, or offload to files."
            ) from error

    def close(self) -> None:
        """Memory goes with the stores."""
