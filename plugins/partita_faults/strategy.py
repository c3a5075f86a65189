"""Injects the fault that the config asks for, at its step and rank."""

from __future__ import annotations

import logging
import time
from typing import Any

from partita.errors import did_you_mean
from partita.plan.problems import Problem
from partita.plugin.markers import hookimpl
from partita.plugin.types import ConfigContribution
from partita_faults.config import FaultsConfig

log = logging.getLogger("partita")
MARK = "fault.txt"  # in the run's log folder: what has been injected
KINDS = (
    "none",
    "kill",
    "stop",
    "slow",
    "nonfinite",
    "flip",
    "full_disk",
    "slow_disk",
    "unreadable",
    "lost_node",
    "clock",
    "corrupt",
    "spike",
    "memory",
)
_undo: dict[int, Any] = {}  # by id of the run


@hookimpl
def partita_config() -> ConfigContribution:
    """Node `faults`."""
    return ConfigContribution(nodes={"faults": FaultsConfig})


@hookimpl
def partita_decide(draft: Any) -> None:
    """A line of the manifest: nobody should take this for a usual run."""
    f = draft.config.faults
    if f.kind in KINDS[1:]:
        draft.effect("faults.kind", "none", f.kind, f"injected on purpose at step {f.step} of rank {f.rank}")


@hookimpl
def partita_check(plan: Any, draft: Any) -> list[Problem]:
    """Values that can't be carried out."""
    f, problems = draft.config.faults, []
    if f.kind not in KINDS:
        problems.append(Problem("faults.kind", f"{f.kind!r} is no fault.", did_you_mean(f.kind, KINDS)))
    if f.kind != "none" and not 0 <= f.rank < plan.layout.world:
        problems.append(Problem("faults.rank", f"there is no rank {f.rank}.", f"Use a rank from 0 to {plan.layout.world - 1}."))
    if f.step < 1:
        problems.append(Problem("faults.step", f"{f.step} is no step.", "Give a number of at least 1."))
    every = draft.config.train.save_every
    if f.kind == "unreadable" and not (isinstance(every, int) and 0 < every < f.step):
        problems.append(
            Problem("faults.step", "there is no checkpoint yet to damage.", "Set train.save_every to less than faults.step.")
        )
    return problems


def _here(run: Any) -> bool:
    f = run.config.faults
    return f.rank <= run.rank < f.rank + (f.ranks if f.kind == "lost_node" else 1)


@hookimpl
def partita_run_start(run: Any) -> None:
    """What must be in place before the step; a later start of the same run is spared."""
    f = run.config.faults
    mark = run.dir / "log" / MARK
    if f.kind == "none" or (f.once and mark.exists()):
        return
    from partita_faults import inject

    _undo[id(run)] = (time.time, mark, inject)
    if f.kind in inject.EARLY and _here(run):
        inject.FAULTS[f.kind](run, f)


@hookimpl
def partita_step_start(run: Any, step: int) -> None:
    """The moment."""
    if id(run) not in _undo:
        return
    f, (_, mark, inject) = run.config.faults, _undo[id(run)]
    if f.kind in inject.EVERYWHERE and step == f.step and not _here(run):
        run.checkpoints.wait()
    if not _here(run) or not (step == f.step or (step > f.step and f.kind in inject.LASTING)):
        return
    if step == f.step:
        mark.write_text(f"{f.kind} at step {step} of rank {run.rank}\n")
        log.warning("injecting %s at step %d of rank %d", f.kind, step, run.rank)
    if f.kind not in (*inject.EARLY, "flip"):
        inject.FAULTS[f.kind](run, f)


@hookimpl
def partita_step_end(run: Any, step: int) -> None:
    """A bit is flipped between two steps, when weights are at rest."""
    if id(run) in _undo and run.config.faults.kind == "flip" and step == run.config.faults.step and _here(run):
        _undo[id(run)][2].flip(run, run.config.faults)


@hookimpl
def partita_run_end(run: Any) -> None:
    """Put back what was replaced in this process."""
    held = _undo.pop(id(run), None)
    if held is not None:
        from partita.train import shards

        time.time, shards.before_write = held[0], None
