"""Local updates: groups of ranks train for themselves and meet every few updates (local SGD, Stich 2019; DiLoCo, Douillard et al. 2023).

Between meetings gradients are summed inside each group only. At a meeting the groups' ways since the last one are averaged, and the average
is gone from where they met last: as it is, or as a gradient of Nesterov's method (DiLoCo).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from partita.runtime.collectives import Collectives
from partita.runtime.mesh import Group
from partita.state.bucket import Bucket, Weights
from partita.state.engine import StateEngine
from partita_compression.exchange import Exchange
from partita_compression.settings import Local


@dataclass
class Meeting:
    """Of one bucket. groups: the ranks at this place in all groups. exchange: in few bits; None: natively.

    last: this rank's shard of the weights at the last meeting, float32. speed: Nesterov's momentum, in DiLoCo.
    A checkpoint between meetings has both, and the states of each group (`partita.state.slices.Apart`).
    """

    local: Local
    groups: Group
    base: Collectives
    exchange: Exchange | None
    last: torch.Tensor
    speed: torch.Tensor | None
    met: bool = False  # and nobody has gone on since

    def meet(self, weights: torch.Tensor) -> None:
        """Set this rank's shard of the weights, the same in all groups to the bit."""
        way = self.last - weights
        work = self.base.all_reduce(way, self.groups) if self.exchange is None else self.exchange.all_reduce(way)
        work.wait()
        way.div_(self.groups.size)
        if self.speed is not None:
            momentum = self.local.momentum or 0.0
            self.speed.mul_(momentum).add_(way)
            way.add_(self.speed, alpha=momentum).mul_(self.local.lr)
        self.last.sub_(way)
        weights.copy_(self.last)
        self.met = True


def begin(engine: StateEngine, met: bool = True) -> None:
    """From now on somebody calls `meet`. met: all groups have the same weights, here they met; else a load has brought those of the last time."""
    for bucket, meeting in _meetings(engine):
        if met:
            meeting.last.copy_(bucket.master.near)
            meeting.met = True
        wire: Any = bucket.collectives
        wire.owner.meets = True


def meet(engine: StateEngine) -> None:
    """Bring the groups together. Collective; between two updates."""
    for bucket in engine.buckets:
        if bucket.weights is Weights.GATHERING:
            bucket.wait_gathered()
    for bucket, meeting in _meetings(engine):
        meeting.meet(bucket.master.near)
    engine.after_load()


def _meetings(engine: StateEngine) -> list[tuple[Bucket, Meeting]]:
    found: list[tuple[Bucket, Meeting]] = []
    for bucket in engine.buckets:
        wire: Any = bucket.collectives
        if wire.meeting is not None:
            found.append((bucket, wire.meeting))
    return found
