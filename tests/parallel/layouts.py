"""Runs of one config in many layouts: planned as the command line plans them, stepped on ranks of the pool."""

from __future__ import annotations

import gc
import os
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from pool import run_ranks

from partita.config.compose import compose_config, registry_for
from partita.config.plain import to_plain
from partita.plan.make import Planned, make_plan
from partita.runtime.spec import RunSpec

TINY = (
    "model.layers=2", "model.width=32", "model.heads=4", "model.dropout=0.1", "data=synthetic", "data.limit=20000", "data.sequence=16",
    "train.global_batch=8", "train.steps=20", "train.sample=0", "tracker=none", "optimizer.lr=5e-3", "train.eval_at_end=false",
    "train.save_at_end=false", "lr_schedule=constant",
)  # fmt: skip

STEPS = 20 if "PARTITA_LONG_TESTS" in os.environ else 6  # updates that are compared; scripts/bench/layouts.py compares 20


def planned(*overrides: str) -> tuple[Planned, Any, Any]:
    """(plan, config, job) of a tiny run."""
    config, job = compose_config([*TINY, *overrides])
    return make_plan(config, registry_for(())), config, job


def spec_of(folder: Path, *overrides: str) -> RunSpec:
    """What the ranks of a tiny run are given. Raises ConfigError for a plan with problems."""
    plan, config, job = planned(f"run.dir={folder}", *overrides)
    plan.raise_problems()
    return RunSpec(to_plain(config), plan.plan, job, plan.plan.layout.world)


def train(folder: Path, *overrides: str, steps: int = STEPS, **more: Any) -> Any:
    """What `stepped` returns on rank 0."""
    return all_ranks(folder, *overrides, steps=steps, **more)[0]


def all_ranks(folder: Path, *overrides: str, steps: int = STEPS, **more: Any) -> list[Any]:
    """What `stepped` returns on each rank."""
    spec = spec_of(folder, *overrides)
    return run_ranks(spec.ranks, stepped, spec, steps, more, timeout=150)


def stepped(rank: int, world: int, spec: RunSpec, steps: int, more: dict[str, Any]) -> Any:
    """Losses and gradient norms of the next `steps` updates. save: write a checkpoint after them. evaluate: add the evaluation's loss.

    peak: add bytes at the peak, and of states at rest.
    """
    from partita.train.loop import StepClock, evaluate, one_update
    from partita.train.progress import Progress
    from partita.train.resume import save
    from partita.train.run import open_run

    torch.set_num_threads(1)
    before = _tensors() if more.get("peak") else []
    run = open_run(spec)
    losses, norms, clock = [], [], StepClock()
    tracker = _tracker(run, before) if more.get("peak") else nullcontext()
    try:
        for step, batches in run.data.iterate(run.step + 1, run.step + steps):
            with tracker:
                metrics, _ = one_update(run, step, batches, clock)
            run.step = step
            losses.append(metrics["loss"])
            norms.append(metrics["grad_norm"])
        out: dict[str, Any] = {"losses": losses, "norms": norms}
        if more.get("evaluate"):
            with Progress(1, 1, enabled=False) as progress:
                out["eval"] = evaluate(run, progress)["eval_loss"]
        if more.get("save"):
            save(run)
            run.checkpoints.wait()
        if more.get("peak"):
            out |= {"peak": tracker.peak, "held": run.engine.allocated()}
        return out
    finally:
        run.close()


def _tensors() -> list[torch.Tensor]:
    """All that are alive in this process."""
    gc.collect()
    return [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.device.type == "cpu"]


def _tracker(run: Any, before: list[torch.Tensor]) -> Any:
    """before: tensors of earlier runs on this process, kept alive so that no storage is taken for another."""
    from allocations import Allocations

    tracker = Allocations([b.full for b in run.engine.buckets])
    others = {t.untyped_storage()._cdata for t in before}
    tracker.see([t for t in _tensors() if t.untyped_storage()._cdata not in others])  # built before the first update
    return tracker


@lru_cache(maxsize=32)
def reference(*overrides: str, steps: int = STEPS) -> Any:
    """The same run on one rank, kept for all layouts that are compared with it."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return train(Path(folder), "parallel.data=1", *overrides, steps=steps, evaluate=True)


def assert_same(got: Any, expected: Any, bound: float = 1e-5) -> None:
    """Relative differences of losses and norms below `bound`."""
    for key in ("losses", "norms"):
        assert len(got[key]) == len(expected[key])
        for step, (a, b) in enumerate(zip(got[key], expected[key], strict=True), 1):
            assert abs(a - b) <= bound * abs(b), f"{key} of step {step}: {a} != {b}\n{got[key]}\n{expected[key]}"
    if "eval" in got:
        assert abs(got["eval"] - expected["eval"]) <= bound * abs(expected["eval"])
