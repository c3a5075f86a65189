"""A small model with every oddity, and a plain training loop that shares no code with the framework: the oracle."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, WIDTH, SEQUENCE = 37, 24, 9


class Block(nn.Module):
    """Uses one Linear twice, a frozen one, and holds parameters that nothing uses, that have no elements, or no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(0))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.inner(self.norm(x)))
        return x + self.gain * self.inner(self.frozen(h)) + self.empty.sum()


class Model(nn.Module):
    """Embedding, blocks, head tied to the embedding. One block is called twice."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        x = self.blocks[1](x)
        return self.head(self.norm(x))


def batch(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of one global batch; a different number of labels counts in each sequence."""
    g = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(VOCAB, (size, SEQUENCE), generator=g)
    labels = torch.randint(VOCAB, (size, SEQUENCE), generator=g)
    keep = torch.rand(size, SEQUENCE, generator=g) < torch.rand(size, 1, generator=g)
    keep[0] = False  # a sequence that counts nowhere
    return ids, labels.masked_fill(~keep, -100)


def loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the token losses."""
    return F.cross_entropy(logits.float().reshape(-1, VOCAB), labels.reshape(-1), ignore_index=-100, reduction="sum")


def train(rule: str, steps: int, size: int, clip: float) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and final weights of the plain loop on whole batches."""
    model = Model()
    trainable = [p for p in model.parameters() if p.requires_grad]
    if rule == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(trainable, lr=0.1, momentum=0.9, weight_decay=0.0)
    else:
        decay = [p for p in trainable if p.dim() > 1]
        rest = [p for p in trainable if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step in range(steps):
        ids, labels = batch(step, size)
        loss = loss_sum(model(ids), labels) / (labels != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        grads = [p.grad for p in trainable if p.grad is not None]
        norms.append(float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))))
        if clip:
            factor = min(1.0, clip / (norms[-1] + 1e-6))
            for g in grads:
                g.mul_(factor)
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {k: v.detach().clone() for k, v in model.named_parameters()}
