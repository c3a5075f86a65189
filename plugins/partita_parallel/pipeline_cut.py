"""Where a model is cut into stages: by what its blocks and ends cost, by count, or by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # they import torch, which a plug-in does only where it is used
    from partita.plan.model_spec import ModelSpec
    from partita.plan.stages import Anatomy

SLACK = 0.02  # of the slowest stage's time, that is given up for a cut with less memory


@dataclass(frozen=True)
class Costs:
    """Of the blocks in order, and of what stands before the first and after the last: FLOPs of a token, and parameters."""

    blocks: tuple[tuple[float, float], ...]
    before: tuple[float, float] = (0.0, 0.0)
    after: tuple[float, float] = (0.0, 0.0)


def model_costs(model: ModelSpec, anatomy: Anatomy, sequence: int) -> Costs:
    """Costs by the model's own count of FLOPs. A table that is looked up costs memory and no time; an output layer, 6 FLOPs a weight."""
    path = {p.name: {n.rpartition(".")[0] for n in (p.name, *p.aliases)} for p in model.parameters}
    root = [p for p in model.parameters if p.unit == model.root]
    behind = [p for p in root if path[p.name] & set(anatomy.after)]
    head = 6.0 * sum(p.numel for p in behind if len(p.shape) > 1)
    rest = max(model.flops_per_token(sequence) - head, 1.0)
    numel = {u.name: u.numel for u in model.units}
    total = sum(numel[name] for name in model.blocks) or 1
    blocks = tuple((rest * numel[name] / total, float(numel[name])) for name in model.blocks)
    front = sum(p.numel for p in root if path[p.name] & set(anatomy.before) or p not in behind)
    return Costs(blocks, (0.0, float(front)), (head, float(sum(p.numel for p in behind))))


def cut_by_cost(costs: Costs, stages: int) -> list[int]:
    """Blocks of each stage, at least one: the slowest stage is as fast as can be, and then the fullest as empty as can be."""
    slowest = _partition(costs, stages, 0, math.inf)
    limit = max(_sums(costs, slowest, 0)) * (1 + SLACK)
    return _partition(costs, stages, 1, limit)


def cut_by_count(blocks: int, stages: int) -> list[int]:
    """Numbers of blocks that differ by one at most; the stages in the middle, which have no embedding or head, get the larger ones."""
    share, rest = divmod(blocks, stages)
    middle = sorted(range(stages), key=lambda s: abs(2 * s - stages + 1))
    return [share + (s in middle[:rest]) for s in range(stages)]


def _ends(costs: Costs, of: int, stage: int, stages: int) -> float:
    return (costs.before[of] if stage == 0 else 0.0) + (costs.after[of] if stage == stages - 1 else 0.0)


def _sums(costs: Costs, sizes: Sequence[int], of: int) -> list[float]:
    starts = [sum(sizes[:s]) for s in range(len(sizes))]
    return [
        sum(c[of] for c in costs.blocks[a : a + n]) + _ends(costs, of, s, len(sizes))
        for s, (a, n) in enumerate(zip(starts, sizes, strict=True))
    ]


def _partition(costs: Costs, stages: int, of: int, limit: float) -> list[int]:
    """Sizes with the smallest largest sum of cost `of`, where no stage takes longer than `limit`. Dynamic programming over blocks."""
    n = len(costs.blocks)
    ahead = [[0.0], [0.0]]
    for time, memory in costs.blocks:
        ahead[0].append(ahead[0][-1] + time)
        ahead[1].append(ahead[1][-1] + memory)
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(stages):
        row: dict[int, tuple[float, int]] = {}
        for end in range(stage + 1, n - (stages - stage - 1) + 1):
            for start, (worst, _) in best[-1].items():
                if start >= end:
                    continue
                time = ahead[0][end] - ahead[0][start] + _ends(costs, 0, stage, stages)
                if time > limit:
                    continue
                here = ahead[of][end] - ahead[of][start] + _ends(costs, of, stage, stages)
                found = (max(worst, here), start)
                if end not in row or found[0] < row[end][0]:
                    row[end] = found
        best.append(row)
    sizes, end = [], n
    for stage in range(stages, 0, -1):
        start = best[stage][end][1]
        sizes.append(end - start)
        end = start
    return sizes[::-1]
