"""What one rank saves, copied at a step boundary into host memory that training does not touch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from partita.errors import CheckpointError
from partita.state.slices import StateSlice
from partita.train.shards import ALIGN
from partita.train.storage import dtype_name, encode


@dataclass(frozen=True)
class Snapshot:
    """All that one rank saves, taken at a step boundary; training may change everything else meanwhile.

    data: bytes of the shard. parts: (key, shape, dtype, lo, hi, offset). extra, plan: used on rank 0. All but data: JSON values.
    """

    data: torch.Tensor
    parts: list[list[Any]]
    rank_extra: Any
    extra: Any
    plan: dict[str, Any]
    score: float | None


def take_snapshot(
    slices: Sequence[StateSlice],
    extra: Mapping[str, Any],
    rank_extra: Mapping[str, Any],
    *,
    rank: int,
    device: torch.device,
    plan: dict[str, Any],
    buffer: Callable[[int], torch.Tensor],
    score: float | None = None,
) -> Snapshot:
    """Copy everything into the host memory that `buffer(bytes)` gives (1-D uint8). Raises CheckpointError for what can't be saved."""
    offsets, size = [], 0
    for s in slices:
        if s.hi - s.lo != s.data.numel() or not 0 <= s.lo <= s.hi <= math.prod(s.shape):
            raise CheckpointError(
                f"{s.key}: {s.data.numel()} elements can't be [{s.lo}, {s.hi}) of a tensor of shape {list(s.shape)}"
            )
        offsets.append(size)
        size += -(-s.data.numel() * s.data.element_size() // ALIGN) * ALIGN
    host = buffer(size)
    for s, offset in zip(slices, offsets, strict=True):
        end = offset + s.data.numel() * s.data.element_size()
        host[offset:end].view(s.data.dtype).copy_(s.data.detach(), non_blocking=True)
    if device.type != "cpu":
        torch.accelerator.synchronize()
    parts = [[s.key, list(s.shape), dtype_name(s.data.dtype), s.lo, s.hi, o] for s, o in zip(slices, offsets, strict=True)]
    finite = float(score) if score is not None and math.isfinite(score) else None
    own = encode(dict(rank_extra), f"rank_extra of rank {rank}")
    return Snapshot(host[:size], parts, own, encode(dict(extra), "extra"), plan, finite)
