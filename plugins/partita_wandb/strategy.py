"""Logs a run to Weights & Biases: one W&B run for each job, in rank 0's process, grouped by sweep; offline unless a key is there.

The id of the W&B run is kept in the run's folder, so a resumed run goes on in the same one. Values are logged against the metric `step`,
not against W&B's own counter: steps that are made again after a resume are not dropped.
"""

from __future__ import annotations

import json
import logging
import netrc
import os
from pathlib import Path
from typing import Any

from partita.plan.problems import Problem
from partita.plugin.markers import hookimpl
from partita.plugin.types import ConfigContribution
from partita_wandb.config import TrackerConfig

log = logging.getLogger("partita")
NAMES = ("wandb", "none")
MODES = ("auto", "offline", "online", "disabled")
HOST = "api.wandb.ai"
ID_FILE = "wandb_id.json"

_runs: dict[int, Any] = {}  # id of our Run -> W&B run; hooks have no state of their own


@hookimpl
def partita_config() -> ConfigContribution:
    """Node `tracker`."""
    return ConfigContribution(nodes={"tracker": TrackerConfig})


@hookimpl
def partita_slots() -> dict[str, tuple[str, ...]]:
    """Names of the slot `tracker`."""
    return {"tracker": NAMES}


@hookimpl
def partita_check(plan: Any, draft: Any) -> list[Problem]:
    """Values that are none of ours."""
    tracker, problems = draft.config.tracker, []
    if tracker.name not in NAMES:
        problems.append(Problem("tracker.name", f"{tracker.name!r} is no tracker.", f"Use one of {', '.join(NAMES)}."))
    if tracker.mode not in MODES:
        problems.append(Problem("tracker.mode", f"{tracker.mode!r} is no mode.", f"Use one of {', '.join(MODES)}."))
    return problems


@hookimpl
def partita_run_start(run: Any) -> None:
    """Open the W&B run, on rank 0."""
    tracker = run.config.tracker
    if run.rank or tracker.name != "wandb" or tracker.mode == "disabled":
        return
    import wandb

    from partita.plan.make import plan_dict

    mode: Any = tracker.mode if tracker.mode != "auto" else ("online" if has_key() else "offline")
    job = run.spec.job
    os.environ.setdefault("WANDB_SILENT", "true")
    made = wandb.init(
        project=tracker.project,
        entity=tracker.entity,
        id=run_id(run.dir, job.multirun),
        resume="allow" if mode == "online" else None,
        name=run.name,
        group=job.sweep_name,
        tags=[*tracker.tags, *(f"{k}={v}"[:64] for k, v in job.choices.items())],
        dir=str(run.dir),
        mode=mode,
        config={**run.spec.config, "plan": plan_dict(run.plan), "plugins": run.registry.names},
        settings=wandb.Settings(silent=True, console="off"),
    )
    made.define_metric("step")
    made.define_metric("*", step_metric="step")
    _runs[id(run)] = made
    log.info("W&B run %s (%s), files in %s", made.id, mode, run.dir / "wandb")


@hookimpl
def partita_step_end(run: Any, metrics: dict[str, Any]) -> None:
    """One point for each step."""
    if id(run) in _runs:
        _runs[id(run)].log(metrics)


@hookimpl
def partita_evaluate(run: Any, metrics: dict[str, Any]) -> None:
    """One point for each evaluation."""
    if id(run) in _runs:
        _runs[id(run)].log(metrics)


@hookimpl
def partita_run_end(run: Any, summary: dict[str, Any]) -> None:
    """Close the W&B run; an interruption is no crash."""
    made = _runs.pop(id(run), None)
    if made is not None:
        made.summary.update({k: v for k, v in summary.items() if v is not None})
        made.finish(exit_code=0)


@hookimpl
def partita_failure(run: Any, error: BaseException) -> None:
    """Mark the W&B run as crashed."""
    made = _runs.pop(id(run), None)
    if made is not None:
        made.summary.update({"status": "failed", "error": f"{type(error).__name__}: {error}"[:500]})
        made.finish(exit_code=1)


def has_key() -> bool:
    """Whether a W&B key is configured; never asks."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(path).authenticators(HOST) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def run_id(folder: Path, multirun: bool) -> str:
    """The id kept in the run's folder, made the first time. WANDB_RUN_ID counts for single runs; a sweep would share it."""
    from wandb.sdk.lib.runid import generate_id

    path = folder / ID_FILE
    if path.exists():
        return str(json.loads(path.read_text())["id"])
    given = None if multirun else os.environ.get("WANDB_RUN_ID")
    new = given or generate_id()
    path.write_text(json.dumps({"id": new}))
    return new
