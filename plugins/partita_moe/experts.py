"""Feed-forward layers of many experts in stacked weights, and the products of tokens that are sorted by expert."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from partita.models.layers import swiglu

Tensor = torch.Tensor


class GroupedProduct(torch.autograd.Function):
    """Rows of x [n, K], sorted by expert with `sizes` rows each, times that expert's weight of [E, K, N] -> [n, N].

    An expert without rows has a gradient of zeros. Nothing is padded, and weights are read where they lie.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        y = x.new_empty(x.shape[0], weight.shape[2])
        for i, (rows, out) in enumerate(zip(x.split(sizes), y.split(sizes), strict=True)):
            if len(rows):
                torch.mm(rows, weight[i], out=out)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dw = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        begin = 0
        for i, n in enumerate(ctx.sizes):
            rows, g = x[begin : begin + n], grad[begin : begin + n]
            if dx is not None and n:
                torch.mm(g, weight[i].t(), out=dx[begin : begin + n])
            if dw is not None:
                torch.mm(rows.t(), g, out=dw[i])  # of no rows: zeros
            begin += n
        return dx, dw, None


def grouped(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    """See `GroupedProduct`; on meta, shapes only."""
    if x.is_meta:
        return x @ weight[0]
    return GroupedProduct.apply(x, weight, sizes)


def spread(bias: Tensor, sizes: list[int], rows: int) -> Tensor:
    """Each expert's bias [E, N] for its rows -> [n, N]."""
    if bias.is_meta:
        return bias[:1].expand(rows, -1)
    return bias.repeat_interleave(torch.tensor(sizes, device=bias.device), dim=0, output_size=rows)


class Experts(nn.Module):
    """`count` feed-forward layers of the same form; experts lie along dimension 0 of every parameter."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.partita_experts: frozenset[str] = frozenset()

    def declare(self) -> None:
        """Say that all parameters are stacked by expert."""
        self.partita_experts = frozenset(self._parameters)


class GeluExperts(Experts):
    """down(gelu(up(x))) with biases."""

    def __init__(self, count: int, width: int, inner: int, approximate: str) -> None:
        super().__init__(count)
        self.approximate = approximate
        self.up = nn.Parameter(torch.empty(count, width, inner))
        self.up_bias = nn.Parameter(torch.empty(count, inner))
        self.down = nn.Parameter(torch.empty(count, inner, width))
        self.down_bias = nn.Parameter(torch.empty(count, width))
        self.declare()

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        """x [n, C] sorted by expert -> [n, C]."""
        y = F.gelu(grouped(x, self.up, sizes) + spread(self.up_bias, sizes, len(x)), approximate=self.approximate)
        return grouped(y, self.down, sizes) + spread(self.down_bias, sizes, len(x))


class SwiGluExperts(Experts):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, count: int, width: int, inner: int) -> None:
        super().__init__(count)
        self.gate_up = nn.Parameter(torch.empty(count, width, 2 * inner))
        self.down = nn.Parameter(torch.empty(count, inner, width))
        self.declare()

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        """x [n, C] sorted by expert -> [n, C]."""
        gate, up = grouped(x, self.gate_up, sizes).chunk(2, dim=-1)
        return grouped(swiglu(gate, up), self.down, sizes)
