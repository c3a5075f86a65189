"""Layouts between which checkpoints move, and what the ranks of a move do. Shared by test_layouts.py and scripts/bench/layouts.py."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]

from pool import run_ranks

DENSE = {
    "one": ("parallel.data=1",),
    "zero0 x2": ("parallel.data=2",),
    "zero1 x2": ("+strategy=zero1", "parallel.data=2"),
    "zero2 x2": ("+strategy=zero2", "parallel.data=2"),
    "zero3 x4": ("+strategy=zero3", "parallel.data=4"),
    "hsdp 2x2": ("+strategy=hsdp", "parallel.replicate=2", "parallel.shard=2"),
    "tensor 2": ("parallel=tensor", "parallel.tensor=2", "parallel.data=1"),
    "zero3 x tensor": ("+strategy=zero3", "parallel=tensor", "parallel.tensor=2", "parallel.data=2"),
    "context 2": ("parallel=context", "parallel.context=2", "parallel.data=1"),
    "pipeline 2": ("parallel=pipeline", "parallel.pipeline=2", "parallel.data=1"),
    "pipeline x zero3 x2": ("+strategy=zero3", "parallel.pipeline=2", "parallel.data=2", "train.micro_batch=1"),
    "zero2 host": ("+strategy=zero2_offload", "parallel.data=2"),
    "zero3 host": ("+strategy=zero3_offload", "parallel.data=2"),
}
EXPERTS = {
    "moe one": ("moe=mixtral", "parallel.data=1"),
    "moe zero3": ("moe=mixtral", "+strategy=zero3", "parallel.data=2"),
    "moe expert 2": ("moe=mixtral", "parallel.data=2", "parallel.expert=2"),
    "moe zero1 expert 2 x2": ("moe=mixtral", "+strategy=zero1", "parallel.data=4", "parallel.expert=2"),
}
SMALL = (
    "model.layers=2", "model.width=32", "model.heads=2", "data=synthetic", "data.limit=20000", "data.sequence=16",
    "train.global_batch=8", "train.steps=20", "tracker=none", "lr_schedule=constant", "model.vocab=256", "train.grad_clip=0.5",
)  # fmt: skip
BEFORE, AFTER = 3, 10  # updates before the checkpoint, and after it


def spec_of(overrides: tuple[str, ...], folder: Path, resume: str) -> Any:
    """What the ranks get, or the problems (a text) of a layout that can't be had in this version."""
    from partita.config.compose import compose_config, registry_for
    from partita.config.plain import to_plain
    from partita.plan.make import make_plan
    from partita.runtime.spec import RunSpec

    config, job = compose_config([*SMALL, *overrides, f"train.resume={resume}"])
    registry = registry_for(())
    planned = make_plan(config, registry)
    if planned.problems:
        return "; ".join(f"{p.key}: {p.reason}" for p in planned.problems)
    plan = planned.plan
    return RunSpec(to_plain(config), plan, replace(job, dir=folder), plan.layout.world, registry.blocked)


def play(rank: int, world: int, spec: Any, again: str, steps: int, keep_at: int) -> list[float]:
    """On a rank: open the run, save what was loaded to `again` (if given), train; a checkpoint after `keep_at` updates. Losses."""
    from partita.train.checkpoint import Checkpointer
    from partita.train.loop import StepClock, one_update
    from partita.train.resume import save
    from partita.train.run import open_run

    run = open_run(spec)
    losses = []
    try:
        if again:
            copy = Checkpointer(again, run.mesh, asynchronous=False)
            copy.save(run.step, run.engine.save_slices(), {}, {})
            copy.close()
        for step in range(run.step + 1, run.step + steps + 1):
            metrics, _ = one_update(run, step, run.data.step(step), StepClock())
            run.step = step
            losses.append(metrics["loss"])
            if step == keep_at:
                save(run)
                run.checkpoints.wait()
    finally:
        run.close()
    return losses


def write(overrides: tuple[str, ...], folder: Path, after: int = AFTER) -> list[float] | str:
    """A checkpoint after BEFORE updates in folder/checkpoints; returns the losses of the `after` next ones, or why there is none."""
    spec = spec_of(overrides, folder, "never")
    if isinstance(spec, str):
        return spec
    losses: list[float] = run_ranks(spec.ranks, play, spec, "", BEFORE + after, BEFORE)[0]
    return losses[BEFORE:]


def move(overrides: tuple[str, ...], source: Path, folder: Path, expected: list[float]) -> list[str]:
    """Load the checkpoint of the folder `source` in a layout, go on; what differs from the run that went on in its own layout."""
    from partita.train.checkpoint import find_checkpoint

    spec = spec_of(overrides, folder, str(find_checkpoint(source)))
    if isinstance(spec, str):
        return [spec]
    losses = run_ranks(spec.ranks, play, spec, str(folder / "again"), AFTER, 0)[0]
    wrong = different(source, folder / "again")
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    return wrong + ([f"losses differ by {worst:.1e}"] if worst > 1e-5 else [])


def different(one: Path, other: Path) -> list[str]:
    """Tensors of two checkpoints that are not equal to the bit, or are in one of them only."""
    left, right = everything(one), everything(other)
    wrong = [f"{key} is in one of both only" for key in sorted(left.keys() ^ right.keys())]
    return wrong + [f"{key} differs" for key in left if key in right and not torch.equal(left[key], right[key])]


def everything(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, weights and states, whole."""
    from partita.state.slices import StateSlice
    from partita.train.checkpoint import load_slices
    from partita.train.index import find_checkpoint, read_index

    index = read_index(find_checkpoint(path))
    out = {key: torch.empty(e.shape, dtype=e.dtype) for key, e in index.tensors.items()}
    load_slices(index.path, [StateSlice(k, tuple(t.shape), t.dtype, 0, t.numel(), t.view(-1)) for k, t in out.items()])
    return out
