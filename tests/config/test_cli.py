"""The console script: commands, their help and their refusals; and errors of a job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from partita import cli
from partita.config.compose import hydra_main
from partita.errors import PartitaError, RunInterrupted


def call(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(sys, "argv", ["partita", *argv])
    return cli.main()


def test_usage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "--help") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("train", "plan", "plugins", "export"))
    assert call(monkeypatch) == 2


def test_unknown_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "trian") == 2
    assert "no command 'trian'; did you mean 'train'" in capsys.readouterr().err


def test_plugins_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "plugins", "plugins.block=[zero]") == 0
    out = capsys.readouterr().out
    assert "partita_precision" in out
    assert "blocked" in out
    assert call(monkeypatch, "plugins", "zero") == 2
    assert "takes no such argument" in capsys.readouterr().err


def test_plan_shows_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "plan", "model.layers=1", "model.width=32", "+strategy=zero1") == 0
    assert "Memory of the fullest rank" in capsys.readouterr().out
    assert call(monkeypatch, "plan", "-m", "model.layers=1", "model.width=32,64") == 0
    assert capsys.readouterr().out.count("Memory of the fullest rank") == 2
    assert list(tmp_path.iterdir()) == []


def test_export_refuses_what_is_no_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert call(monkeypatch, "export") == 2
    assert "RUN_FOLDER OUT_FOLDER" in capsys.readouterr().err
    assert call(monkeypatch, "export", str(tmp_path), str(tmp_path / "out")) == 1
    assert "holds no complete checkpoint" in capsys.readouterr().err


def test_completion_behind_a_command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    line = "partita train precision="
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    assert call(monkeypatch, "-sc", "query=bash") == 0
    assert capfd.readouterr().out.split() == ["precision=bf16", "precision=fp16", "precision=fp32"]


@pytest.mark.parametrize(
    ("error", "status", "traceback"),
    [
        (PartitaError("rank 1 failed at step 3: disk full"), 1, False),
        (RunInterrupted(15, "stopped after step 3"), 143, False),
        (ZeroDivisionError("a bug"), 1, True),
    ],
)
def test_errors_of_a_job(
    error: Exception, status: int, traceback: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def job(config: Any, info: Any) -> None:
        raise error

    assert hydra_main(job, argv=[f"run.dir={tmp_path}"]) == status
    text = capsys.readouterr().err
    assert str(error) in text
    assert ("Traceback" in text) == traceback
    assert "Error executing job" not in text
