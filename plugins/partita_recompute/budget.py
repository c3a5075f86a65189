"""Which blocks to recompute so that what a rank keeps for backward fits into a number of bytes."""

from __future__ import annotations

from dataclasses import replace

from partita.plan.draft import PlanDraft
from partita.plan.kept import activation_bytes, trace
from partita.plan.memory import words
from partita.plan.plan import Activations
from partita.plan.problems import Problem

KEPT = "kept for backward"


def fit(draft: PlanDraft, budget: float) -> Activations:
    """The fewest blocks that have to be recomputed; those that save most first, and of equal ones the first of the model.

    The last blocks are better kept: while they are recomputed, everything before them is still in memory.
    """
    plan = draft.freeze()
    found = trace(draft, plan)
    if not found.units:
        reason = f"the model's activations can't be counted ({found.reason}), so no block can be chosen by a budget."
        draft.problem(Problem("recompute.budget", reason, "Use recompute=full or recompute=selective."))
        return Activations()
    order = sorted(draft.model.blocks, key=lambda name: found.units[name].input - found.units[name].kept)
    for count in range(len(order) + 1):
        again = Activations(units=tuple((name, "full") for name in draft.model.blocks if name in order[:count]))
        kept = activation_bytes(draft, replace(plan, activations=again)).get(KEPT, 0)
        if kept <= budget:
            asked = f"{words(budget)} for activations"
            got = f"{count} of {len(order)} blocks recomputed, {words(kept)} kept"
            draft.effect("recompute.budget", asked, got, "as few blocks as fit")
            return again
    reason = f"with every block recomputed a rank still keeps {words(kept)}, and the budget is {words(budget)}."
    draft.problem(Problem("recompute.budget", reason, f"Give at least {kept:.0f}, or a smaller train.micro_batch."))
    return Activations(default="full")
