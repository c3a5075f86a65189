"""Tiers are planned, and refused where they can't be."""

from __future__ import annotations

import shutil

import pytest

from partita.plan.plan import Tier, Tiers


def test_none_is_where_compute_runs(plan_of):
    assert plan_of().plan.tiers == Tiers()


def test_host_and_file_are_planned(plan_of, tmp_path):
    settings = {"launch__ranks": 2, "zero__stage": 3, "offload__path": str(tmp_path / "states")}
    planned = plan_of(offload__optimizer="file", offload__parameters="host", offload__fraction=0.5, **settings)
    assert planned.plan.tiers == Tiers(Tier("host", 0.5), Tier(), Tier("file", 0.5), path=str(tmp_path / "states"))
    assert planned.problems == []
    halves = [c.bytes for c in planned.costs if c.category == "optimizer"]
    assert len(halves) == 2
    assert abs(halves[0] - halves[1]) < 0.01 * sum(halves)
    assert any(c.place == "file" and c.category == "communication" for c in planned.costs)
    assert not (tmp_path / "states").exists()


def test_a_disk_that_is_too_small_is_found_before_the_run(plan_of, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    (problem,) = plan_of(offload__optimizer="file", offload__path=str(tmp_path)).problems
    assert problem.key == "offload.path"
    assert "1000 B are free" in problem.reason


def test_a_file_system_without_direct_io_is_a_line_of_the_manifest(plan_of, tmp_path, monkeypatch):
    monkeypatch.setattr("partita_offload.direct.probe", lambda folder: f"the file system of {folder} refuses O_DIRECT")
    planned = plan_of(offload__optimizer="file", offload__path=str(tmp_path))
    (line,) = [x for x in planned.manifest.differences() if x.key == "offload.path"]
    assert "refuses O_DIRECT" in line.reason


def test_tiers_come_from_the_slot(registry):
    assert registry.provide("tier", "file").__name__ == "FileTier"
    assert registry.provide("tier", "host").__name__ == "HostTier"


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
