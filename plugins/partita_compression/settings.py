"""What the plug-in adds to the plan, under the name `compression`."""

from __future__ import annotations

from dataclasses import dataclass

EXTENSION = "compression"


@dataclass(frozen=True)
class Settings:
    """warmup: updates that travel natively before gradients are compressed. feedback: keep errors. slow_only: leave what stays
    inside a node native. node_ranks: ranks of a node, whose links count as fast."""

    warmup: int = 0
    feedback: bool = False
    slow_only: bool = False
    node_ranks: int = 1
