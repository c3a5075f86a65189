"""Slot `lr_schedule`: a linear rise, then a parabola that stays high for long and falls fast at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from partita.train.schedules import length


def make_parabola(config: Any, steps: int) -> Callable[[int], float]:
    """Factor on optimizer.lr for update k = 1 to `steps`. `config` is the lr_schedule node: warmup, minimum."""
    rise = max(length(config.warmup, steps), 1)
    fall = max(steps - rise, 1)

    def factor(k: int) -> float:
        if k <= rise:
            return k / rise
        over = min((k - rise) / fall, 1.0)
        return float(config.minimum + (1.0 - config.minimum) * (1.0 - over * over))

    return factor
