"""Tiers are planned, and refused where the engine has none."""

from __future__ import annotations

import pytest

from partita.plan.plan import Tier, Tiers


def test_none_is_where_compute_runs(plan_of):
    assert plan_of().plan.tiers == Tiers()


def test_host_and_file_are_planned_and_refused(plan_of):
    planned = plan_of(
        launch__ranks=2,
        zero__stage=3,
        offload__optimizer="file",
        offload__parameters="host",
        offload__path="/data",
        offload__fraction=0.5,
    )
    assert planned.plan.tiers == Tiers(parameters=Tier("host", 0.5), optimizer=Tier("file", 0.5), path="/data")
    assert sorted(p.key for p in planned.problems) == ["offload.optimizer", "offload.parameters"]
    assert all("is not in this version" in p.reason for p in planned.problems)
    halves = [c.bytes for c in planned.costs if c.category == "optimizer"]
    assert len(halves) == 2 and abs(halves[0] - halves[1]) <= 1
    assert any(c.place == "file" and c.category == "communication" for c in planned.costs)


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ({"offload__optimizer": "disk"}, "offload.optimizer", "'disk' is no place"),
        ({"offload__optimizer": "file"}, "offload.path", "no folder is given"),
        ({"offload__path": "/data"}, "offload.path", "has no effect"),
        ({"offload__fraction": 1.5, "offload__optimizer": "host"}, "offload.fraction", "between 0 and 1"),
        ({"offload__fraction": 0.5}, "offload.fraction", "nothing is offloaded"),
        ({"offload__parameters": "host", "zero__stage": 2}, "offload.parameters", "zero.stage below 3"),
    ],
)
def test_contradictions_name_their_keys(plan_of, overrides, key, words):
    """Public case of the last one: deepspeedai/DeepSpeed#5046, refused there after the model was built."""
    found = plan_of(launch__ranks=2, **overrides).problems
    assert any(p.key == key and words in p.reason for p in found), found
