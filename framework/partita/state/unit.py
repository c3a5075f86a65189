"""A unit at work: the buckets of one block, or of what is in no block."""

from __future__ import annotations

from torch import nn

from partita.state.bucket import Bucket, Weights


class Unit:
    """A module whose states are gathered and reduced together."""

    def __init__(self, name: str, module: nn.Module, buckets: list[Bucket]) -> None:
        self.name, self.module, self.buckets = name, module, buckets
        self.trainable = [b for b in buckets if b.layout.trainable]
        self.partly_frozen = len(self.trainable) < len(buckets)
        self.expected = sum(len(b.layout.segments) for b in self.trainable)
        self.arrived = 0
        self.held = 0  # reasons to keep the weights whole
        # of weights that are whole for a time only
        self.bytes = sum(b.layout.numel * b.full.element_size() for b in buckets if b.cut)

    @property
    def whole(self) -> bool:
        """Whether all weights are gathered, or being gathered."""
        return all(b.weights is not Weights.SHARDED for b in self.buckets)

    def gather(self) -> None:
        """Start gathering what is not whole."""
        for bucket in self.buckets:
            bucket.gather()

    def fetch(self) -> None:
        """Start to read what lies in a tier that is slow."""
        for bucket in self.buckets:
            bucket.fetch()

    def wait_gathered(self) -> None:
        """Have all weights whole."""
        for bucket in self.buckets:
            bucket.wait_gathered()

    def free(self) -> None:
        """Keep only this rank's shard, where the placement says so and nobody holds the unit."""
        if not self.held:
            for bucket in self.buckets:
                bucket.free()

    def hold(self) -> None:
        """Keep the weights whole, once they are gathered, until as many calls of `release`."""
        self.held += 1

    def release(self) -> None:
        """The counterpart of `hold`; the last one frees."""
        self.held -= 1
        self.free()
