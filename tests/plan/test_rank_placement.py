"""Which ranks share a node, in words and in links; messages by alpha and beta."""

from __future__ import annotations

import pytest

from partita.plan.cluster import Cluster
from partita.plan.links import Group, group_of, message, seconds
from partita.plan.plan import Layout
from partita.plan.rank_placement import notes, placement_words

DGX = Cluster(
    nodes=4,
    devices_per_node=8,
    accelerator=True,
    intra_bandwidth=100e9,
    inter_bandwidth=10e9,
    intra_latency=1e-6,
    inter_latency=10e-6,
)


@pytest.mark.parametrize(
    ("layout", "axes", "size", "near"),
    [
        (Layout(replicate=4, shard=2, tensor=4), ("shard",), 2, 2),
        (Layout(replicate=4, shard=2, tensor=4), ("replicate", "shard"), 8, 2),
        (Layout(shard=32), ("shard",), 32, 8),
        (Layout(shard=2, tensor=16), ("tensor",), 16, 8),
        (Layout(pipeline=4, tensor=8), ("pipeline",), 4, 1),
    ],
)
def test_groups(layout, axes, size, near):
    """Counted rank by rank: those that differ along the axes only, and of these those in the first node."""
    assert group_of(DGX, layout, axes) == Group(size, near)
    ranks, stride, members = range(layout.world), 1, [0]
    for axis in ("tensor", "context", "shard", "replicate", "pipeline"):
        if axis in axes:
            members = [m + i * stride for m in members for i in range(getattr(layout, axis))]
        stride *= getattr(layout, axis)
    assert len(members) == size and sum(m < 8 for m in members) == near and set(members) <= set(ranks)


def test_words():
    text = placement_words(DGX, Layout(pipeline=2, shard=2, tensor=8))
    assert text == "tensor 8 in a node; shard 2, pipeline 2 across nodes; node 0: ranks 0-7 = pipeline 0 x shard 0 x tensor 0-7"
    assert "shard 8 (2 in a node) across nodes" in placement_words(DGX, Layout(shard=8, tensor=4))


def test_messages():
    near, far, wide = Group(8, 8), Group(4, 1), Group(32, 8)
    assert seconds(DGX, near, "gather", 8e9) == pytest.approx(7e-6 + 7e9 / 100e9)
    assert seconds(DGX, far, "sum", 4e9) == pytest.approx(2 * 2 * 10e-6 + 6e9 / 10e9)
    # 8 ranks of each node bring 8 links: 80 GB/s; 28 hops inside nodes, 3 between them
    assert seconds(DGX, wide, "gather", 32e9) == pytest.approx(28e-6 + 30e-6 + 31e9 / 80e9)
    assert seconds(DGX, Group(1, 1), "sum", 1e9) == 0
    cost = message(DGX, Layout(tensor=8, shard=4), ("tensor",), "x", 800, "gather", times=3)
    assert (cost.bytes, cost.place) == (2100, "intra")


def test_tensor_groups_over_nodes_are_told(plan_of):
    node = {"cluster__nodes": 2, "cluster__devices_per_node": 2, "cluster__device": "a100", "precision__name": "bf16"}
    planned = plan_of(**node, parallel__tensor=4)
    told = list(notes(planned.draft, planned.plan, planned.costs))
    assert any("parallel.tensor=4 reaches over nodes of 2 devices" in t for t in told)
    planned = plan_of(**node, parallel__tensor=2)
    assert not any("reaches over" in t for t in notes(planned.draft, planned.plan, planned.costs))
