"""Seconds of arithmetic: a roofline for each block, the slowest stage of a pipeline, and the stages that wait for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from partita.plan.activations import Trace
from partita.plan.draft import PlanDraft
from partita.plan.kept import logit_bytes, made_bytes, trace
from partita.plan.operators import ATTENTION, keeps
from partita.plan.parts import stage_units
from partita.plan.plan import Plan
from partita.plan.schedules import bubble, chunks_of, stretch
from partita.plugin.types import Cost

# How often what is saved for backward crosses memory: written and read forward, read backward, and as much for its gradient.
CROSSINGS = 4
# Of forward and backward together, forward is a third of the matrix products.
FORWARD = 1 / 3


@dataclass(frozen=True)
class Work:
    """FLOPs of forward and backward for one token: of each block's matrices, of its attention (by sequence), and of the root.

    matched: share of a block's matrices that lies in modules which are recomputed selectively.
    """

    blocks: Mapping[str, float]
    attention: float
    root: float
    matched: float


def work_of(draft: PlanDraft, plan: Plan) -> Work:
    """The work of the model for one token, found once for each setting of recompute."""
    sequence = draft.config.data.sequence
    key = ("work", sequence, plan.activations.patterns)
    if key not in draft.cache:
        draft.cache[key] = _work(draft, sequence, plan.activations.patterns)
    return draft.cache[key]


def _work(draft: PlanDraft, sequence: int, patterns: tuple[str, ...]) -> Work:
    model = draft.model
    total = model.flops_per_token(sequence)
    matrices = {u.name: 0 for u in model.units}
    largest = 0
    for p in model.parameters:
        if len(p.shape) > 1:
            matrices[p.unit] += p.numel
            largest = max(largest, p.numel) if p.unit == model.root else largest
    attention = total - model.flops_per_token(0)
    head = min(
        6.0 * largest, total - attention
    )  # an embedding that is only looked up costs nothing; the output layer is as large
    rest, inside = total - attention - head, sum(matrices[b] for b in model.blocks)
    blocks = {b: rest * matrices[b] / inside if inside else 0.0 for b in model.blocks}
    root = head if inside else total - attention
    return Work(blocks, attention / max(1, len(model.blocks)), root, _matched_share(draft, patterns))


def _matched_share(draft: PlanDraft, patterns: tuple[str, ...]) -> float:
    """Of the first block's matrices."""
    model = draft.model
    if not patterns or not model.blocks or model.module is None:
        return 0.0
    first = model.blocks[0]
    found = [name for name in model.matching_modules(patterns) if name.startswith(first + ".")]
    inside = {p.name: p.numel for p in model.parameters if p.unit == first and len(p.shape) > 1}
    matched = sum(n for name, n in inside.items() if any(name.startswith(f + ".") for f in found))
    return matched / max(1, sum(inside.values()))


# ------------------------------------------------------------------ seconds


def compute_costs(draft: PlanDraft, plan: Plan, update: bool = True) -> list[Cost]:
    """Arithmetic and memory traffic of the slowest stage, and the update. Nothing where the device's rates are not known."""
    rates, layout = draft.cluster.rates, plan.layout
    flops = rates.flops.get(plan.precision.compute)
    if not flops:
        return []
    share = draft.cluster.share(layout.world)
    matrices, traffic, passes = _slowest_stage(draft, plan, flops * share, (rates.memory or float("inf")) * share)
    again = _again_words(plan)
    many = plan.schedule.micro_batches
    # a rank's fixed cost is its own core's; ranks that share cores share that too
    fixed = (
        passes
        * rates.overhead
        * max(1.0, layout.world / draft.cluster.nodes / draft.cluster.cores * (not draft.cluster.accelerator))
    )
    costs = [
        Cost("compute", f"matrix products{again}", seconds=matrices * many, repeated=True),
        Cost("compute", "elementwise and loss", seconds=traffic * many, repeated=True),
        Cost("compute", "fixed cost of blocks", seconds=fixed * many, repeated=True),
        Cost("compute", "update", seconds=_update(draft, plan, (rates.memory or float("inf")) * share) if update else 0.0),
    ]
    return [c for c in costs if c.seconds]


def _again_words(plan: Plan) -> str:
    return {"full": ", forward again", "selective": ", part of forward again", "operators": ", part of forward again"}.get(
        plan.activations.default, ""
    )


