"""Collectives of the state engine, chosen by backend. All are asynchronous, sum, and need no copy of their input.

Every implementation has `reduce_scatter`, `all_reduce` and `all_gather`; each returns an object with `wait()`. A group of one costs
nothing. A bucket works with what `for_bucket` gives it, which may compress and hold state of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from partita.plan.plan import Plan
from partita.runtime.mesh import Group, Mesh
from partita.runtime.transport import Chain, Transport, Work
from partita.state.slices import Apart, StateSlice

ReadState = Callable[[str], torch.Tensor]  # name of an optimizer state -> this rank's shard of it, after the last update
GRADIENTS, WEIGHTS = "gradient_reduce", "parameter_gather"  # purposes, named as in the plan


@dataclass(frozen=True)
class CollectiveContext:
    """What slot `collective` is built from: a function (CollectiveContext) -> Collectives."""

    mesh: Mesh
    plan: Plan
    transport: Transport


class Collectives(Protocol):
    """Slot `collective`."""

    def for_bucket(self, bucket: Any, state: Any, groups: Any, read: ReadState) -> Collectives:
        """For the buffers of one bucket (`BucketLayout`, `StateLayout`, `Groups`); all ranks ask in the same order."""

    def begin_step(self, update: int, scale: float) -> None:
        """Before the first micro-batch of the update with that number, from 1. scale: factor on the gradients of the one before."""

    def slices(self) -> list[StateSlice]:
        """State of its own that a checkpoint keeps, this rank's part."""

    def apart(self) -> Apart:
        """Whether the outermost copies of the bucket's states go their own ways, so that a checkpoint needs all of them."""

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


def nested_all_gather(collectives: Collectives, buffer: torch.Tensor, levels: Sequence[Group]) -> Work:
    """Fill `buffer` in place. It is cut over the first group, each part over the next, and so on; this rank's innermost part is there."""
    if len(levels) < 2:
        return collectives.all_gather(buffer, levels[0]) if levels else Done()
    parts = [buffer]
    for level in levels[:-1]:
        parts.append(parts[-1].view(level.size, -1)[level.rank])
    pairs = list(zip(parts, levels, strict=True))[::-1]
    return Chain([lambda part=part, level=level: collectives.all_gather(part, level) for part, level in pairs])  # type: ignore[misc]


