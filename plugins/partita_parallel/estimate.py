"""What the axes that cut the model send; what the data axes send is the core's estimate."""

from __future__ import annotations

from partita.plan.draft import PlanDraft
from partita.plan.links import message
from partita.plan.plan import Plan
from partita.plugin.markers import hookimpl
from partita.plugin.types import Cost


@hookimpl
def partita_estimate(plan: Plan, draft: PlanDraft) -> list[Cost]:
    """Bytes and seconds over tensor, context and pipeline in one step."""
    layout, schedule = plan.layout, plan.schedule
    if layout.pipeline * layout.context * layout.tensor == 1:
        return []
    unit_input = draft.unit_input_bytes(plan)
    blocks = -(-len(draft.model.blocks) // layout.pipeline)
    times = blocks * schedule.micro_batches
    costs = []
    if layout.tensor > 1:
        # each matrix with cut inputs has a sum forward and one backward (Shoeybi et al. 2019, section 3), and one where forward runs again
        sums = _sums(draft, plan) * (2 + (plan.activations.default in ("full", "operators")))
        costs.append(
            message(
                draft.cluster,
                layout,
                ("tensor",),
                "activations over tensor",
                unit_input,
                "sum",
                times=sums * times,
                repeated=True,
            )
        )
    if layout.context > 1:
        # keys and values once around the ring forward, with their gradients twice backward (Liu et al. 2023), beside attention
        around = unit_input * 2 * layout.context // layout.tensor
        costs.append(
            message(
                draft.cluster,
                layout,
                ("context",),
                "keys and values over context",
                around,
                "gather",
                times=3 * times,
                overlap=0.2,
                repeated=True,
            )
        )
    if layout.pipeline > 1:
        costs.append(
            message(
                draft.cluster,
                layout,
                ("pipeline",),
                "activations between stages",
                unit_input / (layout.tensor if layout.sequence_parallel else 1),  # else each tensor rank sends all of it
                "send",
                times=2 * schedule.micro_batches * max(1, (len(layout.stage_cuts) + 1) // layout.pipeline),
                repeated=True,
            )
        )
    return costs


def _sums(draft: PlanDraft, plan: Plan) -> float:
    """Matrices of a block, on average, whose ranks' terms of the output are summed: of attention and of the feed-forward layer, as a rule."""
    styles, blocks = plan.layout.styles, draft.model.blocks
    key = ("sums over tensor", styles)
    if key not in draft.cache:
        from partita.plan.styles import CLOSING, styled_modules  # torch is imported only where a plan is made

        module = draft.model.module
        inside = tuple(f"{b}." for b in blocks)
        found = styled_modules(module, styles) if module is not None and styles else ()
        summed = sum(style.name in CLOSING and path.startswith(inside) for path, _, style in found)
        draft.cache[key] = summed / len(blocks) if summed else 2.0
    return float(draft.cache[key])
