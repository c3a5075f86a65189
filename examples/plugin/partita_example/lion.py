"""Slot `optimizer`: Lion (Chen et al. 2023, algorithm 2), an update by sign that keeps one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from partita.state.optimizers import Update


@dataclass(frozen=True)
class Lion:
    """Weights move by lr in the direction sign(beta1 * moment + (1 - beta1) * gradient), and decay by lr * weight_decay."""

    beta1: float
    beta2: float

    def states(self) -> tuple[str, ...]:
        """One moment, half of what Adam keeps."""
        return ("exp_avg",)

    def update(self, update: Update, *, step: int, lr: float, weight_decay: float, scale: torch.Tensor) -> None:
        """Range by range, in place; `scale` multiplies the gradients first."""
        ranges = zip(update.master, update.gradients, update.states["exp_avg"], update.copies, strict=True)
        for weights, gradients, moment, copy in ranges:
            scaled = gradients.to(weights.dtype) * scale
            direction = torch.lerp(scaled, moment.to(weights.dtype), self.beta1).sign_()
            weights.mul_(1.0 - lr * weight_decay).sub_(direction, alpha=lr)
            moment.copy_(torch.lerp(scaled, moment.to(weights.dtype), self.beta2))
            if copy is not None:
                copy.copy_(weights)


def make_lion(config: Any) -> Lion:
    """`config` is the optimizer node."""
    return Lion(config.betas[0], config.betas[1])
