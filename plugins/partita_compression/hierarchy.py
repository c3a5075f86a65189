"""Two-level collectives: inside a node first, so that only 1 / (ranks of a node) of the data crosses the slow links between nodes.

For N = g x k ranks (g in each of k nodes) and n bytes, (k - 1) / k * n / g leave a rank towards other nodes, where a flat exchange
sends (N - g) / N * n. Ranks of a node are neighbours in the group: rank = node * g + place.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from partita.errors import PartitaError
from partita.runtime.collectives import GRADIENTS, WEIGHTS, Done, GlooCollectives
from partita.runtime.mesh import Group, Mesh
from partita.runtime.relay import Step
from partita.runtime.transport import All, Work
from partita_compression.exchange import Exchange
from partita_compression.formats import Format

POSITIONS = 4  # messages of the longest chain
FEW = 8  # nodes up to which a message for each inside the node is cheaper than to reorder the whole buffer


@dataclass
class Levels:
    """Which ranks share a node: those with the same global rank // node_ranks."""

    mesh: Mesh
    node_ranks: int
    _hops: dict[tuple[int, ...], Hops | None] = field(default_factory=dict)

    def check(self) -> None:
        """Collective. Raises PartitaError where ranks that count as one node run on several machines."""
        hosts: list[str] = [""] * self.mesh.world
        dist.all_gather_object(hosts, socket.gethostname())
        for first in range(0, self.mesh.world, self.node_ranks):
            found = dict.fromkeys(hosts[first : first + self.node_ranks])
            if len(found) > 1:
                raise PartitaError(
                    f"compression.node_ranks: ranks {first} to {first + self.node_ranks - 1} count as one node, and run on "
                    f"{', '.join(found)}.\n    -> set it to the ranks of each machine, or use compression.algorithm=flat"
                )

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
        inner: tuple[Group, ...] | None = None
        outer: tuple[Group, ...] | None = None
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

    def _join(self, families: list[list[int]], axes: tuple[str, ...]) -> tuple[Group, ...] | None:
        """This rank's one of the families, with a communicator for each position."""
        found = None
        for ranks in families:
            handles = [dist.new_group(ranks) for _ in range(POSITIONS)]
            if self.mesh.rank in ranks:
                found = tuple(Group(axes, tuple(ranks), ranks.index(self.mesh.rank), handle) for handle in handles)
        return found


@dataclass(frozen=True)
class Hops:
    """A group as `inner` (this node) and `outer` (the ranks at this place in all nodes): by position in a chain of messages, because
    each position has communicators of its own (`partita.runtime.relay`)."""

    inner: tuple[Group, ...]
    outer: tuple[Group, ...]

    def reduce_scatter(
        self, base: GlooCollectives, exchange: Exchange | None, output: torch.Tensor, source: torch.Tensor, *, accumulate: bool
    ) -> Work:
        """First the sum inside the node of what each place passes on, then between nodes, by `exchange` if there is one."""
        mine = torch.empty(
            source.numel() // self.inner[0].size, dtype=torch.promote_types(source.dtype, output.dtype), device=source.device
        )

        def across() -> Work:
            if exchange is None:
                return base.reduce_scatter(output, mine, self.outer[1], accumulate=accumulate)
            return exchange.reduce_scatter(output, mine, accumulate=accumulate)

        return base.transport.chain([lambda: self._within(base, mine, source), across], source.device, GRADIENTS)

    def _within(self, base: GlooCollectives, mine: torch.Tensor, source: torch.Tensor) -> Work:
        """mine [k, part]: the node's sums of what this place passes on, from source [k, g, part]."""
        inner, k = self.inner[0], self.outer[0].size
        if k > FEW:
            by_place = source.view(k, inner.size, -1).transpose(0, 1).contiguous()
            return base.reduce_scatter(mine, by_place.view(-1), inner, accumulate=False)
        rows = zip(mine.view(k, -1), source.view(k, -1), strict=True)
        return All([base.reduce_scatter(row, part, inner, accumulate=False) for row, part in rows])

    def all_reduce(self, base: GlooCollectives, exchange: Exchange | None, buffer: torch.Tensor) -> Work:
        """Sum over the group, in place: scattered inside the node, summed between nodes, shared inside the node."""
        g = self.inner[0].size
        part = -(-buffer.numel() // g)
        if part * g != buffer.numel():
            padded = buffer.new_zeros(part * g)
            padded[: buffer.numel()].copy_(buffer)
        else:
            padded = buffer
        mine = torch.empty(part, dtype=buffer.dtype, device=buffer.device)
        steps: list[Step] = [lambda: base.reduce_scatter(mine, padded, self.inner[0], accumulate=False)]
        summed: Callable[[], None] | None = None
        if exchange is None:
            steps += [lambda: base.all_reduce(mine, self.outer[1]), Done]
        else:
            more, summed = exchange.steps(mine)
            steps += more

        def share() -> Work:
            if summed is not None:
                summed()
            rows = padded.view(g, -1)
            rows[self.inner[0].rank].copy_(mine)
            return base.transport.share(rows.unbind(), self.inner[3], GRADIENTS)

        def trim() -> None:
            if padded is not buffer:
                buffer.copy_(padded[: buffer.numel()])

        return base.transport.chain([*steps, share], buffer.device, GRADIENTS, trim)

    def all_gather(self, base: GlooCollectives, format: Format | None, whole: torch.Tensor) -> Work:
        """Parts of this place between nodes, then everything inside the node; as packets of `format` if there is one, there too."""
        parts = whole.view(self.outer[0].size, self.inner[0].size, -1)
        return self._gather_packed(base, format, parts) if format else self._gather_plain(base, parts)

    def _gather_plain(self, base: GlooCollectives, parts: torch.Tensor) -> Work:
        """parts [k, g, part]; this rank's is there."""
        place, transport = self.inner[0].rank, base.transport

        def within() -> Work:
            return All([transport.share(row.unbind(), self.inner[1], WEIGHTS) for row in parts])

        across = lambda: transport.share(parts[:, place].unbind(), self.outer[0], WEIGHTS)  # noqa: E731
        return transport.chain([across, within], parts.device, WEIGHTS)

    def _gather_packed(self, base: GlooCollectives, format: Format, parts: torch.Tensor) -> Work:
        k, g, n = parts.shape
        node, place, transport = self.outer[0].rank, self.inner[0].rank, base.transport
        packets = torch.empty(g, k, format.size(n), dtype=torch.uint8, device=parts.device)  # a place's packets lie together

        def across() -> Work:
            format.encode(parts[node, place], packets[place, node])
            return transport.share(packets[place].unbind(), self.outer[0], WEIGHTS)

        def unpack_all() -> None:
            for i in range(g):
                for j in range(k):
                    format.decode(packets[i, j], parts[j, i])

        within = lambda: transport.share(packets.unbind(), self.inner[1], WEIGHTS)  # noqa: E731
        return transport.chain([across, within], parts.device, WEIGHTS, unpack_all)
