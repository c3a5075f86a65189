"""The core's own estimate of a plan: memory by category, bytes on each link, seconds where the rates are known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from partita.plan.draft import PlanDraft
from partita.plan.kept import AWAY
from partita.plan.links import message
from partita.plan.memory import fullest_rank
from partita.plan.plan import GRADIENT_AXES, Plan, Wire
from partita.plan.work import compute_costs, step_seconds, waiting_cost
from partita.plugin.types import Cost
from partita.state.layout import size_of

MEMORY = ("parameters", "gradients", "optimizer", "activations", "buffers", "working")


def estimate_plan(draft: PlanDraft, plan: Plan, added: Iterable[Cost] = ()) -> list[Cost]:
    """All costs on the fullest rank and for one step: those that the core knows of, and those `added` by plug-ins."""
    costs = [*memory_costs(draft, plan), *communication_costs(draft, plan), *added, *compute_costs(draft, plan)]
    return [*costs, *waiting_cost(draft, plan, costs)]


# ------------------------------------------------------------------ memory


def memory_costs(draft: PlanDraft, plan: Plan) -> list[Cost]:
    """Bytes of each category on the rank whose accelerator is fullest, by the place where the tiers put them."""
    what = {
        "parameters": plan.precision.compute,
        "gradients": plan.precision.gradient,
        "optimizer": _optimizer_words(draft, plan),
    }
    rank, costs = fullest_rank(draft, plan), []
    for (category, place), size in rank.states.items():
        if size or place == "accelerator":
            costs.append(Cost(category, what[category], size, place, exact=True))
    for words, size in rank.activations.items():
        away = words == AWAY
        costs.append(
            Cost(
                "activations",
                "kept for backward" if away else words,
                size,
                plan.tiers.activations.place if away else "accelerator",
            )
        )
    costs.append(Cost("buffers", "model buffers", draft.model.buffer_bytes, exact=True))
    costs += [Cost("working", words, size) for words, size in rank.working.items()]
    return costs


def _optimizer_words(draft: PlanDraft, plan: Plan) -> str:
    master = [f"master {plan.precision.master}"] if plan.precision.master != plan.precision.compute else []
    return ", ".join([*master, *dict.fromkeys(name for rule in draft.rules for name in rule.states())]) or "nothing kept"


def memory_total(costs: Iterable[Cost], place: str = "accelerator") -> int:
    """Predicted peak on the fullest rank in one place."""
    return sum(c.bytes for c in costs if c.category in MEMORY and c.place == place)


# ------------------------------------------------------------------ communication


def communication_costs(draft: PlanDraft, plan: Plan) -> list[Cost]:
    """What the data axes send in one step: each bucket once for each reduction or gather, by rings."""
    layout, placement, schedule = plan.layout, plan.placement, plan.schedule
    share = layout.pipeline * layout.tensor
    weights = int(draft.model.numel * _wire_size(plan.collectives.parameter_gather, plan.precision.compute)) // share
    gradients = int(draft.model.trainable * _wire_size(plan.collectives.gradient_reduce, plan.precision.reduce)) // share
    cut, rest = placement.optimizer, tuple(a for a in GRADIENT_AXES if a not in placement.optimizer)
    stored = layout.size(placement.parameters)
    times = schedule.micro_batches if placement.gradients else 1
    # a reduction runs beside backward: of the last micro-batch, or of each where gradients are cut
    behind = 2 / 3 if placement.gradients else 2 / 3 / schedule.micro_batches
    width = layout.size(cut)
    sent = partial(_in_buckets, draft, plan)
    wires = plan.collectives
    near_gradients = _inside(wires.gradient_reduce, draft.model.trainable * size_of(plan.precision.reduce) // share)
    near_weights = _inside(wires.parameter_gather, weights)
    wider = tuple(a for a in cut if a not in placement.parameters)
    costs = [
        sent(cut, "gradients scattered", gradients, "scatter", times, behind, near_gradients),
        sent(rest, "gradients summed", gradients // width, "sum", 1, behind, near_gradients and near_gradients // width),
        sent(placement.parameters, "weights gathered", weights, "gather", _gathers(draft, plan), 1.0, near_weights),
        sent(wider, "weights after the update", weights // stored, "gather", 1, 0.0, near_weights and near_weights // stored),
    ]
    return [c for c in costs if c.bytes]


def _gathers(draft: PlanDraft, plan: Plan) -> float:
    """How often a weight is gathered in one step: the root once, a block for forward and for backward unless it stays (`state.gathers`)."""
    passes, blocks = plan.schedule.micro_batches, len(draft.model.blocks)
    if plan.layout.pipeline > 1 or not draft.model.numel:
        return 2.0 * passes
    root = sum(u.numel for u in draft.model.units if u.name == draft.model.root) / draft.model.numel
    stay = min(1 + int(plan.extensions.get("prefetch", 1)), blocks)
    return root + (1 - root) * (2 * passes - stay * (2 * passes - 1) / max(1, blocks))


def _in_buckets(
    draft: PlanDraft,
    plan: Plan,
    axes: tuple[str, ...],
    what: str,
    data: int,
    operation: str,
    times: float,
    overlap: float,
    inside: int | None,
) -> Cost:
    """One message for each unit of a stage: latency counts for each. inside: bytes in a node, where the algorithm has two levels."""
    buckets = max(1, len(draft.model.units) // plan.layout.pipeline)
    near = None if inside is None else inside / buckets
    return message(
        draft.cluster,
        plan.layout,
        axes,
        what,
        data / buckets,
        operation,
        times=times * buckets,
        overlap=min(1.0, overlap),
        inside=near,
    )


def _inside(wire: Wire, size: int) -> int | None:
    """Bytes inside a node for an algorithm with two levels."""
    return size if wire.algorithm == "hierarchical" else None


def _wire_size(wire: Wire, native: str) -> float:
    """Bytes of an element on the wire."""
    if wire.size is not None:
        return wire.size
    return size_of(native if wire.format == "native" else wire.format)


# ------------------------------------------------------------------ the whole step


def model_flops(draft: PlanDraft, plan: Plan) -> float:
    """FLOPs of one step over all ranks, without recompute (what MFU counts)."""
    sequence = draft.config.data.sequence
    return draft.model.flops_per_token(sequence) * plan.schedule.global_batch * sequence


@dataclass(frozen=True)
class Speed:
    """What a plan is predicted to reach: seconds of a step, tokens/s of all ranks, and MFU where the peak is known."""

    seconds: float
    tokens: float
    mfu: float | None


def speed(draft: PlanDraft, plan: Plan, costs: list[Cost]) -> Speed | None:
    """The speed that costs come to; None where rates are not known."""
    total = step_seconds(costs, draft.cluster.accelerator)
    if not total or not any(c.category == "compute" for c in costs):
        return None
    peak = draft.cluster.flops.get(plan.precision.compute)
    mfu = model_flops(draft, plan) / (total * plan.layout.world * peak) if peak else None
    return Speed(total, plan.schedule.global_batch * draft.config.data.sequence / total, mfu)
