"""Which part of a global tensor a module's local parameter is: declared by the transform that cuts, read by everyone else.

A cut goes along one dimension. Packed tensors (queries, keys and values in one matrix) are cut block by block, so a part is a few
ranges of that dimension. Stacked matrices may be cut twice: a few of them, and of each some channels. The parts of all ranks along `axes`
are disjoint and make the whole tensor; they may differ in size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

Range = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """One rank's part of a tensor of `shape`: the `ranges` of dimension `dim`, one after the other (none: all of it).

    more: cuts along other dimensions, (dimension, ranges) each: the part is where all of them meet. axes: mesh axes along which the other parts lie. partial: mesh axes whose ranks hold the same part and each compute a term of
    its gradient (a norm on a part of the tokens): the terms are summed with the data axes, at the end.
    """

    shape: tuple[int, ...]
    dim: int = 0
    ranges: tuple[Range, ...] = ()
    axes: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    more: tuple[tuple[int, tuple[Range, ...]], ...] = ()

    @property
    def cuts(self) -> tuple[tuple[int, tuple[Range, ...]], ...]:
        """(dimension, ranges) of every cut, by dimension."""
        return tuple(sorted((*(((self.dim, self.ranges),) if self.ranges else ()), *self.more)))

    def cut(self, dim: int, ranges: tuple[Range, ...], axes: tuple[str, ...]) -> Part:
        """What is left of this part when it is cut along `axes` too. `dim` is one that it is not cut along yet."""
        if not self.ranges:
            return replace(self, dim=dim, ranges=ranges, axes=axes)
        return replace(self, axes=(*axes, *self.axes), more=(*self.more, (dim, ranges)))

    @property
    def local(self) -> tuple[int, ...]:
        """Shape of the local parameter."""
        sizes = dict(enumerate(self.shape)) | {dim: sum(hi - lo for lo, hi in ranges) for dim, ranges in self.cuts}
        return tuple(sizes.values())

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor; a view where each cut leaves one range."""
        for dim, ranges in self.cuts:
            whole = select(whole, dim, ranges)
        return whole

    def put(self, local: torch.Tensor, whole: torch.Tensor) -> None:
        """Write the part into its place in a whole tensor."""
        _put(local, whole, self.cuts)

    def runs(self, lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
        """Row-major elements [lo, hi) of the local tensor as ranges of the whole one: (first local, first global, count).

        In order, each as long as elements are neighbours in both: one for each row of a cut along the last dimension.
        """
        if not self.ranges:
            if lo < hi:
                yield lo, lo, hi - lo
            return
        *before, (dim, ranges) = self.cuts
        inner = math.prod(self.shape[dim + 1 :])
        height = sum(b - a for a, b in ranges) * inner  # elements of the local tensor for one index of the dimensions before
        if not height:
            return
        for outer in range(lo // height, -(-hi // height)):
            local, base = outer * height, self._row(outer, dim, dict(before)) * self.shape[dim] * inner
            for a, b in ranges:
                size = (b - a) * inner
                first, last = max(lo, local), min(hi, local + size)
                if first < last:
                    yield first, base + a * inner + first - local, last - first
                local += size

    def _row(self, outer: int, dims: int, cuts: dict[int, tuple[Range, ...]]) -> int:
        """Where index `outer` of the first `dims` dimensions of the local tensor, taken as one, is in the whole tensor."""
        if not cuts:
            return outer
        row, stride = 0, 1
        for dim in reversed(range(dims)):
            ranges = cuts.get(dim, ((0, self.shape[dim]),))
            outer, at = divmod(outer, sum(hi - lo for lo, hi in ranges))
            row += _nth(ranges, at) * stride
            stride *= self.shape[dim]
        return row


def select(x: torch.Tensor, dim: int, ranges: tuple[Range, ...]) -> torch.Tensor:
    """Ranges of a dimension, one after the other; a view where it is one."""
    pieces = [x.narrow(dim, lo, hi - lo) for lo, hi in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _put(local: torch.Tensor, whole: torch.Tensor, cuts: tuple[tuple[int, tuple[Range, ...]], ...]) -> None:
    if not cuts:
        whole.copy_(local)
        return
    (dim, ranges), *rest = cuts
    for (lo, hi), piece in zip(ranges, local.split([hi - lo for lo, hi in ranges], dim), strict=True):
        _put(piece, whole.narrow(dim, lo, hi - lo), tuple(rest))


def _nth(ranges: tuple[Range, ...], at: int) -> int:
    """The element at place `at` of ranges that stand one after the other."""
    for lo, hi in ranges:
        if at < hi - lo:
            return lo + at
        at -= hi - lo
    raise IndexError(at)


def declare(module: nn.Module, attribute: str, part: Part) -> None:
    """Say that `module`'s parameter `attribute` is that part of a global tensor. The parameter keeps its name."""
    parts = module.__dict__.setdefault("partita_parts", {})
    parts[attribute] = part


def declared(module: nn.Module, attribute: str) -> Part | None:
    """What a transform has declared of a parameter, if anything."""
    found: dict[str, Part] = module.__dict__.get("partita_parts", {})
    return found.get(attribute)
