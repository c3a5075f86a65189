"""LAMB (You et al. 2020, algorithm 2): Adam's direction, scaled for each tensor to a share of the tensor's own norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from partita.state.optimizers import Rule, Update
from partita.state.rules.pieces import PIECE, pieces

MOMENTS = ("exp_avg", "exp_avg_sq")
Direction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Lamb:
    """Buckets may be cut anywhere: norms of tensors are summed over the ranks that hold their parts, in one small message."""

    beta1: float
    beta2: float
    eps: float
    per_tensor = True

    def states(self) -> tuple[str, ...]:
        """First and second moment."""
        return MOMENTS

    def update(self, update: Update, *, step: int, lr: float, weight_decay: float, scale: torch.Tensor) -> None:
        """See `Rule`."""
        direction = self.direction(step, step, weight_decay)
        move(update, self.ratios(update, direction, scale), lr, direction)

    def direction(self, step: int, seen: int, weight_decay: float) -> Direction:
        """A function from weights and both moments to where the weights go. seen: updates that the second moment has followed."""
        first, root = 1 - self.beta1**step, math.sqrt(1 - self.beta2**seen)

        def to(p: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            found = torch.div(m, v.sqrt().div_(root).add_(self.eps).mul_(first))
            return found.add_(p, alpha=weight_decay) if weight_decay else found

        return to

    def ratios(self, update: Update, direction: Direction, scale: torch.Tensor) -> torch.Tensor:
        """Bring the moments up to date; the trust ratio of each tensor: float32 [count]."""
        squares = torch.zeros(2, update.count, dtype=torch.float64, device=scale.device)
        for p, g, (m, v), _, i, _ in pieces(update, MOMENTS, scale):
            m.lerp_(g, 1 - self.beta1)
            v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
            at = update.tensors[i]
            squares[0, at] += p.double().square().sum()
            squares[1, at] += direction(p, m, v).double().square().sum()
        assert update.total is not None
        update.total(squares)
        weight, moved = squares.sqrt()
        return torch.where((weight > 0) & (moved > 0), weight / moved, torch.ones_like(weight)).float()


def move(update: Update, ratios: torch.Tensor, lr: float, direction: Direction) -> None:
    """Go along the directions, which are found anew: kept, they would take as much memory as the gradients, which callers may still read."""
    moments = [update.states[name] for name in MOMENTS]
    for i, (p, copy) in enumerate(zip(update.master, update.copies, strict=True)):
        factor = ratios[update.tensors[i]] * lr
        for start in range(0, p.numel(), PIECE):
            at = slice(start, start + PIECE)
            p[at].sub_(direction(p[at], *(moment[i][at] for moment in moments)) * factor)
        if copy is not None:
            copy.copy_(p)


def make_lamb(config: Any) -> Rule:
    """`config` is the optimizer node; `eps` of the paper is 1e-6."""
    return Lamb(config.betas[0], config.betas[1], config.eps)
