"""compression=auto: what is chosen follows from the speed of the links, and the plan says so."""

from __future__ import annotations

import pytest

from partita.plan.links import Group, seconds, stages, two_levels
from partita.plan.plan import Wire

AUTO = {f"compression__{key}": "auto" for key in ("gradient_reduce", "parameter_gather", "algorithm")}


def _plan(plan_of, **more):  # type: ignore[no-untyped-def]
    """2 nodes of 2 CPU ranks at stage 2, a model of 20 M parameters."""
    cluster = {"nodes": 2, "devices_per_node": 2, "device": "cpu", "intra_bandwidth": 1e9}
    keys = {f"cluster__{k}": v for k, v in cluster.items()} | {"zero__stage": 2, "parallel__data": 4, "parallel__shard": 4}
    size = {"model__layers": 6, "model__width": 512, "train__global_batch": 4, "data__sequence": 128}
    return plan_of(**{**AUTO, **keys, **size, **more})


@pytest.mark.parametrize(
    ("rate", "reduce"),
    [
        (1e9, Wire()),  # as fast between nodes as inside
        (2e7, Wire("hierarchical", "int8")),
    ],
)
def test_the_links_decide(plan_of, rate, reduce):
    planned = _plan(plan_of, cluster__inter_bandwidth=rate)
    got = planned.plan.collectives.gradient_reduce
    assert not planned.problems
    assert (got.algorithm, got.format) == (reduce.algorithm, reduce.format)
    told = {line.key: line for line in planned.manifest}
    assert told["compression.gradient_reduce"].asked == "auto"
    assert told["compression.gradient_reduce"].got == reduce.format and "planner" in told["compression.gradient_reduce"].reason


def test_what_is_written_out_is_kept(plan_of):
    planned = _plan(plan_of, cluster__inter_bandwidth=2e7, compression__gradient_reduce="native")
    assert planned.plan.collectives.gradient_reduce == Wire("hierarchical", "native")


def test_no_slow_level_no_loss(plan_of):
    planned = plan_of(**AUTO, parallel__data=4, zero__stage=2)
    assert planned.plan.collectives.gradient_reduce == Wire() and planned.plan.collectives.provider == "default"


def test_two_levels_are_predicted_by_the_formula(plan_of):
    """algorithms: (g - 1) / g of the buffer inside, (k - 1) / k of the g-th part between nodes; flat ranks exchange with everyone."""
    planned = _plan(plan_of, cluster__inter_bandwidth=2e7, cluster__inter_latency=0.0, cluster__intra_latency=0.0)
    cluster, group = planned.cluster, Group(4, 2)
    assert two_levels(group) == (Group(2, 2), Group(2, 1))
    n = 8e7
    parts = stages(group, "scatter", n / 4, n)
    assert sum(seconds(cluster, *part) for part in parts) == pytest.approx(n / 2 / 1e9 + n / 4 / 2 / 2 / 2e7)
    assert seconds(cluster, group, "scatter", n) == pytest.approx(n / 2 / 2e7)  # two of four parts of each rank leave the node
    whole = stages(group, "sum", n, n)
    assert sum(seconds(cluster, *part) for part in whole) == pytest.approx(n / 1e9 + 2 * n / 2 / 2 / 2e7)
