"""Muon (Jordan et al. 2024): momentum, made orthogonal by Newton-Schulz iterations. Matrices only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from partita.state.optimizers import Rule, Update

# Coefficients of the quintic iteration, chosen for the steepest slope at zero (Jordan et al. 2024).
QUINTIC = (3.4445, -4.7750, 2.0315)
EPS = 1e-7


@dataclass(frozen=True)
class Muon:
    """Steps have the root mean square of AdamW's (Liu et al. 2025, section 2.2), so one learning rate serves both; decay is decoupled."""

    momentum: float
    nesterov: bool
    iterations: int
    policy = "tensor"

    def states(self) -> tuple[str, ...]:
        """The momentum."""
        return ("momentum",)

    def refuses(self, shape: tuple[int, ...]) -> str:
        """See `Rule`."""
        return "" if len(shape) == 2 else f"Muon updates matrices, not tensors of {len(shape)} dimensions"

    def update(self, update: Update, *, step: int, lr: float, weight_decay: float, scale: torch.Tensor) -> None:
        """See `Rule`. The iterations run in the dtype of the weights that compute reads."""
        for i, (flat, copy) in enumerate(zip(update.master, update.copies, strict=True)):
            shape = update.shapes[i]
            p, m = flat.view(shape), update.states["momentum"][i].view(shape)
            g = update.gradients[i].view(shape).float() * scale
            m.lerp_(g.to(m.dtype), 1 - self.momentum)
            direction = torch.lerp(g, m.float(), self.momentum) if self.nesterov else m.float()
            change = orthogonal(direction.to(flat.dtype if copy is None else copy.dtype), self.iterations)
            p.mul_(1 - lr * weight_decay).add_(change.to(p.dtype), alpha=-lr * 0.2 * math.sqrt(max(shape)))
            if copy is not None:
                copy.copy_(flat)


def orthogonal(matrix: torch.Tensor, iterations: int) -> torch.Tensor:
    """About the nearest matrix whose singular values are 1; they come out between 0.7 and 1.2. Computed in the matrix's dtype."""
    a, b, c = QUINTIC
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / wide.norm().clamp(min=EPS)
    for _ in range(iterations):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x if wide is matrix else x.T


def make_muon(config: Any) -> Rule:
    """`config` is the optimizer node."""
    return Muon(config.momentum, config.nesterov, iterations=5)
