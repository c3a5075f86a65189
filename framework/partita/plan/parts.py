"""Which parameters a rank of the pipeline axis holds, each as far as tensor parallelism leaves it to the fullest rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from partita.plan.model_spec import ModelSpec, ParameterSpec
from partita.plan.plan import Layout
from partita.plan.styles import local_parameters


@dataclass(frozen=True)
class RankPart:
    """The parameters of one rank before the data axes cut them."""

    parameters: tuple[ParameterSpec, ...]


def stage_units(model: ModelSpec, layout: Layout) -> list[list[str]]:
    """Names of the units of each pipeline stage. The root (embedding and head) counts on the first one."""
    cuts = [0, *layout.stage_cuts, len(model.units)]
    return [[u.name for u in model.units[lo:hi]] for lo, hi in pairwise(cuts)]


def rank_parts(model: ModelSpec, layout: Layout) -> Iterator[RankPart]:
    """What one rank of each stage has: of each matrix the part that its tensor style leaves to the fullest rank."""
    parameters = local_parameters(model, layout)
    for units in stage_units(model, layout):
        wanted = set(units)
        yield RankPart(tuple(p for p in parameters if p.unit in wanted))
