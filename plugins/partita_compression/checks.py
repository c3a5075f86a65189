"""What can't be had of the wire, or would go wrong in silence."""

from __future__ import annotations

from partita.errors import did_you_mean
from partita.plan.draft import PlanDraft
from partita.plan.plan import GRADIENT_AXES, Plan
from partita.plan.problems import Problem
from partita_compression.local_plan import check_local
from partita_compression.names import BLOCKS, CASTS, NEEDS_FEEDBACK, ROUNDINGS, RULES
from partita_compression.settings import EXTENSION


def check(plan: Plan, draft: PlanDraft) -> list[Problem]:
    """All problems."""
    return [
        *_check_rules(plan, draft),
        *_check_feedback(plan, draft),
        *_check_thin(plan, draft),
        *_check_numbers(draft),
        *check_local(plan, draft),
    ]


def ruled(draft: PlanDraft) -> str:
    """The update rules that want something of the wire, in words."""
    names = dict.fromkeys([draft.config.optimizer.name, *(g.optimizer for g in draft.config.optimizer.groups)])
    return "optimizer " + " and ".join(n for n in names if n in RULES)


def _check_feedback(plan: Plan, draft: PlanDraft) -> list[Problem]:
    """Formats that need a loss scale, or can't have one, or need their errors."""
    config, wire = draft.config.compression, plan.collectives.gradient_reduce
    scaled, problems = plan.precision.loss_scale is not None, []
    settings = plan.extensions.get(EXTENSION)
    if wire.format == "float16" and plan.precision.compute != "float16" and not scaled:
        reason = "gradients in float16 on the wire overflow above 65504, and no loss scale would notice (compute is not float16)."
        remedy = "Use compression.gradient_reduce=bfloat16, or precision.loss_scale.enabled=true."
        problems.append(Problem("compression.gradient_reduce", reason, remedy))
    if settings is not None and settings.feedback and scaled and not settings.traffic:
        reason = "errors are kept in units of the loss scale, which changes from step to step."
        remedy = "Use precision=bf16 or fp32, or compression.error_feedback=false."
        problems.append(Problem("compression.error_feedback", reason, remedy))
    if (wire.format in NEEDS_FEEDBACK or (settings and settings.traffic)) and config.error_feedback is False:
        reason = f"{wire.format} loses most of each message; without error feedback training does not converge."
        problems.append(Problem("compression.error_feedback", reason, "Leave it out, or use compression.gradient_reduce=int8."))
    return problems


def _check_numbers(draft: PlanDraft) -> list[Problem]:
    """Values that mean nothing."""
    c = draft.config.compression
    average = f"an average of {c.error_average} of the last error, forgotten every {c.error_reset} updates, can't be had."
    rows = (
        (c.rounding not in ROUNDINGS, "rounding", f"{c.rounding!r} is not one of {', '.join(ROUNDINGS)}.",
         did_you_mean(c.rounding, ROUNDINGS).capitalize()),
        (not 0 <= c.error_average < 1 or c.error_reset < 0, "error_average", average, "Use 0 or more, below 1; error_reset: 0 or more."),
        (c.pipeline_activations != "native", "pipeline_activations",
         "activations between stages travel in the dtype of compute, in this version.", "Leave it out; precision=bf16 halves them."),
        (not 0 <= c.warmup < 1, "warmup", f"{c.warmup} is no share of train.steps.", "Use 0 or more, below 1."),
        (c.node_ranks is not None and c.node_ranks < 1, "node_ranks", f"a node has no {c.node_ranks} ranks.", "Use 1 or more, or null."),
        (c.rank < 1, "rank", f"{c.rank} is no rank of a matrix.", "Use 1 or more."),
        (not 0 < c.density <= 1, "density", f"{c.density} is no share of the elements.", "Use more than 0, at most 1."),
    )  # fmt: skip
    return [Problem(f"compression.{key}", reason, remedy) for wrong, key, reason, remedy in rows if wrong]


def _check_thin(plan: Plan, draft: PlanDraft) -> list[Problem]:
    """What PowerSGD can't do."""
    wire = plan.collectives.gradient_reduce
    if wire.format != "powersgd":
        return []
    layout, cut = plan.layout, plan.placement.optimizer
    copies = layout.size(tuple(a for a in GRADIENT_AXES if a not in cut))
    narrower = any(
        0 < layout.size(axes) < layout.size(cut) for axes in (plan.placement.parameters, plan.placement.gradients) if axes
    )
    if wire.algorithm != "hierarchical" and (layout.size(cut) == 1 or (copies == 1 and not narrower)):
        return []
    reason = "powersgd sums whole matrices over all data ranks at once; here gradients are summed level by level, in parts of matrices."
    remedy = "Use compression.algorithm=flat and zero.stage 0 to 3, or another format."
    return [Problem("compression.gradient_reduce", reason, remedy)]


def _check_rules(plan: Plan, draft: PlanDraft) -> list[Problem]:
    """What update rules that say what travels can't be combined with."""
    settings = plan.extensions.get(EXTENSION)
    if settings is None or not settings.traffic:
        return []
    name, wire, problems = ruled(draft), plan.collectives.gradient_reduce.format, []
    if plan.precision.loss_scale is not None:
        reason = f"{name} keeps errors and momentum in units of the loss scale, which changes from step to step."
        problems.append(Problem("optimizer.name", reason, "Use precision=bf16 or fp32."))
    if wire in CASTS and wire != "native":
        reason = f"{name} sends few bits with error feedback, and {wire} is a plain cast."
        problems.append(Problem("compression.gradient_reduce", reason, f"Leave it out, or use one of {', '.join(BLOCKS)}."))
    return problems
