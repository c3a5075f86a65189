"""Observers: they read the run, and rank 0 writes. What an observer raises ends the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from partita.plugin.markers import hookimpl

FILE = "example.jsonl"


def _writes(run: Any) -> bool:
    return run.rank == 0 and run.config.example.report_every > 0


@hookimpl
def partita_run_start(run: Any) -> None:
    """A resumed run makes the steps after its checkpoint again, so their lines go."""
    if _writes(run):
        path = Path(run.dir) / FILE
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        path.write_text("".join(line for line in lines if json.loads(line).get("step", 0) <= run.step and "status" not in line))


@hookimpl
def partita_step_end(run: Any, step: int, metrics: dict[str, Any]) -> None:
    """A line now and then."""
    if _writes(run) and step % run.config.example.report_every == 0:
        _append(run, {"step": step, "loss": metrics["loss"], "cap": run.plan.extensions.get("example_cap")})


@hookimpl
def partita_run_end(run: Any, summary: dict[str, Any]) -> None:
    """A last line."""
    if _writes(run):
        _append(run, {"status": summary["status"], "step": run.step})


def _append(run: Any, line: dict[str, Any]) -> None:
    with (Path(run.dir) / FILE).open("a") as file:
        file.write(json.dumps(line) + "\n")
