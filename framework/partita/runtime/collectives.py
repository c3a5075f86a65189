"""Collectives of the state engine, chosen by backend. All are asynchronous, sum, and need no copy of their input.

Every implementation has `reduce_scatter`, `all_reduce` and `all_gather`; each returns an object with `wait()`. A group of one costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from partita.runtime.mesh import Group


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Blocks (or, on an accelerator, makes the stream wait) until the result is there."""


class Collectives(Protocol):
    """Slot `collective`."""

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, group: Group, *, accumulate: bool) -> Work:
        """Sum `source` [size * n] over the group; part `group.rank` goes into `output` [n] (added if `accumulate`)."""

    def all_reduce(self, buffer: torch.Tensor, group: Group, wire: torch.dtype | None = None) -> Work:
        """Sum `buffer` over the group, in place. A `wire` dtype narrower than the buffer's is sent, and summed in the buffer's."""

    def all_gather(self, buffer: torch.Tensor, group: Group) -> Work:
        """Fill `buffer` [size * n] in place; the caller has written part `group.rank`."""


class Done:
    """Work of a group of one."""

    def wait(self) -> None:
        """Nothing to wait for."""


class Then:
    """Work that runs `finish` once, after the works it waits for."""

    def __init__(self, works: list[Any], finish: Callable[[], None] | None = None) -> None:
        self._works, self._finish = works, finish

    def wait(self) -> None:
        """Wait for all, then finish."""
        for work in self._works:
            work.wait()
        self._works = []
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()


class GlooCollectives:
    """For gloo on CPUs.

    gloo's own reduce_scatter moves as much as an all-reduce and its all_gather stages copies; an all-to-all with a local sum, and one
    in-place broadcast from each owner, take a fraction of their time. The sum is made in rank order and in float32 at least, so it
    is the same on every placement.
    """

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, group: Group, *, accumulate: bool) -> Work:
        """See `Collectives`."""
        if group.size == 1:
            _sum_into(output, source.view(1, -1), accumulate)
            return Done()
        received = torch.empty_like(source)
        work = dist.all_to_all_single(received, source, group=group.process_group, async_op=True)
        return Then([work], lambda: _sum_into(output, received.view(group.size, -1), accumulate))

    def all_reduce(self, buffer: torch.Tensor, group: Group, wire: torch.dtype | None = None) -> Work:
        """See `Collectives`."""
        if group.size == 1:
            return Done()
        if wire is not None and wire.itemsize < buffer.dtype.itemsize:
            return _narrow_all_reduce(self, buffer, group, wire)
        return dist.all_reduce(buffer, group=group.process_group, async_op=True)

    def all_gather(self, buffer: torch.Tensor, group: Group) -> Work:
        """See `Collectives`."""
        if group.size == 1:
            return Done()
        parts = buffer.view(group.size, -1)
        return Then([dist.broadcast(parts[i], r, group=group.process_group, async_op=True) for i, r in enumerate(group.ranks)])


class NativeCollectives(GlooCollectives):
    """For backends whose own algorithms are good (NCCL, RCCL, XCCL).

    They sum in the dtype of the message: a message narrower than the sum is exchanged and summed here, as on gloo.
    """

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, group: Group, *, accumulate: bool) -> Work:
        """See `Collectives`."""
        if group.size == 1 or source.dtype.itemsize < output.dtype.itemsize:
            return super().reduce_scatter(output, source, group, accumulate=accumulate)
        if not accumulate and output.dtype == source.dtype:
            return dist.reduce_scatter_tensor(output, source, group=group.process_group, async_op=True)
        part = source.new_empty(output.numel())
        work = dist.reduce_scatter_tensor(part, source, group=group.process_group, async_op=True)
        return Then([work], lambda: _sum_into(output, part.view(1, -1), accumulate))

    def all_gather(self, buffer: torch.Tensor, group: Group) -> Work:
        """See `Collectives`."""
        if group.size == 1:
            return Done()
        part = buffer.view(group.size, -1)[group.rank]
        return dist.all_gather_into_tensor(buffer, part, group=group.process_group, async_op=True)


def _narrow_all_reduce(collectives: Collectives, buffer: torch.Tensor, group: Group, wire: torch.dtype) -> Work:
    """All-reduce whose messages are `wire`: each rank sums one part in the buffer's dtype, rounds it once, and shares it."""
    part = -(-buffer.numel() // group.size)
    send = buffer.new_zeros(part * group.size, dtype=wire)
    send[: buffer.numel()].copy_(buffer)
    received = torch.empty_like(send)
    work = dist.all_to_all_single(received, send, group=group.process_group, async_op=True)

    def share() -> None:
        total = buffer.new_empty(part)
        _sum_into(total, received.view(group.size, -1), accumulate=False)
        send.view(group.size, -1)[group.rank].copy_(total)
        collectives.all_gather(send, group).wait()
        buffer.copy_(send[: buffer.numel()])

    return Then([work], share)


def _sum_into(output: torch.Tensor, parts: torch.Tensor, accumulate: bool) -> None:
    """output (+)= sum over the rows of `parts`, in the wider of the dtypes and in row order."""
    if accumulate:
        for part in parts:
            output.add_(part)
    elif parts.shape[0] == 2 and parts.dtype == output.dtype:
        torch.add(parts[0], parts[1], out=output)
    else:
        output.copy_(parts[0])
        for part in parts[1:]:
            output.add_(part)


def make_collectives(device: torch.device) -> Collectives:
    """The built-in implementation for a device."""
    return GlooCollectives() if device.type == "cpu" else NativeCollectives()
