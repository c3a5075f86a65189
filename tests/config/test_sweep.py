"""Sweeps: folders, types, jobs that fail, jobs that are done, the table at the end, the exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs as app
import pytest

from partita.config.compose import hydra_main
from partita.config.summary import Outcome, finished, outcomes

GRID = ["-m", "+strategy=ddp", "optimizer.lr=1e-3,3e-3", "precision=fp32,bf16"]
SMALL = ["-m", "optimizer.lr=1e-3,3e-3"]


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the application of jobs.py in this process; what it prints and returns, as of a command."""

    def call(*argv: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch:
            patch.chdir(cwd)
            for name, value in environment.items():
                patch.setenv(name, value)
            status = hydra_main(app.job, argv=list(argv), app="test")
        return subprocess.CompletedProcess(argv, status, *capsys.readouterr())

    return call


def as_command(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, app.__file__, *argv], cwd=cwd, capture_output=True, text=True, timeout=90)


def seen_by_jobs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What the job has seen, by job folder."""
    return {p.parent.name: [json.loads(line) for line in p.read_text().splitlines()] for p in sorted(folder.glob("*/seen.jsonl"))}


def only_sweep(cwd: Path) -> Path:
    (sweep,) = (cwd / "outputs" / "sweeps").iterdir()
    return sweep


def test_grid(tmp_path: Path) -> None:
    done = as_command(*GRID, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sweep = only_sweep(tmp_path)
    seen = seen_by_jobs(sweep)
    assert list(seen) == [
        "0_optimizer.lr=0.001,precision=fp32",
        "1_optimizer.lr=0.001,precision=bf16",
        "2_optimizer.lr=0.003,precision=fp32",
        "3_optimizer.lr=0.003,precision=bf16",
    ]
    lines = [line for (line,) in seen.values()]
    assert [x["config"]["optimizer"]["lr"] for x in lines] == [0.001, 0.001, 0.003, 0.003]
    assert all(isinstance(x["config"]["optimizer"]["lr"], float) for x in lines)
    assert [x["number"] for x in lines] == [0, 1, 2, 3]
    assert {x["sweep"] for x in lines} == {sweep.name}
    assert [Path(x["dir"]) for x in lines] == [sweep / name for name in seen] == [Path(x["config"]["run"]["dir"]) for x in lines]
    assert "4 of 4 jobs done" in done.stdout
    assert "0.0020 *" in done.stdout


def test_failed_job_is_told_at_once_and_the_same_command_finishes_the_rest(run: Run, tmp_path: Path) -> None:
    first = run(*SMALL, cwd=tmp_path, FAIL_LR="0.001")
    assert first.returncode == 1
    sweep = only_sweep(tmp_path)
    assert list(seen_by_jobs(sweep)) == ["1_optimizer.lr=0.003"]
    assert "job 0 (0_optimizer.lr=0.001) failed" in first.stderr
    assert "boom in the job" in first.stderr
    assert "1 of 2 jobs done" in first.stdout
    second = run(*SMALL, cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert only_sweep(tmp_path) == sweep
    assert {name: len(lines) for name, lines in seen_by_jobs(sweep).items()} == dict.fromkeys(seen_by_jobs(sweep), 1)
    assert len(seen_by_jobs(sweep)) == 2
    assert "job 1 (1_optimizer.lr=0.003) is done already" in second.stdout
    assert "2 of 2 jobs done" in second.stdout
    again = run(*SMALL, "run.redo=true", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert all(len(lines) == 2 for lines in seen_by_jobs(sweep).values())


def test_job_with_a_wrong_value_fails_alone(run: Run, tmp_path: Path) -> None:
    done = run("-m", "train.steps=5,-5", f"run.dir={tmp_path}/mine", cwd=tmp_path)
    assert done.returncode == 1
    assert list(seen_by_jobs(tmp_path / "mine")) == ["0_train.steps=5"]
    assert "train.steps: -5 is less than 1" in done.stderr
    assert "Traceback" not in done.stderr
    assert "1 of 2 jobs done" in done.stdout


def test_strategies_sweep(run: Run, tmp_path: Path) -> None:
    done = run("-m", "+strategy=glob([zero1,zero2])", "hydra.sweep.dir=there", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    seen = seen_by_jobs(tmp_path / "there")
    assert [line["config"]["zero"]["stage"] for (line,) in seen.values()] == [1, 2]
    assert list(seen) == ["0_+strategy=zero1", "1_+strategy=zero2"]


def test_sweep_that_optimizes_gets_the_loss(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    argv = ["-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.direction=minimize"]
    done = run(*argv, "optimizer.lr=interval(0.001,0.1)", "hydra.sweep.dir=there", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    seen = seen_by_jobs(tmp_path / "there")
    assert len(seen) == 4
    assert len({line["config"]["optimizer"]["lr"] for (line,) in seen.values()}) == 4
    best = min(line["config"]["optimizer"]["lr"] for (line,) in seen.values())
    results = (tmp_path / "there" / "optimization_results.yaml").read_text()
    assert f"best_value: {2 * best}" in results


def test_results_are_complete_or_not_there(tmp_path: Path) -> None:
    assert finished(tmp_path) is None
    Outcome(1, "1_x").failed(RuntimeError("no")).write(tmp_path / "1_x")
    assert finished(tmp_path / "1_x") is None
    Outcome(0, "0_x").done({"eval_loss": 2.0, "loss": 1.0, "tensor": object()}).write(tmp_path / "0_x")
    assert finished(tmp_path / "0_x") == Outcome(0, "0_x", status="done", objective=2.0, summary={"eval_loss": 2.0, "loss": 1.0})
    (tmp_path / "2_x").mkdir()
    (tmp_path / "2_x" / "result.json").write_text("{half")
    assert finished(tmp_path / "2_x") is None
    assert [o.number for o in outcomes(tmp_path, since=0.0)] == [0, 1]
    assert outcomes(tmp_path, since=4e9) == []


def test_an_interruption_ends_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in job 0 must not start job 1."""
    import signal

    from partita.errors import RunInterrupted

    calls = []

    def job(config: Any, info: Any) -> None:
        calls.append(info.number)
        raise RunInterrupted(signal.SIGINT, "stopped after step 3")

    monkeypatch.chdir(tmp_path)
    assert hydra_main(job, argv=["-m", "seed=1,2"]) == 130
    assert calls == [0]
    assert "0 of 1 jobs done" in capsys.readouterr().out
