"""Where every element of every state lies: a frozen value computed from shapes, read by planner, engine, checkpoint and tests alike.

A *bucket* holds the parameters of one unit that share dtype and trainability, one after the other, padded so that every rank of the
optimizer's shard group owns the same number of elements. Optimizer shard `i` of a bucket is elements [i * shard, (i + 1) * shard).
Parameters of another hyper-parameter group begin at a multiple of ALIGN: with that every range that an update works on does, in every
sharding, and vectors and their scalar rests fall on the same elements, so results don't depend on where a buffer was cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch

from partita.plan.plan import Layout, Placement, Plan, Precision, Tier, Tiers
from partita.state.optimizers import BLOCK, Rule, State, formats_of, policy_of, rule_names
from partita.state.parts import Part

ALIGN = 64  # elements; keeps shards on cache-line and vector boundaries in every dtype


class ParameterLike(Protocol):
    """What a layout needs to know of a parameter (partita.plan.model_spec.ParameterSpec has it)."""

    name: str
    shape: tuple[int, ...]
    trainable: bool
    unit: str
    part: Part | None  # of a global tensor; None: `shape` is the whole one


@dataclass(frozen=True)
class Segment:
    """One parameter inside a bucket: elements [offset, offset + numel), hyper-parameter group `group`; `part` of a global tensor."""

    name: str
    shape: tuple[int, ...]
    offset: int
    group: int
    part: Part

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class BucketLayout:
    """One flat buffer. `shard` elements for each of `shards` owners; the last ones may be padding.

    rule: which of the update rules changes it; policy: where that lets it be cut (see `partita.state.optimizers.Rule`).
    axes: mesh axes along which other ranks hold other parts of the same tensors. partial: mesh axes whose ranks hold the same
    parameters and each a term of their gradients.
    """

    unit: str
    trainable: bool
    segments: tuple[Segment, ...]
    shards: int
    shard: int
    axes: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    rule: int = 0
    policy: str = "element"

    @property
    def padded(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.shard * self.shards

    @property
    def numel(self) -> int:
        """Elements of the parameters."""
        return sum(s.numel for s in self.segments)

    def gaps(self) -> list[tuple[int, int]]:
        """Ranges of the whole buffer that belong to no parameter: between hyper-parameter groups, and the tail."""
        out, end = [], 0
        for s in self.segments:
            if s.offset > end:
                out.append((end, s.offset))
            end = s.offset + s.numel
        return [*out, (end, self.padded)] if end < self.padded else out

    def owned(self, index: int) -> list[tuple[Segment, int, int]]:
        """The parts of parameters in shard `index`: (segment, lo, hi), in elements of the parameter."""
        start, stop = index * self.shard, (index + 1) * self.shard
        parts = []
        for s in self.segments:
            lo, hi = max(start, s.offset), min(stop, s.offset + s.numel)
            if lo < hi or (s.numel == 0 and start <= s.offset < stop):
                parts.append((s, lo - s.offset, hi - s.offset))
        return parts

    def runs(self, index: int) -> list[tuple[int, int, int]]:
        """Contiguous ranges of one hyper-parameter group in shard `index`: (group, lo, hi) in elements of the shard."""
        out: list[tuple[int, int, int]] = []
        base = index * self.shard
        for s, lo, hi in self.owned(index):
            a, b = s.offset + lo - base, s.offset + hi - base
            if a == b:
                continue
            if out and out[-1][0] == s.group and out[-1][2] == a:
                out[-1] = (s.group, out[-1][1], b)
            else:
                out.append((s.group, a, b))
        return out


@dataclass(frozen=True)
class RuleLayout:
    """What a layout needs to know of an update rule: where it lets buckets be cut, and its states, with their dtypes."""

    policy: str
    states: Mapping[str, State]

    @classmethod
    def of(cls, rule: Rule, dtype: str) -> RuleLayout:
        """dtype: of the states that the rule leaves to `precision.optimizer`."""
        formats = {name: replace(s, dtype=s.dtype or dtype) for name, s in formats_of(rule).items()}
        return cls(policy_of(rule), formats)


@dataclass(frozen=True)
class HyperGroup:
    """What some parameters share: factor on the learning rate, weight decay, which of the update rules."""

    lr_scale: float
    weight_decay: float
    rule: int = 0


def assign_groups(parameters: Iterable[ParameterLike], optimizer: Any) -> tuple[dict[str, int], list[HyperGroup]]:
    """Parameter name -> index into the returned hyper-parameter groups, from `optimizer.groups` and `optimizer.decay_1d`.

    Vectors and scalars (biases, norms) get no weight decay unless `decay_1d` or their group says so (GPT-3, appendix B; nanoGPT).
    """
    groups: list[HyperGroup] = []
    index: dict[str, int] = {}
    names = rule_names(optimizer)
    for p in parameters:
        rule = next((g for g in optimizer.groups if _fits(g, p)), None)
        decay = optimizer.weight_decay if len(p.shape) > 1 or optimizer.decay_1d else 0.0
        if rule is not None and rule.weight_decay is not None:
            decay = rule.weight_decay
        name = rule.optimizer if rule is not None and rule.optimizer else optimizer.name
        hyper = HyperGroup(rule.lr_scale if rule else 1.0, decay, names.index(name))
        if hyper not in groups:
            groups.append(hyper)
        index[p.name] = groups.index(hyper)
    return index, groups


def _fits(group: Any, p: ParameterLike) -> bool:
    if group.max_dims is not None and len(p.shape) > group.max_dims:
        return False
    return any(fnmatchcase(p.name, m) for m in group.match)


def build_buckets(
    parameters: Sequence[ParameterLike],
    index: Mapping[str, int],
    shards: Callable[[tuple[str, ...]], int],
    groups: Sequence[HyperGroup] = (),
    rules: Sequence[RuleLayout] = (),
) -> tuple[BucketLayout, ...]:
    """Buckets in order of first appearance. Inside one, parameters stand by hyper-parameter group, then in order of appearance.

    index: parameter -> one of `groups`. shards: owners of a bucket, given the mesh axes along which its tensors are cut already.
    """
    keyed: dict[tuple[Any, ...], list[tuple[ParameterLike, Part]]] = {}
    for p in parameters:
        part = p.part or Part(tuple(p.shape))
        rule = groups[index[p.name]].rule if p.trainable and groups else 0
        keyed.setdefault((p.unit, p.trainable, part.axes, part.partial, rule), []).append((p, part))
    buckets = []
    for (unit, trainable, axes, partial, rule), members in keyed.items():
        policy = rules[rule].policy if trainable and rules else "element"
        members = sorted(members, key=lambda member: index.get(member[0].name, 0))
        segments = [Segment(p.name, tuple(p.shape), 0, index.get(p.name, 0), part) for p, part in members]
        owners = shards(axes)
        segments, shard = _pack(segments, owners) if policy == "tensor" else _line_up(segments, owners, policy)
        buckets.append(BucketLayout(unit, trainable, tuple(segments), owners, shard, axes, partial, rule, policy))
    return tuple(buckets)


def _line_up(segments: list[Segment], owners: int, policy: str) -> tuple[list[Segment], int]:
    """One after the other, and elements of a shard."""
    out: list[Segment] = []
    offset, unit = 0, BLOCK if policy == "block" else ALIGN
    for s in segments:
        if out and (policy == "block" or out[-1].group != s.group):
            offset = math.ceil(offset / unit) * unit
        out.append(replace(s, offset=offset))
        offset += s.numel
    return out, math.ceil(max(offset, 1) / (owners * unit)) * unit


def _pack(segments: list[Segment], owners: int) -> tuple[list[Segment], int]:
    """Whole tensors to owners, the largest first to the one that has least (Graham 1969), and elements of a shard."""
    loads = [0] * owners
    places: list[tuple[int, int]] = [(0, 0)] * len(segments)
    for i in sorted(range(len(segments)), key=lambda i: -segments[i].numel):
        owner = loads.index(min(loads))
        places[i] = (owner, loads[owner])
        loads[owner] += math.ceil(segments[i].numel / ALIGN) * ALIGN
    shard = max(ALIGN, *loads)
    moved = [replace(s, offset=owner * shard + at) for s, (owner, at) in zip(segments, places, strict=True)]
    return sorted(moved, key=lambda s: s.offset), shard


@dataclass(frozen=True)
class StateLayout:
    """All buckets, and the dtypes and cuts of the states that stand on them."""

    buckets: tuple[BucketLayout, ...]
    groups: tuple[HyperGroup, ...]
    placement: Placement
    precision: Precision
    layout: Layout
    accumulates: bool  # several micro-batches are summed before the reduction
    rules: tuple[RuleLayout, ...] = ()
    tiers: Tiers = field(default_factory=Tiers)
    rounded: bool = False  # gathered weights are not the exact ones

    def states_of(self, bucket: BucketLayout) -> Mapping[str, State]:
        """The states that the update rule of a bucket keeps."""
        return self.rules[bucket.rule].states if bucket.trainable and self.rules else {}

    def state_numel(self, bucket: BucketLayout, state: State) -> int:
        """Elements of a state on a rank; of states of other shapes than the parameters, as many as the fullest rank has."""
        if state.shape is None:
            return bucket.shard // state.block
        made = state.shape
        return max(sum(math.prod(made(s.shape)) for s, _, _ in bucket.owned(i)) for i in range(bucket.shards))

    def separate_master(self, bucket: BucketLayout) -> bool:
        """Whether the optimizer updates a copy of its own instead of the weights that compute reads.

        Weights that are rounded on the wire are no exact ones where they stay after they have been gathered.
        """
        stay = bucket.shards > self._ranks(bucket, self.placement_of(bucket).parameters)
        return self.precision.master != self.precision.compute or (self.rounded and stay)

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Of the whole-bucket gradient buffer: what is only passed on can stay in the compute dtype."""
        kept_whole = not self.placement.optimizer or self.accumulates
        return dtype_of(self.precision.gradient if kept_whole else self.precision.compute)

    def placement_of(self, bucket: BucketLayout) -> Placement:
        """The placement, as far as it can cut a bucket whose tensors are cut along some axes already.

        Cut in one part is not cut, but weights that leave the device are released between uses.
        """
        if bucket.shards > 1:
            return self.placement
        return Placement(parameters=self.placement.parameters if self.tiers.parameters.place != "accelerator" else ())

    def _ranks(self, bucket: BucketLayout, axes: tuple[str, ...]) -> int:
        """Parts into which `axes` cut a bucket whose tensors are cut along some axes already."""
        return self.layout.size(tuple(a for a in axes if a not in bucket.axes))

    def bytes(self, place: str = "accelerator") -> dict[str, int]:
        """Bytes on one rank at rest in one place, by category, padding included. Every rank holds the same number.

        gradients counts what lives between micro-batches: the whole bucket where gradients are not cut, else the shard.
        """
        total = {"parameters": 0, "gradients": 0, "optimizer": 0}
        for category, numel, width, leaves in self.pieces():
            tier = getattr(self.tiers, category)
            far = far_elements(numel, tier) if leaves else 0
            if place == "accelerator":
                total[category] += (numel - far) * width
            elif place == tier.place:
                total[category] += far * width
        return total

    def pieces(self) -> Iterator[tuple[str, int, int, bool]]:
        """Every buffer at rest: (category, elements, bytes of an element, whether a tier may hold it)."""
        compute, master = size_of(self.precision.compute), size_of(self.precision.master)
        for b in self.buckets:
            placement = self.placement_of(b)
            yield "parameters", b.padded // self._ranks(b, placement.parameters), compute, bool(placement.parameters)
            if not b.trainable:
                continue
            if self.separate_master(b):
                yield "optimizer", b.shard, master, True
            for state in self.states_of(b).values():
                yield "optimizer", self.state_numel(b, state), size_of(state.dtype or ""), True
            reduced_apart = bool(placement.optimizer) or self.tiers.gradients.place != "accelerator"
            if reduced_apart:
                yield "gradients", b.shard, size_of(self.precision.gradient), True
                if 1 < self._ranks(b, placement.gradients) < b.shards:
                    yield "gradients", b.padded // self._ranks(b, placement.gradients), size_of(self.precision.gradient), False
            # whole gradients that are reduced at once, into a shard or on their way to a tier, are no state at rest
            if not placement.gradients and (self.accumulates or not reduced_apart):
                yield "gradients", b.padded, self.gradient_dtype.itemsize, False


