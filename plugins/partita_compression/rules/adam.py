"""Adam for few bits on the wire: 1-bit Adam and 0/1 Adam. Weight decay is decoupled.

Both divide by a second moment that stays what it is while bits are few, since the noise of single messages would spoil it. What is
lost of a message comes with the next ones, so weights see it as noise with a mean of zero: bounded by `steady`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from partita.state.optimizers import Adam, Rule, Update, rounding_of
from partita_compression.rules.options import numbers, updates
from partita_compression.settings import Traffic, variance_update
from partita_kernels import adamw_

BLOCK = 1024  # elements whose signs share a scale on the wire
FLOOR = 0.1  # share of a block's mean second moment that each element has at least


def steady(moments: Sequence[torch.Tensor]) -> None:
    """Let no second moment be far below those around it: a message of signs brings each element of a block the block's mean.

    Elements that never had a gradient (rows of an embedding that no token asks for) would be divided by nothing at all; DeepSpeed wants
    a mask for them.
    """
    for v in moments:
        whole = v.numel() // BLOCK * BLOCK
        for part in (v[:whole].view(-1, BLOCK), v[whole:].view(1, -1)):
            if part.numel():
                part.copy_(torch.maximum(part.float(), part.float().mean(1, keepdim=True) * FLOOR))


@dataclass(frozen=True)
class FewBitAdam:
    """What the two have in common."""

    beta1: float
    beta2: float
    eps: float
    freeze: int
    narrow = True

    def states(self) -> tuple[str, ...]:
        """First and second moment."""
        return ("exp_avg", "exp_avg_sq")

    def _plain(self, update: Update, **numbers: Any) -> None:
        Adam(self.beta1, self.beta2, self.eps, decoupled=True).update(update, **numbers)

    def _apart(
        self,
        update: Update,
        *,
        step: int,
        lr: float,
        beta1: float,
        weight_decay: float,
        scale: torch.Tensor,
        seen: int,
        frozen: bool,
    ) -> None:
        adamw_(
            list(update.master), list(update.gradients), list(update.states["exp_avg"]), list(update.states["exp_avg_sq"]),
            copies=list(update.copies), step=step, lr=lr, beta1=beta1, beta2=self.beta2, eps=self.eps, weight_decay=weight_decay,
            scale=scale, rounding=rounding_of(update, step), seen=seen, frozen=frozen,
        )  # fmt: skip


@dataclass(frozen=True)
class OneBitAdam(FewBitAdam):
    """1-bit Adam (Tang et al. 2021, algorithm 1): AdamW for `freeze` updates; then the second moment stays, and the momentum travels.

    Each rank keeps the momentum of its own gradients, in the wire; what arrives is their sum. In the paper a rank adds its gradient to
    the momentum that arrived last. Without losses both are the same, and with ours no rank needs the others' shards of it.
    """

    options = ("freeze_step", "steps")

    @property
    def traffic(self) -> Traffic:
        """See `Rule`."""
        return Traffic(self.freeze, self.beta1)

    def update(self, update: Update, *, step: int, lr: float, weight_decay: float, scale: torch.Tensor) -> None:
        """See `Rule`. After the freeze `gradients` are the momentum."""
        if step <= self.freeze:
            self._plain(update, step=step, lr=lr, weight_decay=weight_decay, scale=scale)
            return
        if step == self.freeze + 1:
            steady(update.states["exp_avg_sq"])
        started = 1 - self.beta1**step  # with a beta of 0 the kernel takes the momentum as it is, and corrects nothing
        self._apart(
            update, step=step, lr=lr / started, beta1=0.0, weight_decay=weight_decay * started, scale=scale, seen=self.freeze, frozen=True
        )  # fmt: skip


@dataclass(frozen=True)
class ZeroOneAdam(FewBitAdam):
    """0/1 Adam (Lu et al. 2022): the second moment follows the gradient in updates that become rarer, and not at all after `freeze`.

    In all others the gradient travels in few bits. Of the paper's two parts this is the one about variance; for updates without any
    communication see the node `local`.
    """

    scaler: int = 16
    options = ("var_freeze_step", "var_update_scaler", "steps")

    @property
    def traffic(self) -> Traffic:
        """See `Rule`."""
        return Traffic(self.freeze, None, self.scaler)

    def update(self, update: Update, *, step: int, lr: float, weight_decay: float, scale: torch.Tensor) -> None:
        """See `Rule`."""
        changes, seen = variance_update(min(step, self.freeze), self.scaler)
        changes = changes and step <= self.freeze
        if changes and seen == step:
            self._plain(update, step=step, lr=lr, weight_decay=weight_decay, scale=scale)
            return
        if not changes and variance_update(step - 1, self.scaler)[0] and step - 1 <= self.freeze:
            steady(update.states["exp_avg_sq"])
        self._apart(
            update, step=step, lr=lr, beta1=self.beta1, weight_decay=weight_decay, scale=scale, seen=seen, frozen=not changes
        )  # fmt: skip


def make_onebit_adam(config: Any) -> Rule:
    """`config` is the optimizer node."""
    found = numbers(config, {"freeze_step": 100000, "steps": None})
    freeze = max(1, updates("freeze_step", found["freeze_step"], found["steps"]))
    return OneBitAdam(config.betas[0], config.betas[1], config.eps, freeze)


def make_zero_one_adam(config: Any) -> Rule:
    """`config` is the optimizer node."""
    found = numbers(config, {"var_freeze_step": 100000, "var_update_scaler": 16, "steps": None})
    freeze = max(1, updates("var_freeze_step", found["var_freeze_step"], found["steps"]))
    return ZeroOneAdam(config.betas[0], config.betas[1], config.eps, freeze, max(1, int(found["var_update_scaler"])))
