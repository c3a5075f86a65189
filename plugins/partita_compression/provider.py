"""Slot `collective`, name `compressed`: the built-in collectives with the wire formats and the algorithm that the plan asks for."""

from __future__ import annotations

from typing import Any

import torch

from partita.plan.plan import AXES
from partita.runtime.collectives import GRADIENTS, CollectiveContext, Collectives, Work, collectives_for
from partita.runtime.mesh import Group
from partita.state.slices import StateSlice
from partita_compression.exchange import Exchange, gather
from partita_compression.formats import FORMATS
from partita_compression.hierarchy import Hops, Levels
from partita_compression.settings import EXTENSION, Settings


class CompressedCollectives:
    """What has no bucket (norms, whole tensors) goes as always; see `BucketCollectives` for the rest."""

    def __init__(self, context: CollectiveContext) -> None:
        self.context, self.plan = context, context.plan
        self.settings: Settings = context.plan.extensions[EXTENSION]
        self.base = collectives_for(context.mesh.device, context.transport)
        self.levels = Levels(context.mesh, self.settings.node_ranks)
        self.update = 0
        self.reduce_scatter, self.all_reduce, self.all_gather = (
            self.base.reduce_scatter,
            self.base.all_reduce,
            self.base.all_gather,
        )

    def for_bucket(self, bucket: Any, state: Any, groups: Any) -> Collectives:
        """Holds the errors of the bucket's gradients."""
        return BucketCollectives(self, bucket, groups)

    def begin_step(self, update: int) -> None:
        """Which update comes: warm-up ends by count."""
        self.update = update

    def slices(self) -> list[StateSlice]:
        """Buckets have them."""
        return []

    @property
    def warm(self) -> bool:
        """Whether gradients of this update are compressed."""
        return self.update > self.settings.warmup


class BucketCollectives:
    """Gradients and weights of one bucket on the wire."""

    def __init__(self, owner: CompressedCollectives, bucket: Any, groups: Any) -> None:
        self.owner, self.bucket = owner, bucket
        plan, context, settings = owner.plan, owner.context, owner.settings
        self._reduce = FORMATS.get(plan.collectives.gradient_reduce.format)
        self._gather = FORMATS.get(plan.collectives.parameter_gather.format)
        self._hierarchical = plan.collectives.gradient_reduce.algorithm == "hierarchical"
        self._exchanges: dict[tuple[int, ...], Exchange] = {}
        transport, device = context.transport, context.mesh.device
        sizes = ((groups.shard, bucket.padded, False), (groups.replicas, bucket.shard, True))
        for group, elements, shared in sizes:
            hops = self._hops(group)
            outer = hops.outer if hops else group
            if (
                self._reduce is None
                or not bucket.trainable
                or outer.size == 1
                or (settings.slow_only and not owner.levels.slow(outer))
            ):
                continue
            within = hops.inner.size if hops else 1
            self._exchanges[group.ranks] = Exchange(
                self._reduce, outer, -(-elements // within), transport, device, feedback=settings.feedback, shared=shared
            )

    def for_bucket(self, bucket: Any, state: Any, groups: Any) -> Collectives:
        """Of its own bucket, itself."""
        return self

    def begin_step(self, update: int) -> None:
        """The owner is told."""

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, group: Group, *, accumulate: bool) -> Work:
        """See `Collectives`."""
        base, exchange = self.owner.base, self._exchange(group)
        hops = self._hops(group)
        if hops is not None:
            return hops.reduce_scatter(base, exchange, output, source, accumulate=accumulate)
        if exchange is None:
            return base.reduce_scatter(output, source, group, accumulate=accumulate)
        return exchange.reduce_scatter(output, source, accumulate=accumulate)

    def all_reduce(self, buffer: torch.Tensor, group: Group, wire: torch.dtype | None = None) -> Work:
        """See `Collectives`."""
        base, exchange = self.owner.base, self._exchange(group)
        hops = self._hops(group)
        if hops is not None:
            return hops.all_reduce(base, exchange, buffer)
        return base.all_reduce(buffer, group, wire) if exchange is None else exchange.all_reduce(buffer)

    def all_gather(self, buffer: torch.Tensor, group: Group) -> Work:
        """See `Collectives`."""
        if self._gather is None or group.size == 1:
            return self.owner.base.all_gather(buffer, group)
        hops = self._hops(group)
        if hops is not None:
            return hops.all_gather(self.owner.base, self._gather, buffer)
        if self.owner.settings.slow_only and not self.owner.levels.slow(group):
            return self.owner.base.all_gather(buffer, group)
        return gather(self._gather, self.owner.context.transport, buffer, group)

    def _hops(self, group: Group) -> Hops | None:
        return self.owner.levels.split(group) if self._hierarchical else None

    def _exchange(self, group: Group) -> Exchange | None:
        return self._exchanges.get(group.ranks) if self.owner.warm else None

    # ------------------------------------------------------------------ state

    def slices(self) -> list[StateSlice]:
        """The errors, parameter by parameter: [ranks, *shape], each rank's in its own row."""
        mesh = self.owner.context.mesh
        senders = mesh.group(tuple(a for a in AXES if a != "pipeline"))
        out: list[StateSlice] = []
        for number, exchange in enumerate(self._exchanges.values()):
            for name, tensor in exchange.errors.items():
                out += self._rows(f"{GRADIENTS}.{number}.{name}", tensor, senders)
        return out

    def _rows(self, kind: str, tensor: torch.Tensor, senders: Group) -> list[StateSlice]:
        """An error buffer belongs to no whole parameter where it covers a part of the bucket: it is saved as it lies."""
        key = f"wire.{self.bucket.unit}.{self.bucket.segments[0].name}.{kind}"
        n = tensor.numel()
        return [StateSlice(key, (senders.size, n), tensor.dtype, senders.rank * n, (senders.rank + 1) * n, tensor)]


def make_compressed(context: CollectiveContext) -> Collectives:
    """Slot `collective`, name `compressed`."""
    return CompressedCollectives(context)
