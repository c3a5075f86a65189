"""Two-level collectives: inside a node first, so that only 1 / (ranks of a node) of the data crosses the slow links between nodes.

For N = g x k ranks (g in each of k nodes) and n bytes, (k - 1) / k * n / g leave a rank towards other nodes, where a flat exchange
sends (N - g) / N * n. Ranks of a node are neighbours in the group: rank = node * g + place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from partita.runtime.collectives import GRADIENTS, WEIGHTS, GlooCollectives, Then, Work
from partita.runtime.mesh import Group, Mesh
from partita_compression.exchange import Exchange, unpack
from partita_compression.formats import Format


@dataclass
class Levels:
    """Which ranks share a node: those with the same global rank // node_ranks."""

    mesh: Mesh
    node_ranks: int
    _hops: dict[tuple[int, ...], Hops | None] = field(default_factory=dict)

    def slow(self, group: Group) -> bool:
        """Whether the group reaches over more than one node."""
        return len({r // self.node_ranks for r in group.ranks}) > 1

    def split(self, group: Group) -> Hops | None:
        """The group in two levels; None where it has one only. Collective the first time for each kind of group."""
        if group.ranks not in self._hops:
            self._hops[group.ranks] = self._make(group)
        return self._hops[group.ranks]

    def _make(self, group: Group) -> Hops | None:
        """All ranks make the subgroups of all families of these axes, in one order."""
        if group.size == 1:
            return None
        inner: Group | None = None
        outer: Group | None = None
        for family in self.mesh.families(group.axes):
            nodes: dict[int, list[int]] = {}
            for rank in family:
                nodes.setdefault(rank // self.node_ranks, []).append(rank)
            rows = list(nodes.values())
            if len(rows) == 1 or len(rows[0]) == 1 or len({len(r) for r in rows}) > 1:
                return None  # one level, or nodes of different sizes: flat
            inner = self._join(rows, group.axes) or inner
            outer = self._join([list(c) for c in zip(*rows, strict=True)], group.axes) or outer
        assert inner is not None and outer is not None
        return Hops(inner, outer)

    def _join(self, families: list[list[int]], axes: tuple[str, ...]) -> Group | None:
        found = None
        for ranks in families:
            handle = dist.new_group(ranks)
            if self.mesh.rank in ranks:
                found = Group(axes, tuple(ranks), ranks.index(self.mesh.rank), handle)
        return found


@dataclass(frozen=True)
class Hops:
    """A group as `inner` (this node) and `outer` (the ranks at this place in all nodes)."""

    inner: Group
    outer: Group

    def reduce_scatter(
        self, base: GlooCollectives, exchange: Exchange | None, output: torch.Tensor, source: torch.Tensor, *, accumulate: bool
    ) -> Work:
        """First the sum inside the node of what each place passes on, then between nodes, by `exchange` if there is one."""
        g, k = self.inner.size, self.outer.size
        by_place = source.view(k, g, -1).transpose(0, 1).contiguous()  # [g, k, part]
        mine = torch.empty(source.numel() // g, dtype=torch.promote_types(source.dtype, output.dtype), device=source.device)
        first = base.reduce_scatter(mine, by_place.view(-1), self.inner, accumulate=False)

        def across() -> None:
            if exchange is None:
                base.reduce_scatter(output, mine, self.outer, accumulate=accumulate).wait()
            else:
                exchange.reduce_scatter(output, mine, accumulate=accumulate).wait()

        return Then([first], across)

    def all_reduce(self, base: GlooCollectives, exchange: Exchange | None, buffer: torch.Tensor) -> Work:
        """Sum over the group, in place: scattered inside the node, summed between nodes, shared inside the node."""
        g = self.inner.size
        part = -(-buffer.numel() // g)
        if part * g != buffer.numel():  # uneven: flat inside the node, which the links there bear
            padded = buffer.new_zeros(part * g)
            padded[: buffer.numel()].copy_(buffer)
        else:
            padded = buffer
        mine = torch.empty(part, dtype=buffer.dtype, device=buffer.device)
        first = base.reduce_scatter(mine, padded, self.inner, accumulate=False)

        def rest() -> None:
            if exchange is None:
                base.all_reduce(mine, self.outer).wait()
            else:
                exchange.all_reduce(mine).wait()
            rows = padded.view(g, -1)
            rows[self.inner.rank].copy_(mine)
            base.transport.share(rows.unbind(), self.inner, GRADIENTS).wait()
            if padded is not buffer:
                buffer.copy_(padded[: buffer.numel()])

        return Then([first], rest)

    def all_gather(self, base: GlooCollectives, format: Format, whole: torch.Tensor) -> Work:
        """Packets of this place between nodes, then everything inside the node: still packed, so that it is small there too."""
        g, k = self.inner.size, self.outer.size
        parts = whole.view(k, g, -1)
        size = format.size(parts.shape[-1])
        packets = torch.empty(g, k, size, dtype=torch.uint8, device=whole.device)
        row = packets[self.inner.rank]
        format.encode(parts[self.outer.rank, self.inner.rank], row[self.outer.rank])
        first = base.transport.share(row.unbind(), self.outer, WEIGHTS)

        def rest() -> None:
            base.transport.share(packets.unbind(), self.inner, WEIGHTS).wait()
            unpack(format, packets.transpose(0, 1).reshape(k * g, size), whole)

        return Then([first], rest)
