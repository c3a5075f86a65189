"""Rows to the ranks that hold their experts and back: uneven all-to-alls, whose gradients go the other way."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from partita.runtime.mesh import Group

Tensor = torch.Tensor


class Exchange(torch.autograd.Function):
    """Rows [n, C], `sent` of them for each rank in order, for the rows that the others have for this one, `received` from each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
        ctx.splits, ctx.group = (sent, received), group
        return _exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        sent, received = ctx.splits
        return _exchange(grads[0], received, sent, ctx.group), None, None, None


def _exchange(x: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group.process_group)
    return out


def exchange(x: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """See `Exchange`."""
    return Exchange.apply(x, sent, received, group)


def exchange_counts(counts: Tensor, group: Group) -> Tensor:
    """counts int64 [E]: rows for each expert. Returns [ranks, E / ranks]: rows that each rank has for each expert of this one."""
    out = counts.new_empty(counts.shape)
    dist.all_to_all_single(out, counts, group=group.process_group)
    return out.view(group.size, -1)


def by_expert(received: Tensor) -> Tensor:
    """Where rows that lie by (rank, expert) go so that they lie by (expert, rank): int64 indices [n] to gather with.

    received: int64 [ranks, experts], rows of each.
    """
    flat = received.reshape(-1)
    begins = flat.cumsum(0) - flat
    order = begins.view_as(received).t().reshape(-1)
    sizes = received.t().reshape(-1)
    ends = sizes.cumsum(0)
    n = int(ends[-1]) if len(ends) else 0
    shift = (order - (ends - sizes)).repeat_interleave(sizes, output_size=n)
    return torch.arange(n, device=received.device) + shift
