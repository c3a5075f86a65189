"""Slot `collective`, name `compressed`: the built-in collectives with the wire formats and the algorithm that the plan asks for."""

from __future__ import annotations

from typing import Any

import torch

from partita.errors import PartitaError
from partita.plan.plan import AXES, EXPERT_AXES, GRADIENT_AXES
from partita.runtime.collectives import CollectiveContext, Collectives, ReadState, collectives_for
from partita.state.slices import Apart, StateSlice
from partita_compression.bucket import BucketCollectives
from partita_compression.formats import Stochastic, gather_format, reduce_format
from partita_compression.hierarchy import Levels
from partita_compression.ledger import Finder
from partita_compression.settings import EXTENSION, Settings

SMOOTHING = 0.9  # of the average factor of clipping


class CompressedCollectives:
    """What has no bucket (norms, whole tensors) goes as always; see `BucketCollectives` for the rest."""

    def __init__(self, context: CollectiveContext) -> None:
        self.context, self.plan = context, context.plan
        self.settings: Settings = context.plan.extensions[EXTENSION]
        self.base = collectives_for(context.mesh.device, context.transport)
        self.levels = Levels(context.mesh, self.settings.node_ranks)
        self.finder = Finder()
        device = context.mesh.device if self.settings.stochastic else None
        self.reduce_format = reduce_format(self.plan.collectives.gradient_reduce.format, self.settings.density, device)
        self.gather_format = gather_format(self.plan.collectives.parameter_gather.format)
        self.update = self.passes = 0
        self._warmup = max((t.warmup or 0 for t in self.settings.traffic if t.momentum is not None), default=0)
        self.scale = torch.zeros(
            1
        )  # average over the warm-up of what gradients were multiplied with; on the CPU: nobody waits for it
        self.meets = False  # somebody will bring the groups together
        self._buckets: list[BucketCollectives] = []
        if self.settings.slow_only or context.plan.collectives.gradient_reduce.algorithm == "hierarchical":
            self.levels.check()
        if self.reduce_format is not None:
            self._make_lanes()
        self.reduce_scatter, self.all_reduce, self.all_gather = (
            self.base.reduce_scatter,
            self.base.all_reduce,
            self.base.all_gather,
        )

    def _make_lanes(self) -> None:
        """Second communicators of the sums over copies: made by all ranks in one order, whatever buckets their stages have."""
        cut = self.plan.placement.optimizer
        for axes in ((), EXPERT_AXES, ("tensor",)):
            for partial in ((), ("tensor",)):
                summed = (a for a in AXES if a in GRADIENT_AXES or a in partial)
                self.context.mesh.group(tuple(a for a in summed if a not in axes and a not in cut), lane=1)

    def for_bucket(self, bucket: Any, state: Any, groups: Any, read: ReadState) -> Collectives:
        """Holds what is kept of the bucket's messages."""
        self._buckets.append(BucketCollectives(self, bucket, groups, read))
        return self._buckets[-1]

    def begin_step(self, update: int, scale: float) -> None:
        """Which update comes: warm-up ends by count. One that comes again was skipped the last time."""
        if self.settings.local is not None and not self.meets:
            raise PartitaError(
                "local.every: groups of ranks meet in the training loop only, not in one of your own\n    -> local.every=1"
            )
        if update == self.update:
            for bucket in self._buckets:
                bucket.clean()
        elif 1 < update <= 1 + self._warmup:
            self.scale.lerp_(torch.tensor([scale]), 1 - SMOOTHING)
        if self.settings.reset and update % self.settings.reset == 0 and update != self.update:
            for bucket in self._buckets:
                bucket.forget()
        if isinstance(self.reduce_format, Stochastic):
            self.reduce_format.begin(update * self.context.mesh.world + self.context.mesh.rank)
        self.update, self.passes = update, self.passes + 1
        for bucket in self._buckets:
            if bucket.meeting is not None:
                bucket.meeting.met = False

    @property
    def clip(self) -> float:
        """What clipping made of gradients on average, when the warm-up of momentum ended; 1 where nobody knows."""
        return float(self.scale) / (1 - SMOOTHING**self._warmup) or 1.0

    def slices(self) -> list[StateSlice]:
        """Buckets have them."""
        return []

    def apart(self) -> Apart:
        """Buckets say it."""
        return Apart()


def make_compressed(context: CollectiveContext) -> Collectives:
    """Slot `collective`, name `compressed`."""
    return CompressedCollectives(context)
