"""Runs that lose a rank go on by themselves: with fewer ranks, with all of them again, with the same losses."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import commands

from partita.cli import replanner, with_ranks
from partita.config.compose import compose_config, registry_for
from partita.config.job import JobInfo
from partita.plan.make import make_plan

BATCH = ("train.global_batch=12", "lr_schedule=constant", "train.save_every=5")


def test_four_ranks_three_and_four_again(tmp_path: Path) -> None:
    """A rank is killed; nobody helps. Every loss is that of the uninterrupted run."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    commands.train(whole, *BATCH, "parallel.data=1", "train.steps=300")
    settings = ("parallel.data=4", "train.steps=300", "launch.restarts=2", "launch.min_ranks=2", "launch.cooldown=1")
    process = commands.start(folder, *BATCH, *settings)
    commands.wait_for_step(folder, 11, process)
    os.kill(commands.ranks_of(process)[-1], signal.SIGKILL)
    assert process.wait(timeout=120) == 0, (tmp_path / "run.out").read_text()[-3000:]
    commands.assert_gone(process.pid)
    out = (tmp_path / "run.out").read_text()
    assert re.search(r"rank \d of 4 failed at step \d+ \(\w+\): its process was ended by SIGKILL", out)
    assert "going on with 3 of 4 ranks (1 restarts left)" in out
    assert "going on with 4 ranks again" in out
    assert [m["step"] for m in commands.metrics(folder)] == list(range(1, 301))
    assert commands.column(folder, "loss") == pytest.approx(commands.column(whole, "loss"), rel=1e-5)


def test_a_run_below_its_bounds_fails(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = commands.start(folder, *BATCH, "parallel.data=2", "train.steps=100000", "launch.restarts=3", "launch.min_ranks=2")
    commands.wait_for_step(folder, 3, process)
    os.kill(commands.ranks_of(process)[-1], signal.SIGKILL)
    assert process.wait(timeout=60) == 1
    commands.assert_gone(process.pid)
    assert "going on" not in (tmp_path / "run.out").read_text()


@pytest.mark.parametrize(
    ("overrides", "left", "ranks"),
    [
        (("parallel.data=4",), 3, 3),
        (("parallel.data=4", "train.global_batch=16"), 3, 2),  # 16 sequences don't go into 3 ranks
        (("parallel.replicate=2", "parallel.shard=2"), 3, 2),  # a group of 2 stays a group of 2
        (("launch.ranks=4", "+strategy=zero3"), 3, 3),
        (("parallel.data=4", "train.global_batch=16", "launch.min_ranks=3"), 3, None),
    ],
    ids=str,
)
def test_the_plan_is_made_again(overrides: tuple[str, ...], left: int, ranks: int | None, tmp_path: Path) -> None:
    config, _ = compose_config([*commands.TINY, *BATCH, *overrides])
    first = make_plan(config, registry_for(())).plan
    assert first.layout.world == 4
    again = replanner(config, JobInfo(tmp_path, "x"), registry_for(()), config.launch.min_ranks, first)
    spec: Any = again(left)
    assert (spec.ranks if spec else None) == ranks
    if spec:
        assert spec.plan.schedule.global_batch == config.train.global_batch
        assert spec.plan.layout.world == ranks
        assert config.parallel.data == compose_config([*commands.TINY, *overrides])[0].parallel.data  # not touched
        assert with_ranks(config, 1, 12).launch.ranks == 1


def planned(*overrides: str) -> Any:
    config, _ = compose_config([*commands.TINY, "parallel.data=2", *overrides])
    return make_plan(config, registry_for(()))


def test_who_restarts_is_told_and_what_nothing_reads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [e for e in planned("launch.restarts=2").manifest.as_list() if e["key"] == "launch.restarts" and e.get("why")]
    problems = planned("train.memory_every=5").problems
    assert [p.key for p in problems] == ["train.memory_every"] and "launch.restarts" in problems[0].remedy
    assert not planned("train.memory_every=5", "launch.restarts=1").problems
    assert [p.key for p in planned("train.memory_every=-1", "launch.restarts=1").problems] == ["train.memory_every"]
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    line = next(
        e for e in planned("launch.restarts=2", "train.memory_every=5").manifest.as_list() if e["key"] == "launch.restarts"
    )
    assert (line["asked"], line["in_effect"]) == (2, 0) and "torchrun" in line["why"]
