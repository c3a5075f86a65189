"""What the ranks of test_cut_parameters.py run: an engine over a few cut and whole parameters, with gradients written by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from partita.config.schema import OptimizerConfig
from partita.plan.plan import Layout, Placement, Plan, Schedule
from partita.runtime.mesh import Mesh
from partita.state.engine import StateEngine
from partita.state.optimizers import make_sgd
from partita.state.parts import Part, declare

STAGES = {
    0: Placement(),
    1: Placement(optimizer=("replicate", "shard")),
    2: Placement((), ("replicate", "shard"), ("replicate", "shard")),
    3: Placement(("replicate", "shard"), ("replicate", "shard"), ("replicate", "shard")),
}


class Model(nn.Module):
    """matrix: columns [2, 3] in uneven parts over `tensor`. whole: the same gradient on all ranks. terms: each rank has a term of it."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        rank, degree = mesh.coordinates["tensor"], mesh.layout.tensor
        part = Part((2, 3), 1, ((3 * rank // degree, 3 * (rank + 1) // degree),), ("tensor",))
        self.matrix = nn.Parameter(torch.zeros(part.local))
        self.whole, self.terms = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        declare(self, "matrix", part)
        declare(self, "terms", Part((1,), partial=("tensor",)))
        self.part = part

    def forward(self, matrix: torch.Tensor, whole: float, term: float) -> torch.Tensor:
        """A loss whose gradients are the arguments (of the matrix: this rank's part)."""
        return (self.matrix * self.part.take(matrix)).sum() + self.whole.sum() * whole + self.terms.sum() * term


def one_step(rank: int, world: int, stage: int, tensor: int, parts: int, clip: float) -> dict[str, Any]:
    """One SGD update with lr 1. Global gradients: a matrix of norm 3 spread over the ranks, whole 4, terms 12 (1/tensor of it on each)."""
    layout = Layout(shard=world // tensor, tensor=tensor)
    mesh = Mesh(layout, rank, torch.device("cpu"))
    config = OptimizerConfig(name="sgd", lr=1.0, weight_decay=0.0)
    model = Model(mesh)
    plan = Plan(layout, Schedule(micro_batches=parts), placement=STAGES[stage])
    engine = StateEngine(model, plan, mesh, config, make_sgd(config))
    engine.materialize()
    gradient = torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 2.0]])
    share = 1 / (parts * layout.shard)
    engine.begin_step()
    for i in range(parts):
        engine.backward(model(gradient * share, 4.0 * share, 12.0 / tensor * share), last=i == parts - 1)
    norm, _ = engine.finish_gradients(torch.zeros(1, dtype=torch.float64))
    seen = {name: engine.full_tensor(name, "gradient") for name in ("matrix", "whole", "terms")}
    engine.update(1.0, clip, norm)
    return {"norm": norm, "gradients": seen, "moved": {n: -engine.full_tensor(n) for n in seen}, "slices": _covered(engine)}


def _covered(engine: StateEngine) -> dict[str, list[int]]:
    """Elements that this rank saves, by key."""
    found: dict[str, list[int]] = {}
    for s in engine.save_slices():
        found.setdefault(s.key, []).extend(range(s.lo, s.hi))
    return found
