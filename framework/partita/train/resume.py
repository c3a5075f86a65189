"""What a run stores in its checkpoints, and how it goes on from one."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from partita.errors import CheckpointError
from partita.runtime import phase
from partita.runtime.rng import get_rng_state, set_rng_state
from partita.state.slices import StateSlice, plain_key
from partita.train.index import Index, find_checkpoint, read_index, readable, some
from partita.train.loading import LoadReport

if TYPE_CHECKING:
    from partita.train.run import Run

log = logging.getLogger("partita")
WEIGHT, MOMENT = "model.", "optimizer."
AUTO = "auto"


def save(run: Run, score: float | None = None) -> None:
    """Start a checkpoint of the state after `run.step`. Collective: every rank calls it."""
    phase.set(step=run.step, phase="save")
    run.checkpoints.save(run.step, *_contents(run), score)
    run.notify("partita_save", step=run.step, path=run.checkpoints.path(run.step))
    phase.set(step=run.step, phase="train")


def remember(run: Run) -> None:
    """Start a snapshot in memory of the state after `run.step`. Collective: every rank calls it."""
    assert run.memory is not None
    phase.set(step=run.step, phase="snapshot")
    run.memory.save(run.step, *_contents(run))
    phase.set(step=run.step, phase="train")


def _contents(run: Run) -> tuple[Sequence[StateSlice], dict[str, Any], dict[str, Any]]:
    """This rank's states, values for all ranks, and its own."""
    slices, left_out = _kept(run, run.engine.save_slices())
    extra = {
        "step": run.step,
        "engine": run.engine.extra_state(),
        "data": run.data.state(),
        "skipped_updates": run.data.skipped,
        "aliases": {alias: b.name for b in run.engine.bindings for alias in b.aliases},
        "best": run.best,
        "config": run.spec.config,
        "left_out": left_out,
    }
    return slices, extra, {"rng": get_rng_state()}


def _kept(run: Run, slices: Sequence[StateSlice]) -> tuple[Sequence[StateSlice], dict[str, Any]]:
    """The slices that the config wants saved, and a note of what is left out on purpose."""
    config = run.config.train
    frozen = set() if config.save_frozen else _frozen(run)
    left_out = {"optimizer": not config.save_optimizer, "frozen": sorted(frozen)}
    if config.save_optimizer and not frozen:
        return slices, left_out
    kept = [s for s in slices if s.key.removeprefix(WEIGHT) not in frozen or not s.key.startswith(WEIGHT)]
    return [s for s in kept if config.save_optimizer or not plain_key(s.key).startswith(MOMENT)], left_out


def _frozen(run: Run) -> set[str]:
    return {b.name for b in run.engine.bindings if not b.parameter.requires_grad}


# ------------------------------------------------------------------ going on


def resume(run: Run) -> None:
    """Go on from the checkpoint that `train.resume` names, or from a newer snapshot in memory, if there is one."""
    phase.set(step=0, phase="load")
    wanted = run.config.train.resume
    path = None if wanted == "never" else run.checkpoints.latest() if wanted == AUTO else Path(wanted)
    if run.memory is not None:
        if wanted == AUTO:
            path = _newer(run, path)
        else:
            run.memory.forget()
    if wanted != AUTO:
        run.metrics.set_aside(0 if path is None else step_of(path))
    if path is None:
        run.metrics.cut(0)
        return
    go_on_from(run, path)


def step_of(path: Path) -> int:
    """The step of a checkpoint. Raises CheckpointError where there is none."""
    return read_index(find_checkpoint(path)).step


def go_on_from(run: Run, path: Path) -> None:
    """Put the run where it was when the checkpoint was saved. Collective."""
    started = time.perf_counter()
    extra, rank_extra = load(run, path)
    run.engine.after_load()
    with readable(Path(path)):
        if extra.get("engine") is not None:
            run.engine.load_extra_state(extra["engine"])
        if extra.get("data") is not None:
            run.data.check(extra["data"])
        run.data.skipped = int(extra.get("skipped_updates") or 0)
        run.step, run.best = int(extra["step"]), extra.get("best")
        if rank_extra:
            set_rng_state(rank_extra["rng"])
    run.metrics.cut(run.step)
    if run.rank == 0:
        log.info("resumed from %s after step %d (%.1f s)", path, run.step, time.perf_counter() - started)
    run.notify("partita_load", step=run.step, path=path)


def _newer(run: Run, path: Path | None) -> Path | None:
    """A snapshot in memory that is at least as new as the checkpoint `path`, else that. Collective."""
    assert run.memory is not None

    def needed(index: Index) -> set[int]:
        found = (s.found_in(index.tensors) for s in run.engine.load_slices())
        wanted = [s for s in found if s.key in index.tensors]
        return {part.rank for s in wanted for part in index.tensors[s.key].overlaps(s.lo, s.hi)}

    return run.memory.restore(needed, at_least=step_of(path) if path else 0) or path


def load(run: Run, path: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Fill the run's states; returns what the checkpoint holds beside tensors, for all ranks and for this one."""
    config = run.config.train
    frozen = _frozen(run)

    def skip(index: Index, key: str) -> bool:
        left_out = (index.extra or {}).get("left_out") or {}
        if key.startswith(MOMENT):
            if left_out.get("optimizer") and config.resume_optimizer:
                raise CheckpointError(
                    f"train.resume: {index.path} was saved without the optimizer's states (train.save_optimizer=false)\n"
                    "    -> train.resume_optimizer=false takes its weights, step and schedule; moments begin at zero"
                )
            return not config.resume_optimizer
        name = key.removeprefix(WEIGHT)
        return name in frozen and name in left_out.get("frozen", ())

    slices = run.engine.load_slices()
    extra, rank_extra = run.checkpoints.load(path, slices, config.resume_partial, skip)
    report = run.checkpoints.report
    if report is not None and (config.resume_partial or report.skipped or not config.resume_optimizer):
        _tell(run, report)
    return extra, rank_extra


def _tell(run: Run, report: LoadReport) -> None:
    """One report of all ranks, on rank 0: what has not been loaded. Ranks hold different parts, so it takes a collective."""
    own = {"skipped": report.skipped, "missing": report.missing, "mismatched": report.mismatched}
    everyone: list[Any] = [own] * run.mesh.world
    if run.mesh.world > 1:
        dist.all_gather_object(everyone, own)
    for kind, words in (("skipped", "left out on purpose"), ("missing", "not stored"), ("mismatched", "of another shape")):
        names = sorted({name for rank in everyone for name in rank[kind]})
        if names and run.rank == 0:
            log.warning("%s: %d states keep their initial values, %s: %s", report.path, len(names), words, some(names, 12))
