"""When a run saves: every so many steps, or as often as costs the least time altogether."""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist

from partita.runtime.mesh import Mesh

FIRST = 10  # step of the first save where the interval is to be found: by then steps have their usual length


class SaveClock:
    """Says after which steps to save. every: steps, 0 (never), or `auto`.

    auto: after each save the interval is set to sqrt(2 C M) seconds, C the seconds that the save held the loop up (at least those that it
    takes to write, if the loop had to wait for it), M `mtbf`, the mean seconds between failures (Young 1974; Daly 2006, equation 37 for
    C much less than M). Rank 0's clock decides for all ranks.
    """

    def __init__(self, every: int | str, mtbf: float, mesh: Mesh) -> None:
        self._auto, self._mtbf, self._mesh = every == "auto", mtbf, mesh
        self.interval = FIRST if self._auto else int(every)
        self._next = 0  # step of the next save; 0: not known yet
        self._since: tuple[int, float] | None = None  # step and time of the last save's end

    def due(self, step: int) -> bool:
        """Whether to save after this step."""
        if not self._auto:
            return bool(self.interval) and step % self.interval == 0
        if not self._next:
            self._next = step + self.interval - 1
            self._since = (step, time.perf_counter())
        return step >= self._next

    def saved(self, step: int, seconds: float) -> None:
        """A save after `step` held the loop up for `seconds`. Collective where the interval is found."""
        if not self._auto:
            return
        now = time.perf_counter()
        if self._since is not None and step > self._since[0]:
            length = (now - seconds - self._since[1]) / (step - self._since[0])
            self.interval = interval(seconds, length, self._mtbf)
        told = torch.tensor([self.interval], dtype=torch.int64, device=self._mesh.device)
        if self._mesh.world > 1:
            dist.broadcast(told, src=0)
        self.interval = int(told.item())
        self._next, self._since = step + self.interval, (step, now)


def interval(stall: float, step: float, mtbf: float) -> int:
    """Steps between saves of `stall` seconds each, where a step takes `step` seconds and failures are `mtbf` seconds apart."""
    return max(1, round(math.sqrt(2 * max(stall, 1e-6) * mtbf) / max(step, 1e-9)))
