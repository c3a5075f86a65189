"""The device of this rank, through torch.accelerator: CPU, CUDA, ROCm, XPU and MPS are one path."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """kind: torch's device type. index: of this rank's accelerator, 0 on a CPU."""

    kind: str
    index: int = 0

    @classmethod
    def current(cls) -> Device:
        """The accelerator that belongs to LOCAL_RANK, else the CPU. Makes it the current one."""
        if not torch.accelerator.is_available():
            return cls("cpu")
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
        torch.accelerator.set_device_index(index)
        accelerator = torch.accelerator.current_accelerator()
        return cls(accelerator.type if accelerator is not None else "cpu", index)

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

    def memory(self) -> int:
        """Bytes at the peak: of the accelerator's allocator, or resident memory of this process on a CPU."""
        if self.kind == "cpu":
            import resource

            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return int(torch.accelerator.max_memory_allocated(self.torch_device))

    def peak_flops(self, dtype: str) -> float | None:
        """Dense FLOP/s of this device in the table of known devices; None where it is not known."""
        if self.kind != "cuda":
            return None
        from partita.plan.devices import DEVICES

        name = torch.cuda.get_device_name(self.index).lower()
        for key, known in DEVICES.items():
            if key in name and dtype in ("bfloat16", "float16"):
                return float(known.flops)
        return None
