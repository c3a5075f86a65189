"""Bytes of all tensors that are alive, and their peak: what a plan predicts, seen from outside of the framework."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveTensors(TorchDispatchMode):
    """Counts each storage that an operation returned, as long as it lives and as large as it is then (`resize_` included).

    Storages of `others` (memory of the host, say) are left out. Temporaries inside one operation are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, Any] = {}
        self._others: set[int] = set()
        self.peak = 0
        self.largest: list[int] = []

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Don't count the storage of `tensor`."""
        self._others.add(tensor.untyped_storage()._cdata)

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor made before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages and storage.device.type != "meta":
            self._storages[key] = weakref.ref(storage, lambda _r, k=key: self._gone(k))

    def _gone(self, key: int) -> None:
        self._storages.pop(key, None)
        self._others.discard(key)

    def now(self) -> int:
        """Bytes alive."""
        found = [(k, r()) for k, r in list(self._storages.items())]
        return sum(s.nbytes() for k, s in found if s is not None and k not in self._others)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor):
                self.add(value)
        self.peak = max(self.peak, self.now())
        return out
