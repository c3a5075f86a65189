"""Squared L2 norm of flat buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

CHUNK = 1 << 20  # elements summed in float32 before partial sums go to float64


def squared_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of squares of all elements, 0-d float64 (float32 where the device has no float64); one read of each buffer.

    A non-finite element makes the result non-finite, so it serves as the finite check too. Low-precision buffers are widened chunk by chunk.
    """
    parts = [_square(chunk) for t in tensors for chunk in t.split(CHUNK)]
    if not parts:
        return torch.zeros(())
    stacked = torch.stack(parts)
    return stacked.sum(dtype=torch.float32 if stacked.device.type == "mps" else torch.float64)


def _square(chunk: torch.Tensor) -> torch.Tensor:
    wide = chunk if chunk.dtype == torch.float32 else chunk.float()
    return torch.dot(wide, wide)
