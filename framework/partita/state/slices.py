"""One contiguous part of one state tensor: what a checkpoint saves and loads."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StateSlice:
    """Elements [lo, hi) in row-major order of the tensor `key` of `shape`.

    data: 1-D view of hi - lo elements; a load writes into it. key: `model.<parameter>`, `optimizer.<parameter>.<state>`, `buffer.<name>`,
    or `wire.<parameter>.<state>` [senders, *shape]. optional: a load goes on without it where the checkpoint has none of that shape.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    lo: int
    hi: int
    data: torch.Tensor
    optional: bool = False
