"""One bucket at work: flat buffers of weights, gradients and optimizer states, and the two state machines over them.

Weights are `sharded` (only this rank's shard is current), `gathering` or `gathered`. Gradients are `filling`, `reducing` or `ready`.
Nothing here asks for a ZeRO stage: what is cut follows from the placement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

from partita.plan.plan import Placement
from partita.runtime.collectives import Collectives, Work
from partita.runtime.mesh import Group
from partita.state.layout import BucketLayout, StateLayout, dtype_of
from partita.state.slices import StateSlice
from partita_kernels import squared_norm


class Weights(Enum):
    """State of a bucket's weights on this rank."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


@dataclass(frozen=True)
class Groups:
    """Process groups of a bucket's states: `shard` along the axes that cut the optimizer (maybe none), `replicas` along all others
    over which its gradients are summed. copies: ranks of this stage that hold the same shard, this one the `copy`-th of them."""

    shard: Group
    replicas: Group
    copies: int = 1
    copy: int = 0


class BufferPool:
    """Reuses whole-bucket buffers: fresh memory costs page faults on every step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer with undefined contents."""
        free = self._free.get((numel, dtype))
        return free.pop() if free else torch.empty(numel, dtype=dtype, device=self._device)

    def give(self, buffer: torch.Tensor) -> None:
        """Hand a buffer back."""
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)


