"""Node `local` in the plan: groups of ranks that train for themselves."""

from __future__ import annotations

from partita.errors import did_you_mean
from partita.plan.draft import PlanDraft
from partita.plan.plan import Plan
from partita.plan.problems import Problem
from partita_compression.settings import EXTENSION, Local

APART = "replicate"
METHODS = ("average", "diloco")
FORMATS = ("native", "int8", "int4", "fp8", "onebit")


def decide_local(draft: PlanDraft) -> Local | None:
    """None where all ranks sum their gradients in every update."""
    config = draft.config.local
    for key, known in (("method", METHODS), ("format", FORMATS)):
        value = getattr(config, key)
        if value not in known:
            draft.problem(
                Problem(f"local.{key}", f"{value!r} is not one of {', '.join(known)}.", did_you_mean(value, known).capitalize())
            )
    if config.every < 1:
        draft.problem(Problem("local.every", f"groups can't meet every {config.every} updates.", "Use 1 or more."))
    if config.every <= 1:
        return None
    if draft.get("layout").replicate == 1:
        draft.effect("local.every", config.every, 1, "parallel.replicate is 1: there is one group")
        return None
    if config.method == "diloco":
        return Local(config.every, config.lr, config.momentum, config.format)
    return Local(config.every, format=config.format)


def check_local(plan: Plan, draft: PlanDraft) -> list[Problem]:
    """What groups that train for themselves can't be combined with."""
    settings, train = plan.extensions.get(EXTENSION), draft.config.train
    if settings is None or settings.local is None:
        return []
    every, problems = settings.local.every, []
    if APART in plan.placement.optimizer:
        reason = "each group needs all states, and they are cut over the groups too (axis replicate)."
        problems.append(Problem("local.every", reason, "Use zero.preset=hsdp, which cuts inside groups, or zero.stage=0."))
    away = sorted({t.place for t in (plan.tiers.parameters, plan.tiers.optimizer)} - {"accelerator"})
    if away:
        reason = f"weights are set where groups meet, and those on tier {away[0]!r} are not at hand."
        problems.append(Problem("local.every", reason, "Set offload=none."))
    if plan.layout.expert > 1:
        reason = "experts that are shared out over all data ranks have no copy in each group."
        problems.append(Problem("local.every", reason, "Set parallel.expert=1."))
    if any(t.momentum is not None for t in settings.traffic) or settings.rank:
        reason = "gradients that are summed in groups travel natively or in blocks there."
        problems.append(Problem("local.every", reason, "Use another optimizer, and no powersgd."))
    for key in ("steps", "save_every", "eval_every"):
        value = getattr(train, key)
        if value and (not isinstance(value, int) or value % every):
            reason = f"groups differ between meetings, and train.{key}={value} is no multiple of local.every={every}."
            problems.append(Problem(f"train.{key}", reason, f"Use a multiple of {every}."))
    return problems
