"""Several ranks of a checkpoint in one process: the protocol talks through files alone, so they need no process group."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from partita.errors import CheckpointError
from partita.plan.plan import Layout
from partita.runtime.mesh import Mesh
from partita.state.slices import StateSlice
from partita.train.checkpoint import Checkpointer

State = dict[str, torch.Tensor]


def checkpointer(folder: Path, rank: int = 0, world: int = 1, life: str | None = None, **options: Any) -> Checkpointer:
    """That of one rank."""
    mesh = Mesh(Layout(replicate=world), rank, torch.device("cpu"))
    return Checkpointer(folder, mesh, life=life or secrets.token_hex(4), **options)


def checkpointers(folder: Path, world: int, **options: Any) -> list[Checkpointer]:
    """Those of all ranks of one start."""
    life = secrets.token_hex(4)
    return [checkpointer(folder, rank, world, life, **options) for rank in range(world)]


def full(value: float, *shape: int, key: str = "model.x") -> State:
    """One tensor of one value."""
    return {key: torch.full(shape, float(value))}


def cut(state: State, cuts: Sequence[int]) -> list[list[StateSlice]]:
    """The slices of each rank where the tensors, laid end to end, are cut at `cuts` (ascending, first 0, last the sum of elements)."""
    out: list[list[StateSlice]] = []
    for rank, (start, stop) in enumerate(pairwise(cuts)):
        mine, offset = [], 0
        for key, tensor in state.items():
            n = tensor.numel()
            lo, hi = max(start, offset) - offset, min(stop, offset + n) - offset
            if lo < hi or (n == 0 and rank == 0):
                lo, hi = (lo, hi) if n else (0, 0)
                mine.append(StateSlice(key, tuple(tensor.shape), tensor.dtype, lo, hi, tensor.reshape(-1)[lo:hi]))
            offset += n
        out.append(mine)
    return out


def even(state: State, world: int) -> list[list[StateSlice]]:
    """Equal ranges."""
    total = sum(math.prod(t.shape) for t in state.values())
    return cut(state, [total * r // world for r in range(world + 1)])


def save(
    ranks: list[Checkpointer], step: int, state: State, extra: dict[str, Any] | None = None, score: float | None = None
) -> list[str | None]:
    """One save by all ranks, awaited; returns each rank's error, None for none."""
    for r, (c, slices) in enumerate(zip(ranks, even(state, len(ranks)), strict=True)):
        c.save(step, slices, extra or {"step": step}, {"rank": r}, score)
    return outcomes(ranks)


def outcomes(ranks: list[Checkpointer]) -> list[str | None]:
    """Wait for all ranks; each one's error, None for none."""
    found: list[str | None] = []
    for c in ranks:
        try:
            c.wait()
            found.append(None)
        except CheckpointError as error:
            found.append(str(error))
    return found


def names(folder: Path) -> list[str]:
    """What lies in a folder, sorted."""
    return sorted(p.name for p in folder.iterdir())
