"""What ranks run in the tests of Hugging Face models under the trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

COMMON = (
    "model=hf", "data=synthetic", "data.limit=8000", "data.sequence=16", "train.global_batch=4", "train.steps=2", "tracker=none",
    "optimizer.lr=0.01", "train.resume=never", "model.layers=2", "model.width=32", "model.heads=4", "model.init_std=0.2",
)  # fmt: skip


def spec_of(overrides: tuple[str, ...], folder: Path) -> Any:
    """What ranks get. Raises ConfigError with the problems of the plan."""
    from partita.config.compose import compose_config, registry_for
    from partita.config.plain import to_plain
    from partita.plan.make import make_plan
    from partita.runtime.spec import RunSpec

    config, job = compose_config([*COMMON, *overrides])
    registry = registry_for(())
    planned = make_plan(config, registry)
    planned.raise_problems()
    plan = planned.plan
    return RunSpec(to_plain(config), plan, replace(job, dir=folder), plan.layout.world, registry.blocked)


def train_and_save(rank: int, world: int, specs: list[Any], ids: torch.Tensor) -> list[torch.Tensor]:
    """Two updates of each spec, a checkpoint, and the logits of what was trained."""
    return [_train(spec, ids) for spec in specs]


def _train(spec: Any, ids: torch.Tensor) -> torch.Tensor:
    from partita.train.loop import StepClock, one_update
    from partita.train.resume import save
    from partita.train.run import open_run

    run = open_run(spec)
    try:
        for step in (1, 2):
            one_update(run, step, run.data.step(step), StepClock())
            run.step = step
        save(run)
        run.checkpoints.wait()
        run.model.eval()
        with torch.no_grad(), run.engine.full_parameters():
            logits: torch.Tensor = run.model(ids)
        return logits.float()
    finally:
        for part in (run.data, run.checkpoints, run.metrics, run.engine):
            part.close()


def peak_of_loading(rank: int, world: int, warm: Any, spec: Any) -> int:
    """Bytes by which resident memory, the pages of mapped files included, rises at most while a run is built. warm: a small one before."""
    from partita.train.run import open_run

    for each in (warm, spec):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of what follows
        before = _status("VmRSS")
        run = open_run(each)
        rise = _status("VmHWM") - before
        for part in (run.data, run.checkpoints, run.metrics, run.engine):
            part.close()
    return rise


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))
