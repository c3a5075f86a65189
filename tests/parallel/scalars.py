"""A model of scalars whose gradients are known, trained through a pipeline's executor: reports of wrong scales in other frameworks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from partita.config.schema import OptimizerConfig
from partita.plan.plan import Layout, Plan, Schedule
from partita.runtime.mesh import Mesh
from partita.state.engine import StateEngine
from partita.state.optimizers import make_sgd
from partita.train.step import StepContext
from partita_parallel.pipeline_order import STAGES, place_stages
from partita_parallel.pipeline_run import make_pipeline
from partita_parallel.pipeline_split import split


class Scale(nn.Module):
    """y = weight * x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


class Scales(nn.Module):
    """The product of its weights and the input, which comes as integers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scale() for _ in range(count))

    def forward(self, input_ids: Any, positions: Any = None, documents: Any = None, noise: Any = None) -> torch.Tensor:
        x = input_ids.float()
        for block in self.blocks:
            x = block(x)
        return x


def linear_loss(y: torch.Tensor, labels: torch.Tensor, **_: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of y over the labels that count."""
    counted = labels != -100
    return (y * counted).sum(), counted.sum()


def gradients(
    rank: int, world: int, schedule: str, values: list[list[int]], start: dict[str, float] | None = None, clip: float = 0.0
) -> tuple[dict[str, float], float, dict[str, float]]:
    """(gradients here, global norm, weights after an SGD update with learning rate 1). values: inputs of each micro-batch; 0 counts not."""
    each = STAGES[schedule][0]
    stages = world * each
    layout = Layout(pipeline=world, stage_cuts=tuple(range(1, stages)), stage_ranks=place_stages(schedule, world, each))
    plan = Plan(layout=layout, schedule=Schedule(len(values), 1, len(values), schedule))
    with torch.device("meta"):
        model = split(Scales(stages), plan, rank)
    mesh = Mesh(layout, rank, torch.device("cpu"))
    config = OptimizerConfig(name="sgd", lr=1.0, momentum=0.0, weight_decay=0.0)
    engine = StateEngine(model, plan, mesh, config, make_sgd(config))
    engine.materialize(lambda name, shape: torch.full(shape, (start or {}).get(name, 1.0)))
    executor = make_pipeline(StepContext(model.train(), engine, mesh, plan, linear_loss))
    batches = []
    for row in values:
        ids = torch.tensor([row])
        batches.append({"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100), "sample": torch.zeros(1, dtype=torch.int64)})
    total = sum(v != 0 for row in values for v in row)
    engine.begin_step()
    local = executor.train(1, batches, lambda: total)
    norm, _ = engine.finish_gradients(local.reshape(1).double())
    names = [b.name for b in engine.bindings]
    found = {n: float(engine.full_tensor(n, "gradient")) for n in names}
    engine.update(1.0, clip, norm)
    return found, norm, {n: float(engine.full_tensor(n)) for n in names}
