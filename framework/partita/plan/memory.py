"""Bytes on the fullest rank. States are exact: they come from the layout that the engine allocates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from partita.plan.activations import Trace, UnitActivations, larger, trace_activations
from partita.plan.closed import merged_layouts
from partita.plan.draft import PlanDraft
from partita.plan.model_spec import ModelSpec
from partita.plan.parts import rank_parts, stage_units
from partita.plan.plan import Plan
from partita.plan.schedules import in_flight
from partita.state.layout import StateLayout, build_layout, dtype_of, size_of


def state_layouts(draft: PlanDraft, plan: Plan) -> Iterator[StateLayout]:
    """The layout of each rank of the pipeline axis, bucket by bucket."""
    rules = draft.rule_layouts(plan)
    for part in rank_parts(draft.model, plan.layout):
        yield build_layout(part, plan, rules, draft.config.optimizer)


def state_bytes(draft: PlanDraft, plan: Plan) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer at rest on a rank of the fullest stage, in all places, padding included."""
    total: dict[str, int] = {}
    for (category, _), size in placed_bytes(draft, plan).items():
        total[category] = total.get(category, 0) + size
    return total


def placed_bytes(draft: PlanDraft, plan: Plan) -> dict[tuple[str, str], int]:
    """`state_bytes` by (category, place); places where nothing of a category lies are left out, but for the accelerator."""
    tiers = plan.tiers
    moved = [t for t in (tiers.parameters, tiers.gradients, tiers.optimizer) if t.place != "accelerator"]
    # where a bucket is cut is rounded, so parts of buckets don't add up as whole ones do
    whole = all(t.fraction == 1.0 for t in moved)
    places = dict.fromkeys(["accelerator", *(t.place for t in moved)])

    def of(layout: StateLayout) -> dict[tuple[str, str], int]:
        found = {(category, place): size for place in places for category, size in layout_bytes(layout, place).items()}
        return {key: size for key, size in found.items() if size or key[1] == "accelerator"}

    layouts = merged_layouts(draft, plan) if whole else state_layouts(draft, plan)
    return max((of(layout) for layout in layouts), key=lambda b: sum(b.values()))


