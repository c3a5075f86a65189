"""State bytes of many plans of one model: sizes of buckets are found once for each cut of the model, and then it is arithmetic.

Bytes are linear in the shards of buckets, so one bucket that is as large as all alike together has the same bytes. What they are is
asked of `StateLayout` itself, so the engine's layout and this agree by construction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from partita.plan.draft import PlanDraft
from partita.plan.parts import RankPart, rank_parts
from partita.plan.plan import Layout, Plan
from partita.state.layout import ALIGN, BLOCK, BucketLayout, StateLayout, assign_groups, build_buckets, build_layout


@dataclass(frozen=True)
class Alike:
    """Buckets that the data axes cut alike. sizes: elements of each, rounded up to the alignment."""

    trainable: bool
    axes: tuple[str, ...]
    partial: tuple[str, ...]
    rule: int
    policy: str
    sizes: tuple[int, ...]

    def together(self, layout: Layout, cut: tuple[str, ...]) -> BucketLayout:
        """One bucket in place of all."""
        owners = layout.size(tuple(a for a in cut if a not in self.axes))
        unit = BLOCK if self.policy == "block" else ALIGN
        shard = sum(math.ceil(size / (owners * unit)) for size in self.sizes) * unit
        return BucketLayout("all", self.trainable, (), owners, shard, self.axes, self.partial, self.rule, self.policy)


def cut_key(layout: Layout) -> tuple[object, ...]:
    """What decides which parameters a rank has, before the data axes cut them."""
    return (
        layout.pipeline,
        layout.stage_cuts,
        layout.stage_ranks,
        layout.tensor,
        layout.expert,
        layout.styles,
        layout.spread_kv,
        layout.sequence_parallel,
    )


def known_parts(draft: PlanDraft, layout: Layout) -> list[RankPart]:
    """`rank_parts`, found once for all layouts that share models out alike."""
    key = ("parts", cut_key(layout))
    if key not in draft.cache:
        draft.cache[key] = list(rank_parts(draft.model, layout))
    return draft.cache[key]


def alike_buckets(draft: PlanDraft, layout: Layout) -> list[list[Alike]]:
    """For each rank of the pipeline axis."""
    key = ("alike", cut_key(layout))
    if key not in draft.cache:
        draft.cache[key] = [_group(draft, part.parameters) for part in known_parts(draft, layout)]
    return draft.cache[key]


def _group(draft: PlanDraft, parameters: Sequence[Any]) -> list[Alike]:
    index, groups = assign_groups([p for p in parameters if p.trainable], draft.config.optimizer)
    rules = draft.rule_layouts(Plan())  # dtypes play no part here
    found: dict[tuple[bool, tuple[str, ...], tuple[str, ...], int, str], list[int]] = {}
    for bucket in build_buckets(parameters, index, lambda axes: 1, groups if rules else (), rules):
        key = (bucket.trainable, bucket.axes, bucket.partial, bucket.rule, bucket.policy)
        found.setdefault(key, []).append(bucket.padded)
    return [Alike(*key, tuple(sizes)) for key, sizes in found.items()]


def merged_layouts(draft: PlanDraft, plan: Plan) -> list[StateLayout]:
    """For each rank of the pipeline axis a layout of merged buckets, with the same bytes as the real one.

    Where whole tensors are dealt out to owners it is the real one: what the fullest owner has is no sum.
    """
    rules = draft.rule_layouts(plan)
    if any(rule.policy == "tensor" for rule in rules):
        return [build_layout(part, plan, rules, draft.config.optimizer) for part in known_parts(draft, plan.layout)]
    empty = empty_layout(draft, plan)
    cut = plan.placement.optimizer
    return [
        replace(empty, buckets=tuple(a.together(plan.layout, cut) for a in rank)) for rank in alike_buckets(draft, plan.layout)
    ]


def empty_layout(draft: PlanDraft, plan: Plan) -> StateLayout:
    """A layout of no parameters: what the plan says of all of them."""
    return build_layout(_Nothing(), plan, draft.rule_layouts(plan), draft.config.optimizer)


@dataclass(frozen=True)
class _Nothing:
    """A model without parameters."""

    parameters: tuple[()] = ()
