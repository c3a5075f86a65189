"""Lion over flat ranges in one pass (Chen et al. 2023, algorithm 2): an update by sign that keeps one moment.

In a step: g = scale * gradient; u = sign(beta1 m + (1 - beta1) g); p = p(1 - lr decay) - lr u; m += (1 - beta2)(g - m).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from partita_kernels.dispatch import Operation
from partita_kernels.flat import Copies, PerRange, State, Tensors, batches, spread
from partita_kernels.jit import kernel
from partita_kernels.rounding import Rounding
from partita_kernels.update import Rule

if TYPE_CHECKING:
    import triton.language as tl


def lion_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    *,
    copies: Copies,
    lr: PerRange,
    beta1: float,
    beta2: float,
    weight_decay: PerRange,
    scale: torch.Tensor,
    skip: torch.Tensor | None = None,
    scales: Tensors | None = None,
    rounding: Rounding | None = None,
) -> None:
    """Lion, in place. scales: of 8-bit moments. Other arguments as `adamw_`."""
    count = len(params)
    lrs, decays = spread(lr, count, "lr"), spread(weight_decay, count, "weight_decay")
    numbers = [(rate, 1 - rate * decay, 1 - beta1, 1 - beta2) for rate, decay in zip(lrs, decays)]
    states = [State(exp_avgs, scales or [None] * count)]
    work = batches(params, grads, states, copies, numbers, None if rounding is None else rounding.starts)
    if work:
        LION.on(work[0].params[0].device)(work, scale, skip, 0, rounding)


def _piece(p: Any, g: Any, states: Sequence[Any], numbers: tuple[float, ...], flag: int) -> None:
    lr, keep, one1, one2 = numbers
    (m,) = states
    direction = (m + one1 * (g - m)).sign_()
    m.lerp_(g, one2)
    p.mul_(keep).sub_(direction, alpha=lr)


@kernel
def _step(p, g, m, unused, numbers, FLAG: tl.constexpr):
    mixed = m + tl.load(numbers + 2) * (g - m)
    # The sign; of NaN it is NaN.
    sign = tl.where(mixed > 0, 1.0, tl.where(mixed < 0, -1.0, mixed))
    p = p * tl.load(numbers + 1) - tl.load(numbers) * sign
    return p, m + tl.load(numbers + 3) * (g - m), unused


RULE = Rule(2, _piece, _step)
LION = Operation("lion", RULE.reference, RULE.triton, RULE.cpu)
