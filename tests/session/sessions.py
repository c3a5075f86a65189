"""What ranks run in the tests of sessions, and the plain loops that they are compared with."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import partita

WIDTH, SIZE, STEPS = 12, 8, 6


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Net(nn.Module):
    """Not one of ours: no hook, no init, odd sizes."""

    def __init__(self, seed: int, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.enter = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step."""
    g = torch.Generator().manual_seed(step)
    return torch.randn(SIZE, 5, generator=g), torch.randn(SIZE, 3, generator=g)


def mse(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean squared error."""
    return F.mse_loss(model(data[0]), data[1])


def plain(seed: int = 0, lr: float = 0.1) -> tuple[list[float], list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses, norms, weights, and the gradients of the last update, of SGD with momentum without any framework."""
    model = Net(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = mse(model, batch(step))
        loss.backward()
        raw = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {n: p.detach().clone() for n, p in model.named_parameters()}, raw


def config(stage: int, accumulate: int = 1, lr: float = 0.1) -> dict[str, Any]:
    """Settings of `plain`."""
    return {
        "zero.stage": stage, "optimizer.name": "sgd", "optimizer": {"lr": lr, "momentum": 0.9, "weight_decay": 0.0},
        "lr_schedule": {"name": "constant", "warmup": 0}, "parallel.microbatches": accumulate,
    }  # fmt: skip


def part(data: tuple[torch.Tensor, torch.Tensor], rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's samples."""
    return data[0].chunk(world)[rank], data[1].chunk(world)[rank]


def train(rank: int, world: int, stage: int, accumulate: int, fine: bool) -> Any:
    """(losses, norms, weights, gradients, a momentum); ranks begin with different weights, of which rank 0's count."""
    session = partita.prepare(Net(rank), config(stage, accumulate))
    losses, norms = [], []
    for step in range(STEPS):
        mine = part(batch(step), rank, world)
        pieces = list(zip(mine[0].chunk(accumulate), mine[1].chunk(accumulate), strict=True))
        if fine:
            for x, y in pieces:
                session.backward(F.mse_loss(session.forward(x), y))
            result = session.step()
        else:
            result = session.step(pieces if accumulate > 1 else mine, mse)
        losses.append(result.loss)
        norms.append(result.norm)
    gradients = {n: session.gradient(n) for n in session.names()}
    return losses, norms, session.state_dict(), gradients, session.state("enter.weight", "momentum")


def weighted(rank: int, world: int, stage: int) -> Any:
    """Sums over a number of rows that differs between ranks, one of which has none."""
    session = partita.prepare(Net(0), config(stage))
    x, y = batch(0)
    rows = [slice(0, 8), slice(8, 8)] if world == 2 else [slice(0, 8)]
    result = session.step(
        (x[rows[rank]], y[rows[rank]]), lambda m, d: ((m(d[0]) - d[1]) ** 2).sum(), weight=lambda d: d[0].numel()
    )
    return result.loss, {n: session.gradient(n) for n in session.names()}


def two(rank: int, world: int, together: bool) -> Any:
    """A teacher and a student of different plans; interleaved, or one after the other."""
    teacher = partita.prepare(Net(1), config(3, lr=0.05))
    student = partita.prepare(Net(2, blocks=2), config(2))

    def teach(step: int) -> float:
        return teacher.step(part(batch(step), rank, world), mse).loss

    def learn(step: int) -> float:
        return student.step(part(batch(100 + step), rank, world), mse).loss

    def imitate(step: int) -> float:
        """Distillation: the teacher answers while the student's update is under way."""
        x, _ = part(batch(200 + step), rank, world)
        out = student.forward(x)
        with torch.no_grad():
            wanted = teacher.forward(x)
        student.backward(F.mse_loss(out, wanted))
        return student.step().loss

    if together:
        losses = [(teach(s), learn(s)) for s in range(STEPS)]
    else:
        first = [teach(s) for s in range(STEPS)]
        losses = list(zip(first, [learn(s) for s in range(STEPS)], strict=True))
    return losses, [imitate(s) for s in range(STEPS)], teacher.state_dict(), student.state_dict()


def stored(rank: int, world: int, folder: str) -> Any:
    """Saved at stage 3, loaded at stage 1, both trained on."""
    first = partita.prepare(Net(0), config(3))
    for step in range(2):
        first.step(part(batch(step), rank, world), mse)
    first.save(folder)
    second = partita.prepare(Net(7), config(1))
    second.load(folder)
    return [s.step(part(batch(2), rank, world), mse).loss for s in (first, second)], second.updates


class Frozen(nn.Module):
    """Blocks of a frozen norm and a layer that is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(4))
        for block in self.blocks:
            block[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def frozen_norms(rank: int, world: int) -> Any:
    """Gradients under stage 3 with recompute, those of a plain backward, and how many blocks are whole after the update."""
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    plain = Frozen()
    plain(x).square().mean().backward()
    session = partita.prepare(
        Frozen(), ["zero.stage=3", "recompute=full", "optimizer.name=sgd", "optimizer.lr=0.1", "train.grad_clip=0"]
    )
    session.step(x.chunk(world)[rank], lambda model, part: model(part).square().mean())
    names = [n for n, p in plain.named_parameters() if p.requires_grad]
    whole = sum(any(b.full.untyped_storage().size() for b in unit.buckets) for unit in session.engine.blocks)
    return {n: session.gradient(n) for n in names}, {n: plain.get_parameter(n).grad for n in names}, whole
