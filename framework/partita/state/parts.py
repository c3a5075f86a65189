"""Which part of a global tensor a module's local parameter is: declared by the transform that cuts, read by everyone else.

A cut goes along one dimension. Packed tensors (queries, keys and values in one matrix) are cut block by block, so a part is a few
ranges of that dimension. The parts of all ranks along `axes` are disjoint and make the whole tensor; they may differ in size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

Range = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """One rank's part of a tensor of `shape`: the `ranges` of dimension `dim`, one after the other (none: all of it).

    axes: mesh axes along which the other parts lie. partial: mesh axes whose ranks hold the same part and each compute a term of
    its gradient (a norm on a part of the tokens): the terms are summed with the data axes, at the end.
    """

    shape: tuple[int, ...]
    dim: int = 0
    ranges: tuple[Range, ...] = ()
    axes: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()

    @property
    def local(self) -> tuple[int, ...]:
        """Shape of the local parameter."""
        if not self.ranges:
            return self.shape
        return (*self.shape[: self.dim], sum(hi - lo for lo, hi in self.ranges), *self.shape[self.dim + 1 :])

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor; a view where the part is one range."""
        if not self.ranges:
            return whole
        pieces = [whole.narrow(self.dim, lo, hi - lo) for lo, hi in self.ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def put(self, local: torch.Tensor, whole: torch.Tensor) -> None:
        """Write the part into its place in a whole tensor."""
        if not self.ranges:
            whole.copy_(local)
            return
        sizes = [hi - lo for lo, hi in self.ranges]
        for (lo, hi), piece in zip(self.ranges, local.split(sizes, self.dim), strict=True):
            whole.narrow(self.dim, lo, hi - lo).copy_(piece)

    def runs(self, lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
        """Row-major elements [lo, hi) of the local tensor as ranges of the whole one: (first local, first global, count).

        In order, each as long as elements are neighbours in both: one for each row of a cut along the last dimension.
        """
        if not self.ranges:
            if lo < hi:
                yield lo, lo, hi - lo
            return
        inner = math.prod(self.shape[self.dim + 1 :])
        height = sum(b - a for a, b in self.ranges) * inner  # elements of the local tensor for one index of the dimensions before
        if not height:
            return
        for outer in range(lo // height, -(-hi // height)):
            local, base = outer * height, outer * self.shape[self.dim] * inner
            for a, b in self.ranges:
                size = (b - a) * inner
                first, last = max(lo, local), min(hi, local + size)
                if first < last:
                    yield first, base + a * inner + first - local, last - first
                local += size


def declare(module: nn.Module, attribute: str, part: Part) -> None:
    """Say that `module`'s parameter `attribute` is that part of a global tensor. The parameter keeps its name."""
    parts = module.__dict__.setdefault("partita_parts", {})
    parts[attribute] = part


def declared(module: nn.Module, attribute: str) -> Part | None:
    """What a transform has declared of a parameter, if anything."""
    found: dict[str, Part] = module.__dict__.get("partita_parts", {})
    return found.get(attribute)
