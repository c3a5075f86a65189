"""The world mesh: named axes, and process groups for any set of them. Groups are passed in, never read from globals."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from partita.plan.plan import AXES, Layout


@dataclass(frozen=True)
class Group:
    """The ranks that differ from this one only along `axes`, in mesh order.

    ranks: global ranks. rank: position of this process in them. process_group: None for a group of one, which needs no communication.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    rank: int
    process_group: Any = None

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)


@dataclass
class Mesh:
    """All ranks on named axes (size 1 included), outermost first as in `partita.plan.plan.AXES`."""

    layout: Layout
    rank: int
    device: torch.device
    _groups: dict[tuple[tuple[str, ...], int], Group] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = [getattr(self.layout, axis) for axis in AXES]
        self.coordinates = dict(zip(AXES, _unravel(self.rank, sizes), strict=True))

    @property
    def world(self) -> int:
        """All ranks."""
        return self.layout.world

    def ranks(self, axes: tuple[str, ...], coordinates: dict[str, int] | None = None) -> tuple[int, ...]:
        """Global ranks that share `coordinates` on all axes but `axes`, in mesh order."""
        fixed = coordinates or self.coordinates
        choices = [range(getattr(self.layout, a)) if a in axes else (fixed[a],) for a in AXES]
        return tuple(_ravel(point, [getattr(self.layout, a) for a in AXES]) for point in product(*choices))

    def group(self, axes: tuple[str, ...], lane: int = 0) -> Group:
        """The group along `axes` (those of size 1 make no difference); made once. Collective the first time: all ranks must ask in the same order.

        lane: groups of other lanes have the same ranks and a communicator of their own, so that one can't hold up the other.
        """
        ordered = tuple(a for a in AXES if a in axes and getattr(self.layout, a) > 1)
        key = (ordered, lane)
        if key not in self._groups:
            self._groups[key] = self._make(ordered, own=lane > 0)
        return self._groups[key]

    def families(self, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """The ranks of every group along `axes`, sorted: the same list on all ranks."""
        return sorted({self.ranks(axes, dict(zip(AXES, p, strict=True))) for p in self._points()})

    def _make(self, axes: tuple[str, ...], own: bool) -> Group:
        mine = self.ranks(axes)
        handle = None
        if len(mine) > 1:
            # new_group is collective over the world: every family of ranks is made by every rank.
            for family in self.families(axes):
                made = dist.new_group(list(family)) if own or len(family) < self.world else dist.group.WORLD
                if family == mine:
                    handle = made
        return Group(axes, mine, mine.index(self.rank), handle)

    def _points(self) -> product[tuple[int, ...]]:
        return product(*(range(getattr(self.layout, a)) for a in AXES))


def _unravel(index: int, sizes: list[int]) -> list[int]:
    out = []
    for size in reversed(sizes):
        out.append(index % size)
        index //= size
    return out[::-1]


def _ravel(point: tuple[int, ...], sizes: list[int]) -> int:
    index = 0
    for value, size in zip(point, sizes, strict=True):
        index = index * size + value
    return index
