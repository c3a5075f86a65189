"""Matrices that are cut over ranks (Shoeybi et al. 2019, section 3), with their communication behind the arithmetic of backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from partita.runtime.functional import Gathering, Scattering, reduce, reduce_scatter
from partita.runtime.mesh import Group
from partita.runtime.traffic import sent_among

Tensor = torch.Tensor


class _Column(torch.autograd.Function):
    """y = x W^T + b with the outputs of W on several ranks.

    The gradient of x, to which every rank adds a term, travels while that of W is computed. With `sequence` x is the rank's part of
    the tokens (dimension -2): it is gathered here and again in backward, so that only the part is kept (Korthikanti et al. 2022).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool) -> Tensor:
        ctx.group, ctx.sequence = group, sequence
        ctx.save_for_backward(x, weight)
        return F.linear(Gathering(x, group, -2).wait() if sequence else x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
        gathering = Gathering(x, ctx.group, -2) if ctx.sequence and needs_w else None
        dx: Tensor | None = None
        work: Any = None
        if needs_x:
            dx = grad @ weight
            if ctx.sequence:
                work = Scattering(dx, ctx.group, -2)
            else:
                work = dist.all_reduce(dx, group=ctx.group.process_group, async_op=True)
                work = sent_among(ctx.group, dx, work, 2)
        dw = db = None
        if needs_w:
            whole = gathering.wait() if gathering is not None else x
            dw = grad.reshape(-1, grad.shape[-1]).t() @ whole.reshape(-1, whole.shape[-1])
        if needs_b:
            db = grad.reshape(-1, grad.shape[-1]).sum(0)
        if work is not None:
            received = work.wait()
            dx = received if ctx.sequence else dx
        return dx, dw, db, None, None


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, *, sequence: bool) -> Tensor:
    """x [..., T, in] (the rank's T / size tokens with `sequence`), weight [out / size, in] -> [..., T, out / size]."""
    if group.size == 1:
        return F.linear(x, weight, bias)
    out: Tensor = _Column.apply(x, weight, bias, group, sequence)
    return out


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, *, sequence: bool) -> Tensor:
    """x [..., T, in / size], weight [out, in / size] -> [..., T, out], with `sequence` the rank's T / size tokens.

    The bias (whole) is added once, after the sum.
    """
    y = F.linear(x, weight)
    y = reduce_scatter(y, group, -2) if sequence else reduce(y, group)
    return y if bias is None else y + bias
