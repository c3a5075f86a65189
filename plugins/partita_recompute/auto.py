"""All policies that need no further number, for the planner."""

from __future__ import annotations

from partita.plan.draft import PlanDraft
from partita.plugin.markers import hookimpl
from partita.plugin.types import Choices


@hookimpl
def partita_choices(draft: PlanDraft) -> Choices | None:
    """None, selective and full, where recompute.policy is `auto`."""
    if draft.config.recompute.policy != "auto":
        return None
    return Choices(tuple({"recompute.policy": policy} for policy in ("none", "selective", "full")))
