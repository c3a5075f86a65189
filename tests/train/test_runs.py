"""Whole runs through the command line: agreement between layouts, resume, signals, killed processes, failures, sweeps."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parent))

import commands

from partita.models.gpt import make_gpt
from partita.train.loading import read_weights, verify

CONSTANT = ("lr_schedule=constant", "lr_schedule.warmup=0")  # a schedule that does not depend on train.steps
LONG = (*CONSTANT, "train.steps=400", "train.save_every=5", "train.keep=3")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank, one micro-batch."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    commands.train(folder, "parallel.data=1", "model.dropout=0.1", "train.save_every=6", "train.keep=9")
    return folder


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.data=1", "train.micro_batch=2"),
        ("parallel.data=2",),
        ("parallel.data=2", "train.micro_batch=1"),
        ("parallel.data=4", "train.micro_batch=2"),
        ("+strategy=zero1", "parallel.data=2"),
        ("+strategy=zero2", "parallel.data=2", "train.micro_batch=1"),
        ("+strategy=zero3", "parallel.data=4", "train.micro_batch=1"),
        ("+strategy=zero3", "parallel.data=2", "recompute=full"),
    ],
    ids=" ".join,
)
def test_every_layout_gives_the_same_training(reference: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    folder = tmp_path / "run"
    commands.train(folder, *overrides, "model.dropout=0.1")
    for name in ("loss", "grad_norm"):
        assert commands.column(folder, name) == pytest.approx(commands.column(reference, name), rel=1e-5)
    assert commands.column(folder, "tokens") == commands.column(reference, "tokens")


def test_a_run_leaves_what_it_promises(reference: Path) -> None:
    assert {p.name for p in reference.iterdir()} >= {
        "config.yaml",
        "plan.yaml",
        "manifest.yaml",
        "metrics.jsonl",
        "log",
        "checkpoints",
    }
    plan = yaml.safe_load((reference / "plan.yaml").read_text())
    assert plan["layout"]["shard"] == 1
    assert (reference / "log" / "rank0.log").exists()
    assert [m["step"] for m in commands.metrics(reference)] == list(range(1, 13))


@pytest.mark.parametrize(
    "layout", [("parallel.data=1",), ("parallel.data=2",), ("+strategy=zero3", "parallel.data=2")], ids=" ".join
)
def test_resume_in_the_same_or_another_layout(reference: Path, tmp_path: Path, layout: tuple[str, ...]) -> None:
    folder = tmp_path / "run"
    start = reference / "checkpoints" / "step-00000006"
    commands.train(folder, *layout, "model.dropout=0.1", f"train.resume={start}")
    got, expected = commands.column(folder, "loss"), commands.column(reference, "loss")[6:]
    if layout == ("parallel.data=1",):
        assert got == expected
    assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_plain_module_takes_the_weights_of_any_stage(tmp_path: Path, stage: int) -> None:
    """Strictly: tied weights are there under both names. Evaluation of few samples (one rank has nothing to do at the end) changes
    no training and gives the mean of one rank."""
    few = ("data.limit=1500", "train.micro_batch=1", "train.steps=4", "train.save_every=4")
    commands.train(tmp_path / "run", f"zero.stage={stage}", "parallel.data=2", *few, "train.eval_every=2")
    weights = read_weights(tmp_path / "run" / "checkpoints")
    config = SimpleNamespace(
        **{
            k: SimpleNamespace(**v)
            for k, v in yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()).items()
            if isinstance(v, dict)
        }
    )
    model = make_gpt(config, 260)
    model.load_state_dict(weights, strict=True)
    assert torch.equal(weights["head.weight"], weights["tokens.weight"]) and model.head.weight is model.tokens.weight
    if stage == 3:
        commands.train(tmp_path / "quiet", "zero.stage=3", "parallel.data=2", *few)
        assert commands.column(tmp_path / "run", "loss") == commands.column(tmp_path / "quiet", "loss")
        commands.train(tmp_path / "one", "parallel.data=1", *few, "train.eval_every=2")
        lines = [
            json.loads(x)
            for f in ("run", "one")
            for x in (tmp_path / f / "metrics.jsonl").read_text().splitlines()
            if "eval_loss" in x
        ]
        assert lines[0]["eval_tokens"] == lines[1]["eval_tokens"]
        assert lines[0]["eval_loss"] == pytest.approx(lines[1]["eval_loss"], rel=1e-6)


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_leaves(tmp_path: Path, signum: int, status: int) -> None:
    """To the process that was started, or, as batch systems do it, to every process at once while threads prepare data."""
    folder = tmp_path / "run"
    process = commands.start(folder, "parallel.data=2", "train.steps=100000", "train.keep=1", "data.workers=2")
    commands.wait_for_step(folder, 3, process)
    for pid in [process.pid] if signum == signal.SIGINT else commands.session_members(process.pid):
        os.kill(pid, signum)
    assert process.wait(timeout=30) == status
    commands.assert_gone(process.pid)
    step = commands.metrics(folder)[-1]["step"]
    assert (folder / "checkpoints" / "latest").read_text().strip() == f"step-{step:08d}"
    assert "Traceback" not in (tmp_path / "run.out").read_text()


def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = commands.start(folder, "parallel.data=2", "train.steps=100000")
    commands.wait_for_step(folder, 3, process)
    os.kill(commands.ranks_of(process)[-1], signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    commands.assert_gone(process.pid)
    done = len(commands.metrics(folder))
    commands.train(folder, "parallel.data=2", f"train.steps={done + 2}")
    assert [m["step"] for m in commands.metrics(folder)] == list(range(1, done + 3))


def test_a_kill_costs_nothing_that_was_saved(tmp_path: Path) -> None:
    """Of a rank, then of the launcher."""
    whole = tmp_path / "whole"
    commands.train(whole, *CONSTANT, "parallel.data=2", "train.steps=30", "train.save_every=5")
    folder = tmp_path / "run"
    for attempt, victim in enumerate(("rank", "launcher")):
        process = commands.start(folder, "parallel.data=2", *LONG)
        commands.wait_for_step(folder, 8 + 8 * attempt, process)
        time.sleep(random.random() * 0.1)
        os.kill(random.choice(commands.ranks_of(process)) if victim == "rank" else process.pid, signal.SIGKILL)
        assert process.wait(timeout=20) != 0
        commands.assert_gone(process.pid, timeout=15)
        for path in (folder / "checkpoints").glob("step-????????"):
            assert verify(path) > 0
    last = len(commands.metrics(folder))
    commands.train(folder, *CONSTANT, "parallel.data=2", f"train.steps={max(30, last)}", "train.save_every=5")
    assert commands.column(folder, "loss")[:20] == commands.column(whole, "loss")[:20]


def test_a_new_start_in_a_used_folder_keeps_what_was_measured(tmp_path: Path) -> None:
    """resume=never and a way back to an earlier checkpoint go another way: the old figures stay beside the new ones."""
    folder, run = tmp_path / "run", ("parallel.data=1", "train.steps=4", "train.save_every=2")
    commands.train(folder, *run)
    first = (folder / "metrics.jsonl").read_text()
    commands.train(folder, *run, "train.resume=never", "optimizer.lr=1e-2")
    assert (folder / "metrics-1.jsonl").read_text() == first
    assert [m["step"] for m in commands.metrics(folder)] == [1, 2, 3, 4]
    second = (folder / "metrics.jsonl").read_text()
    commands.train(folder, *run, f"train.resume={folder}/checkpoints/step-00000002", "optimizer.lr=2e-2")
    assert (folder / "metrics-2.jsonl").read_text() == second
    assert commands.column(folder, "loss")[:2] == [json.loads(x)["loss"] for x in second.splitlines()[:2]]
    commands.train(folder, *run, "train.steps=5")  # goes on: nothing to set aside
    assert len(commands.metrics(folder)) == 5 and not (folder / "metrics-3.jsonl").exists()


def test_a_failing_rank_costs_one_message(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = commands.train(
        folder, "parallel.data=2", "optimizer.lr=1e30", "optimizer=sgd", "train.grad_clip=0", check=False, timeout=60
    )
    assert done.returncode == 1
    assert "rank" in done.stderr
    assert "step" in done.stderr
    assert "gradient norm" in done.stderr
    assert "Traceback" not in done.stderr
    assert "optimizer.lr" in done.stderr


def test_a_sweep_has_a_folder_and_a_result_for_each_job(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    axes = ("+strategy=ddp", "optimizer.lr=1e-3,3e-3", "precision=fp32,bf16")
    commands.script("train.py", "-m", f"hydra.sweep.dir={sweep}", *commands.TINY, "parallel.data=1", "train.steps=2", *axes)
    jobs = sorted(p.parent for p in sweep.glob("*/config.yaml"))
    assert len(jobs) == 4
    rates = [yaml.safe_load((j / "config.yaml").read_text())["optimizer"]["lr"] for j in jobs]
    assert sorted(rates) == [1e-3, 1e-3, 3e-3, 3e-3]
    assert all(isinstance(r, float) for r in rates)
    for job in jobs:
        assert len(commands.metrics(job)) == 2
        assert json.loads((job / "result.json").read_text())["status"] == "done"
