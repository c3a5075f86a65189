"""What a foreign checkpoint holds, in one form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Weights = dict[str, torch.Tensor]
Translate = Callable[[Weights], Weights]


@dataclass
class Source:
    """weights: whole parameters by name. states: optimizer state (exp_avg, ...) -> the same names. buffers: whole, by name.

    step: updates made. model: config node of the model, as a dict of `ModelConfig` fields, where it is known. notes: for the user.
    """

    what: str
    weights: Weights
    states: dict[str, Weights] = field(default_factory=dict)
    buffers: Weights = field(default_factory=dict)
    step: int = 0
    model: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    def translated(self, translate: Translate) -> None:
        """Rename and reshape weights; states are treated as their weights are. What has none (frozen weights) gets none."""
        states = {}
        for kind, values in self.states.items():
            holes = {n: torch.full_like(w, torch.nan) for n, w in self.weights.items() if n not in values}
            states[kind] = {n: t for n, t in translate({**values, **holes}).items() if not bool(t.isnan().any())}
        self.weights, self.states = translate(self.weights), states
