"""Adam and AdamW over flat ranges in one pass: unscale and clip, decay, moments, weights, low-precision copy.

In a step: g = scale * gradient; m += (1 - beta1)(g - m); v = beta2 v + (1 - beta2) g^2;
p = p(1 - lr decay) - lr / (1 - beta1^step) * m / (sqrt(v / (1 - beta2^step)) + eps). Memory read and written for each weight with
bfloat16 gradients and copies: 28 bytes; with 8-bit moments 16.
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

DECOUPLED = 1


def adamw_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    copies: Copies,
    step: int,
    lr: PerRange,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: PerRange,
    decoupled: bool = True,
    scale: torch.Tensor,
    skip: torch.Tensor | None = None,
    scales: tuple[Tensors, Tensors] | None = None,
    rounding: Rounding | None = None,
    seen: int | None = None,
    frozen: bool = False,
) -> None:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2), or with decoupled=False Adam with decay in the gradient, in place.

    All tensors are 1-D, contiguous and of any length, range by range of equal length. params float32 or bfloat16; gradients
    float32, bfloat16 or float16. copies: low-precision weights to write, or None for a range. step counts from 1. lr,
    weight_decay: one number, or one for each range. scale: 0-d float32 factor on the gradients (unscale x clip). skip: 0-d;
    nonzero: nothing changes. Gradients may be overwritten.

    Moments are float32, bfloat16, or 8-bit: uint8 codes with `scales`, the float32 block scales of both moments
    (ceil(n / 256) for a range); all start at zero. rounding: bfloat16 weights and narrow moments are rounded stochastically
    (see `Rounding`); None: to nearest, which loses updates of less than half a step of the format.

    seen: updates that have changed the second moments, for those that don't follow every step (1-bit Adam and its kin); default: step.
    frozen: leave them as they are.

    Raises ValueError for unequal lengths, and for formats that don't fit.
    """
    count = len(params)
    none: Copies = [None] * count
    first, second = scales or (none, none)
    lrs, decays = spread(lr, count, "lr"), spread(weight_decay, count, "weight_decay")
    apart = frozen or seen not in (None, step)
    second_beta = 1.0 if frozen else beta2
    root = math.sqrt(1 - beta2 ** (step if seen is None else seen))
    numbers = [_numbers(step, rate, beta1, second_beta, eps, decay, root) for rate, decay in zip(lrs, decays)]
    states = [State(exp_avgs, first), State(exp_avg_sqs, second, signed=False)]
    work = batches(params, grads, states, copies, numbers, None if rounding is None else rounding.starts)
    if work:
        operation = APART if apart else ADAMW
        operation.on(work[0].params[0].device)(work, scale, skip, DECOUPLED if decoupled else 0, rounding)


def _numbers(step: int, lr: float, beta1: float, beta2: float, eps: float, decay: float, root: float) -> tuple[float, ...]:
    """What kernels read. one1, one2: 1 - beta from doubles, since in float32 1 - 0.999 is off by 2e-5 of itself."""
    return 1 - lr * decay, 1 - beta1, beta2, 1 - beta2, eps, decay, lr / (1 - beta1**step), root, lr, beta1, float(step)


def _piece(p: Any, g: Any, states: Sequence[Any], numbers: tuple[float, ...], flag: int) -> None:
    keep, one1, beta2, one2, eps, decay, step_size, root = numbers[:8]
    m, v = states
    if flag & DECOUPLED:
        p.mul_(keep)
    elif decay:
        g = g.add(p, alpha=decay)
    m.lerp_(g, one1)
    v.mul_(beta2).addcmul_(g, g, value=one2)
    p.addcdiv_(m, v.sqrt().div_(root).add_(eps), value=-step_size)


@kernel
def _step(p, g, m, v, numbers, FLAG: tl.constexpr):
    if FLAG == 1:
        p = p * tl.load(numbers)
    else:
        g = g + tl.load(numbers + 5) * p
    m = m + tl.load(numbers + 1) * (g - m)
    v = tl.load(numbers + 2) * v + tl.load(numbers + 3) * g * g
    p = p - tl.load(numbers + 6) * m / (tl.sqrt(v) / tl.load(numbers + 7) + tl.load(numbers + 4))
    return p, m, v


def _fused(batch: Batch, scale: torch.Tensor, flag: int) -> None:
    """torch divides by grad_scale and writes the result into the gradient: a factor of one isn't passed, any other is taken back."""
    update: Any = torch._fused_adamw_ if flag & DECOUPLED else torch._fused_adam_
    factor = float(scale)
    for numbers, params, grads, first, second in by_numbers(batch):
        _, _, beta2, _, eps, decay, _, _, lr, beta1, step = numbers
        update(
            params, grads, first, second, [], [torch.full((), step) for _ in params],
            lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
            grad_scale=None if factor == 1.0 else torch.tensor(1.0 / factor if factor else math.inf), found_inf=None,
        )  # fmt: skip
        give_back(grads, factor)


RULE = Rule(0, _piece, _step, _fused)
ADAMW = Operation("adamw", RULE.reference, RULE.triton, RULE.cpu)
_OWN = Rule(0, _piece, _step)  # torch's fused update knows one step for both moments
APART = Operation("adamw_apart", _OWN.reference, _OWN.triton, _OWN.cpu)
