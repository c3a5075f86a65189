"""The updates of what lies on the device: views of all ranges, made once and not on every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from partita.runtime.collectives import Collectives
from partita.state.bucket import Bucket
from partita.state.layout import HyperGroup, Segment, StateLayout
from partita.state.optimizers import Rule, Update, is_per_tensor

Range = tuple[Bucket, int, int, Segment | None]  # elements [lo, hi) of a bucket's shard, and the tensor that they lie in


def build_updates(
    buckets: Sequence[Bucket], layout: StateLayout, rules: Sequence[Rule], collectives: Collectives
) -> list[tuple[HyperGroup, Update]]:
    """One `Update` for each hyper-parameter group that has elements here, or whose rule needs all ranks."""
    out = []
    for number, group in enumerate(layout.groups):
        rule = rules[group.rule]
        members = [b for b in buckets if b.layout.trainable and any(s.group == number for s in b.layout.segments)]
        if is_per_tensor(rule):
            ranges = [r for b in members for r in _tensor_ranges(b, number)]
            if members:
                out.append((group, _per_tensor(members, number, ranges, collectives)))
            continue
        ranges = [(b, lo, min(hi, b.keep), None) for b in members for g, lo, hi in b.runs() if g == number and lo < b.keep]
        if ranges:
            out.append((group, Update(*_views(ranges, rule.states()), keys=[b.key + lo for b, lo, _, _ in ranges])))
    return out


def _tensor_ranges(bucket: Bucket, group: int) -> list[Range]:
    base = bucket.index * bucket.layout.shard
    owned = [
        (s, s.offset + lo - base, s.offset + hi - base) for s, lo, hi in bucket.layout.owned(bucket.index) if s.group == group
    ]
    return [(bucket, lo, hi, s) for s, lo, hi in owned if hi > lo]


def _per_tensor(members: list[Bucket], group: int, ranges: list[Range], collectives: Collectives) -> Update:
    names = [s.name for b in members for s in b.layout.segments if s.group == group]
    place = {name: i for i, name in enumerate(names)}
    inside = [s for _, _, _, s in ranges if s is not None]
    ranks = members[0].groups.shard

    def total(values: torch.Tensor) -> None:
        collectives.all_reduce(values, ranks).wait()

    return Update(
        *_views(ranges, list(members[0].formats)),
        keys=[b.key + lo for b, lo, _, _ in ranges],
        shapes=[s.shape for s in inside],
        tensors=[place[s.name] for s in inside],
        count=len(names),
        total=total,
    )


def _views(
    ranges: list[Range], names: Sequence[str]
) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, list[torch.Tensor]], list[torch.Tensor | None]]:
    """Master weights, gradients, states and copies of ranges whose buckets have one rule."""
    return (
        [b.master.near[lo:hi] for b, lo, hi, _ in ranges],
        [b.arrays["gradient"].near[lo:hi] for b, lo, hi, _ in ranges],
        {k: [b.state_view(k, lo, hi, s) for b, lo, hi, s in ranges] for k in names},
        [b.own.near[lo:hi] if b.own is not b.master else None for b, lo, hi, _ in ranges],
    )