def _slowest_stage(draft: PlanDraft, plan: Plan, flops: float, memory: float) -> tuple[float, float, float]:
    """(seconds of matrices, seconds of traffic, passes of blocks) for one micro-batch on the stage that takes longest."""
    layout, work = plan.layout, work_of(draft, plan)
    tokens = plan.schedule.micro_batch * draft.config.data.sequence / layout.context
    found = trace(draft, plan)
    decided, known = dict(plan.activations.units), {}
    stages = _ranks_units(draft, plan)
    best = (0.0, 0.0, 0.0)
    for index, units in enumerate(stages):
        matrices = made = passes = 0.0
        for u in units:
            if u not in work.blocks:
                continue
            kind = (found.kinds.get(u), decided.get(u), work.blocks[u])
            if kind not in known:
                known[kind] = _of_block(plan, work, found, u)
            here = known[kind]
            matrices, made, passes = matrices + here[0], made + here[1], passes + here[2]
        last = index == len(stages) - 1
        matrices += work.root if last else 0.0
        traffic = CROSSINGS * (made + (logit_bytes(found, plan) if last else 0))
        best = max(best, (tokens * matrices / layout.tensor / flops, traffic / memory, passes), key=lambda x: x[0] + x[1])
    return best


def _of_block(plan: Plan, work: Work, found: Trace, unit: str) -> tuple[float, float, float]:
    """(FLOPs of a token, bytes made of a micro-batch, passes) of a block, with what is computed again."""
    matrices = (work.blocks[unit] + work.attention) * (1 + FORWARD * _again(plan, work, unit))
    made = made_bytes(found.units, plan, unit) * (1 + FORWARD * _again(plan, work, unit, False))
    return matrices, made, 1 + FORWARD * (plan.activations.of(unit) != "keep")


def _ranks_units(draft: PlanDraft, plan: Plan) -> list[list[str]]:
    """Units of each rank along the pipeline, the one with the last stage last."""
    stages, ranks = stage_units(draft.model, plan.layout), plan.layout.stage_ranks
    if len(ranks) != len(stages):
        return stages
    joined: dict[int, list[str]] = {}
    for rank, units in zip(ranks, stages, strict=True):
        joined.setdefault(rank, []).extend(units)
    last = ranks[-1]
    return [units for rank, units in joined.items() if rank != last] + [joined[last]]


def _again(plan: Plan, work: Work, unit: str, products: bool = True) -> float:
    """Share of a unit's forward that is computed again: of its matrix products, or of the rest."""
    match plan.activations.of(unit):
        case "full":
            return 1.0
        case "selective":
            return work.matched
        case "operators":
            kept = plan.activations.operators
            parts = (work.blocks[unit] * (not keeps("mm", kept)), work.attention * (not keeps(ATTENTION, kept)))
            return sum(parts) / ((work.blocks[unit] + work.attention) or 1.0) if products else 1.0
    return 0.0


def _update(draft: PlanDraft, plan: Plan, memory: float) -> float:
    """Seconds of the optimizer where its states are on the device: read all of them, write all but the gradient."""
    if plan.tiers.optimizer.place != "accelerator":
        return 0.0
    states = draft.state_bytes(plan)
    shard = states["gradients"] / plan.layout.size(plan.placement.optimizer if not plan.placement.gradients else ())
    return (2 * states["optimizer"] + shard) / memory


def waiting_cost(draft: PlanDraft, plan: Plan, costs: list[Cost]) -> list[Cost]:
    """The pipeline's bubble: what stages wait for each other, on top of all that each micro-batch takes."""
    layout, schedule, cluster = plan.layout, plan.schedule, draft.cluster
    if layout.pipeline == 1:
        return []
    beside = layout.world / cluster.nodes / layout.pipeline  # ranks of one stage in a node
    cores = None if cluster.accelerator else max(1.0, cluster.cores / beside)
    stages = len(layout.stage_cuts) + 1
    chunks = chunks_of(schedule.name, stages, layout.pipeline)
    known = bool(schedule.in_flight)  # then the orders that run have been played through
    waiting = schedule.bubble if known else bubble(schedule.name, layout.pipeline, schedule.micro_batches, chunks)
    factor = stretch(waiting, layout.pipeline, cores) - 1
    busy = sum(c.seconds for c in costs if c.repeated and not c.overlap)
    return [Cost("compute", f"pipeline bubble, {factor:.1%}", seconds=busy * factor)] if factor and busy else []


# Messages that run beside arithmetic slow it down: by 1.1 to 1.3 (Miao et al. 2022, Galvatron, section 3.3).
CONTENTION = 0.2


def step_seconds(costs: list[Cost], accelerator: bool = True) -> float:
    """Seconds of one step: arithmetic, what everything waits for, and what does not fit beside the arithmetic.

    accelerator: without one, messages take the cores that compute, and nothing is hidden.
    """
    arithmetic = sum(c.seconds for c in costs if c.category == "compute")
    others = [c for c in costs if c.category != "compute"]
    if not accelerator:
        return arithmetic + sum(c.seconds for c in others)
    hidden = [c for c in others if c.overlap]
    room = max((c.overlap for c in hidden), default=0.0) * arithmetic
    late = max([sum(c.seconds for c in hidden) - room, *(c.seconds - c.overlap * arithmetic for c in hidden), 0.0])
    beside = CONTENTION * (sum(c.seconds for c in hidden) - late)
    return arithmetic + sum(c.seconds for c in others if not c.overlap) + late + beside
