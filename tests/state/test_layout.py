"""Layouts are values: every element of every parameter is owned exactly once, whatever the shapes and the number of shards."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.config.schema import OptimizerConfig, OptimizerGroup
from partita.plan.plan import Layout, Placement, Plan, Precision, Schedule
from partita.state.layout import ALIGN, RuleLayout, assign_groups, build_buckets, build_layout
from partita.state.optimizers import State


@dataclass(frozen=True)
class P:
    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    unit: str = "root"
    part: None = None


shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8)


@given(shapes, st.integers(1, 9), st.lists(st.integers(0, 2), min_size=8, max_size=8))
def test_shards_cover_every_parameter_once(given_shapes: list[tuple[int, ...]], shards: int, groups: list[int]) -> None:
    parameters = [P(f"p{i}", s) for i, s in enumerate(given_shapes)]
    index = {p.name: g for p, g in zip(parameters, groups)}
    (bucket,) = build_buckets(parameters, index, lambda _: shards)
    assert bucket.shard % ALIGN == 0
    assert bucket.padded - bucket.numel < ALIGN * (shards + 2) or bucket.numel == 0
    assert sum(hi - lo for lo, hi in bucket.gaps()) == bucket.padded - bucket.numel
    for p in parameters:
        parts = sorted((lo, hi) for i in range(shards) for s, lo, hi in bucket.owned(i) if s.name == p.name)
        ends = [0, *(hi for _, hi in parts)]
        assert [lo for lo, _ in parts] == ends[:-1]
        assert ends[-1] == math.prod(p.shape)


@given(shapes, st.integers(1, 5), st.lists(st.integers(0, 2), min_size=8, max_size=8))
def test_runs_are_few_and_cover_what_is_owned(given_shapes: list[tuple[int, ...]], shards: int, groups: list[int]) -> None:
    parameters = [P(f"p{i}", s) for i, s in enumerate(given_shapes)]
    (bucket,) = build_buckets(parameters, {p.name: g for p, g in zip(parameters, groups)}, lambda _: shards)
    for i in range(shards):
        runs = bucket.runs(i)
        assert sum(hi - lo for _, lo, hi in runs) == sum(hi - lo for _, lo, hi in bucket.owned(i))
        assert all(lo % ALIGN == 0 for _, lo, _ in runs)
        assert len(runs) <= 3  # parameters stand by group: one run for each group


def test_groups_by_pattern() -> None:
    parameters = [P("a.weight", (2, 2)), P("a.bias", (2,)), P("head.weight", (2, 2)), P("head.bias", (2,))]
    config = OptimizerConfig(weight_decay=0.1, groups=[OptimizerGroup(["head.*"], lr_scale=0.5)])
    index, groups = assign_groups(parameters, config)
    got = {n: (groups[g].lr_scale, groups[g].weight_decay) for n, g in index.items()}
    assert got == {"a.weight": (1.0, 0.1), "a.bias": (1.0, 0.0), "head.weight": (0.5, 0.1), "head.bias": (0.5, 0.0)}


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (Placement(), (1024 * 2, 1024 * 4, 1024 * 12)),
        (Placement((), (), ("shard",)), (1024 * 2, 1024 * 4 + 256 * 4, 256 * 12)),
        (Placement((), ("shard",), ("shard",)), (1024 * 2, 256 * 4, 256 * 12)),
        (Placement(("shard",), ("shard",), ("shard",)), (256 * 2, 256 * 4, 256 * 12)),
    ],
)
def test_bytes_of_mixed_precision_adam(placement: Placement, expected: tuple[int, int, int]) -> None:
    """Rajbhandari et al. 2020, section 3.1: 2 bytes of weights and 12 of optimizer states for each parameter; our gradients are fp32."""
    plan = Plan(
        layout=Layout(shard=4),
        placement=placement,
        precision=Precision(compute="bfloat16"),
        schedule=Schedule(micro_batches=2),
    )
    spec = type("Spec", (), {"parameters": [P("w", (32, 32))]})
    states = [RuleLayout("element", {"exp_avg": State("float32"), "exp_avg_sq": State("float32")})]
    got = build_layout(spec, plan, states, OptimizerConfig()).bytes()
    assert (got["parameters"], got["gradients"], got["optimizer"]) == expected
