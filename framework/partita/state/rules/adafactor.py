"""Adafactor (Shazeer and Stern 2018, algorithms 4 and 5): second moments of a matrix from the means of its rows and columns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from partita.state.optimizers import Rule, State, Update

Shape = tuple[int, ...]


def row_shape(shape: Shape) -> Shape:
    """A number for each row of each matrix; nothing for vectors."""
    return shape[:-1] if len(shape) > 1 else (0,)


def column_shape(shape: Shape) -> Shape:
    """A number for each column of each matrix; nothing for vectors."""
    return (*shape[:-2], shape[-1]) if len(shape) > 1 else (0,)


def vector_shape(shape: Shape) -> Shape:
    """As the parameter, for vectors and scalars."""
    return shape if len(shape) < 2 else (0,)


@dataclass(frozen=True)
class Adafactor:
    """Without momentum; steps are relative to the root mean square of the parameter; weight decay is decoupled.

    eps1: below which squares count as this (float32: 1.2e-7, as torch). eps2: least root mean square of a parameter. clip: largest root
    mean square of an update. decay: the second moment of step t keeps 1 - t^decay.
    """

    eps1: float
    eps2: float
    clip: float
    decay: float
    policy = "tensor"

    def states(self) -> tuple[str, ...]:
        """Row means, column means, and squares of vectors."""
        return ("row", "column", "square")

    def formats(self) -> dict[str, State]:
        """See `Rule`."""
        return {"row": State(shape=row_shape), "column": State(shape=column_shape), "square": State(shape=vector_shape)}

    def update(self, update: Update, *, step: int, lr: float, weight_decay: float, scale: torch.Tensor) -> None:
        """See `Rule`."""
        fresh, rate = step**self.decay, min(lr, 1 / math.sqrt(step))
        for i, (flat, copy) in enumerate(zip(update.master, update.copies, strict=True)):
            shape = update.shapes[i]
            p, g = flat.view(shape), update.gradients[i].view(shape).float() * scale
            size = max(1, p.numel())
            step_size = rate * torch.clamp(p.norm() / math.sqrt(size), min=self.eps2)
            p.mul_(1 - lr * weight_decay)
            states = [update.states[name][i] for name in self.states()]
            change = g.mul_(self._second(g, states, shape, fresh).clamp_(min=self.eps1**2).rsqrt_())
            shrink = torch.clamp(change.norm() / (math.sqrt(size) * self.clip), min=1.0)
            p.sub_(change.mul_(step_size / shrink))
            if copy is not None:
                copy.copy_(flat)

    def _second(self, g: torch.Tensor, states: list[torch.Tensor], shape: Shape, fresh: float) -> torch.Tensor:
        """The estimate of the second moment, after it has been brought up to date; free to be overwritten."""
        if len(shape) < 2:
            return states[2].view(shape).lerp_(g.square(), fresh).clone()
        row, column = states[0].view(row_shape(shape)), states[1].view(column_shape(shape))
        square = g.square()
        row.lerp_(square.mean(-1), fresh)
        column.lerp_(square.mean(-2), fresh)
        mean = row.mean(-1, keepdim=True).clamp_(min=self.eps1)
        return (row / mean).unsqueeze(-1) * column.unsqueeze(-2)


def make_adafactor(config: Any) -> Rule:
    """`config` is the optimizer node."""
    return Adafactor(torch.finfo(torch.float32).eps, 1e-3, 1.0, -0.8)
