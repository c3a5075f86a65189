"""Collectives that autograd knows, over groups that are passed in. A group of one changes nothing.

copy      forward the same on every rank            backward sum
reduce    forward sum                               backward the same on every rank
gather    forward all parts of a dimension          backward the own part, or the own part of the sum
scatter   forward the own part of a dimension       backward all parts
reduce_scatter   forward the own part of the sum    backward all parts
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from partita.runtime.mesh import Group
from partita.runtime.traffic import sending_among, sent_among

Tensor = torch.Tensor
# torch 2.13 renamed them; both are flat
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


# ------------------------------------------------------------------ plain collectives


def all_reduce(x: Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Sum (or `op`) of x over the group, in a new tensor."""
    out = x.contiguous().clone()
    with sending_among(group, out, 2):
        dist.all_reduce(out, op, group=group.process_group)
    return out


class Gathering:
    """Under way: the parts of all ranks, one after the other along `dim`, in rank order."""

    def __init__(self, x: Tensor, group: Group, dim: int) -> None:
        self._dim = dim % x.ndim
        x = x.detach().contiguous()
        self._parts = x.new_empty((group.size, *x.shape))
        work = _all_gather(self._parts.view(-1), x.view(-1), group=group.process_group, async_op=True)
        self._work = sent_among(group, self._parts, work)

    def wait(self) -> Tensor:
        """The whole tensor."""
        self._work.wait()
        return self._parts.movedim(0, self._dim).flatten(self._dim, self._dim + 1)


class Scattering:
    """Under way: this rank's part along `dim` of the sum of x over the group.

    An all-to-all and a local sum in float32: gloo's own reduce-scatter moves as much as an all-reduce.
    """

    def __init__(self, x: Tensor, group: Group, dim: int) -> None:
        send = x.unflatten(dim, (group.size, -1)).movedim(dim % x.ndim, 0).contiguous()
        self._native = send.device.type != "cpu"
        self._parts = torch.empty_like(send[0] if self._native else send)
        if self._native:
            work = _reduce_scatter(self._parts.view(-1), send.view(-1), group=group.process_group, async_op=True)
        else:
            work = dist.all_to_all_single(self._parts, send, group=group.process_group, async_op=True)
        self._work = sent_among(group, send, work)
        self._send = send  # alive until it has been sent

    def wait(self) -> Tensor:
        """The part."""
        self._work.wait()
        return (
            self._parts
            if self._native
            else self._parts.sum(0, dtype=torch.promote_types(self._parts.dtype, torch.float32)).to(self._parts.dtype)
        )


def part(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's part of a dimension that the group's size divides."""
    size = x.shape[dim] // group.size
    return x.narrow(dim, group.rank * size, size)


# ------------------------------------------------------------------ for autograd


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_reduce(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, summed: bool) -> Tensor:
        ctx.group, ctx.dim, ctx.summed = group, dim, summed
        return Gathering(x, group, dim).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        own = Scattering(grad, ctx.group, ctx.dim).wait() if ctx.summed else part(grad, ctx.group, ctx.dim).contiguous()
        return own, None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return part(x, group, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Gathering(grad, ctx.group, ctx.dim).wait(), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return Scattering(x, group, dim).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Gathering(grad, ctx.group, ctx.dim).wait(), None, None


def copy(x: Tensor, group: Group) -> Tensor:
    """x, whose gradient is the sum of what the ranks compute."""
    return x if group.size == 1 else _Copy.apply(x, group)


def reduce(x: Tensor, group: Group) -> Tensor:
    """Sum of x; every rank goes on alike with it."""
    return x if group.size == 1 else _Reduce.apply(x, group)


def gather(x: Tensor, group: Group, dim: int, *, summed: bool) -> Tensor:
    """All parts along `dim`. summed: ranks go on differently with them, so that the gradient is the sum of theirs."""
    return x if group.size == 1 else _Gather.apply(x, group, dim, summed)


def scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """The own part along `dim` of a tensor that every rank has."""
    return x if group.size == 1 else _Scatter.apply(x, group, dim)


def reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """The own part along `dim` of the sum of x."""
    return x if group.size == 1 else _ReduceScatter.apply(x, group, dim)


# ------------------------------------------------------------------ uneven parts


class _GatherUneven(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
        ctx.first, ctx.size = sum(sizes[: group.rank]), x.shape[-1]
        padded = x if x.shape[-1] == max(sizes) else torch.nn.functional.pad(x, (0, max(sizes) - x.shape[-1]))
        whole = Gathering(padded, group, -1).wait()
        if len(set(sizes)) == 1:
            return whole
        return torch.cat([p[..., :n] for p, n in zip(whole.chunk(len(sizes), -1), sizes, strict=True)], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.narrow(-1, ctx.first, ctx.size).contiguous(), None, None


def gather_last(x: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
    """All parts along the last dimension, of `sizes` by rank; every rank goes on alike with them."""
    return x if group.size == 1 else _GatherUneven.apply(x, group, sizes)
