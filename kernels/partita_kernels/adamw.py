"""Adam and AdamW over flat ranges in one pass: unscale and clip, decay, moments, weights, low-precision copy.

In a step: g = scale * gradient; m += (1 - beta1)(g - m); v = beta2 v + (1 - beta2) g^2;
p = p(1 - lr decay) - lr / (1 - beta1^step) * m / (sqrt(v / (1 - beta2^step)) + eps). Memory read and written for each weight with
bfloat16 gradients and copies: 28 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from partita_kernels import native
from partita_kernels.dispatch import Operation
from partita_kernels.flat import Batch, batches, chunks, is_set
from partita_kernels.jit import cdiv, kernel

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 1024  # elements of a Triton program


class Hyper(NamedTuple):
    """Numbers of a step, as doubles."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool

    @property
    def step_size(self) -> float:
        """lr with the first moment's bias taken off."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def root_correction(self) -> float:
        """What sqrt(v) is divided by."""
        return math.sqrt(1 - self.beta2**self.step)


def adamw_(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    *,
    copies: Sequence[torch.Tensor | None],
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    scale: torch.Tensor,
    skip: torch.Tensor | None = None,
) -> None:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2), or with decoupled=False Adam with decay in the gradient, in place.

    All tensors are 1-D, contiguous and of any length, range by range of equal length; params and moments float32, gradients
    float32, bfloat16 or float16. copies: low-precision weights to write, or None for a range. step counts from 1. scale: 0-d
    float32 factor on the gradients (unscale x clip). skip: 0-d; nonzero: nothing changes. Gradients may be overwritten.
    Raises ValueError for unequal lengths.
    """
    work = batches(params, grads, [exp_avgs, exp_avg_sqs], copies)
    if work:
        hyper = Hyper(step, lr, beta1, beta2, eps, weight_decay, decoupled)
        ADAMW.on(work[0].params[0].device)(work, hyper, scale, skip)


def reference(work: list[Batch], h: Hyper, scale: torch.Tensor, skip: torch.Tensor | None) -> None:
    """Plain torch, piece by piece; computes in the dtype of the parameters."""
    if is_set(skip):
        return
    for batch in work:
        first, second = batch.states
        p: Any
        for p, g, m, v, copy in chunks(batch.params, batch.grads, first, second, batch.copies):
            _update_piece(p, g, m, v, h, scale)
            if copy is not None:
                copy.copy_(p)


def _update_piece(p: Any, g: Any, m: Any, v: Any, h: Hyper, scale: torch.Tensor) -> None:
    grad = g.to(p.dtype) * scale.to(p)
    if h.decoupled:
        p.mul_(1 - h.lr * h.weight_decay)
    elif h.weight_decay:
        grad.add_(p, alpha=h.weight_decay)
    m.lerp_(grad, 1 - h.beta1)
    v.mul_(h.beta2).addcmul_(grad, grad, value=1 - h.beta2)
    p.addcdiv_(m, v.sqrt().div_(h.root_correction).add_(h.eps), value=-h.step_size)


@kernel
def _kernel(
    p_ptr, g_ptr, m_ptr, v_ptr, copy_ptr, scale_ptr, skip_ptr, n,
    keep, one1, beta2, one2, eps, decay, step_size, root,
    COPY: tl.constexpr, SKIP: tl.constexpr, DECOUPLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if SKIP:
        n = tl.where(tl.load(skip_ptr) == 0, n, 0)
    inside = at < n
    scale = tl.load(scale_ptr)
    p = tl.load(p_ptr + at, mask=inside, other=0.0)
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32) * scale
    m = tl.load(m_ptr + at, mask=inside, other=0.0)
    v = tl.load(v_ptr + at, mask=inside, other=0.0)
    if DECOUPLED:
        p = p * keep
    else:
        g = g + decay * p
    m = m + one1 * (g - m)
    v = beta2 * v + one2 * g * g
    p = p - step_size * m / (tl.sqrt(v) / root + eps)
    tl.store(p_ptr + at, p, mask=inside)
    tl.store(m_ptr + at, m, mask=inside)
    tl.store(v_ptr + at, v, mask=inside)
    if COPY:
        tl.store(copy_ptr + at, p.to(copy_ptr.dtype.element_ty), mask=inside)


def triton(work: list[Batch], h: Hyper, scale: torch.Tensor, skip: torch.Tensor | None, block: int = BLOCK) -> None:
    """One launch for each range; nothing waits for the device."""
    device = work[0].params[0].device
    scale = scale.to(device, torch.float32)
    flag = scale if skip is None else skip.to(device, torch.float32)
    numbers = (
        1 - h.lr * h.weight_decay,
        1 - h.beta1,
        h.beta2,
        1 - h.beta2,
        h.eps,
        h.weight_decay,
        h.step_size,
        h.root_correction,
    )
    for batch in work:
        for p, g, m, v, copy in zip(batch.params, batch.grads, *batch.states, batch.copies, strict=True):
            n = p.numel()
            constants = {"COPY": copy is not None, "SKIP": skip is not None, "DECOUPLED": h.decoupled, "BLOCK": block}
            _kernel[(cdiv(n, block),)](p, g, m, v, p if copy is None else copy, scale, flag, n, *numbers, **constants)


def cpu(work: list[Batch], h: Hyper, scale: torch.Tensor, skip: torch.Tensor | None) -> None:
    """torch's fused update for float32 without copies; one C++ pass for low precision, where torch would need three."""
    if is_set(skip):
        return
    for batch in work:
        if batch.plain:
            _torch_fused(batch, h, float(scale))
        elif batch.native and (library := native.load("optimizer")):
            _native(library, batch, h, float(scale))
        else:
            reference([batch], h, scale, None)


def _torch_fused(batch: Batch, h: Hyper, scale: float) -> None:
    """torch divides by grad_scale and writes the result into the gradient, so a factor of one isn't passed."""
    update: Any = torch._fused_adamw_ if h.decoupled else torch._fused_adam_
    update(
        batch.params,
        batch.grads,
        *batch.states,
        [],
        [torch.full((), float(h.step)) for _ in batch.params],
        lr=h.lr,
        beta1=h.beta1,
        beta2=h.beta2,
        weight_decay=h.weight_decay,
        eps=h.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None if scale == 1.0 else torch.tensor(1.0 / scale if scale else math.inf),
        found_inf=None,
    )


def _native(library: Any, batch: Batch, h: Hyper, scale: float) -> None:
    grad_code, copy_code = batch.codes()
    pointers = native.pointers
    first, second = (pointers(s) for s in batch.states)
    numbers = (h.lr, h.beta1, h.beta2, h.eps, h.weight_decay, h.step_size, h.root_correction, scale)
    library.adamw(
        native.integer(len(batch.params)), native.lengths(batch.params), pointers(batch.params),
        pointers(batch.grads), grad_code, first, second, pointers(batch.copies), copy_code,
        *map(native.double, numbers), int(h.decoupled), native.threads(),
    )  # fmt: skip


ADAMW = Operation("adamw", reference, triton, cpu)
