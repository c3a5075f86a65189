"""Which parameters a rank of the pipeline axis holds, each as far as tensor parallelism leaves it to the fullest rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from partita.plan.model_spec import ModelSpec, ParameterSpec
from partita.plan.plan import EXPERT_AXES, Layout
from partita.plan.stages import rank_parameters
from partita.plan.styles import local_parameters
from partita.state.parts import Part


@dataclass(frozen=True)
class RankPart:
    """The parameters of one rank before the data axes cut them."""

    parameters: tuple[ParameterSpec, ...]


def stage_units(model: ModelSpec, layout: Layout) -> list[list[str]]:
    """Names of the units of each pipeline stage. The root (embedding and head) counts on the first one."""
    cuts = [0, *layout.stage_cuts, len(model.units)]
    return [[u.name for u in model.units[lo:hi]] for lo, hi in pairwise(cuts)]


def expert_part(part: Part, rank: int, ranks: int) -> Part:
    """The experts of one rank of the expert axis out of a part of a tensor [experts, ...]. The axis folds over `shard`."""
    experts = part.shape[0]
    return part.cut(0, ((experts * rank // ranks, experts * (rank + 1) // ranks),), EXPERT_AXES)


def _share(p: ParameterSpec, layout: Layout) -> ParameterSpec:
    if layout.expert == 1 or not p.experts:
        return p
    part = expert_part(p.part or Part(p.shape), layout.expert - 1, layout.expert)  # the last has most
    return replace(p, shape=part.local, part=part)


def rank_parts(model: ModelSpec, layout: Layout) -> Iterator[RankPart]:
    """What one rank of each pipeline rank's stages has: of each matrix the part that its tensor style leaves to the fullest rank."""
    for parameters in rank_parameters(model, layout, [_share(p, layout) for p in local_parameters(model, layout)]):
        yield RankPart(parameters)
