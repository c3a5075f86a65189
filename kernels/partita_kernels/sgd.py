"""SGD with momentum over flat ranges in one pass: unscale and clip, decay, momentum, weights, low-precision copy.

In a step: g = scale * gradient + decay * p; b = momentum * b + g; p -= lr * (nesterov: g + momentum * b, else b).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from partita_kernels.dispatch import Operation
from partita_kernels.flat import Batch, Copies, PerRange, State, Tensors, batches, spread
from partita_kernels.jit import kernel
from partita_kernels.rounding import Rounding
from partita_kernels.update import Rule, by_numbers, give_back

if TYPE_CHECKING:
    import triton.language as tl

MOMENTUM, NESTEROV = 1, 2


def sgd_(
    params: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors | None,
    *,
    copies: Copies,
    lr: PerRange,
    momentum: float,
    nesterov: bool,
    weight_decay: PerRange,
    scale: torch.Tensor,
    skip: torch.Tensor | None = None,
    scales: Tensors | None = None,
    rounding: Rounding | None = None,
) -> None:
    """SGD as torch.optim.SGD defines it, in place. Momentum buffers start at zero; None: no momentum.

    scales: of 8-bit momentum buffers. Other arguments as `adamw_`.
    """
    count = len(params)
    states = [] if momentum_buffers is None else [State(momentum_buffers, scales or [None] * count)]
    lrs, decays = spread(lr, count, "lr"), spread(weight_decay, count, "weight_decay")
    numbers = [(rate, momentum if states else 0.0, decay) for rate, decay in zip(lrs, decays)]
    work = batches(params, grads, states, copies, numbers, None if rounding is None else rounding.starts)
    flag = (MOMENTUM | (NESTEROV if nesterov else 0)) if states else 0
    if work:
        SGD.on(work[0].params[0].device)(work, scale, skip, flag, rounding)


def _piece(p: Any, g: Any, states: Sequence[Any], numbers: tuple[float, ...], flag: int) -> None:
    lr, momentum, decay = numbers
    g = g.add(p, alpha=decay)
    for b in states:
        b.mul_(momentum).add_(g)
        g = g.add_(b, alpha=momentum) if flag & NESTEROV else b
    p.add_(g, alpha=-lr)


@kernel
def _step(p, g, b, unused, numbers, FLAG: tl.constexpr):
    momentum = tl.load(numbers + 1)
    g = g + tl.load(numbers + 2) * p
    if FLAG != 0:
        b = momentum * b + g
        if FLAG == 3:
            g = g + momentum * b
        else:
            g = b
    return p - tl.load(numbers) * g, b, unused


def _fused(batch: Batch, scale: torch.Tensor, flag: int) -> None:
    """torch divides by grad_scale and writes the result into the gradient: a factor of one isn't passed, any other is taken back."""
    factor = float(scale)
    for (lr, momentum, decay), params, grads, *buffers in by_numbers(batch):
        torch._fused_sgd_(
            params, grads, buffers[0] if buffers else [], weight_decay=decay, momentum=momentum, lr=lr, dampening=0.0,
            nesterov=bool(flag & NESTEROV), maximize=False, is_first_step=False,
            grad_scale=None if factor == 1.0 else torch.tensor(1.0 / factor if factor else math.inf), found_inf=None,
        )  # fmt: skip
        give_back(grads, factor)


RULE = Rule(1, _piece, _step, _fused)
SGD = Operation("sgd", RULE.reference, RULE.triton, RULE.cpu)
