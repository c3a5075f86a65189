"""Memory and communication against closed forms."""

from __future__ import annotations

import pytest

from partita.plan.devices import HOP_INTER
from partita.plan.kept import activation_bytes
from partita.plan.memory import layout_bytes, state_bytes, state_layouts
from partita.plan.rates import MATMUL_SHARE


def by_category(planned, exact: bool = True) -> dict[str, int]:
    total: dict[str, int] = {}
    for cost in planned.costs:
        if cost.exact == exact:
            total[cost.category] = total.get(cost.category, 0) + cost.bytes
    return total


def sent(planned) -> dict[str, int]:
    return {c.what: c.bytes for c in planned.costs if c.category == "communication"}


def test_states_are_what_the_layout_says(plan_of):
    planned = plan_of(launch__ranks=4, zero__stage=3)
    (layout,) = state_layouts(planned.draft, planned.plan)
    assert (
        {k: v for k, v in by_category(planned).items() if k != "buffers"}
        == layout.bytes()
        == state_bytes(planned.draft, planned.plan)
    )


@pytest.mark.parametrize(
    ("stage", "parameters", "gradients", "optimizer"),
    [(0, 2, 4, 12), (2, 2, 4 / 8, 12 / 8), (3, 2 / 8, 4 / 8, 12 / 8)],
)
def test_bytes_for_each_parameter_in_bf16_on_8_ranks(plan_of, stage, parameters, gradients, optimizer):
    """Rajbhandari et al. 2020, figure 1, with gradients accumulated in float32: 18 P, and its 1/N."""
    planned = plan_of(launch__ranks=8, zero__stage=stage, precision__name="bf16", train__micro_batch=1, model__width=256)
    found, count = by_category(planned), planned.model.numel
    padding = 8 * 64 * 5 * 16  # a tail for each of 5 buckets
    assert found["parameters"] == pytest.approx(parameters * count, abs=padding)
    assert found["gradients"] == pytest.approx(gradients * count, abs=padding)
    assert found["optimizer"] == pytest.approx(optimizer * count, abs=padding)


def test_more_data_ranks_never_take_more_memory(plan_of):
    previous = None
    for ranks in (1, 2, 4, 8):
        states = state_bytes(*(lambda p: (p.draft, p.plan))(plan_of(launch__ranks=ranks, zero__stage=3, train__micro_batch=1)))
        total = states["parameters"] + states["optimizer"]
        assert previous is None or total < previous
        previous = total


def test_optimizer_wider_than_weights(plan_of):
    planned = plan_of(launch__ranks=4, zero__preset="hfsdp", zero__shard_size=2)
    (layout,) = state_layouts(planned.draft, planned.plan)
    padded = sum(b.padded for b in layout.buckets)
    assert layout_bytes(layout)["parameters"] == padded // 2 * 4
    assert layout_bytes(layout)["optimizer"] == padded // 4 * 2 * 4


def test_recompute_lowers_activations(plan_of):
    kept = {}
    for policy in ("none", "selective", "full"):
        planned = plan_of(recompute__policy=policy, launch__ranks=1)
        kept[policy] = activation_bytes(planned.draft, planned.plan)
    assert kept["full"]["kept for backward"] < kept["selective"]["kept for backward"] < kept["none"]["kept for backward"]
    block = 8 * 32 * 64 * 4
    inputs = 4 * block
    assert kept["full"]["kept for backward"] - inputs < kept["none"]["kept for backward"] / 4, "what is left is the root's"
    assert "recomputed, one block" not in kept["none"]


def test_bytes_sent_by_stage(plan_of):
    count = plan_of().model.numel * 4
    one, rounds = count * 3 // 4, 4
    stage = {
        s: sent(plan_of(launch__ranks=4, zero__stage=s, train__micro_batch=1, recompute__policy="none")) for s in range(4)
    }  # 16 sequences: 4 passes
    assert stage[0] == {"gradients summed": 2 * one}
    assert stage[1] == {"gradients scattered": one, "weights after the update": one}
    assert stage[2] == {"gradients scattered": rounds * one, "weights after the update": one}
    block = sum(u.numel for u in plan_of().model.units if u.name == "blocks.0") * 4 * 3 // 4
    often = one - 4 * block + (2 * rounds * 4 - 2 * (2 * rounds - 1)) * block  # two blocks stay between passes
    assert stage[3] == {"gradients scattered": rounds * one, "weights gathered": pytest.approx(often, abs=100)}


def test_hybrid_sends_across_groups_only_a_share(plan_of):
    count = plan_of().model.numel * 4
    found = sent(plan_of(launch__ranks=4, zero__preset="hsdp", zero__shard_size=2, train__micro_batch=4))
    block = sum(u.numel for u in plan_of().model.units if u.name == "blocks.0") * 4
    assert found == {
        "gradients scattered": count // 2,
        "gradients summed": 2 * (count // 2 // 2),
        "weights gathered": pytest.approx((count + 2 * block) // 2, abs=100),  # two of four blocks twice
    }


def test_narrow_wire_halves_the_gradients(plan_of):
    native, narrow = (
        sent(plan_of(launch__ranks=2, compression__gradient_reduce=f))["gradients summed"] for f in ("native", "bf16")
    )
    assert native == 2 * narrow


def test_links_and_seconds_on_a_described_cluster(plan_of):
    planned = plan_of(
        cluster__nodes=2,
        cluster__devices_per_node=4,
        cluster__device="a100",
        zero__preset="hsdp",
        zero__shard_size="node",
        precision__name="bf16",
    )
    costs = {c.what: c for c in planned.costs if c.category == "communication"}
    assert costs["gradients scattered"].place == "intra" and costs["gradients summed"].place == "inter"
    # two nodes: up and down a tree of one level for each of 5 units, and the bytes at the share of 200 Gb/s that collectives reach
    assert costs["gradients summed"].seconds == pytest.approx(
        5 * 2 * HOP_INTER + costs["gradients summed"].bytes / 20e9, rel=1e-3
    )
    matrices = next(c for c in planned.costs if c.what == "matrix products")
    flops = planned.model.flops_per_token(32) * 16 * 32
    assert matrices.seconds == pytest.approx(flops / (8 * 312e12 * MATMUL_SHARE))


def test_pipeline_bubble_and_tensor_traffic_are_shown(plan_of):
    planned = plan_of(
        cluster__nodes=1,
        cluster__device="h100",
        parallel__pipeline=4,
        parallel__tensor=2,
        train__micro_batch=1,
        precision__name="bf16",
    )
    words = [c.what for c in planned.costs]
    assert "pipeline bubble, 18.8%" in words  # 3 / 16
    assert "activations over tensor" in words and "activations between stages" in words
    assert planned.plan.layout.stage_cuts == (2, 3, 4)  # unit 0 is the root
