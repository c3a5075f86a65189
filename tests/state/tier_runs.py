"""What the ranks of tests/state/test_tiers.py run."""

from __future__ import annotations

import os
from typing import Any

import torch
from engine_runs import BF16, FP32, make_engine, make_plan, optimizer_config, step, tiers_at
from reference import Model
from torch import nn

from partita.errors import PartitaError
from partita.plan.plan import Tier, Tiers
from partita.state.tiers import updater
from partita.train.checkpoint import Checkpointer

PRECISIONS = {"fp32": FP32, "bf16": BF16}


def tiers_of(path: str, fraction: float = 1.0, **places: str) -> Tiers:
    """`parameters`, `gradients`, `optimizer` by place; others stay."""
    named = {kind: Tier(place, fraction) for kind, place in places.items()}
    return Tiers(**named, path=path if "file" in places.values() else None)


def train(rank: int, world: int, placement: str, rule: str, steps: int, size: int, clip: float, extent: int, **plan: Any) -> Any:
    """Train in extents of `extent` elements; returns (losses, norms, whole states, compute copies)."""
    torch.set_num_threads(1)
    updater.EXTENT = extent
    made = make_plan(world, placement, **plan)
    engine = make_engine(rank, made, rule)
    try:
        lr = optimizer_config(rule).lr
        out = [step(engine, n, size, rank, lr, clip) for n in range(steps)]
        kinds = ["parameter", *engine.layout.rules[0].states]
        states = {
            (b.name, k): engine.full_tensor(b.name, k)
            for b in engine.bindings
            for k in (kinds if b.parameter.requires_grad else kinds[:1])
        }
        with engine.full_parameters():
            copies = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
        return [o[0] for o in out], [o[1] for o in out], states, copies
    finally:
        engine.close()


def save(rank: int, world: int, placement: str, home: str, folder: str) -> None:
    """Two updates with states at `home`, then a checkpoint."""
    updater.EXTENT = 1024
    engine = make_engine(rank, make_plan(world, placement, tiers=tiers_at(home, placement)), "adamw")
    for n in range(2):
        step(engine, n, 8, rank, 1e-2, 0.5)
    checkpoints = Checkpointer(folder, engine.mesh, asynchronous=False)
    checkpoints.save(2, engine.save_slices(), {"engine": engine.extra_state()}, {})
    step(engine, 2, 8, rank, 1e-2, 0.5)  # goes on without harm
    engine.close()


def resume(rank: int, world: int, placement: str, home: str, folder: str) -> Any:
    """Load into another model at `home`, and two more updates; returns as `train` does."""
    updater.EXTENT = 1024
    torch.manual_seed(99)
    engine = make_engine(rank, make_plan(world, placement, tiers=tiers_at(home, placement)), "adamw", Model(seed=5))
    extra, _ = Checkpointer(folder, engine.mesh).load(folder, engine.load_slices())
    engine.after_load()
    engine.load_extra_state(extra["engine"])
    out = [step(engine, n, 8, rank, 1e-2, 0.5) for n in (2, 3)]
    kinds = ("parameter", "exp_avg", "exp_avg_sq")
    states = {(b.name, k): engine.full_tensor(b.name, k) for b in engine.bindings if b.parameter.requires_grad for k in kinds}
    with engine.full_parameters():
        copies = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
    engine.close()
    return [o[0] for o in out], [o[1] for o in out], states, copies


def broken_disk(rank: int, world: int, folder: str) -> str:
    """Training whose file ends early after two updates; returns the message of the error."""
    engine = make_engine(rank, make_plan(world, "gradients", tiers=tiers_of(folder, optimizer="file")), "adamw")
    for n in range(2):
        step(engine, n, 8, rank, 1e-2, 0.5)
    engine.settle()
    os.ftruncate(engine._homes._built["file"]._file.handle, 0)
    try:
        for n in range(2):
            step(engine, n, 8, rank, 1e-2, 0.5)
    except PartitaError as error:
        return str(error)
    finally:
        engine.close()
    return "no error"


def many_saves(rank: int, world: int, home: str, folder: str) -> tuple[int, int, int, int]:
    """Resident bytes after 4 and after 12 saves, bytes that a load read, and bytes of this rank's states."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    engine = make_engine(rank, make_plan(world, "gradients", tiers=tiers_of(folder, optimizer=home)), "adamw", model)
    checkpoints = Checkpointer(folder, engine.mesh)
    resident = {}
    for n in range(1, 13):
        engine.begin_step()
        engine.backward(model(torch.ones(2, 512)).square().mean() / world, last=True)
        norm, _ = engine.finish_gradients(torch.zeros(1, dtype=torch.float64))
        engine.update(1e-3, 1.0, norm)
        checkpoints.save(n, engine.save_slices(), {}, {})
        checkpoints.wait()
        with open("/proc/self/statm") as file:
            resident[n] = int(file.read().split()[1]) * 4096
    slices = engine.load_slices()
    checkpoints.load(folder, slices)
    engine.after_load()
    engine.close()
    assert checkpoints.report is not None
    own = sum(s.data.nbytes for s in slices)
    return resident[4], resident[12], checkpoints.report.bytes_read, own