def nested_cuts(placement: Placement) -> tuple[tuple[str, ...], ...]:
    """The cuts of a placement, one inside the other, outermost first: the axes of each state but those of narrower ones.

    A shard of the optimizer so lies inside the part of the gradients that its rank keeps, and inside its part of the weights.
    """
    found: list[tuple[str, ...]] = []
    taken: set[str] = set()
    for axes in sorted((placement.parameters, placement.gradients, placement.optimizer), key=len):
        new = tuple(a for a in axes if a not in taken)
        if new:
            found.append(new)
            taken |= set(new)
    return tuple(found)


def far_elements(numel: int, tier: Tier) -> int:
    """How many of the last elements of a shard lie in its tier: whole multiples of ALIGN, nearest to the fraction asked for."""
    if tier.place == "accelerator":
        return 0
    return min(numel, round(numel * tier.fraction / ALIGN) * ALIGN)


def build_layout(spec: Any, plan: Plan, rules: Sequence[RuleLayout], optimizer: Any) -> StateLayout:
    """The layout of a model (anything with `.parameters` of ParameterLike) under a plan.

    rules: in the order of `rule_names`. optimizer: the config node, for parameter groups.
    """
    index, groups = assign_groups([p for p in spec.parameters if p.trainable], optimizer)
    shards = plan.layout.size(plan.placement.optimizer)
    cut = plan.placement.optimizer
    owners = lambda axes: plan.layout.size(tuple(a for a in cut if a not in axes))  # noqa: E731
    buckets = build_buckets(spec.parameters, index, owners, groups, rules)
    placement = plan.placement
    if shards == 1:  # cut in one part is not cut, but weights that leave the device are released between uses
        placement = Placement(parameters=placement.parameters if plan.tiers.parameters.place != "accelerator" else ())
    several = plan.schedule.reduce_every > 1 or not placement.gradients
    accumulates = plan.schedule.micro_batches > 1 and several
    rounded = plan.collectives.parameter_gather.format != "native"
    return StateLayout(
        buckets, tuple(groups), placement, plan.precision, plan.layout, accumulates, tuple(rules), plan.tiers, rounded
    )


def dtype_of(name: str) -> torch.dtype:
    """torch dtype of a name such as `bfloat16`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no torch dtype")
    return dtype


def size_of(name: str) -> int:
    """Bytes of one element of the dtype of that name."""
    return dtype_of(name).itemsize
