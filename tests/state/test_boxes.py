"""A range of a tensor and the boxes that cover it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.state.boxes import Box, boxes


@st.composite
def _ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=5)))
    lo = draw(st.integers(0, math.prod(shape)))
    return shape, lo, draw(st.integers(lo, math.prod(shape)))


@given(_ranges())
@settings(max_examples=300, deadline=None)
def test_boxes_cover_exactly_the_range_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    """Reading the boxes one after the other gives the elements of the range; there are at most 2 N - 1 of them."""
    shape, lo, hi = case
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    found = boxes(shape, lo, hi)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    seen = []
    for box in found:
        block = tensor[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size))].reshape(-1)
        assert block[0] == box.start and block.numel() == box.numel
        seen += block.tolist()
    assert seen == list(range(lo, hi))


def test_the_bound_is_reached() -> None:
    """A range that begins and ends in the middle of everything."""
    assert len(boxes((4, 4, 4), 1, 63)) == 5
    assert len(boxes((3, 3, 3, 3), 1, 80)) == 7


def test_scalars_and_empty_tensors() -> None:
    """A scalar is one box without dimensions; a tensor without elements has none."""
    assert boxes((), 0, 1) == [Box((), (), 0)]
    assert boxes((), 0, 0) == []
    assert boxes((0,), 0, 0) == []
    assert boxes((3, 0, 2), 0, 0) == []
    assert boxes((11,), 3, 7) == [Box((3,), (4,), 3)]


def test_a_range_outside_of_the_tensor_is_refused() -> None:
    """The message has both the range and the shape."""
    with pytest.raises(ValueError, match=r"\[2, 9\).*\(2, 4\).*8"):
        boxes((2, 4), 2, 9)
