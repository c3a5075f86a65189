"""Feed-forward layers of many experts in stacked weights, for tokens that are sorted by expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from partita.models.layers import swiglu_halves
from partita_kernels import grouped_matmul

Tensor = torch.Tensor


def spread(bias: Tensor, sizes: Tensor, rows: int) -> Tensor:
    """Each expert's bias [E, N] for its rows -> [n, N]."""
    if bias.is_meta:
        return bias[:1].expand(rows, -1)
    return bias.repeat_interleave(sizes, dim=0, output_size=rows)


class Experts(nn.Module):
    """`count` feed-forward layers of the same form; experts lie along dimension 0 of every parameter.

    partita_inner: where the inner channels are, by which the tensor axis may cut them (partita.plan.styles).
    """

    partita_inner: ClassVar[Mapping[str, tuple[int, int]]]

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.adds_whole = True  # whether what isn't cut belongs to this rank's terms of the answers
        self.partita_experts: frozenset[str] = frozenset()

    def declare(self) -> None:
        """Say that all parameters are stacked by expert."""
        self.partita_experts = frozenset(self._parameters)


class GeluExperts(Experts):
    """down(gelu(up(x))) with biases."""

    partita_inner: ClassVar = {"up": (2, 1), "up_bias": (1, 1), "down": (1, 1)}

    def __init__(self, count: int, width: int, inner: int, approximate: str) -> None:
        super().__init__(count)
        self.approximate = approximate
        self.up = nn.Parameter(torch.empty(count, width, inner))
        self.up_bias = nn.Parameter(torch.empty(count, inner))
        self.down = nn.Parameter(torch.empty(count, inner, width))
        self.down_bias = nn.Parameter(torch.empty(count, width))
        self.declare()

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        """x [n, C] sorted by expert, int64 sizes [E] -> [n, C]."""
        y = F.gelu(grouped_matmul(x, self.up, sizes) + spread(self.up_bias, sizes, len(x)), approximate=self.approximate)
        bias = self.down_bias if self.adds_whole else self.down_bias * 0.0  # with a gradient, of zeros
        return grouped_matmul(y, self.down, sizes) + spread(bias, sizes, len(x))


class SwiGluExperts(Experts):
    """down(silu(gate(x)) * up(x))."""

    partita_inner: ClassVar = {"gate_up": (2, 2), "down": (1, 1)}

    def __init__(self, count: int, width: int, inner: int) -> None:
        super().__init__(count)
        self.gate_up = nn.Parameter(torch.empty(count, width, 2 * inner))
        self.down = nn.Parameter(torch.empty(count, inner, width))
        self.declare()

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        """x [n, C] sorted by expert, int64 sizes [E] -> [n, C]."""
        return grouped_matmul(swiglu_halves(grouped_matmul(x, self.gate_up, sizes)), self.down, sizes)
