"""AdamW with moments of 8 bits (Dettmers et al. 2022): each block of 256 elements has a scale of its own.

In place of the paper's table of values, codes are companded by a power, which needs no search: a first moment is
scale * sign * (code / 127)^2, a second one scale * (code / 255)^4, down to 2e-10 of the largest in its block. Second moments that are not
zero are never stored as zero, which would make steps without bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from partita.state.optimizers import BLOCK, Rule, State, Update
from partita.state.rules.pieces import PIECE


def encode_first(m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [blocks, BLOCK] -> (int8 codes [blocks, BLOCK], float32 scales [blocks])."""
    scale = m.abs().amax(1)
    relative = m / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    return relative.abs().sqrt_().mul_(127).round_().copysign_(m).to(torch.int8), scale


def decode_first(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The counterpart of `encode_first`."""
    c = codes.float().div_(127)
    return c.mul_(c.abs()).mul_(scale.unsqueeze(1))


def encode_second(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [blocks, BLOCK], not negative -> (uint8 codes [blocks, BLOCK], float32 scales [blocks])."""
    scale = v.amax(1)
    relative = v / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    codes = relative.sqrt_().sqrt_().mul_(255).round_()
    return torch.where(v > 0, codes.clamp_(min=1), codes).to(torch.uint8), scale


def decode_second(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The counterpart of `encode_second`."""
    return codes.float().div_(255).square_().square_().mul_(scale.unsqueeze(1))


@dataclass(frozen=True)
class AdamW8bit:
    """2.03 bytes of moments for each weight, where AdamW has 8. Ranges are whole blocks."""

    beta1: float
    beta2: float
    eps: float
    policy = "block"

    def states(self) -> tuple[str, ...]:
        """Codes and scales of the moments."""
        return ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")

    def formats(self) -> dict[str, State]:
        """See `Rule`."""
        scale = State("float32", BLOCK)
        return {"exp_avg": State("int8"), "exp_avg_scale": scale, "exp_avg_sq": State("uint8"), "exp_avg_sq_scale": scale}

    def update(self, update: Update, *, step: int, lr: float, weight_decay: float, scale: torch.Tensor) -> None:
        """See `Rule`."""
        step_size, root = lr / (1 - self.beta1**step), math.sqrt(1 - self.beta2**step)
        m8, ms, v8, vs = (update.states[name] for name in self.states())
        for i, (master, gradient, copy) in enumerate(zip(update.master, update.gradients, update.copies, strict=True)):
            for start in range(0, master.numel(), PIECE):
                at, of = slice(start, start + PIECE), slice(start // BLOCK, (start + PIECE) // BLOCK)
                p, g = master[at].view(-1, BLOCK), (gradient[at].float() * scale).view(-1, BLOCK)
                codes, squares = m8[i][at].view(-1, BLOCK), v8[i][at].view(-1, BLOCK)
                m = decode_first(codes, ms[i][of]).lerp_(g, 1 - self.beta1)
                v = decode_second(squares, vs[i][of]).mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
                for target, value in zip(
                    (codes, ms[i][of], squares, vs[i][of]), (*encode_first(m), *encode_second(v)), strict=True
                ):
                    target.copy_(value)
                p.mul_(1 - lr * weight_decay).addcdiv_(m, v.sqrt_().div_(root).add_(self.eps), value=-step_size)
                if copy is not None:
                    copy[at].copy_(master[at])


def make_adamw8bit(config: Any) -> Rule:
    """`config` is the optimizer node."""
    return AdamW8bit(config.betas[0], config.betas[1], config.eps)
