"""Rows to the ranks that hold their experts and back: uneven all-to-alls, whose gradients go the other way."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from partita.runtime.mesh import Group
from partita.runtime.traffic import sending_among, sent
from partita_kernels import Order
from partita_moe.packing import Packing

Tensor = torch.Tensor
PURPOSE = "expert_dispatch"  # in the communication log, named as in the plan


class Exchange:
    """Rows [n, C], `given` of them for each rank in order, under way for the rows that the others have for this one, `taken` from each.

    The exchange begins at once; what is computed before `arrived` is asked for runs beside it. So does, in backward, what was computed in
    between: gradients set out when those of the arrived rows are known, and are waited for when those of the sent ones are needed.
    packing: what rows and gradients travel as; None: as they are.
    """

    def __init__(self, x: Tensor, given: list[int], taken: list[int], group: Group, packing: Packing | None = None) -> None:
        self._given, self._taken, self._group, self._packing = given, taken, group, packing
        self._work: Any = None
        self.rows: list[Tensor] = []  # gradients on their way back
        self._out: list[Tensor] = [_Depart.apply(x, self)]

    def arrived(self) -> Tensor:
        """The rows of the others [m, C], in the order of ranks. To be called once."""
        # Kept here, the rows would keep the graph, and the graph this object: memory that nobody can find.
        return _Arrive.apply(self._out.pop(), self)

    def start(self, x: Tensor, back: bool = False) -> Tensor:
        """Memory that the rows will be in once `wait` has returned."""
        given, taken = (self._taken, self._given) if back else (self._given, self._taken)
        out = x.new_empty(sum(taken), *x.shape[1:])
        source, into = x.contiguous(), out
        if self._packing is not None:
            source = self._packing.pack(source)
            into = source.new_empty(sum(taken), self._packing.width(x.shape[1]))
        self._held = source, into, out  # alive until the rows are there
        work = dist.all_to_all_single(into, source, taken, given, group=self._group.process_group, async_op=True)
        leaving = len(source) - given[self._group.rank]
        self._work = sent(PURPOSE, leaving * (source.nbytes // (len(source) or 1)), work, source)
        return out

    def wait(self) -> None:
        """Until the rows of `start` are there."""
        self._work.wait()
        _, into, out = self._held
        if self._packing is not None:
            self._packing.unpack(into, out)
        del self._work, self._held


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: Exchange) -> Tensor:
        ctx.way = way
        return way.start(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.way.wait()
        return ctx.way.rows.pop(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, way: Exchange) -> Tensor:
        ctx.way = way
        way.wait()
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.way.rows.append(ctx.way.start(grads[0], back=True))
        return grads[0], None  # of the right shape for autograd, and nobody looks at it


def exchange_counts(counts: Tensor, group: Group) -> Tensor:
    """counts int64 [E]: rows for each expert. Returns [ranks, E / ranks]: rows that each rank has for each expert of this one."""
    out = counts.new_empty(counts.shape)
    with sending_among(group, counts, purpose=PURPOSE):
        dist.all_to_all_single(out, counts, group=group.process_group)
    return out.view(group.size, -1)


def by_expert(received: Tensor) -> Order:
    """How rows that lie by (rank, expert) lie by (expert, rank). received: int64 [ranks, experts], rows of each."""
    flat = received.reshape(-1)
    begins = flat.cumsum(0) - flat
    order = begins.view_as(received).t().reshape(-1)
    sizes = received.t().reshape(-1)
    ends = sizes.cumsum(0)
    n = int(ends[-1]) if len(ends) else 0
    shift = (order - (ends - sizes)).repeat_interleave(sizes, output_size=n)
    every = torch.arange(n, device=received.device)
    slots = every + shift
    return Order(slots, torch.empty_like(slots).scatter_(0, slots, every).unsqueeze(1), received.sum(0))
