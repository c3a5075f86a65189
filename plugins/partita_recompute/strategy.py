"""Decides section `activations`."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from partita.errors import did_you_mean
from partita.plan.draft import PlanDraft
from partita.plan.operators import ATTENTION, GROUPS, keeps
from partita.plan.plan import Activations, Plan
from partita.plan.problems import Problem
from partita.plugin.markers import hookimpl
from partita.plugin.types import ConfigContribution, Transform
from partita_recompute.config import RecomputeConfig

if TYPE_CHECKING:
    from torch import nn

POLICIES = {"none": "keep", "full": "full", "selective": "selective", "operators": "operators", "budget": "keep"}
# Attention keeps the most bytes for the least compute (Korthikanti et al. 2022, section 5).
SELECTIVE = ("*attention*", "*attn*")
# The dear ones; what lies between them takes little time to make again, and most of the memory.
OPERATORS = ("matmul", "attention")


@hookimpl
def partita_config() -> ConfigContribution:
    """Node `recompute`, section `activations`."""
    return ConfigContribution(nodes={"recompute": RecomputeConfig}, sections=("activations",))


@hookimpl
def partita_decide(draft: PlanDraft) -> None:
    """One decision for all units."""
    config = draft.config.recompute
    if config.policy not in POLICIES:
        remedy = did_you_mean(config.policy, POLICIES).capitalize()
        draft.problem(Problem("recompute.policy", f"{config.policy!r} is no policy.", remedy))
    patterns: tuple[str, ...] = ()
    if config.policy == "selective":
        patterns = tuple(config.patterns) or SELECTIVE
        if not config.patterns:
            draft.effect("recompute.patterns", [], list(patterns), "default of selective")
    operators: tuple[str, ...] = ()
    if config.policy == "operators":
        operators = tuple(config.operators) or OPERATORS
        if not config.operators:
            draft.effect("recompute.operators", [], list(operators), "default of operators")
    if config.policy in ("full", "operators") and not draft.model.blocks:
        draft.effect("recompute.policy", config.policy, "none", "the model has no blocks to recompute")
    if config.policy == "budget" and config.budget is not None:
        from partita_recompute.budget import fit  # torch is imported only where a plan is made

        draft.write("activations", fit(draft, config.budget))
        return
    draft.write("activations", Activations(POLICIES.get(config.policy, "keep"), patterns=patterns, operators=operators))


@hookimpl
def partita_check(plan: Plan, draft: PlanDraft) -> list[Problem]:
    """Options that would have no effect, and patterns that match nothing."""
    config = draft.config.recompute
    problems = []
    if config.patterns and config.policy != "selective":
        reason = f"patterns are used by recompute.policy=selective only, and it is {config.policy!r}."
        problems.append(Problem("recompute.patterns", reason, "Drop recompute.patterns, or set recompute.policy=selective."))
    problems += _check_operators(plan, config)
    if config.budget is not None and config.policy != "budget":
        reason = f"a budget is used by recompute.policy=budget only, and it is {config.policy!r}."
        problems.append(Problem("recompute.budget", reason, "Drop recompute.budget."))
    if config.budget is None and config.policy == "budget":
        problems.append(
            Problem("recompute.budget", "recompute.policy=budget needs a budget.", "Give recompute.budget in bytes, e.g. 2e9.")
        )
    dead = [p for p in plan.activations.patterns if not draft.model.matching_modules((p,))]
    if dead and (config.patterns or len(dead) == len(plan.activations.patterns)):
        reason = f"no module inside a unit matches {', '.join(map(repr, dead))}."
        remedy = did_you_mean(dead[0].strip("*"), draft.model.module_names()).capitalize()
        problems.append(Problem("recompute.patterns", reason, remedy))
    return problems


def _check_operators(plan: Plan, config: RecomputeConfig) -> list[Problem]:
    """Operators that nothing uses or that there are not, and kept outputs that would have to leave."""
    problems = []
    if config.operators and config.policy != "operators":
        reason = f"operators are used by recompute.policy=operators only, and it is {config.policy!r}."
        problems.append(Problem("recompute.operators", reason, "Drop recompute.operators, or set recompute.policy=operators."))
    if plan.activations.operators and plan.tiers.activations.place != "accelerator":
        reason = (
            f"outputs that recompute.policy=operators keeps stay where they are, not on tier {plan.tiers.activations.place!r}."
        )
        problems.append(
            Problem("recompute.policy", reason, "Use recompute=full, whose inputs leave, or offload.activations=none.")
        )
    if plan.layout.context > 1 and plan.layout.context_method == "ring" and keeps(ATTENTION, plan.activations.operators):
        reason = "ring attention adds its pieces up in place, so what each of them gave can't be kept."
        remedy = "Set recompute.operators=[matmul], or parallel.context_method=ulysses."
        problems.append(Problem("recompute.operators", reason, remedy))
    for given in plan.activations.operators:
        if given in GROUPS:
            continue
        import torch  # what names there are, torch says

        names = [n for n in dir(torch.ops.aten) if not n.startswith("__")]
        if not any(fnmatchcase(name, given) for name in names):
            remedy = did_you_mean(given, [*GROUPS, *names]).capitalize()
            problems.append(Problem("recompute.operators", f"{given!r} is no operator of torch.ops.aten.", remedy))
    return problems


@hookimpl
def partita_transforms(plan: Plan) -> list[Transform]:
    """Transform `recompute`, where any unit recomputes."""
    activations = plan.activations
    if {activations.default, *(d for _, d in activations.units)} <= {"keep"}:
        return []

    def apply(model: nn.Module, context: Any) -> nn.Module:
        from partita_recompute.checkpoint import recompute  # torch is imported where a model is built

        return recompute(model, activations)

    return [Transform("recompute", apply, after=("adapter",), before=("compile",))]
