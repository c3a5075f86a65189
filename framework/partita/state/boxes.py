"""A contiguous range of a tensor as a few axis-aligned boxes: the bridge between flat buffers and tensor space."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A block of a tensor whose elements are neighbours in row-major order.

    offset, size: its corner and extents, one for each dimension. start: row-major position of its first element in the tensor.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.size)


def boxes(shape: Sequence[int], lo: int, hi: int) -> list[Box]:
    """Disjoint boxes that cover elements [lo, hi) of a row-major tensor of `shape`, in order of `start`.

    At most 2 N - 1 of them for N dimensions (1 for a scalar): an incomplete first row, whole rows, an incomplete last row, and so
    on inside the incomplete rows. None for an empty range. Raises ValueError where the range doesn't lie in the tensor.
    """
    numel = math.prod(shape)
    if not 0 <= lo <= hi <= numel:
        raise ValueError(f"elements [{lo}, {hi}) do not lie in a tensor of shape {tuple(shape)}, which has {numel}")
    return _cover(tuple(shape), lo, hi) if lo < hi else []


def _cover(shape: tuple[int, ...], lo: int, hi: int) -> list[Box]:
    """The boxes of a non-empty range."""
    if not shape:
        return [Box((), (), 0)]
    row = math.prod(shape[1:])
    first, last = -(-lo // row), hi // row  # whole rows are [first, last)
    if first > last:  # begins and ends inside the same row
        return _in_row(shape, last, lo, hi)
    out = _in_row(shape, first - 1, lo, first * row) if lo < first * row else []
    if first < last:
        out.append(Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]), first * row))
    if last * row < hi:
        out += _in_row(shape, last, last * row, hi)
    return out


def _in_row(shape: tuple[int, ...], index: int, lo: int, hi: int) -> list[Box]:
    """The boxes of a part of row `index`."""
    base = index * math.prod(shape[1:])
    return [Box((index, *b.offset), (1, *b.size), base + b.start) for b in _cover(shape[1:], lo - base, hi - base)]
