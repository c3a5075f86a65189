"""The device of this rank, through torch.accelerator: CPU, CUDA, ROCm, XPU and MPS are one path."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Device:
    """kind: torch's device type. index: of this rank's accelerator, 0 on a CPU."""

    kind: str
    index: int = 0

    @classmethod
    def current(cls) -> Device:
        """The accelerator that belongs to LOCAL_RANK, else the CPU. Makes it the current one."""
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator is None:
            return cls("cpu")
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
        torch.accelerator.set_device_index(index)
        return cls(accelerator.type, index)

    @staticmethod
    def count() -> int:
        """Accelerators of this machine; 0 where it has none."""
        return torch.accelerator.device_count() if torch.accelerator.is_available() else 0

    @property
    def torch_device(self) -> torch.device:
        """For tensors."""
        return torch.device(self.kind) if self.kind == "cpu" else torch.device(self.kind, self.index)

    @property
    def backend(self) -> str:
        """Process group backend: gloo on a CPU, the accelerator's own otherwise."""
        if self.kind == "cpu":
            return "gloo"
        return torch.distributed.get_default_backend_for_device(self.torch_device)

    @property
    def name(self) -> str:
        """As the driver calls it; the kind where it says nothing."""
        properties = getattr(self._module(), "get_device_properties", None)
        return str(properties(self.index).name) if self.kind != "cpu" and properties is not None else self.kind

    def synchronize(self) -> None:
        """Wait for everything that was started on it."""
        if self.kind != "cpu":
            torch.accelerator.synchronize(self.torch_device)

    def memory(self) -> int:
        """Bytes at the peak: of the accelerator's allocator, or resident memory of this process on a CPU."""
        if self.kind != "cpu":
            return int(self.memory_stats().get("allocated_bytes.all.peak", 0))
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB

    def memory_stats(self) -> dict[str, Any]:
        """Counters of the accelerator's allocator, by torch's names; empty on a CPU."""
        return {} if self.kind == "cpu" else dict(torch.accelerator.memory_stats(self.torch_device))

    def peak_flops(self, dtype: str) -> float | None:
        """Dense FLOP/s of this device in `dtype` (a name like bfloat16); None where the table of known devices has nothing."""
        from partita.plan.devices import DEVICES, device_row

        row = None if self.kind == "cpu" else device_row(self.name)
        return DEVICES[row].flops.get(dtype) if row else None

    def _module(self) -> Any:
        return None if self.kind == "cpu" else torch.get_device_module(self.kind)
