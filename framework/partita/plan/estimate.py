"""The core's own estimate of a plan: memory by category, bytes on each link, seconds where the rates are known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from partita.plan.draft import PlanDraft
from partita.plan.memory import activation_bytes, state_bytes, working_bytes
from partita.plan.plan import GRADIENT_AXES, Plan, Wire
from partita.plugin.types import Cost
from partita.state.layout import size_of

MEMORY = ("parameters", "gradients", "optimizer", "activations", "buffers", "working")
# Share of the peak that large dense training reaches (Narayanan et al. 2021, table 1: 44 to 52 %; Llama 3: 38 to 43 %).
EFFICIENCY = 0.4


def estimate_plan(draft: PlanDraft, plan: Plan) -> list[Cost]:
    """All costs that the core knows of, on the fullest rank and for one step."""
    return [*memory_costs(draft, plan), *communication_costs(draft, plan), *compute_costs(draft, plan)]


# ------------------------------------------------------------------ memory


def memory_costs(draft: PlanDraft, plan: Plan) -> list[Cost]:
    """Bytes of each category on the fullest rank, by the place where the tiers put them."""
    what = {
        "parameters": plan.precision.compute,
        "gradients": plan.precision.gradient,
        "optimizer": _optimizer_words(draft, plan),
    }
    costs = []
    for category, size in state_bytes(draft, plan).items():
        tier = getattr(plan.tiers, category)
        away = int(size * tier.fraction) if tier.place != "accelerator" else 0
        costs += [Cost(category, what[category], size - away, exact=True)] if size > away or not away else []
        costs += [Cost(category, what[category], away, tier.place, exact=True)] if away else []
    tier = plan.tiers.activations
    for words, size in activation_bytes(draft, plan).items():
        away = int(size * tier.fraction) if tier.place != "accelerator" and words == "kept for backward" else 0
        costs += [Cost("activations", words, size - away)] + ([Cost("activations", words, away, tier.place)] if away else [])
    costs.append(Cost("buffers", "model buffers", draft.model.buffer_bytes, exact=True))
    costs += [Cost("working", words, size) for words, size in working_bytes(draft, plan).items()]
    return costs


def _optimizer_words(draft: PlanDraft, plan: Plan) -> str:
    master = [f"master {plan.precision.master}"] if plan.precision.master != plan.precision.compute else []
    return ", ".join([*master, *draft.optimizer_states]) or "nothing kept"


def memory_total(costs: Iterable[Cost], place: str = "accelerator") -> int:
    """Predicted peak on the fullest rank in one place."""
    return sum(c.bytes for c in costs if c.category in MEMORY and c.place == place)


# ------------------------------------------------------------------ communication


def communication_costs(draft: PlanDraft, plan: Plan) -> list[Cost]:
    """What the data axes send in one step from one rank, by rings: (n - 1) / n of the data for a gather or scatter."""
    layout, placement, schedule = plan.layout, plan.placement, plan.schedule
    share = layout.pipeline * layout.tensor
    weights = draft.model.numel * size_of(plan.precision.compute) // share
    gradients = draft.model.trainable * _wire_size(plan.collectives.gradient_reduce, plan.precision.reduce) // share
    cut, rest = placement.optimizer, tuple(a for a in GRADIENT_AXES if a not in placement.optimizer)
    width = layout.size(cut)
    times = schedule.micro_batches if placement.gradients else 1
    costs = [
        _sent(draft, plan, cut, "gradients scattered", _ring(gradients, width) * times),
        _sent(draft, plan, rest, "gradients summed", 2 * _ring(gradients // width, layout.size(rest))),
    ]
    stored = layout.size(placement.parameters)
    if stored > 1:
        costs.append(
            _sent(draft, plan, placement.parameters, "weights gathered", 2 * schedule.micro_batches * _ring(weights, stored))
        )
    wider = tuple(a for a in cut if a not in placement.parameters)
    costs.append(_sent(draft, plan, wider, "weights after the update", _ring(weights // stored, layout.size(wider))))
    return [c for c in costs if c.bytes]


def _ring(size: int, ranks: int) -> int:
    return size * (ranks - 1) // ranks


def _wire_size(wire: Wire, native: str) -> int:
    """Bytes of an element on the wire; formats below 8 bits count as one byte with their scales."""
    name = native if wire.format == "native" else wire.format
    return 1 if name in ("int8", "onebit") else size_of(name)


def _sent(draft: PlanDraft, plan: Plan, axes: Sequence[str], what: str, size: int) -> Cost:
    place = draft.cluster.link(plan.layout, tuple(axes))
    bandwidth = draft.cluster.bandwidth(place)
    return Cost("communication", what, size, place, size / bandwidth if bandwidth else 0.0)


# ------------------------------------------------------------------ compute


def model_flops(draft: PlanDraft, plan: Plan) -> float:
    """FLOPs of one step over all ranks, without recompute (what MFU counts)."""
    sequence = draft.config.data.sequence
    return draft.model.flops_per_token(sequence) * plan.schedule.global_batch * sequence


def compute_costs(draft: PlanDraft, plan: Plan) -> list[Cost]:
    """Seconds of arithmetic where the device's rate is known, and of stages that wait."""
    rate = draft.cluster.flops.get(plan.precision.compute)
    if not rate:
        return []
    full = sum(plan.activations.of(u) == "full" for u in draft.model.blocks)
    again = 1 + full / max(1, len(draft.model.blocks)) / 3  # one more forward is a third of forward and backward
    seconds = model_flops(draft, plan) * again / (plan.layout.world * rate * EFFICIENCY)
    costs = [Cost("compute", f"arithmetic at {EFFICIENCY:.0%} of peak", seconds=seconds)]
    if plan.layout.pipeline > 1:
        bubble = (plan.layout.pipeline - 1) / plan.schedule.micro_batches
        costs.append(Cost("compute", f"pipeline bubble, {bubble:.1%}", seconds=seconds * bubble))
    return costs
