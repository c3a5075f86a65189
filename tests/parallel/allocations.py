"""Bytes of all tensors that are alive on a rank, op by op: what a device's allocator would have at its peak."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """`peak`: the largest sum of bytes since `reset`. Storages in `resizable` are asked for their size at each op.

    Temporary memory inside an op is not seen.
    """

    def __init__(self, resizable: list[torch.Tensor]) -> None:
        super().__init__()
        self._resizable = {t.untyped_storage()._cdata: t.untyped_storage() for t in resizable}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.see(tree_leaves((args, kwargs, out)))
        return out

    def see(self, values: list[Any]) -> None:
        """Take note of tensors, and of the sum."""
        for t in values:
            if isinstance(t, torch.Tensor) and t.device.type == "cpu":
                storage = t.untyped_storage()
                if storage._cdata not in self._resizable:
                    self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {k: v for k, v in self._alive.items() if not v[0].expired()}
        total = sum(n for _, n in self._alive.values()) + sum(s.nbytes() for s in self._resizable.values())
        self.peak = max(self.peak, total)
