"""What ranks keep of a forward pass for backward, and what they need on top of it for a moment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from partita.plan.activations import Trace, UnitActivations, larger, trace_activations
from partita.plan.draft import PlanDraft
from partita.plan.model_spec import ModelSpec
from partita.plan.plan import Plan
from partita.plan.schedules import in_flight
from partita.plan.stages import stage_units
from partita.plan.styles import INNER
from partita.state.layout import dtype_of, size_of

AWAY = "kept for backward, in its tier"


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


@dataclass(frozen=True)
class _Share:
    """One rank of the pipeline axis. stages: (micro-batches on their way, blocks) of each. first, last: micro-batches on their way of the
    stage with that end of the model; None: it is elsewhere."""

    stages: tuple[tuple[float, tuple[str, ...]], ...]
    first: float | None
    last: float | None

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(unit for _, units in self.stages for unit in units)


def activation_bytes(draft: PlanDraft, plan: Plan) -> dict[str, int]:
    """`activations_by_rank` of the rank with most."""
    return max(activations_by_rank(draft, plan), key=lambda found: sum(found.values()))


def activations_by_rank(draft: PlanDraft, plan: Plan) -> list[dict[str, int]]:
    """For each rank of the pipeline axis what it keeps for backward, and what the loss or the blocks need on top, whichever is more; empty
    where the model can't be traced. AWAY is the part of what is kept that lies in the tier of activations."""
    found = trace(draft, plan)
    if not found.units:
        return [{}] * plan.layout.pipeline
    sizes = _sizes(found, plan)
    return [_of_rank(draft, plan, found, sizes, share) for share in _shares(draft, plan)]


class _Size(NamedTuple):
    """Bytes of a unit on a rank: kept for backward, of what backward computes again, of its largest tensor."""

    kept: int = 0
    again: int = 0
    largest: int = 0


