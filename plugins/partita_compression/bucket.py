"""The collectives of one bucket: what travels for its gradients and weights, and what is kept of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from partita.runtime.collectives import Collectives, ReadState, Then, Work
from partita.runtime.mesh import Group
from partita.state.layout import BucketLayout
from partita.state.slices import Apart, StateSlice
from partita.state.units import SHARED
from partita_compression.exchange import Exchange, gather
from partita_compression.formats import reduce_format
from partita_compression.hierarchy import Hops
from partita_compression.ledger import BASIS, ERROR, MEETING, MOMENTUM, SCALE, SPEED, Kept, Ledger
from partita_compression.local import Meeting
from partita_compression.lowrank import LowRank
from partita_compression.momentum import Momentum
from partita_compression.settings import Local

if TYPE_CHECKING:
    from partita_compression.provider import CompressedCollectives

APART = "replicate"  # mesh axis along which groups may train for themselves
Span = tuple[int, int, int]  # (first element in the bucket, first one in a buffer, count)


class BucketCollectives:
    """Gradients and weights of one bucket on the wire. groups: `partita.state.bucket.Groups`."""

    def __init__(self, owner: CompressedCollectives, bucket: BucketLayout, groups: Any, read: ReadState) -> None:
        self.owner, self.bucket, self.groups, self._read = owner, bucket, groups, read
        self.traffic = owner.settings.traffic_of(bucket.rule)
        self._format, self._gather = owner.reduce_format, owner.gather_format
        self._hierarchical = owner.plan.collectives.gradient_reduce.algorithm == "hierarchical"
        self.ledger = Ledger(owner.context.mesh, bucket, self._layout(), owner.finder)
        self._exchanges: dict[tuple[tuple[int, ...], int], Exchange] = {}
        self._momentum: Momentum | None = None
        self._low_rank: LowRank | None = None
        self.meeting: Meeting | None = None
        self._copies = groups.replicas
        if owner.settings.local is not None:
            self._copies = owner.context.mesh.group(tuple(a for a in groups.replicas.axes if a != APART))
        if bucket.trainable:
            if self.traffic.momentum is not None:
                self._keep_momentum(self.traffic.momentum)
            if owner.settings.rank:
                self._make_low_rank()
            self._make_exchanges()
            if owner.settings.local is not None:
                self._make_meeting(owner.settings.local)

    def for_bucket(self, bucket: Any, state: Any, groups: Any, read: ReadState) -> Collectives:
        """Of its own bucket, itself."""
        return self

    def begin_step(self, update: int, scale: float) -> None:
        """The owner is told."""

    # ------------------------------------------------------------------ building

    def _layout(self) -> str:
        """All that says which rank keeps what."""
        g, settings = self.groups, self.owner.settings
        levels = "x".join(str(level.size) for level in g.levels) or "1"
        nodes = f"-nodes{settings.node_ranks}" if self._hierarchical or settings.slow_only else ""
        return f"cut{levels}-copies{g.replicas.size}{nodes}"

    def _keep_momentum(self, beta: float) -> None:
        """Each rank has the momentum of its own gradients for the whole bucket."""
        self._momentum = Momentum(beta, self.bucket.padded, self.owner.context.mesh.device, self._seed)
        self._keep_whole(MOMENTUM, self._momentum.own)
        self.ledger.alike.append((SCALE, self.bucket.segments[0].name, self.owner.scale))

    def _seed(self, momentum: torch.Tensor) -> None:
        """This rank's share of the optimizer's momentum: of its shard, divided among the ranks that have the same."""
        if self.bucket.unit.startswith(SHARED) and self.owner.context.mesh.coordinates["pipeline"]:
            return  # what stages share is summed over them; the first one has it
        n, at = self.bucket.shard, self.groups.index * self.bucket.shard
        torch.div(self._read("exp_avg"), self._copies.size, out=momentum[at : at + n])

    def _keep_whole(self, kind: str, tensor: torch.Tensor) -> None:
        """Of a buffer that each rank has for the whole bucket."""
        senders = self.groups.shard.size * self.groups.replicas.size
        row = self.groups.replicas.rank * self.groups.shard.size + self.groups.index
        self.ledger.kept.append(Kept(kind, "own", tensor, ((0, 0, self.bucket.padded),), (row, senders)))

    def _make_low_rank(self) -> None:
        """PowerSGD, over the one group that the gradients are summed over."""
        owner, groups = self.owner, self.groups
        group = groups.shard if groups.shard.size > 1 else self._copies
        if group.size == 1 or self.traffic.warmup is None or (owner.settings.slow_only and not owner.levels.slow(group)):
            return
        self._low_rank = LowRank(self.bucket, group, owner.settings.rank, owner.base, owner.context.mesh.device)
        self._keep_whole(ERROR, self._low_rank.error)
        for m in self._low_rank.matrices:
            self.ledger.alike.append((BASIS, m.segment.name, self._low_rank.q(m).view(-1)))

    def _make_meeting(self, local: Local) -> None:
        """What the groups say to each other, and what they keep for the next time."""
        owner, n, device = self.owner, self.bucket.shard, self.owner.context.mesh.device
        apart, format = owner.context.mesh.group((APART,)), reduce_format(local.format, owner.settings.density)
        first = self.groups.index * n
        exchange = None
        if format is not None:
            exchange = Exchange(format, apart, n, owner.context.transport, device, feedback=True, shared=True)
            self._keep(exchange, apart, ((first, 0, n),), None, "meeting")
        speed = None
        if local.momentum is not None:
            speed = torch.zeros(n, dtype=torch.float32, device=device)
            self.ledger.kept.append(Kept(SPEED, "own", speed, ((first, 0, n),)))
        last = torch.zeros(n, dtype=torch.float32, device=device)
        self.meeting = Meeting(local, apart, owner.base, exchange, last, speed)

    def _make_exchanges(self) -> None:
        """One for each group over which gradients are summed in few bits, from the outermost cut to the copies."""
        first, n = 0, self.bucket.padded
        copies, below = self._copies, self.groups.shard.size
        for level in self.groups.levels:
            below //= level.size
            self._add(level, first, n, (copies.rank, copies.size), (self.groups.index % below, below), shared=False)
            n //= level.size
            first += level.rank * n
        self._add(copies, first, n, (0, 1), (0, 1), shared=True)

    def _add(self, group: Group, first: int, n: int, outside: tuple[int, int], inside: tuple[int, int], *, shared: bool) -> None:
        """An exchange over `group` of elements [first, first + n) of the bucket, or of what the ranks of a node pass on of them.

        outside, inside: which of how many ranks this is, of those that have terms of the same elements, along other groups.
        """
        hops, settings = self._hops(group), self.owner.settings
        outer = hops.outer[1] if hops else group
        if self._format is None or self.traffic.warmup is None or outer.size == 1:
            return
        if settings.slow_only and not self.owner.levels.slow(outer):
            return
        g, place = (hops.inner[0].size, hops.inner[0].rank) if hops else (1, 0)
        second = (hops.outer[2] if hops else self.owner.context.mesh.group(group.axes, lane=1)) if shared else None
        exchange = Exchange(
            self._format, outer, -(-n // g), self.owner.context.transport, self.owner.context.mesh.device,
            feedback=settings.feedback, shared=shared, second=second,
        )  # fmt: skip
        self._exchanges[group.ranks, n] = exchange
        row = (outside[0] * outer.size + outer.rank) * inside[1] + inside[0]
        rows = outside[1] * outer.size * inside[1]
        number = len(self._exchanges)  # what a load brings of another layout is sent with the first message
        spans = _spans(first, n, g, outer.size, place, shared)
        self._keep(exchange, outer, spans, (row, rows) if number == 1 else None, str(number))

    def _keep(
        self, exchange: Exchange, outer: Group, spans: tuple[Span, ...], heirs: tuple[int, int] | None, name_of: str
    ) -> None:
        """The errors of an exchange."""
        for name, error in exchange.errors.items():
            if name == "owner":
                start = outer.rank * exchange.part
                mine = [(lo + start, 0, min(exchange.part, count - start)) for lo, _, count in spans if count > start]
                kept = Kept(ERROR, f"shared{name_of}", error, tuple(mine))
            else:
                kept = Kept(ERROR, f"sent{name_of}", error, spans, heirs)
            exchange.holes[name] = self.ledger.holes(kept)
            self.ledger.kept.append(kept)

    # ------------------------------------------------------------------ at work

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, group: Group, *, accumulate: bool) -> Work:
        """See `Collectives`."""
        base, exchange, hops = self.owner.base, self._exchange(group, source.numel()), self._hops(group)
        source = self._meant(source)
        if self._thin(source):
            return self._low_rank_part(output, source, group, accumulate)
        if hops is not None:
            return hops.reduce_scatter(base, exchange, output, source, accumulate=accumulate)
        if exchange is None:
            return base.reduce_scatter(output, source, group, accumulate=accumulate)
        return exchange.reduce_scatter(output, source, accumulate=accumulate)

    def all_reduce(self, buffer: torch.Tensor, group: Group, wire: torch.dtype | None = None) -> Work:
        """See `Collectives`."""
        if self.meeting is not None and group.ranks == self.groups.replicas.ranks:  # the other groups go their own ways
            return self._inside(buffer, wire)
        return self._sum(buffer, group, wire)

    def _inside(self, buffer: torch.Tensor, wire: torch.dtype | None) -> Work:
        """The sum over this group, as large as if all groups had the same."""
        assert self.meeting is not None
        times = self.meeting.groups.size
        return Then([self._sum(buffer, self._copies, wire)], lambda: _scale(buffer, times))

    def _sum(self, buffer: torch.Tensor, group: Group, wire: torch.dtype | None) -> Work:
        base, exchange, hops = self.owner.base, self._exchange(group, buffer.numel()), self._hops(group)
        if self.groups.shard.size == 1:
            meant = self._meant(buffer)
            if meant is not buffer:
                buffer.copy_(meant)
        if self._thin(buffer):
            assert self._low_rank is not None
            return self._low_rank.sum(buffer, buffer)
        if hops is not None:
            return hops.all_reduce(base, exchange, buffer)
        return base.all_reduce(buffer, group, wire) if exchange is None else exchange.all_reduce(buffer)

    def all_gather(self, buffer: torch.Tensor, group: Group) -> Work:
        """See `Collectives`."""
        owner = self.owner
        hops = self._hops(group)
        if hops is not None:
            return hops.all_gather(owner.base, self._gather, buffer)
        if self._gather is None or group.size == 1:
            return owner.base.all_gather(buffer, group)
        if owner.settings.slow_only and not owner.levels.slow(group):
            return owner.base.all_gather(buffer, group)
        return gather(self._gather, owner.context.transport, buffer, group)

    def _meant(self, gradient: torch.Tensor) -> torch.Tensor:
        """What this rank has to say: its gradient, or its momentum. Sums on their way to another level are passed on."""
        update, traffic = self.owner.update, self.traffic
        if self._momentum is None or gradient.numel() != self.bucket.padded or traffic.native(update):
            return gradient
        return self._momentum.take(gradient, self.owner.passes, self.owner.clip, first=traffic.native(update - 1))

    def _thin(self, gradient: torch.Tensor) -> bool:
        return (
            self._low_rank is not None and gradient.numel() == self.bucket.padded and not self.traffic.native(self.owner.update)
        )

    def _low_rank_part(self, output: torch.Tensor, source: torch.Tensor, group: Group, accumulate: bool) -> Work:
        """This rank's part of the low-rank sum."""
        assert self._low_rank is not None
        total = torch.empty(source.numel(), dtype=torch.float32, device=source.device)
        mine = total.view(group.size, -1)[group.rank]

        def take() -> None:
            if accumulate:
                output.add_(mine)
            else:
                output.copy_(mine)

        return Then([self._low_rank.sum(source, total)], take)

    def _hops(self, group: Group) -> Hops | None:
        return self.owner.levels.split(group) if self._hierarchical else None

    def _exchange(self, group: Group, elements: int) -> Exchange | None:
        return None if self.traffic.native(self.owner.update) else self._exchanges.get((group.ranks, elements))

    # ------------------------------------------------------------------ state

    def clean(self) -> None:
        """The last update was skipped, since something wasn't finite: nothing of that stays."""
        for kept in self.ledger.kept:
            torch.nan_to_num_(kept.tensor, 0.0, 0.0, 0.0)

    def forget(self) -> None:
        """Errors begin at nothing."""
        for kept in self.ledger.kept:
            if kept.kind == ERROR:
                kept.tensor.zero_()

    def slices(self) -> list[StateSlice]:
        """What is kept, of ranks that save. The weights of the last meeting are those of the model until the groups go on."""
        if self.meeting is None:
            return self.ledger.slices()
        first, saved = self.groups.index * self.bucket.shard, not self.meeting.met and self.groups.copy == 0
        return self.ledger.slices() + self.ledger.weights(MEETING, self.meeting.last, first, saved)

    def apart(self) -> Apart:
        """Groups that train for themselves: weights are the same until they go on from a meeting."""
        if self.meeting is None:
            return Apart()
        return Apart(self.meeting.groups.rank, self.meeting.groups.size, weights=not self.meeting.met)


def _scale(buffer: torch.Tensor, factor: int) -> None:
    buffer.mul_(factor)


def _spans(first: int, n: int, g: int, k: int, place: int, shared: bool) -> tuple[Span, ...]:
    """Where in the bucket the buffer of an exchange lies whose ranks each pass on the `place`-th of `g` parts of [first, first + n)."""
    if g == 1:
        return ((first, 0, n),)
    part = -(-n // g)
    if shared:
        return ((first + place * part, 0, max(0, min(part, n - place * part))),)
    each = n // (g * k)
    return tuple((first + (node * g + place) * each, node * each, each) for node in range(k))