def nested_reduce_scatter(
    collectives: Collectives,
    output: torch.Tensor,
    source: torch.Tensor,
    levels: Sequence[Group],
    wire: torch.dtype,
    accumulate: bool,
) -> Work:
    """Sum `source` over all groups; this rank's innermost part (see `nested_all_gather`) goes into `output`.

    Sums between levels have the dtype of `output`; what is sent has `wire` where that is narrower.
    """
    sums = [source]
    for level in levels[:-1]:
        sums.append(output.new_empty(sums[-1].numel() // level.size))
    sums.append(output)

    def hop(i: int) -> Work:
        send = sums[i] if wire.itemsize >= sums[i].dtype.itemsize else sums[i].to(wire)
        return collectives.reduce_scatter(sums[i + 1], send, levels[i], accumulate=accumulate and i + 1 == len(levels))

    return hop(0) if len(levels) == 1 else Chain([lambda i=i: hop(i) for i in range(len(levels))])  # type: ignore[misc]


class GlooCollectives:
    """For gloo on CPUs.

    gloo's own reduce_scatter moves as much as an all-reduce and its all_gather stages copies; messages from rank to rank with a local sum,
    and one in-place broadcast from each owner, take a fraction of their time. The sum is made in rank order and in float32 at least, so it
    is the same on every placement.
    """

    def __init__(self, transport: Transport | None = None) -> None:
        self.transport = transport or Transport()

    def for_bucket(self, bucket: Any, state: Any, groups: Any, read: ReadState) -> Collectives:
        """Itself: it holds nothing."""
        return self

    def begin_step(self, update: int, scale: float) -> None:
        """Nothing to do."""

    def slices(self) -> list[StateSlice]:
        """None."""
        return []

    def apart(self) -> Apart:
        """All ranks sum all gradients: copies are equal."""
        return Apart()

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, group: Group, *, accumulate: bool) -> Work:
        """See `Collectives`."""
        if group.size == 1:
            _sum_into(output, [source], accumulate)
            return Done()
        work, parts = self._parts(source, group)
        return Then([work], lambda: _sum_into(output, parts, accumulate))

    def _parts(self, source: torch.Tensor, group: Group) -> tuple[Work, Sequence[torch.Tensor]]:
        """Every rank's term of this rank's part of `source`, in rank order, when the work is done."""
        sent = source.view(group.size, -1).unbind()
        received = [source.new_empty(sent[0].numel()) if i != group.rank else own for i, own in enumerate(sent)]
        return self.transport.swap(received, sent, group, GRADIENTS), received

    def all_reduce(self, buffer: torch.Tensor, group: Group, wire: torch.dtype | None = None) -> Work:
        """See `Collectives`."""
        if group.size == 1:
            return Done()
        if wire is not None and wire.itemsize < buffer.dtype.itemsize:
            return _narrow_all_reduce(self.transport, buffer, group, wire)
        return self.transport.all_reduce(buffer, group, GRADIENTS)

    def all_gather(self, buffer: torch.Tensor, group: Group) -> Work:
        """See `Collectives`."""
        if group.size == 1:
            return Done()
        return self.transport.share(buffer.view(group.size, -1).unbind(), group, WEIGHTS)


class NativeCollectives(GlooCollectives):
    """For backends whose own algorithms are good (NCCL, RCCL, XCCL).

    They sum in the dtype of the message: a message narrower than the sum is exchanged and summed here, as on gloo.
    """

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, group: Group, *, accumulate: bool) -> Work:
        """See `Collectives`."""
        if group.size == 1 or source.dtype.itemsize < output.dtype.itemsize:
            return super().reduce_scatter(output, source, group, accumulate=accumulate)
        if not accumulate and output.dtype == source.dtype:
            return self.transport.reduce_scatter(output, source, group, GRADIENTS)
        part = source.new_empty(output.numel())
        work = self.transport.reduce_scatter(part, source, group, GRADIENTS)
        return Then([work], lambda: _sum_into(output, [part], accumulate))

    def _parts(self, source: torch.Tensor, group: Group) -> tuple[Work, Sequence[torch.Tensor]]:
        """See `GlooCollectives`."""
        received = torch.empty_like(source)
        work = self.transport.all_to_all(received, source, group, GRADIENTS)
        return work, received.view(group.size, -1).unbind()

    def all_gather(self, buffer: torch.Tensor, group: Group) -> Work:
        """See `Collectives`."""
        if group.size == 1:
            return Done()
        part = buffer.view(group.size, -1)[group.rank]
        return self.transport.all_gather(buffer, part, group, WEIGHTS)


def _narrow_all_reduce(transport: Transport, buffer: torch.Tensor, group: Group, wire: torch.dtype) -> Work:
    """All-reduce whose messages are `wire`: each rank sums one part in the buffer's dtype, rounds it once, and shares it."""
    part = -(-buffer.numel() // group.size)
    send = buffer.new_zeros(part * group.size, dtype=wire)
    send[: buffer.numel()].copy_(buffer)
    received = torch.empty_like(send)
    work = transport.all_to_all(received, send, group, GRADIENTS)

    def share() -> None:
        total = buffer.new_empty(part)
        _sum_into(total, received.view(group.size, -1).unbind(), accumulate=False)
        send.view(group.size, -1)[group.rank].copy_(total)
        transport.share(send.view(group.size, -1).unbind(), group, GRADIENTS).wait()
        buffer.copy_(send[: buffer.numel()])

    return Then([work], share)


def _sum_into(output: torch.Tensor, parts: Sequence[torch.Tensor], accumulate: bool) -> None:
    """output (+)= sum of `parts`, in the wider of the dtypes and in their order."""
    if accumulate:
        for part in parts:
            output.add_(part)
    elif len(parts) == 2 and parts[0].dtype == output.dtype:
        torch.add(parts[0], parts[1], out=output)
    else:
        output.copy_(parts[0])
        for part in parts[1:]:
            output.add_(part)


def collectives_for(device: torch.device, transport: Transport | None = None) -> GlooCollectives:
    """The built-in implementation for a device."""
    return GlooCollectives(transport) if device.type == "cpu" else NativeCollectives(transport)


def make_collectives(context: CollectiveContext) -> Collectives:
    """Slot `collective`, name `default`."""
    return collectives_for(context.mesh.device, context.transport)
