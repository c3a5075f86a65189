"""All placements, for the planner."""

from __future__ import annotations

from partita.plan.draft import PlanDraft
from partita.plugin.markers import hookimpl
from partita.plugin.types import Choices
from partita_zero.presets import STAGES

IN_GROUPS = ("hsdp", "hpz", "hfsdp")  # presets that cut inside groups of ranks


@hookimpl
def partita_choices(draft: PlanDraft) -> Choices | None:
    """Stages and presets, where zero.stage is `auto` and no preset is given."""
    config = draft.config.zero
    if config.stage != "auto" or config.preset is not None:
        return None
    stages = [{"zero.stage": stage, "zero.preset": None} for stage in range(len(STAGES))]
    return Choices((*stages, *({"zero.stage": 0, "zero.preset": name} for name in IN_GROUPS)))
