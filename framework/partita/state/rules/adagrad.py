"""Adagrad (Duchi et al. 2011)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from partita.state.optimizers import Rule, Update
from partita.state.rules.pieces import pieces


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


def make_adagrad(config: Any) -> Rule:
    """`config` is the optimizer node."""
    return Adagrad(config.eps)