def _sizes(found: Trace, plan: Plan) -> dict[str, _Size]:
    """Of each unit; of those that are alike found once."""
    decided, known, out = dict(plan.activations.units), {}, {}
    for name, unit in found.units.items():
        kind = (found.kinds[name], decided.get(name))
        if kind not in known:
            tensor = plan.layout.tensor
            known[kind] = _Size(kept_bytes(found.units, plan, name), _again(found.units, plan, name), unit.largest // tensor)
        out[name] = known[kind]
    return out


def _shares(draft: PlanDraft, plan: Plan) -> list[_Share]:
    """What each rank of the pipeline axis has when it keeps most."""
    layout, schedule = plan.layout, plan.schedule
    stages = stage_units(draft.model, layout)
    placed = layout.stage_ranks or tuple(range(layout.pipeline))
    usual = in_flight(schedule.name, layout.pipeline, schedule.micro_batches, max(1, len(stages) // layout.pipeline))
    many = [schedule.in_flight[s] if schedule.in_flight else usual for s in range(len(stages))]
    shares = []
    for rank in range(layout.pipeline):
        mine = [s for s in range(len(stages)) if s < len(placed) and placed[s] == rank]
        ends = [many[s] if s in mine else None for s in (0, len(stages) - 1)]
        shares.append(_Share(tuple((many[s], tuple(stages[s])) for s in mine), *ends))
    return shares


def _of_rank(draft: PlanDraft, plan: Plan, found: Trace, sizes: dict[str, _Size], share: _Share) -> dict[str, int]:
    ends = _ends(draft, plan, found, share)
    blocks = sum(many * sum(sizes[u].kept for u in units if u in sizes) for many, units in share.stages)
    total = {"kept for backward": int(ends + blocks)}
    if plan.tiers.activations.place != "accelerator":
        # what blocks keep leaves as they end; the one at work has its own here
        leaves = int(blocks * plan.tiers.activations.fraction)
        total = {"kept for backward": total["kept for backward"] - leaves, AWAY: leaves}
    here = [sizes[u] for u in share.blocks if u in sizes]
    moments: list[dict[str, int]] = [_in_blocks(draft, plan, here, total.get(AWAY, 0))]
    if share.last is not None:
        moments.append(_at_loss(found, plan))
    largest: dict[str, int] = max(moments, key=lambda moment: sum(moment.values()))
    total |= largest
    return {name: size for name, size in total.items() if size}


def _ends(draft: PlanDraft, plan: Plan, found: Trace, share: _Share) -> float:
    """What is kept by what stands in no block: before the first and after the last one."""
    root = draft.model.root
    whole, tail = kept_bytes(found.units, plan, root), _tail_bytes(found.units, plan, root)
    return (share.first or 0.0) * (whole - tail) + (share.last or 0.0) * tail


def _at_loss(found: Trace, plan: Plan) -> dict[str, int]:
    """On top of what is kept, when the loss is computed: then all blocks have run, and none is at work."""
    return {"logits and loss": logit_bytes(found, plan)}


def _in_blocks(draft: PlanDraft, plan: Plan, blocks: list[_Size], leaves: int) -> dict[str, int]:
    """On top of what is kept, in backward (or, where activations leave as blocks end, in forward): the logits are gone by then."""
    again, largest = _at_work(plan, blocks)
    one = max((b.kept for b in blocks), default=0)
    if leaves:  # accelerators bring the block before back in the meantime
        one = min(leaves, one * (2 if draft.cluster.accelerator else 1))
    if leaves and not any(b.again for b in blocks):
        return {"offloaded, one block": one}
    return {"offloaded, one block": one if leaves else 0, "recomputed, one block": again, "gradient in a block": largest}


def _at_work(plan: Plan, blocks: list[_Size]) -> tuple[int, int]:
    """(bytes made again, largest gradient) of the block whose backward has most in memory, on top of all that is kept.

    What the blocks after it kept is gone by then; a pipeline has other micro-batches under way, and is taken at its most.
    """
    if not plan.activations.units:  # all alike: the last one
        return max((b.again for b in blocks), default=0), max((b.largest for b in blocks), default=0)
    best, later = (0, 0), 0
    for block in reversed(blocks):
        best = max(best, (max(0, block.again - later), block.largest), key=sum)
        later += block.kept if plan.layout.pipeline == 1 else 0
    return best


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
    streams = tensor if plan.layout.sequence_parallel else 1
    match plan.activations.of(name):
        case "full" if unit.input:
            return unit.input // streams
        case "selective":
            again = unit.matched // tensor + (_of_stacks(unit, plan) if unit.stacked else 0)
            return made_bytes(units, plan, name) - again + unit.matched_input // streams
        case "operators" if unit.input:
            # what a matrix gives before its ranks' terms are summed is whole
            return unit.input // streams + unit.outputs_stream + (unit.outputs - unit.outputs_stream) // tensor
    return made_bytes(units, plan, name)


def made_bytes(units: dict[str, UnitActivations], plan: Plan, name: str) -> int:
    """What a unit saves on a rank in one forward of a micro-batch, if nothing is recomputed."""
    unit, tensor = units.get(name, UnitActivations()), plan.layout.tensor
    whole = 0 if tensor == 1 or plan.layout.sequence_parallel else max(0, unit.stream - unit.input)
    return whole + (unit.kept - whole) // tensor + _of_stacks(unit, plan)


def _of_stacks(unit: UnitActivations, plan: Plan) -> int:
    """What a rank has of stacked layers beyond a tensor rank's share of all.

    Ranks that have whole layers have the inner channels of all their tokens. Ranks that cut them have some channels of the tokens of all.
    """
    if not unit.rows + unit.inner:
        return 0
    tensor, cut = plan.layout.tensor, any(style == INNER for _, style in plan.layout.styles)
    by_tokens = plan.layout.sequence_parallel
    rows = 0 if by_tokens and not cut else unit.rows - unit.rows // tensor
    return rows + (0 if by_tokens or cut else unit.inner - unit.inner // tensor)


def _tail_bytes(units: dict[str, UnitActivations], plan: Plan, root: str) -> int:
    """Of what the root keeps, what it keeps after the last block."""
    unit = units.get(root, UnitActivations())
    return kept_bytes(units, plan, root) * unit.tail // unit.kept if unit.kept else 0


def _again(units: dict[str, UnitActivations], plan: Plan, name: str) -> int:
    unit = units.get(name, UnitActivations())
    decision, tensor = plan.activations.of(name), plan.layout.tensor
    again = {"full": unit.kept, "selective": unit.matched, "operators": unit.kept - unit.reused}.get(decision, 0) // tensor
    return again + (_of_stacks(unit, plan) if decision == "full" or (decision == "selective" and unit.stacked) else 0)
