"""1-bit LAMB (Li et al. 2021, algorithm 1): LAMB, then momentum in few bits under a frozen second moment and a scaled frozen trust ratio."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from partita.state.optimizers import Rule, State, Update
from partita.state.rules.lamb import Lamb, move
from partita_compression.rules.adam import steady
from partita_compression.rules.options import numbers, updates
from partita_compression.settings import Traffic


def _two(_: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the state `trust`."""
    return (2,)


@dataclass(frozen=True)
class OneBitLamb:
    """Two phases. First LAMB for `freeze` updates, with an average of each tensor's trust ratio. Then the second moment stays, and the ratio
    is that average times a factor: how much smaller than the frozen one a second moment is that goes on (section 4.2).

    smoothing: of the average. least, most: bounds of the trust ratio; None: LAMB's own has none. low, high, pace: bounds of the factor, and of
    its change in one update. Scales on the wire are those of blocks, so momenta aren't brought to one size first (section 4.3).
    """

    beta1: float
    beta2: float
    eps: float
    freeze: int
    smoothing: float = 0.9
    least: float | None = None
    most: float | None = None
    low: float = 0.5
    high: float = 4.0
    pace: float = 0.1
    policy = "tensor"
    options = ("freeze_step", "coeff_beta", "min_coeff", "max_coeff", "factor_min", "factor_max", "factor_threshold", "steps")

    @property
    def traffic(self) -> Traffic:
        """See `Rule`."""
        return Traffic(self.freeze, self.beta1)

    def states(self) -> tuple[str, ...]:
        """First and second moment, the second moment that goes on, and [average trust ratio, last factor - 1]."""
        return ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh", "trust")

    def formats(self) -> dict[str, State]:
        """See `Rule`."""
        return {name: State("float32", shape=_two) if name == "trust" else State() for name in self.states()}

    def update(self, update: Update, *, step: int, lr: float, weight_decay: float, scale: torch.Tensor) -> None:
        """See `Rule`. After the freeze `gradients` are the momentum."""
        lamb = Lamb(self.beta1, self.beta2, self.eps)
        direction = lamb.direction(step, min(step, self.freeze), weight_decay)
        if step <= self.freeze:
            ratios = lamb.ratios(update, direction, scale)
            if self.least is not None or self.most is not None:
                ratios.clamp_(self.least, self.most)
            for trust, tensor in zip(update.states["trust"], update.tensors, strict=True):
                trust[0].lerp_(ratios[tensor], 1 - self.smoothing)
            move(update, ratios, lr, direction)
            return
        if step == self.freeze + 1:
            steady(update.states["exp_avg_sq"])
            for fresh, frozen in zip(update.states["exp_avg_sq_fresh"], update.states["exp_avg_sq"], strict=True):
                fresh.copy_(frozen)
        ratios = torch.ones(update.count, device=scale.device)
        for i, tensor in enumerate(update.tensors):
            ratios[tensor] = self._ratio(update, i, step, weight_decay, scale)
        move(update, ratios, lr, direction)

    def _ratio(self, update: Update, i: int, step: int, weight_decay: float, scale: torch.Tensor) -> torch.Tensor:
        """Take over the momentum of a tensor; its trust ratio (0-d)."""
        momentum = update.gradients[i].float() * scale
        m, v, fresh, trust = (update.states[name][i] for name in self.states())
        gradient = momentum.sub(m, alpha=self.beta1).div_(1 - self.beta1)
        fresh.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        m.copy_(momentum)
        frozen = v.sqrt().div_(math.sqrt(1 - self.beta2**self.freeze)).add_(self.eps)
        going = fresh.sqrt().div_(math.sqrt(1 - self.beta2**step)).add_(self.eps)
        direction = momentum.div_(1 - self.beta1**step).div_(frozen)
        factor = (frozen / going).amax()
        if weight_decay:
            moved = direction.norm()
            direction.add_(update.master[i], alpha=weight_decay)
            share = (moved / direction.norm().clamp(min=1e-30)).clamp(max=1.0)
            factor = factor * share + (1 - share)
        last = trust[1] + 1
        factor = factor.clamp(self.low, self.high).clamp(last * (1 - self.pace), last * (1 + self.pace))
        trust[1] = factor - 1
        return trust[0] / (1 - self.smoothing**self.freeze) * factor


def make_onebit_lamb(config: Any) -> Rule:
    """`config` is the optimizer node."""
    known: dict[str, float | None] = {
        "freeze_step": 100000, "coeff_beta": 0.9, "min_coeff": None, "max_coeff": None, "factor_min": 0.5, "factor_max": 4.0,
        "factor_threshold": 0.1, "steps": None,
    }  # fmt: skip
    found = numbers(config, known)
    freeze = max(1, updates("freeze_step", found["freeze_step"], found["steps"]))
    return OneBitLamb(
        config.betas[0], config.betas[1], config.eps, freeze, found["coeff_beta"], found["min_coeff"], found["max_coeff"],
        found["factor_min"], found["factor_max"], found["factor_threshold"],
    )  # fmt: skip
