"""What ranks run to see whether a run holds on to more and more tensors."""

from __future__ import annotations

import gc
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from partita.config.compose import compose_config, registry_for
from partita.config.plain import to_plain
from partita.plan.make import make_plan
from partita.runtime.spec import RunSpec
from partita.train.loop import StepClock, one_update
from partita.train.run import open_run

SMALL = (
    "model=llama", "model.layers=4", "model.width=32", "model.heads=4", "model.vocab=64", "data=synthetic", "data.sequence=16",
    "train.global_batch=8", "train.save_at_end=false", "tracker=none", "launch.threads=1",
)  # fmt: skip


def live_tensors(rank: int, world: int, overrides: list[str], at: tuple[int, ...]) -> list[int]:
    """Tensors that are alive after the updates `at`, those in cycles that only C++ could undo included."""
    config, job = compose_config([*SMALL, *overrides, f"launch.ranks={world}", "train.steps=1000"])
    planned = make_plan(config, registry_for(()))
    planned.raise_problems()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        run = open_run(RunSpec(to_plain(config), planned.plan, replace(job, dir=Path(folder)), world))
        clock = StepClock()
        for step, batches in run.data.iterate(1):
            one_update(run, step, batches, clock)
            run.step = step
            if step in at:
                gc.collect()
                found.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
            if step == max(at):
                break
        run.close()
    return found
