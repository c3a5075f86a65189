"""What the ranks of tests/state/test_cases.py run with models of which a part is trained, or is somewhere at a time."""

from __future__ import annotations

from typing import Any

import torch
from cases import engine_for, sgd, update
from engine_runs import make_plan, tiers_at
from live import LiveTensors
from torch import nn

from partita.config.schema import OptimizerConfig
from partita.plan.plan import Activations
from partita.runtime.mesh import Mesh
from partita.state.engine import StateEngine
from partita.state.optimizers import make_sgd
from partita_recompute.checkpoint import recompute


class AdaptedBlock(nn.Module):
    """A frozen norm and linear layer, and a trained pair of small matrices beside it."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.base = nn.LayerNorm(width), nn.Linear(width, width)
        self.down, self.up = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)
        for frozen in (self.norm, self.base):
            frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + torch.tanh(self.base(h) + self.up(self.down(h)))


class Adapted(nn.Module):
    """Blocks with adapters; the first one is wholly frozen, and so is what lies outside."""

    WIDTH, INNER, BLOCKS = 32, 3, 3

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(13, self.WIDTH)
        self.blocks = nn.ModuleList(AdaptedBlock(self.WIDTH, self.INNER) for _ in range(self.BLOCKS))
        self.head = nn.Linear(self.WIDTH, 13)
        for frozen in (self.embed, self.blocks[0], self.head):
            frozen.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    @classmethod
    def sizes(cls) -> tuple[int, int]:
        """Elements that are frozen, and trained."""
        model = cls()
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return sum(p.numel() for p in model.parameters()) - trained, trained


def _tokens(step: int) -> torch.Tensor:
    return torch.randint(13, (4, 6), generator=torch.Generator().manual_seed(step))


def _adapter_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / 20


def adapters_by_hand(world: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a plain loop."""
    model = Adapted()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0
    )
    losses = []
    for step in range(3):
        loss = _adapter_loss(model, _tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def adapters(rank: int, world: int, placement: str, home: str, again: bool) -> Any:
    """Losses, weights, and bytes at rest of the same by the engine; `again`: blocks are recomputed."""
    model: Any = Adapted()
    if again:
        model = recompute(model, Activations("full"))
    config = OptimizerConfig(lr=0.01, weight_decay=0.0)
    engine = engine_for(rank, world, placement, model, config, tiers=tiers_at(home, placement))
    losses = []
    for step in range(3):
        engine.begin_step()
        loss = _adapter_loss(engine.model, _tokens(step).chunk(world)[rank])
        engine.backward(loss, last=True)
        norm, (total,) = engine.finish_gradients(loss.detach().double().reshape(1))
        engine.update(0.01, 0.0, norm)
        losses.append(total)
    weights = {b.name: engine.full_tensor(b.name) for b in engine.bindings}
    for unit in engine.units:
        unit.free()
    places = ("accelerator", "host", "file")
    found = [engine.allocated(place) for place in places]
    return losses, weights, {kind: sum(f[kind] for f in found) for kind in found[0]}


def largest_at_once(rank: int, world: int) -> tuple[int, int, int]:
    """Peak bytes of live tensors while weights are drawn, and while two updates run; bytes of all weights."""
    width, blocks = 64, 16
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(blocks)))
    plan, config = make_plan(world, "parameters"), sgd()
    with LiveTensors() as live:
        engine = StateEngine(model, plan, Mesh(plan.layout, rank, torch.device("cpu")), config, make_sgd(config))
        engine.materialize(lambda _n, shape: torch.full(shape, 1.0 / width))
        initial, live.peak = live.peak, 0
        for _ in range(2):
            engine.begin_step()
            engine.backward(engine.model(torch.ones(1, width)).sum() / world, last=True)
            update(engine, [], 0.1)
    return initial, live.peak, 4 * width * width * blocks
