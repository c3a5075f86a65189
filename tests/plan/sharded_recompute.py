"""What the ranks of the recompute tests run (module-level, so that worker processes can find it)."""

from __future__ import annotations

from typing import Any

import torch
from planning import Toy

from partita.config.schema import OptimizerConfig
from partita.plan.memory import layout_bytes
from partita.plan.model_spec import inspect_model
from partita.plan.plan import Activations, Layout, Placement, Plan, Precision, Schedule
from partita.runtime.mesh import Mesh
from partita.state.engine import StateEngine
from partita.state.layout import RuleLayout, build_layout
from partita.state.optimizers import make_adamw
from partita_recompute.checkpoint import recompute


def train(rank: int, world: int, placement: Placement, activations: Activations, precision: Precision, parts: int) -> Any:
    """Three updates of the toy; returns (losses, norms, bytes held, bytes planned)."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Toy(3, 32, 4, 50)
    config = OptimizerConfig()
    plan = Plan(Layout(shard=world), Schedule(8, 8 // world // parts, parts), precision, placement, activations=activations)
    planned = layout_bytes(
        build_layout(inspect_model(model), plan, [RuleLayout.of(make_adamw(config), precision.optimizer)], config)
    )
    model = recompute(model, activations)
    engine = StateEngine(model, plan, Mesh(plan.layout, rank, torch.device("cpu")), config, make_adamw(config))
    engine.materialize()
    losses, norms = [], []
    for step in range(3):
        ids = torch.randint(50, (8, 9), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        engine.begin_step()
        local = 0.0
        for i, part in enumerate(ids.chunk(parts)):
            logits = engine.model(part[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
            local += loss.item()
            engine.backward(loss / 64, last=i == parts - 1)
        norm, (total,) = engine.finish_gradients(torch.tensor([local], dtype=torch.float64))
        engine.update(1e-2, 1.0, norm)
        losses.append(total)
        norms.append(norm)
    return losses, norms, engine.allocated(), planned
