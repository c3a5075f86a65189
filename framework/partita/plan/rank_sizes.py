"""How many elements of weights a rank of the pipeline axis uses at once when they are whole."""

from __future__ import annotations

from dataclasses import dataclass

from partita.plan.closed import cut_key, known_parts
from partita.plan.draft import PlanDraft
from partita.plan.plan import Layout
from partita.plan.stages import stage_units


@dataclass(frozen=True)
class RankSizes:
    """Elements, each as far as tensor and expert parallelism leave it to the rank. root: of what is in no block; block: of the largest
    block; stage: of the blocks of the largest stage; blocks: of all blocks."""

    root: int
    block: int
    stage: int
    blocks: int


def rank_sizes(draft: PlanDraft, layout: Layout) -> list[RankSizes]:
    """For each rank of the pipeline axis."""
    key = ("rank sizes", cut_key(layout))
    if key not in draft.cache:
        draft.cache[key] = _sizes(draft, layout)
    return draft.cache[key]


def _sizes(draft: PlanDraft, layout: Layout) -> list[RankSizes]:
    stages, blocks = stage_units(draft.model, layout), set(draft.model.blocks)
    placed = layout.stage_ranks or tuple(range(layout.pipeline))
    found = []
    for rank, part in enumerate(known_parts(draft, layout)):
        units: dict[str, int] = {}
        for p in part.parameters:
            name = p.unit if p.unit in blocks else ""
            units[name] = units.get(name, 0) + p.numel
        root = units.pop("", 0)
        mine = [sum(units.get(u, 0) for u in s) for s, where in zip(stages, placed, strict=False) if where == rank]
        found.append(RankSizes(root, max(units.values(), default=0), max(mine, default=0), sum(units.values())))
    return found
