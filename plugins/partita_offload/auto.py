"""All tiers that are worth a thought, for the planner."""

from __future__ import annotations

from typing import Any

from partita.plan.draft import PlanDraft
from partita.plugin.markers import hookimpl
from partita.plugin.types import Choices

# What leaves together, the least first: states that are touched once a step go before those that each pass reads.
GROUPS = ((), ("optimizer",), ("optimizer", "gradients"), ("optimizer", "gradients", "parameters"))


@hookimpl
def partita_choices(draft: PlanDraft) -> Choices | None:
    """Groups of states on the host, and in files where a folder is given. A state whose key is not `auto` keeps its place."""
    config = draft.config.offload
    free = [s for s in ("parameters", "gradients", "optimizer") if getattr(config, s) == "auto"]
    if not free:
        return None
    places = ["host", *(["file"] if config.path else [])]
    ways: list[dict[str, Any]] = []
    for place in places:
        for group in GROUPS:
            settings = {f"offload.{s}": place if s in group else "none" for s in free}
            if settings not in ways:
                ways.append(settings)
    return Choices(tuple(ways))
