"""In which order a model uses its blocks: what the last pass did is expected of the next one.

A *use* is the number of a block, inverted (~i) for backward. A pass is the forward and backward of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

LONGEST = 1 << 16  # uses that are noted of one pass, which may never end


class Order(Protocol):
    """What the gathers ask."""

    def first(self) -> list[int]:
        """The block that is used first in the next forward, if it is known."""

    def meet(self, use: int) -> Sequence[int]:
        """A block is used now. Returns blocks that were expected before it."""

    def ahead(self, count: int) -> list[int]:
        """The next `count` blocks that will be used, the nearest first, each once, without the one that is used now."""

    def keeps(self, block: int, count: int) -> bool:
        """Whether a block whose use has ended is among the next `count` different ones."""


class SeenOrder:
    """Follows the passes of a model. blocks: how many; until a pass has been seen they are expected one after the other.

    A pass that leaves some uses out is followed; while it does what the last one didn't, nothing is expected. Ranks that use the same
    blocks expect the same.
    """

    def __init__(self, blocks: int) -> None:
        self._expected: Sequence[int] = [*range(blocks), *(~i for i in reversed(range(blocks)))]
        self._seen: list[int] = []
        self._at = 0  # of what is expected, that many uses are over
        self._lost = False
        self.wraps = False  # another pass with the same weights follows

    def begin(self) -> None:
        """A pass begins; what was seen of one that never ended is forgotten."""
        self._seen, self._at, self._lost, self.wraps = [], 0, False, False

    def end(self) -> None:
        """A pass has ended."""
        if self._seen:
            self._expected = self._seen
        self.begin()

    def meet(self, use: int) -> Sequence[int]:
        """See `Order`."""
        if (self._seen and self._seen[-1] == use) or len(self._seen) == LONGEST:
            return ()
        self._seen.append(use)
        at = self._at
        if at < len(self._expected) and self._expected[at] == use:
            self._at, self._lost = at + 1, False
            return ()
        try:
            self._at = self._expected.index(use, at) + 1
        except ValueError:
            self._lost = True
            return ()
        self._lost = False
        return [_block(missed) for missed in self._expected[at : self._at - 1]]

    def first(self) -> list[int]:
        """See `Order`."""
        return self.ahead(1)

    def ahead(self, count: int) -> list[int]:
        """See `Order`."""
        now = _block(self._seen[-1]) if self._seen else -1
        found: list[int] = []
        for block in self._following() if count else ():
            if block != now and block not in found:
                found.append(block)
                if len(found) == count:
                    break
        return found

    def keeps(self, block: int, count: int) -> bool:
        """See `Order`."""
        met: set[int] = set()
        for other in self._following() if count else ():
            if other == block:
                return True
            met.add(other)
            if len(met) == count:
                break
        return False

    def _following(self) -> Iterator[int]:
        if self._lost:
            return
        for i in range(self._at, len(self._expected)):
            yield _block(self._expected[i])
        for use in (self._seen or self._expected) if self.wraps else ():
            yield _block(use)


class StageOrder:
    """For the stages of a pipeline, which are run in the order of its schedule: inside of a stage one block after the other."""

    def __init__(self, stages: Sequence[Sequence[int]]) -> None:
        self._stage = {block: list(stage) for stage in stages for block in stage}
        self._use = 0

    def first(self) -> list[int]:
        """See `Order`."""
        return [0] if self._stage else []

    def meet(self, use: int) -> Sequence[int]:
        """See `Order`."""
        self._use = use
        return ()

    def ahead(self, count: int) -> list[int]:
        """See `Order`."""
        block = _block(self._use)
        stage = self._stage[block]
        at = stage.index(block)
        return stage[at + 1 : at + 1 + count] if self._use >= 0 else stage[max(0, at - count) : at][::-1]

    def keeps(self, block: int, count: int) -> bool:
        """See `Order`. The executor holds what it wants to keep."""
        return False


def _block(use: int) -> int:
    return use if use >= 0 else ~use