def layout_bytes(layout: StateLayout, place: str = "accelerator") -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer of one layout in one place."""
    return layout.bytes(place)


def working_bytes(draft: PlanDraft, plan: Plan) -> dict[str, int]:
    """What a rank holds for a moment, or for use again: weights of the units that are gathered, gradients that are being reduced."""
    layout, placement = plan.layout, plan.placement
    root, block = (size // layout.tensor for size in draft.block_bytes(plan.precision.compute))
    away = plan.tiers.parameters.place != "accelerator"
    found = {}
    if layout.size(placement.parameters) > 1 or (away and placement.parameters):
        ahead = min(1 + int(plan.extensions.get("prefetch", 1)), max(1, len(draft.model.blocks)))
        stage, rank = _stage_bytes(draft, plan)
        longer = {"run": min(stage + block, rank), "step": rank} if layout.pipeline > 1 else {}
        found["weights gathered"] = root + max(longer.get(plan.schedule.gather, 0), min(ahead * block, rank))
    state, cut = merged_layouts(draft, plan)[0], layout.size(placement.optimizer)
    stows = plan.tiers.gradients.place != "accelerator"
    kept = _stage_bytes(draft, plan)[1] if plan.schedule.reduce_every > 1 else 2 * block
    elements = (root + kept) // size_of(plan.precision.compute)
    if (cut > 1 or stows) and (placement.gradients or not state.accumulates):
        found["gradients being reduced"] = elements * state.gradient_dtype.itemsize
    if cut > 1 and stows:
        found["gradients on their way to their tier"] = elements // cut * size_of(plan.precision.gradient)
    return found


def _stage_bytes(draft: PlanDraft, plan: Plan) -> tuple[int, int]:
    """Weights of the blocks of the largest stage, and of the fullest rank with all of its stages, when they are whole."""
    layout = plan.layout
    numel = {u.name: u.numel for u in draft.model.units if u.name != draft.model.root}
    stages = [sum(numel.get(u, 0) for u in units) for units in stage_units(draft.model, layout)]
    placed = layout.stage_ranks or tuple(range(len(stages)))
    ranks = [sum(n for n, r in zip(stages, placed, strict=False) if r == rank) for rank in range(layout.pipeline)]
    width = size_of(plan.precision.compute)
    return max(stages) * width // layout.tensor, max(ranks) * width // layout.tensor


def trace(draft: PlanDraft, plan: Plan) -> Trace:
    """Activations of one micro-batch by unit, as a rank computes them if nothing is recomputed or cut by tensor parallelism.

    Traced for one and two sequences; what more of them keep follows, since every tensor has a batch dimension or none.
    """
    size, chosen = plan.schedule.micro_batch, (plan.activations.patterns, plan.activations.operators)
    sequence = -(-draft.config.data.sequence // plan.layout.context)
    key = ("trace", size, sequence, plan.precision.compute, chosen)
    if key not in draft.cache:
        if size <= 2:
            draft.cache[key] = _trace(draft.model, plan, (size, sequence))
        else:
            one, two = (trace(draft, replace(plan, schedule=replace(plan.schedule, micro_batch=n))) for n in (1, 2))
            unknown = one.reason or two.reason
            draft.cache[key] = _trace(draft.model, plan, (size, sequence)) if unknown else larger(one, two, size)
    return draft.cache[key]


def _trace(model: ModelSpec, plan: Plan, shape: tuple[int, int]) -> Trace:
    dtype = dtype_of(plan.precision.compute)
    matched = model.matching_modules(plan.activations.patterns) if plan.activations.patterns else []
    traced = trace_activations(model.module, model.blocks, model.root, shape, dtype, matched, plan.activations.operators)
    own = getattr(model.module, "activation_bytes", None)
    if traced.reason and callable(own):
        sizes: dict[str, int] = own(*shape, dtype.itemsize)
        return Trace({name: UnitActivations(kept=size) for name, size in sizes.items()}, reason=traced.reason)
    return traced


AWAY = "kept for backward, in its tier"


def activation_bytes(draft: PlanDraft, plan: Plan) -> dict[str, int]:
    """What a rank keeps for backward, and what the loss or the blocks need on top, whichever is more; empty where the model can't be
    traced. AWAY is the part of what is kept that lies in the tier of activations."""
    found = trace(draft, plan)
    if not found.units:
        return {}
    total = {"kept for backward": max(_kept_by_ranks(draft, plan, found))}
    if plan.tiers.activations.place != "accelerator":
        # what blocks keep leaves as they end; the one at work has its own here
        root = max(_kept_by_ranks(draft, plan, found, (draft.model.root,)))
        leaves = int((total["kept for backward"] - root) * plan.tiers.activations.fraction)
        total |= {
            "kept for backward": total["kept for backward"] - leaves,
            AWAY: leaves,
        }
    moments: list[dict[str, int]] = [_at_loss(found, plan), _in_blocks(draft, plan, found, total.get(AWAY, 0))]
    largest = max(moments, key=lambda moment: sum(moment.values()))
    total |= largest
    return {name: size for name, size in total.items() if size}


def _at_loss(found: Trace, plan: Plan) -> dict[str, int]:
    """On top of what is kept, when the loss is computed: then all blocks have run, and none is at work."""
    return {"logits and loss": logit_bytes(found, plan)}


def _in_blocks(draft: PlanDraft, plan: Plan, found: Trace, leaves: int) -> dict[str, int]:
    """On top of what is kept, in backward (or, where activations leave as blocks end, in forward): the logits are gone by then."""
    blocks, tensor = draft.model.blocks, plan.layout.tensor
    again, largest = _at_work(draft, plan, found)
    one = int(max((kept_bytes(found.units, plan, u) for u in blocks), default=0))
    if leaves:  # accelerators bring the block before back in the meantime
        one = min(leaves, one * (2 if draft.cluster.accelerator else 1))
    if leaves and not any(_again(found.units, plan, u) for u in blocks):
        return {"offloaded, one block": one}
    return {
        "offloaded, one block": one if leaves else 0,
        "recomputed, one block": again,
        "gradient in a block": largest // tensor,
    }


def _at_work(draft: PlanDraft, plan: Plan, found: Trace) -> tuple[int, int]:
    """(bytes made again, largest gradient) of the block whose backward has most in memory, on top of all that is kept.

    What the blocks after it kept is gone by then; a pipeline has other micro-batches under way, and is taken at its most.
    """
    blocks, tensor = draft.model.blocks, plan.layout.tensor
    if not plan.activations.units:  # all alike: the last one
        again = max((_again(found.units, plan, u) for u in blocks), default=0) // tensor
        return again, max((found.units[u].largest for u in blocks if u in found.units), default=0)
    best, later = (0, 0), 0
    for name in reversed(blocks):
        largest = found.units[name].largest if name in found.units else 0
        again = max(0, _again(found.units, plan, name) // tensor - later)
        best = max(best, (again, largest), key=sum)
        later += int(kept_bytes(found.units, plan, name)) if plan.layout.pipeline == 1 else 0
    return best


def _kept_by_ranks(draft: PlanDraft, plan: Plan, found: Trace, only: tuple[str, ...] = ()) -> list[int]:
    """What each rank of the pipeline axis keeps when it keeps most: of each of its stages the micro-batches that are on their way.

    only: count these units; default: all.
    """
    layout, schedule, root = plan.layout, plan.schedule, draft.model.root
    stages = stage_units(draft.model, layout)
    ranks = layout.stage_ranks or tuple(range(layout.pipeline))
    chunks = max(1, len(stages) // layout.pipeline)
    usual = in_flight(schedule.name, layout.pipeline, schedule.micro_batches, chunks)
    kept = [0.0] * layout.pipeline
    for stage, units in enumerate(stages):
        many = schedule.in_flight[stage] if schedule.in_flight else usual
        rank = ranks[stage] if stage < len(ranks) else layout.pipeline - 1
        kept[rank] += many * sum(kept_bytes(found.units, plan, u) for u in units if not only or u in only)
    if not any(u.name == root for u in draft.model.units):  # a root without parameters keeps something all the same
        kept[0] += usual * kept_bytes(found.units, plan, root)
    return [int(k) for k in kept]


def logit_bytes(found: Trace, plan: Plan) -> int:
    """Logits and their gradient as computed, and log-probabilities (and a copy to make them from) in float32.

    A loss over a cut vocabulary keeps no log-probabilities: it has one of the two for as long as it works.
    """
    width = size_of(plan.precision.compute)
    per_logit = 2 * width + 4 + (4 if width < 4 and plan.layout.tensor == 1 else 0)
    return found.output_numel * per_logit // plan.layout.tensor


def kept_bytes(units: dict[str, UnitActivations], plan: Plan, name: str) -> int:
    """What a unit keeps for backward of one micro-batch on a rank, under the plan's recompute.

    Tensor parallelism cuts what lies between its matrices; what is as large as the stream is cut only where it is cut by tokens too
    (Korthikanti et al. 2022, section 4.2), but for the attention's output, which is the input of a matrix that is cut.
    """
    unit, tensor = units.get(name, UnitActivations()), plan.layout.tensor
    by_tokens = tensor == 1 or plan.layout.sequence_parallel
    whole = 0 if by_tokens else max(0, unit.stream - unit.input)
    match plan.activations.of(name):
        case "full" if unit.input:
            return unit.input // (tensor if by_tokens else 1)
        case "selective":
            return whole + (unit.kept - whole - unit.matched) // tensor + unit.matched_input // (tensor if by_tokens else 1)
        case "operators" if unit.input:
            # what a matrix gives before its ranks' terms are summed is whole
            outputs = unit.outputs_stream + (unit.outputs - unit.outputs_stream) // tensor
            return unit.input // (tensor if by_tokens else 1) + outputs
    return whole + (unit.kept - whole) // tensor


def _again(units: dict[str, UnitActivations], plan: Plan, name: str) -> int:
    unit = units.get(name, UnitActivations())
    return {"full": unit.kept, "selective": unit.matched, "operators": unit.kept - unit.reused}.get(plan.activations.of(name), 0)


def words(size: float) -> str:
    """Bytes in the unit that makes a number between 1 and 1024, e.g. `1.50 GiB`."""
    value: Any = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
