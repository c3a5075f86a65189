"""Layers that run a kernel of `partita_kernels` where that is wanted, and torch's own operations elsewhere. Both give the same numbers.

`choose` says for the whole process where kernels are wanted; a run calls it when its model is built.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import partita_kernels
from partita_kernels.dispatch import TRITON_DEVICES, has_triton

AUTO = "auto"
WHEN = (AUTO, "always", "never")

_when = "auto"


def choose(when: str) -> None:
    """auto: on accelerators, where torch would take several kernels; always; never. Raises ValueError for others."""
    global _when
    if when not in WHEN:
        raise ValueError(f"kernels.layers: {when!r} is none of {', '.join(WHEN)}")
    _when = when


def fused(x: torch.Tensor) -> bool:
    """Are kernels wanted for a tensor like x?"""
    return _when == "always" or (_when == "auto" and x.device.type in TRITON_DEVICES and has_triton())


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm with weight, over the last dimension."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., C] -> [..., C]."""
        return partita_kernels.layer_norm(x, self.weight, self.bias, self.eps) if fused(x) else super().forward(x)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm with weight and eps, over the last dimension."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., C] -> [..., C]."""
        return partita_kernels.rms_norm(x, self.weight, self.eps or 0.0) if fused(x) else super().forward(x)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, all [..., C]."""
    return partita_kernels.swiglu(gate, up) if fused(gate) else F.silu(gate) * up


def swiglu_halves(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of x [..., 2C] = (gate, up) -> [..., C]. By `auto` on every device: the kernel has half the passes over memory."""
    return partita_kernels.swiglu_halves(x) if _when != "never" else swiglu(*x.chunk(2, dim=-1))


def rotate(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """x [B, H, T, D] with channel i turned together with channel i + D/2; turn: cosines and sines [B or 1, 1, T, D/2]."""
    if fused(x):
        cos, sin = (t.squeeze(1).float() for t in turn)
        return partita_kernels.rope(x, *((t[0] for t in (cos, sin)) if cos.shape[0] == 1 else (cos, sin)))
    (a, b), (cos, sin) = x.chunk(2, dim=-1), turn
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
