"""Update rules over flat shards (slot `optimizer`). One call updates all ranges of one hyper-parameter group in one pass over memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from partita_kernels import adamw_, sgd_


@dataclass(frozen=True)
class Update:
    """What one update works on: lists of 1-D ranges of equal lengths, range by range.

    master: weights to change. gradients: summed, not yet scaled. states: by name. copies: low-precision weights written in the same
    pass, or None where the master is what compute reads.
    """

    master: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]
    states: Mapping[str, Sequence[torch.Tensor]]
    copies: Sequence[torch.Tensor | None]


class Rule(Protocol):
    """Slot `optimizer`: a builder `(config.optimizer) -> Rule`."""

    def states(self) -> tuple[str, ...]:
        """Names of the states, each as long as the weights; all start at zero."""

    def update(self, update: Update, *, step: int, lr: float, weight_decay: float, scale: torch.Tensor) -> None:
        """Change weights, states and copies in place. step counts from 1; scale (0-d float32) multiplies the gradients first."""


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1); decoupled: AdamW (Loshchilov and Hutter 2019, algorithm 2)."""

    beta1: float
    beta2: float
    eps: float
    decoupled: bool

    def states(self) -> tuple[str, ...]:
        """First and second moment."""
        return ("exp_avg", "exp_avg_sq")

    def update(self, update: Update, *, step: int, lr: float, weight_decay: float, scale: torch.Tensor) -> None:
        """See `Rule`."""
        adamw_(
            list(update.master),
            list(update.gradients),
            list(update.states["exp_avg"]),
            list(update.states["exp_avg_sq"]),
            copies=list(update.copies),
            step=step,
            lr=lr,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=weight_decay,
            decoupled=self.decoupled,
            scale=scale,
            skip=None,
        )


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent with momentum as torch.optim.SGD defines it (Sutskever et al. 2013 up to the place of lr)."""

    momentum: float
    nesterov: bool

    def states(self) -> tuple[str, ...]:
        """A momentum buffer, if there is momentum."""
        return ("momentum",) if self.momentum else ()

    def update(self, update: Update, *, step: int, lr: float, weight_decay: float, scale: torch.Tensor) -> None:
        """See `Rule`."""
        sgd_(
            list(update.master),
            list(update.gradients),
            list(update.states["momentum"]) if self.momentum else None,
            copies=list(update.copies),
            lr=lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=weight_decay,
            scale=scale,
            skip=None,
        )


def make_adamw(config: Any) -> Rule:
    """`config` is the optimizer node."""
    return Adam(config.betas[0], config.betas[1], config.eps, decoupled=True)


def make_adam(config: Any) -> Rule:
    """`config` is the optimizer node."""
    return Adam(config.betas[0], config.betas[1], config.eps, decoupled=False)


def make_sgd(config: Any) -> Rule:
    """`config` is the optimizer node."""
    return Sgd(config.momentum, config.nesterov)