class Bucket:
    """Flat buffers of one `BucketLayout` on this rank."""

    def __init__(
        self,
        layout: BucketLayout,
        state: StateLayout,
        groups: Groups,
        collectives: Collectives,
        pool: BufferPool,
        device: torch.device,
        wire: torch.dtype,
    ) -> None:
        self.layout, self.groups, self._pool = layout, groups, pool
        self._collectives = collectives.for_bucket(layout, state, groups)
        self._placement: Placement = state.placement_of(layout)
        self.index = groups.shard.rank
        compute, master = dtype_of(state.precision.compute), dtype_of(state.precision.master)
        self._gradient_dtype, self._accumulator_dtype = state.gradient_dtype, dtype_of(state.precision.gradient)
        self._wire = wire  # of gradients on their way to be summed
        n = layout.shard
        self.full = torch.zeros(layout.padded, dtype=compute, device=device)
        self._bytes = self.full.untyped_storage().size()
        self.cut = bool(self._placement.parameters) and groups.shard.size > 1
        # The part of the weights that this rank's compute copy owns: in place where the whole bucket stays.
        self.own = torch.zeros(n, dtype=compute, device=device) if self.cut else self._mine(self.full)
        separate = layout.trainable and compute != master
        self.master = torch.zeros(n, dtype=master, device=device) if separate else self.own
        self.states = (
            {k: torch.zeros(n, dtype=dtype_of(d), device=device) for k, d in state.states.items()} if layout.trainable else {}
        )
        self.weights = Weights.GATHERED
        self._gathering: Work | None = None
        self.gradient: torch.Tensor | None = None
        self.reduced = self._make_reduced(n, device)
        self._reducing: Work | None = None
        self._filled = [False] * len(layout.segments)
        self._gaps = layout.gaps()
        self._accumulated = False  # `reduced` holds the sum of earlier micro-batches of this step
        self.parameters: list[nn.Parameter | None] = [None] * len(layout.segments)

    def _make_reduced(self, n: int, device: torch.device) -> torch.Tensor | None:
        if not self.layout.trainable:
            return None
        if self.groups.shard.size == 1:  # whole gradients are reduced in place
            self.gradient = torch.zeros(self.layout.padded, dtype=self._gradient_dtype, device=device)
            return self.gradient
        return torch.zeros(n, dtype=self._accumulator_dtype, device=device)

    def _mine(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[self.index * self.layout.shard : (self.index + 1) * self.layout.shard]

    # ------------------------------------------------------------------ weights

    def bind(self, parameters: list[nn.Parameter]) -> None:
        """Make each parameter a permanent view of the whole buffer."""
        self.parameters = list(parameters)
        for parameter, s in zip(parameters, self.layout.segments, strict=True):
            parameter.data = self.full[s.offset : s.offset + s.numel].view(s.shape)

    def write(self, segment: int, value: torch.Tensor) -> None:
        """Set one whole parameter (any float dtype) in the compute copy, and in this rank's master."""
        s = self.layout.segments[segment]
        flat = value.reshape(-1)
        self.full[s.offset : s.offset + s.numel].copy_(flat)
        base = self.index * self.layout.shard
        lo, hi = max(base, s.offset), min(base + self.layout.shard, s.offset + s.numel)
        if lo < hi:
            part = flat[lo - s.offset : hi - s.offset]
            self.master[lo - base : hi - base].copy_(part)
            self.own[lo - base : hi - base].copy_(part)

    def gather(self) -> None:
        """Start to make all weights current, if they are not."""
        if self.weights is not Weights.SHARDED:
            return
        if self.cut:
            self.full.untyped_storage().resize_(self._bytes)
            self._mine(self.full).copy_(self.own)
        self._gathering = self._collectives.all_gather(self.full, self.groups.shard)
        self.weights = Weights.GATHERING

    def wait_gathered(self) -> None:
        """Have all weights current."""
        self.gather()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        self.weights = Weights.GATHERED

    def free(self) -> None:
        """Give the whole buffer's memory back, where the placement cuts the weights."""
        if self.cut and self.weights is not Weights.SHARDED:
            self.wait_gathered()
            self.full.untyped_storage().resize_(0)
            self.weights = Weights.SHARDED

    def updated(self) -> None:
        """The optimizer has changed this rank's shard: other ranks' shards are stale."""
        if self.groups.shard.size > 1:
            if self.cut:
                self.free()
            self.weights = Weights.SHARDED

    # ------------------------------------------------------------------ gradients

    def collect(self, segment: int, gradient: torch.Tensor) -> None:
        """Put or add one parameter's gradient into the whole-bucket buffer."""
        s = self.layout.segments[segment]
        into = self._buffer()[s.offset : s.offset + s.numel]
        flat = gradient.reshape(-1)
        if self._filled[segment]:
            into.add_(flat)
        else:
            into.copy_(flat)
            self._filled[segment] = True

    def _buffer(self) -> torch.Tensor:
        if self.gradient is None:
            self.gradient = self._pool.take(self.layout.padded, self._gradient_dtype)
        return self.gradient

    def reduce(self) -> None:
        """Start the reduction of what has been collected; parameters without a gradient count as zero."""
        buffer = self._buffer()
        for filled, s in zip(self._filled, self.layout.segments, strict=True):
            if not filled:
                buffer[s.offset : s.offset + s.numel] = 0
        for lo, hi in self._gaps:
            buffer[lo:hi] = 0
        self._filled = [False] * len(self._filled)
        assert self.reduced is not None
        if self.groups.shard.size > 1:
            send = buffer if self._wire.itemsize >= buffer.dtype.itemsize else buffer.to(self._wire)
            self._reducing = self._collectives.reduce_scatter(self.reduced, send, self.groups.shard, accumulate=self._accumulated)
        else:
            self._reducing = self._collectives.all_reduce(buffer, self.groups.replicas, self._wire)

    def wait_reduced(self) -> None:
        """Finish the reduction over the shard group, if one is under way."""
        if self._reducing is None:
            return
        self._reducing.wait()
        self._reducing = None
        self._accumulated = True
        if self.groups.shard.size > 1:
            assert self.gradient is not None
            self._pool.give(self.gradient)
            self.gradient = None

    def reduce_replicas(self) -> Work:
        """Start the sum over the ranks that hold the same shard; once, after the last micro-batch."""
        assert self.reduced is not None
        return self._collectives.all_reduce(self.reduced, self.groups.replicas, self._wire)

    def square(self) -> torch.Tensor:
        """Squared norm of this rank's reduced gradients, 0-d. Taken bucket by bucket, so that it doesn't depend on which of them left."""
        assert self.reduced is not None
        return squared_norm([self.reduced])

    def begin_step(self) -> None:
        """Forget the gradients of the last step."""
        self._accumulated = False

    # ------------------------------------------------------------------ views

    def wire_slices(self) -> list[StateSlice]:
        """What the collectives of this bucket hold for themselves, such as errors of compression."""
        return self._collectives.slices()

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(hyper-parameter group, lo, hi) ranges of this rank's shard."""
        yield from self.layout.runs(self.index)
