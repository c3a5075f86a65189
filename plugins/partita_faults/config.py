"""Config node `faults`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class FaultsConfig:
    """One fault, at one step of one rank."""

    # none, kill, stop, slow, nonfinite, flip, full_disk, slow_disk, unreadable, lost_node, clock, corrupt, spike, memory
    kind: str = "none"
    # where it happens
    rank: int = 0
    # update (from 1) at which it happens, or begins
    step: int = 5
    # lost_node: ranks from `rank` on that go together
    ranks: int = 2
    # slow: seconds added to each step. slow_disk: to each 4 MiB written. clock: seconds that the wall clock jumps
    seconds: float = 0.2
    # nonfinite, corrupt, spike: name of the module whose output is wrong; default: the first (spike: the last). flip: of the parameter in which a bit is flipped; default: the first
    target: str | None = None
    # not again when the run is started again in its folder
    once: bool = True
