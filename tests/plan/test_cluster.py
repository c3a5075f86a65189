"""Clusters found and described."""

from __future__ import annotations

import os

import pytest

from partita.config.schema import ClusterConfig, LaunchConfig
from partita.errors import ConfigError
from partita.plan.cluster import Cluster, find_cluster, host_memory, joined_ranks
from partita.plan.devices import DEVICES, device_row
from partita.plan.plan import Layout
from partita.plan.rates import LINK_SHARE


def test_this_machine_has_flexible_ranks_without_accelerators():
    cluster = find_cluster(ClusterConfig(), LaunchConfig())
    if cluster.accelerator:
        assert cluster.ranks == cluster.devices_per_node
    else:
        assert cluster.ranks is None and cluster.memory is None
        assert cluster.cores == len(os.sched_getaffinity(0))
        assert cluster.capacity(2) == cluster.host_memory / 2
    assert cluster.host_memory == host_memory() > 2**28


def test_described_cluster_takes_the_table_and_overrides():
    config = ClusterConfig(nodes=4, devices_per_node=8, device="mi300x", inter_bandwidth=1e9, memory=100e9)
    cluster = find_cluster(config, LaunchConfig())
    assert (cluster.nodes, cluster.devices_per_node, cluster.ranks) == (4, 8, 32)
    assert cluster.memory == 100e9 and cluster.inter_bandwidth == 1e9
    assert cluster.intra_bandwidth == DEVICES["mi300x"].intra * LINK_SHARE
    assert cluster.capacity(32) == 100e9


def test_device_not_in_the_table_may_be_described():
    cluster = find_cluster(ClusterConfig(nodes=1, devices_per_node=2, device="prototype", memory=1e9, flops=1e12), LaunchConfig())
    assert cluster.device == "prototype" and cluster.flops["bfloat16"] == 1e12


@pytest.mark.parametrize("ranks", [0, -2, "many"])
def test_ranks_must_be_a_count(ranks):
    with pytest.raises(ConfigError, match=r"launch.ranks: .* is no positive whole number"):
        find_cluster(ClusterConfig(), LaunchConfig(ranks=ranks))


def test_launchers_say_how_many_ranks_there_are():
    assert joined_ranks({"RANK": "1", "WORLD_SIZE": "4"}) == (4, "WORLD_SIZE")
    assert joined_ranks({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "16"}) == (16, "Slurm")
    assert joined_ranks({"WORLD_SIZE": "4"}) is None


@pytest.mark.parametrize(
    ("environment", "nodes", "near"),
    [
        ({"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}, 2, 2),
        ({"LOCAL_WORLD_SIZE": "2"}, 2, 2),
        ({"LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1"}, 1, 1),
        ({"LOCAL_WORLD_SIZE": "3", "GROUP_WORLD_SIZE": "2"}, 1, 1),  # uneven: 3 here, 1 there
        ({"LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}, 1, 1),  # the same, seen from there
        ({}, 1, 1),
    ],
)
def test_launchers_say_over_how_many_nodes_the_ranks_are_spread(monkeypatch, environment, nodes, near):
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", **environment}.items():
        monkeypatch.setenv(name, value)
    here = find_cluster(ClusterConfig(calibration="none"), LaunchConfig())
    if not here.accelerator:
        assert (here.nodes, here.devices_per_node) == (nodes, near)


@pytest.mark.parametrize(
    ("reported", "row"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-PCIE-40GB", "a100_40"),
        ("NVIDIA H200", "h200"),
        ("GeForce", None),
    ],
)
def test_names_that_drivers_report(reported, row):
    assert device_row(reported) == row


def test_every_device_has_a_source():
    assert all(spec.source for spec in DEVICES.values())


def test_links():
    cluster = Cluster(nodes=4, devices_per_node=8)
    layout = Layout(replicate=4, shard=2, tensor=4)
    assert cluster.link(layout, ("tensor",)) == "intra"
    assert cluster.link(layout, ("shard",)) == "intra"
    assert cluster.link(layout, ("replicate",)) == "inter"
    assert cluster.link(layout, ("replicate", "shard")) == "inter"
    assert Cluster(nodes=1, devices_per_node=2).link(layout, ("replicate",)) == "intra"
