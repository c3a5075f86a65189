"""Bytes on the fullest rank. States are exact: they come from the layout that the engine allocates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from partita.plan.closed import cut_key, empty_layout, merged_layouts
from partita.plan.draft import PlanDraft
from partita.plan.kept import activations_by_rank
from partita.plan.parts import rank_parts
from partita.plan.plan import Plan
from partita.plan.rank_sizes import RankSizes, rank_sizes
from partita.state.layout import StateLayout, build_layout, size_of

Placed = dict[tuple[str, str], int]  # (category, place) -> bytes


@dataclass(frozen=True)
class RankMemory:
    """Of one rank of the pipeline axis. states: at rest, by (category, place). activations, working: for a moment, by what they are."""

    states: Placed
    activations: dict[str, int]
    working: dict[str, int]

    @property
    def on_device(self) -> int:
        """Bytes that the accelerator holds at the peak."""
        states = sum(size for (_, place), size in self.states.items() if place == "accelerator")
        return states + sum(self.activations.values()) + sum(self.working.values())


def fullest_rank(draft: PlanDraft, plan: Plan) -> RankMemory:
    """What the rank has whose accelerator is fullest; of a pipeline's ranks that need not be the one with most states."""
    ranks = zip(_placed_by_rank(draft, plan), activations_by_rank(draft, plan), working_by_rank(draft, plan), strict=True)
    return max((RankMemory(*rank) for rank in ranks), key=lambda rank: rank.on_device)


def state_layouts(draft: PlanDraft, plan: Plan) -> Iterator[StateLayout]:
    """The layout of each rank of the pipeline axis, bucket by bucket."""
    rules = draft.rule_layouts(plan)
    for part in rank_parts(draft.model, plan.layout):
        yield build_layout(part, plan, rules, draft.config.optimizer)


def state_bytes(draft: PlanDraft, plan: Plan) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer at rest on the rank with most of them, in all places, padding included."""
    total: dict[str, int] = {}
    for (category, _), size in placed_bytes(draft, plan).items():
        total[category] = total.get(category, 0) + size
    return total


def placed_bytes(draft: PlanDraft, plan: Plan) -> Placed:
    """`state_bytes` by (category, place); places where nothing of a category lies are left out, but for the accelerator."""
    return max(_placed_by_rank(draft, plan), key=lambda b: sum(b.values()))


def _placed_by_rank(draft: PlanDraft, plan: Plan) -> list[Placed]:
    """Found once for all plans that cut and keep states alike: the planner asks for many."""
    layout, schedule = plan.layout, plan.schedule
    sums = (schedule.micro_batches > 1, schedule.reduce_every > 1)
    key = (
        "placed",
        cut_key(layout),
        layout.replicate,
        layout.shard,
        layout.context,
        plan.placement,
        plan.tiers,
        plan.precision,
        sums,
    )
    if key not in draft.cache:
        draft.cache[key] = _place(draft, plan)
    return draft.cache[key]


def _place(draft: PlanDraft, plan: Plan) -> list[Placed]:
    tiers = plan.tiers
    moved = [t for t in (tiers.parameters, tiers.gradients, tiers.optimizer) if t.place != "accelerator"]
    # where a bucket is cut is rounded, so parts of buckets don't add up as whole ones do
    whole = all(t.fraction == 1.0 for t in moved)
    places = dict.fromkeys(["accelerator", *(t.place for t in moved)])

    def of(layout: StateLayout) -> Placed:
        found = {(category, place): size for place in places for category, size in layout_bytes(layout, place).items()}
        return {key: size for key, size in found.items() if size or key[1] == "accelerator"}

    return [of(layout) for layout in (merged_layouts(draft, plan) if whole else state_layouts(draft, plan))]


def layout_bytes(layout: StateLayout, place: str = "accelerator") -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer of one layout in one place."""
    return layout.bytes(place)


def working_by_rank(draft: PlanDraft, plan: Plan) -> list[dict[str, int]]:
    """What each rank of the pipeline axis holds for a moment, or for use again: weights of the units that are gathered, gradients that are
    being reduced, and messages between stages."""
    state, streams = empty_layout(draft, plan), _streams(plan)
    stream = draft.unit_input_bytes(plan) // (plan.layout.tensor if plan.layout.sequence_parallel else 1)
    out = []
    for rank, sizes in enumerate(rank_sizes(draft, plan.layout)):
        found = {
            "weights gathered": _gathered(draft, plan, sizes),
            **_reduced(plan, sizes, state),
            "messages between stages": streams[rank] * stream,
        }
        out.append({name: size for name, size in found.items() if size})
    return out


def _gathered(draft: PlanDraft, plan: Plan, sizes: RankSizes) -> int:
    layout, placement = plan.layout, plan.placement
    away = plan.tiers.parameters.place != "accelerator"
    if not (layout.size(placement.parameters) > 1 or (away and placement.parameters)):
        return 0
    ahead = 1 + int(plan.extensions.get("prefetch", 1))
    longer = {"run": min(sizes.stage + sizes.block, sizes.blocks), "step": sizes.blocks} if layout.pipeline > 1 else {}
    blocks = max(longer.get(plan.schedule.gather, 0), min(ahead * sizes.block, sizes.blocks))
    return (sizes.root + blocks) * size_of(plan.precision.compute)


def _reduced(plan: Plan, sizes: RankSizes, state: StateLayout) -> dict[str, int]:
    placement, cut = plan.placement, plan.layout.size(plan.placement.optimizer)
    stows = plan.tiers.gradients.place != "accelerator"
    kept = sizes.blocks if plan.schedule.reduce_every > 1 else min(2 * sizes.block, sizes.blocks)
    found = {}
    if (cut > 1 or stows) and (placement.gradients or not state.accumulates):
        found["gradients being reduced"] = (sizes.root + kept) * state.gradient_dtype.itemsize
    if cut > 1 and stows:
        found["gradients on their way to their tier"] = (sizes.root + kept) // cut * size_of(plan.precision.gradient)
    return found


def _streams(plan: Plan) -> list[int]:
    """Messages that a rank of the pipeline axis holds at once: for each neighbour one that is worked on, one on its way there, and one that
    is awaited."""
    ranks, placed = plan.layout.pipeline, plan.layout.stage_ranks or tuple(range(plan.layout.pipeline))
    pairs = {(a, b) for a, b in pairwise(placed) if a != b}
    return [3 * sum(rank in pair for pair in pairs) for rank in range(ranks)]


def words(size: float) -> str:
    """Bytes in the unit that makes a number between 1 and 1024, e.g. `1.50 GiB`."""
    value: Any = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
