"""Feed-forward layers of many experts in stacked weights, and the products of tokens that are sorted by expert."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from partita.models.layers import swiglu

Tensor = torch.Tensor
ALIGNMENT = 16  # bytes, of what torch's grouped product reads
ONE_CALL = (torch.float32, torch.bfloat16)


class GroupedProduct(torch.autograd.Function):
    """Rows of x [n, K], sorted by expert with `sizes` rows each, times that expert's weight of [E, K, N] -> [n, N].

    An expert without rows has a gradient of zeros. Nothing is padded, and weights are read where they lie.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        return _product(x, weight, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0].contiguous()
        x, weight = ctx.saved_tensors
        dx = _product(grad, weight.transpose(1, 2), ctx.sizes) if ctx.needs_input_grad[0] else None
        dw = _outer(x, grad, weight, ctx.sizes) if ctx.needs_input_grad[1] else None
        return dx, dw, None


def _product(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    """As `GroupedProduct`, without gradient: one call of torch where it has one for such tensors, else one for each expert."""
    if _one_call(x, weight):
        return F.grouped_mm(x, weight, offs=_ends(sizes, x))
    y = x.new_empty(x.shape[0], weight.shape[2])
    for rows, matrix, out in zip(x.split(sizes), weight.unbind(), y.split(sizes), strict=True):
        if len(rows):
            torch.mm(rows, matrix, out=out)
    return y


def _outer(x: Tensor, grad: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    """x.T @ grad of each expert, laid out like its weight; of no rows: zeros."""
    if _one_call(x, weight):
        if weight.stride(1) == 1:
            return F.grouped_mm(grad.t(), x, offs=_ends(sizes, x)).transpose(1, 2)
        return F.grouped_mm(x.t(), grad, offs=_ends(sizes, x))
    dw = torch.empty_like(weight)
    for rows, g, out in zip(x.t().split(sizes, 1), grad.split(sizes), dw.unbind(), strict=True):
        torch.mm(rows, g, out=out)
    return dw


def _ends(sizes: list[int], x: Tensor) -> Tensor:
    return torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=x.device)


def _one_call(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped product takes them: some rows, which begin at multiples of 16 bytes, and no float64."""
    if not len(x) or x.device.type != "cpu" or x.dtype not in ONE_CALL:
        return False
    aligned = all(n * x.element_size() % ALIGNMENT == 0 for n in weight.shape[1:])
    return aligned and x.data_ptr() % ALIGNMENT == 0 and weight.data_ptr() % ALIGNMENT == 0


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
