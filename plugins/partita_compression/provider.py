"""Slot `collective`, name `compressed`: the built-in collectives with the wire formats and the algorithm that the plan asks for."""

from __future__ import annotations

from typing import Any

from partita.errors import PartitaError
from partita.runtime.collectives import CollectiveContext, Collectives, collectives_for
from partita.state.slices import StateSlice
from partita_compression.bucket import BucketCollectives
from partita_compression.formats import gather_format, reduce_format
from partita_compression.hierarchy import Levels
from partita_compression.ledger import Finder
from partita_compression.settings import EXTENSION, Settings


class CompressedCollectives:
    """What has no bucket (norms, whole tensors) goes as always; see `BucketCollectives` for the rest."""

    def __init__(self, context: CollectiveContext) -> None:
        self.context, self.plan = context, context.plan
        self.settings: Settings = context.plan.extensions[EXTENSION]
        self.base = collectives_for(context.mesh.device, context.transport)
        self.levels = Levels(context.mesh, self.settings.node_ranks)
        self.finder = Finder()
        self.reduce_format = reduce_format(self.plan.collectives.gradient_reduce.format, self.settings.density)
        self.gather_format = gather_format(self.plan.collectives.parameter_gather.format)
        self.update = self.passes = 0
        self.meets = False  # somebody will bring the groups together
        self._buckets: list[BucketCollectives] = []
        self.reduce_scatter, self.all_reduce, self.all_gather = (
            self.base.reduce_scatter,
            self.base.all_reduce,
            self.base.all_gather,
        )

    def for_bucket(self, bucket: Any, state: Any, groups: Any) -> Collectives:
        """Holds what is kept of the bucket's messages."""
        self._buckets.append(BucketCollectives(self, bucket, groups))
        return self._buckets[-1]

    def begin_step(self, update: int) -> None:
        """Which update comes: warm-up ends by count. One that comes again was skipped the last time."""
        if self.settings.local is not None and not self.meets:
            raise PartitaError(
                "local.every: groups of ranks meet in the training loop only, not in one of your own\n    -> local.every=1"
            )
        if update == self.update:
            for bucket in self._buckets:
                bucket.clean()
        self.update, self.passes = update, self.passes + 1

    def slices(self) -> list[StateSlice]:
        """Buckets have them."""
        return []


def make_compressed(context: CollectiveContext) -> Collectives:
    """Slot `collective`, name `compressed`."""
    return CompressedCollectives(context)
