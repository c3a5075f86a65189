"""Config node `moe`: which experts the model has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class MoeConfig:
    """A routing by name."""

    # none: dense feed-forward layers
    name: str = "none"
