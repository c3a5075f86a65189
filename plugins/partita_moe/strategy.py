"""Mixture of experts. This version has dense layers only, and says so instead of training something else."""

from __future__ import annotations

from partita.errors import did_you_mean
from partita.plan.draft import PlanDraft
from partita.plan.plan import Plan
from partita.plan.problems import Problem
from partita.plugin.markers import hookimpl
from partita.plugin.types import ConfigContribution
from partita_moe.config import MoeConfig

ROUTINGS = ("none",)
KNOWN = ("switch", "gshard", "mixtral", "deepseek", "residual")  # names of the literature, to answer them with a better sentence


@hookimpl
def partita_config() -> ConfigContribution:
    """Node `moe`."""
    return ConfigContribution(nodes={"moe": MoeConfig})


@hookimpl
def partita_check(plan: Plan, draft: PlanDraft) -> list[Problem]:
    """Refuse what is not a routing of this version, and an expert axis without experts."""
    name = draft.config.moe.name
    problems = []
    if name in KNOWN:
        problems.append(
            Problem("moe.name", f"mixture of experts ({name!r}) is not in this version.", "Use moe.name=none: dense layers.")
        )
    elif name not in ROUTINGS:
        problems.append(Problem("moe.name", f"{name!r} is no routing.", did_you_mean(name, ROUTINGS).capitalize()))
    if name == "none" and plan.layout.expert > 1:
        reason = f"{plan.layout.expert} ranks would share experts, but moe.name=none makes a model without experts."
        problems.append(Problem("parallel.expert", reason, "Set parallel.expert=1."))
    return problems
