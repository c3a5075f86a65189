"""LAMB (You et al. 2020, algorithm 2): Adam's direction, scaled for each tensor to a share of the tensor's own norm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from partita.state.optimizers import Rule, Update
from partita.state.rules.pieces import pieces


@dataclass(frozen=True)
class Lamb:
    """Buckets may be cut anywhere: norms of tensors are summed over the ranks that hold their parts, in one small message."""

    beta1: float
    beta2: float
    eps: float
    per_tensor = True

    def states(self) -> tuple[str, ...]:
        """First and second moment."""
        return ("exp_avg", "exp_avg_sq")

    def update(self, update: Update, *, step: int, lr: float, weight_decay: float, scale: torch.Tensor) -> None:
        """See `Rule`."""
        move(update, self.ratios(update, step, weight_decay, scale), lr)

    def ratios(self, update: Update, step: int, weight_decay: float, scale: torch.Tensor) -> torch.Tensor:
        """Bring the moments up to date and put the direction in the place of the gradient; the trust ratio of each tensor: float32 [count]."""
        squares = torch.zeros(2, update.count, dtype=torch.float64, device=scale.device)
        first, root = 1 - self.beta1**step, math.sqrt(1 - self.beta2**step)
        for p, g, (m, v), _, i, start in pieces(update, ("exp_avg", "exp_avg_sq"), scale):
            m.lerp_(g, 1 - self.beta1)
            v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
            torch.div(m, v.sqrt().div_(root).add_(self.eps).mul_(first), out=g)
            if weight_decay:
                g.add_(p, alpha=weight_decay)
            at = update.tensors[i]
            squares[0, at] += p.double().square().sum()
            squares[1, at] += g.double().square().sum()
            update.gradients[i][start : start + g.numel()].copy_(g)
        assert update.total is not None
        update.total(squares)
        weight, direction = squares.sqrt()
        return torch.where((weight > 0) & (direction > 0), weight / direction, torch.ones_like(weight)).float()


def move(update: Update, ratios: torch.Tensor, lr: float) -> None:
    """Go along the directions that stand in place of the gradients."""
    for i, (p, g, copy) in enumerate(zip(update.master, update.gradients, update.copies, strict=True)):
        p.sub_(g.float() * (ratios[update.tensors[i]] * lr))
        if copy is not None:
            copy.copy_(p)


def make_lamb(config: Any) -> Rule:
    """`config` is the optimizer node; `eps` of the paper is 1e-6."""
    return Lamb(config.betas[0], config.betas[1], config.eps)
