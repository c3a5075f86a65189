"""A plan in one line."""

from __future__ import annotations

from partita.plan.plan import AXES, Plan


def plan_words(plan: Plan) -> str:
    """e.g. `pipeline 8 x shard 16 x tensor 8, 1f1b, 96 x 1 sequences, optimizer cut, recompute full`."""
    layout, schedule = plan.layout, plan.schedule
    axes = " x ".join(f"{a} {getattr(layout, a)}" for a in AXES if getattr(layout, a) > 1) or "1 rank"
    parts = [axes + (f" (expert {layout.expert})" if layout.expert > 1 else "")]
    if layout.sequence_parallel and layout.tensor > 1:
        parts.append("sequence parallel")
    if schedule.name != "none":
        each = len(layout.stage_ranks) // layout.pipeline
        parts.append(schedule.name + (f" {each}" if each > 2 else ""))
    parts.append(f"{schedule.micro_batches} x {schedule.micro_batch} sequences")
    cut = [s for s in ("parameters", "gradients", "optimizer") if layout.size(getattr(plan.placement, s)) > 1]
    if cut:
        narrow = [s for s in cut if getattr(plan.placement, s) != plan.placement.optimizer]
        parts.append(" + ".join(cut) + " cut" + (f" ({', '.join(narrow)} in groups)" if narrow else ""))
    if plan.activations.default != "keep":
        parts.append(f"recompute {plan.activations.default}")
    away = [f"{s} on {getattr(plan.tiers, s).place}" for s in ("parameters", "gradients", "optimizer", "activations")]
    parts += [a for a in away if not a.endswith("accelerator")]
    parts += wire_words(plan)
    return ", ".join(parts)


def wire_words(plan: Plan) -> list[str]:
    """What travels other than natively, and in two levels."""
    wires = {"gradients": plan.collectives.gradient_reduce, "weights": plan.collectives.parameter_gather}
    found = [f"{what} as {wire.format}" for what, wire in wires.items() if wire.format != "native"]
    return found + ["in two levels"] * any(wire.algorithm != "flat" for wire in wires.values())
