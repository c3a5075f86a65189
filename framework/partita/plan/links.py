"""How long a message takes: latency and bandwidth (alpha and beta) of each level of the cluster, for rings inside and across nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from partita.plan.cluster import Cluster
from partita.plan.plan import AXES, Layout
from partita.plugin.types import Cost

# operation -> times that the data passes each rank's link; all but `send` move (n - 1) / n of it (Thakur et al. 2005, section 4)
PASSES = {"gather": 1, "scatter": 1, "sum": 2, "exchange": 1, "send": 1}


@dataclass(frozen=True)
class Group:
    """Ranks that differ along some axes only: how many, how many of them share a node."""

    size: int
    near: int

    @property
    def place(self) -> str:
        """`intra` where all of them share a node, else `inter`."""
        return "intra" if self.near >= self.size else "inter"


def group_of(cluster: Cluster, layout: Layout, axes: tuple[str, ...]) -> Group:
    """The group of a rank along `axes`. Inner axes are neighbours in a node, so the strides of the mesh say who shares one."""
    size = near = stride = 1
    for axis in reversed(AXES):
        degree = getattr(layout, axis)
        if axis in axes:
            size *= degree
            near *= degree if cluster.nodes == 1 else max(1, min(degree, cluster.devices_per_node // stride))
        stride *= degree
    return Group(size, min(near, size))


def seconds(cluster: Cluster, group: Group, operation: str, data: float) -> float:
    """Time of one operation on `data` bytes: of the whole buffer, or of the message for `send`. 0 where no bandwidth is known.

    A ring crosses from node to node once for each rank that shares the node, so each of them brings its own link along. CPU ranks
    exchange with everyone.
    """
    if group.size == 1 and operation != "send":
        return 0.0
    bandwidth = _bandwidth(cluster, group)
    if not bandwidth:
        return 0.0
    return _latency(cluster, group, operation) + moved(group.size, operation, data) / bandwidth


def two_levels(group: Group) -> tuple[Group, Group] | None:
    """The group inside a node, and between the nodes at one place of each; None where it has one level, or nodes with unlike shares."""
    if not 1 < group.near < group.size or group.size % group.near:
        return None
    return Group(group.near, group.near), Group(group.size // group.near, 1)


def stages(group: Group, operation: str, data: float, inside: float) -> list[tuple[Group, str, float]]:
    """The operations that one operation in two levels is made of: a node's ranks share what crosses to other nodes.

    data: bytes of the whole buffer as it travels between nodes; inside: as it travels in a node.
    """
    levels = two_levels(group)
    assert levels is not None
    near, far = levels
    if operation == "sum":
        return [(near, "scatter", inside), (far, "sum", data / near.size), (near, "gather", inside)]
    return [(near, operation, inside), (far, operation, data / near.size)]


def moved(ranks: int, operation: str, data: float) -> float:
    """Bytes that one rank sends."""
    if operation == "send":
        return data
    return PASSES[operation] * data * (ranks - 1) / ranks


def _bandwidth(cluster: Cluster, group: Group) -> float | None:
    if group.place == "intra":
        return cluster.intra_bandwidth
    if cluster.inter_bandwidth is None:
        return None
    if not cluster.accelerator:  # every rank sends to every other one, so that most of it leaves the node
        across = cluster.inter_bandwidth * (group.size - 1) / (group.size - group.near)
    else:
        across = cluster.inter_bandwidth * group.near
    return min(across, cluster.intra_bandwidth) if cluster.intra_bandwidth and group.near > 1 else across


def _latency(cluster: Cluster, group: Group, operation: str) -> float:
    near, far = cluster.intra_latency, cluster.inter_latency
    if operation == "send":
        return near if group.place == "intra" else far
    nodes = max(1, math.ceil(group.size / group.near))
    if operation == "sum":  # trees: up and down again (Sanders et al. 2009, two-tree algorithm)
        return 2 * (math.log2(nodes) * far + math.log2(group.near) * near)
    if operation == "exchange":  # one message to each
        return (group.size - nodes) * near + (nodes - 1) * far
    return (group.size - nodes) * near + (nodes - 1) * far  # ring


def message(
    cluster: Cluster,
    layout: Layout,
    axes: tuple[str, ...],
    what: str,
    data: float,
    operation: str,
    *,
    times: float = 1,
    overlap: float = 0.0,
    repeated: bool = False,
    inside: float | None = None,
) -> Cost:
    """The cost of `times` operations on `data` bytes each in one step, between the ranks along `axes`.

    overlap, repeated: as in `Cost`. inside: in two levels, where the group has them, and then this many bytes inside a node.
    """
    group = group_of(cluster, layout, axes)
    parts = [(group, operation, data)]
    if inside is not None and two_levels(group):
        parts = stages(group, operation, data, inside)
    sent = int(sum(moved(g.size, o, d) for g, o, d in parts) * times) if group.size > 1 else 0
    spent = sum(seconds(cluster, g, o, d) for g, o, d in parts) * times * crowd(cluster, layout) if sent else 0.0
    return Cost("communication", what, sent, group.place, spent, overlap=overlap, repeated=repeated)


def crowd(cluster: Cluster, layout: Layout) -> float:
    """How many times slower links are because more ranks share a node's cores than when they were measured."""
    if cluster.accelerator:
        return 1.0
    return max(1.0, layout.world / cluster.nodes / cluster.link_ranks)
