"""States in bfloat16, rounded up or down at random so that small changes are kept on average (Gupta et al. 2015, section 3).

A moment that changes by less than half a unit in the last place never moves under rounding to nearest. The random bits are a hash of step,
state and place in the bucket: the same in every layout, and none is kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from partita.state.optimizers import Rule, Update
from partita.state.rules.pieces import PIECE


def round_to_bfloat16(values: torch.Tensor, seed: int, first: int) -> torch.Tensor:
    """float32 [n] -> bfloat16 [n]; element i uses the random bits of (seed, first + i). Infinities and NaN stay what they are."""
    # 32-bit mixing steps of MurmurHash3 (Appleby 2011), on int64 so that products don't overflow
    h = torch.arange(first, first + values.numel(), device=values.device, dtype=torch.int64)
    h.mul_(0x9E3779B1).add_(seed & 0xFFFFFFFF).bitwise_and_(0xFFFFFFFF)
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        h.bitwise_xor_(h >> shift).mul_(factor).bitwise_and_(0xFFFFFFFF)
    noise = (h >> 16).to(torch.int32)
    bits = values.contiguous().view(torch.int32)
    rounded = (bits + noise).bitwise_and_(-65536).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


class Rounded:
    """A rule over one element at a time, with those of its states that lie in bfloat16 widened for the update and rounded after it."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def states(self) -> tuple[str, ...]:
        """Those of the rule."""
        return self._rule.states()

    def update(self, update: Update, *, step: int, lr: float, weight_decay: float, scale: torch.Tensor) -> None:
        """See `Rule`."""
        names = self.states()
        for i in range(len(update.master)):
            for start in range(0, update.master[i].numel(), PIECE):
                at = slice(start, start + PIECE)
                copy = update.copies[i]
                wide = {k: [update.states[k][i][at].float()] for k in names}
                part = replace(
                    update,
                    master=[update.master[i][at]],
                    gradients=[update.gradients[i][at]],
                    states=wide,
                    copies=[None if copy is None else copy[at]],
                )
                self._rule.update(part, step=step, lr=lr, weight_decay=weight_decay, scale=scale)
                for number, name in enumerate(names):
                    rounded = round_to_bfloat16(wide[name][0], step * 16 + number, update.keys[i] + start)
                    update.states[name][i][at].copy_(rounded)
