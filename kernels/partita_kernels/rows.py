"""Tensors as rows of their last dimension."""

from __future__ import annotations

import torch


def as_rows(t: torch.Tensor) -> torch.Tensor:
    """[..., C] as [R, C] with neighbouring elements in a row; copies only what can't be viewed so."""
    rows = t.reshape(t.numel() // max(t.shape[-1], 1), t.shape[-1])
    return rows if rows.shape[1] <= 1 or rows.stride(1) == 1 else rows.contiguous()


def like(t: torch.Tensor) -> torch.Tensor:
    """Unwritten memory of the same shape and dtype, contiguous."""
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def wide(t: torch.Tensor) -> torch.Tensor:
    """At least float32."""
    return t if t.dtype in (torch.float32, torch.float64) else t.float()
