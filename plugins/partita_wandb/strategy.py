"""Logs a run to Weights & Biases: one W&B run for each job, in rank 0's process, grouped by sweep.

Offline unless a key is configured, and never a prompt. Points are logged against `global_step`: steps that are made again after
a resume are not dropped. A run that fails is marked as failed.
"""

from __future__ import annotations

import logging
from typing import Any

from partita.errors import PartitaError
from partita.plan.problems import Problem
from partita.plugin.markers import hookimpl
from partita.plugin.types import ConfigContribution
from partita_wandb.config import TrackerConfig
from partita_wandb.credentials import effective_mode
from partita_wandb.identity import Identity, identify
from partita_wandb.session import AXIS, Session

log = logging.getLogger("partita")
NAMES = ("wandb", "none")
MODES = ("auto", "offline", "online", "disabled")
TAG = 64  # longest tag that W&B takes
OPENING = 30.0  # seconds that its server has to answer

_sessions: dict[int, Session] = {}  # by id of the run: hook functions have no state of their own


@hookimpl
def partita_config() -> ConfigContribution:
    """Node `tracker`."""
    return ConfigContribution(nodes={"tracker": TrackerConfig})


@hookimpl
def partita_slots() -> dict[str, tuple[str, ...]]:
    """Names of the slot `tracker`."""
    return {"tracker": NAMES}


@hookimpl
def partita_decide(draft: Any) -> None:
    """Manifest line: the mode in effect."""
    tracker = draft.config.tracker
    if tracker.name == "wandb" and tracker.mode in MODES:
        mode, reason = effective_mode(tracker.mode)
        if mode != tracker.mode:
            draft.effect("tracker.mode", tracker.mode, mode, reason)


@hookimpl
def partita_check(plan: Any, draft: Any) -> list[Problem]:
    """Values that are none of ours, and what is required but can't be had."""
    tracker, problems = draft.config.tracker, []
    if tracker.name not in NAMES:
        return []  # the core asks whether anyone has it
    if tracker.mode not in MODES:
        problems.append(Problem("tracker.mode", f"{tracker.mode!r} is no mode.", f"Use one of {', '.join(MODES)}."))
    elif tracker.required and tracker.mode == "online" and effective_mode("online")[0] != "online":
        reason = "W&B is required and online, and no key is configured."
        problems.append(Problem("tracker.mode", reason, "Set WANDB_API_KEY, or run `wandb login`, or use tracker.mode=offline."))
    return problems


@hookimpl
def partita_run_start(run: Any) -> None:
    """Get ready, on rank 0; the W&B run is opened after the first step, or now where it is required."""
    tracker = run.config.tracker
    if run.rank or tracker.name != "wandb":
        return
    mode, reason = effective_mode(tracker.mode)
    if mode == "disabled":
        return
    if tracker.mode == "online" and mode != "online":
        log.warning("W&B: %s instead of online; %s", mode, reason)
    identity = identify(run.dir, run.spec.job.multirun)
    # Offline, W&B can't ask its server how far its own counter went: leave the room that earlier attempts may have used.
    first = identity.attempt * 4 * (run.config.train.steps + 1) if mode == "offline" and identity.attempt else None
    session = Session(lambda: (_open if tracker.required else _open_anyhow)(run, mode, identity), first)
    if tracker.required:
        _start_now(session, mode)
    _sessions[id(run)] = session


def _start_now(session: Session, mode: str) -> None:
    try:
        session.start()
    except Exception as error:
        remedy = "    -> tracker.mode=offline keeps the run on disk; tracker.required=false goes on without W&B"
        raise PartitaError(f"tracker.required: W&B can't start ({mode}): {type(error).__name__}: {error}\n{remedy}") from error


def _open_anyhow(run: Any, mode: str, identity: Identity) -> Any:
    """The W&B run, on disk where its server can't be reached."""
    try:
        return _open(run, mode, identity)
    except Exception as error:
        if mode == "offline":
            raise
        log.warning("W&B: offline instead of %s: %s: %s", mode, type(error).__name__, error)
        import wandb

        wandb.teardown()  # its service still holds the id
        return _open(run, "offline", identity)


def _open(run: Any, mode: Any, identity: Identity) -> Any:
    """The W&B run."""
    import wandb

    tracker, job = run.config.tracker, run.spec.job
    made = wandb.init(
        project=tracker.project,
        entity=tracker.entity,
        id=identity.id,
        resume="allow" if mode == "online" else None,
        name=run.name,
        group=job.sweep_name,
        tags=[*tracker.tags, *(f"{group}={option}"[:TAG] for group, option in job.choices.items())],
        dir=str(run.dir),
        mode=mode,
        config=_record(run),
        reinit="create_new",  # a run of somebody else in this process stays theirs
        settings=wandb.Settings(silent=True, console="off", init_timeout=OPENING),
    )
    made.define_metric(AXIS)
    made.define_metric("*", step_metric=AXIS)
    again = f", attempt {identity.attempt + 1}" if identity.attempt else ""
    log.info("W&B run %s (%s%s), files in %s", identity.id, mode, again, run.dir / "wandb")
    return made


def _record(run: Any) -> dict[str, Any]:
    """What is attached to the W&B run: resolved config, plan, plug-ins with versions, command line."""
    from partita.plan.make import plan_dict

    plugins = {p.name: f"{p.distribution} {p.version}" for p in run.registry.describe() if not p.blocked}
    return {**run.spec.config, "plan": plan_dict(run.plan), "plugin_versions": plugins, "overrides": list(run.spec.job.overrides)}


@hookimpl
def partita_step_end(run: Any, metrics: dict[str, Any]) -> None:
    """One point for each step."""
    if id(run) in _sessions:
        _sessions[id(run)].log(metrics)


@hookimpl
def partita_evaluate(run: Any, metrics: dict[str, Any]) -> None:
    """One point for each evaluation."""
    if id(run) in _sessions:
        _sessions[id(run)].log(metrics)


@hookimpl(trylast=True)
def partita_run_end(run: Any, summary: dict[str, Any]) -> None:
    """Close the W&B run, with the pictures that others have made until then; an interruption is no crash."""
    session = _sessions.pop(id(run), None)
    if session is not None:
        session.draw(run.pictures)
        session.finish(0, {name: value for name, value in summary.items() if value is not None})


@hookimpl
def partita_failure(run: Any, error: BaseException) -> None:
    """Mark the W&B run as failed."""
    session = _sessions.pop(id(run), None)
    if session is not None:
        session.finish(1, {"status": "failed", "error": f"{type(error).__name__}: {error}"[:500]})
