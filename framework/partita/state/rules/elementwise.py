"""Rules that look at one element at a time: Lion, Adagrad."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from partita.state.optimizers import Rule, Update
from partita.state.rules.pieces import pieces


@dataclass(frozen=True)
class Lion:
    """Lion (Chen et al. 2023, algorithm 2): the sign of an interpolated momentum; decay is decoupled."""

    beta1: float
    beta2: float

    def states(self) -> tuple[str, ...]:
        """The momentum."""
        return ("exp_avg",)

    def update(self, update: Update, *, step: int, lr: float, weight_decay: float, scale: torch.Tensor) -> None:
        """See `Rule`."""
        for p, g, (m,), *_ in pieces(update, self.states(), scale):
            p.mul_(1 - lr * weight_decay).add_(torch.lerp(g, m, self.beta1).sign_(), alpha=-lr)
            m.lerp_(g, 1 - self.beta2)


@dataclass(frozen=True)
class Adagrad:
    """Adagrad (Duchi et al. 2011), diagonal, as torch.optim.Adagrad: decay is added to the gradient."""

    eps: float

    def states(self) -> tuple[str, ...]:
        """The sum of squares."""
        return ("sum",)

    def update(self, update: Update, *, step: int, lr: float, weight_decay: float, scale: torch.Tensor) -> None:
        """See `Rule`."""
        for p, g, (total,), *_ in pieces(update, self.states(), scale):
            if weight_decay:
                g.add_(p, alpha=weight_decay)
            total.addcmul_(g, g)
            p.addcdiv_(g, total.sqrt().add_(self.eps), value=-lr)


def make_lion(config: Any) -> Rule:
    """`config` is the optimizer node; `betas` of the paper are 0.9 and 0.99."""
    return Lion(config.betas[0], config.betas[1])


def make_adagrad(config: Any) -> Rule:
    """`config` is the optimizer node."""
    return Adagrad(config.eps)
