"""Config node `recompute`: what each unit keeps for backward."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RecomputeConfig:
    """Activation checkpointing: memory against one more forward pass (Chen et al. 2016)."""

    # none (keep all), full (keep the input of each unit), selective (recompute matching modules only), operators (keep the outputs of
    # some operators only), budget, auto (the planner chooses)
    policy: str = "none"
    # selective: shell patterns on module names inside a unit, e.g. `*attention*`, `mlp`; a module inside a match belongs to it
    patterns: list[str] = field(default_factory=list)
    # operators: whose outputs stay, the rest is computed again: matmul, attention, or shell patterns on names of torch.ops.aten, e.g.
    # `gelu`; default: matmul and attention
    operators: list[str] = field(default_factory=list)
    # budget: bytes of activations that a rank may keep; the plan chooses the units to recompute
    budget: float | None = None
