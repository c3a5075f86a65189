"""Where this rank is: step and phase, for the one message that a failure costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Position:
    """Last position that was set."""

    step: int = 0
    phase: str = "start"


current = Position()


def set(*, step: int, phase: str) -> None:
    """Note the position; costs two assignments."""
    current.step, current.phase = step, phase
