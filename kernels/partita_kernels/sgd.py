"""SGD with momentum over flat ranges in one pass: unscale and clip, decay, momentum, weights, low-precision copy.

In a step: g = scale * gradient + decay * p; b = momentum * b + g; p -= lr * (nesterov: g + momentum * b, else b).
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

    lr: float
    momentum: float
    nesterov: bool
    weight_decay: float


def sgd_(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    momentum_buffers: Sequence[torch.Tensor] | None,
    *,
    copies: Sequence[torch.Tensor | None],
    lr: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    scale: torch.Tensor,
    skip: torch.Tensor | None = None,
) -> None:
    """SGD as torch.optim.SGD defines it, in place. Momentum buffers start at zero; None: no momentum.

    Other arguments as `adamw_`.
    """
    work = batches(params, grads, [] if momentum_buffers is None else [momentum_buffers], copies)
    if work:
        SGD.on(work[0].params[0].device)(work, Hyper(lr, momentum, nesterov, weight_decay), scale, skip)


def reference(work: list[Batch], h: Hyper, scale: torch.Tensor, skip: torch.Tensor | None) -> None:
    """Plain torch, piece by piece; computes in the dtype of the parameters."""
    if is_set(skip):
        return
    for batch in work:
        for p, g, copy, *buffers in chunks(batch.params, batch.grads, batch.copies, *batch.states):
            _update_piece(p, g, buffers, h, scale)
            if copy is not None:
                copy.copy_(p)  # type: ignore[arg-type]


def _update_piece(p: Any, g: Any, buffers: list[Any], h: Hyper, scale: torch.Tensor) -> None:
    grad = (g.to(p.dtype) * scale.to(p)).add_(p, alpha=h.weight_decay)
    for b in buffers:
        b.mul_(h.momentum).add_(grad)
        grad = grad.add_(b, alpha=h.momentum) if h.nesterov else b
    p.add_(grad, alpha=-h.lr)


@kernel
def _kernel(
    p_ptr, g_ptr, b_ptr, copy_ptr, scale_ptr, skip_ptr, n, lr, momentum, decay,
    COPY: tl.constexpr, SKIP: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if SKIP:
        n = tl.where(tl.load(skip_ptr) == 0, n, 0)
    inside = at < n
    p = tl.load(p_ptr + at, mask=inside, other=0.0)
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale_ptr) + decay * p
    if MOMENTUM:
        b = momentum * tl.load(b_ptr + at, mask=inside, other=0.0) + g
        tl.store(b_ptr + at, b, mask=inside)
        if NESTEROV:
            g = g + momentum * b
        else:
            g = b
    p = p - lr * g
    tl.store(p_ptr + at, p, mask=inside)
    if COPY:
        tl.store(copy_ptr + at, p.to(copy_ptr.dtype.element_ty), mask=inside)


def triton(work: list[Batch], h: Hyper, scale: torch.Tensor, skip: torch.Tensor | None, block: int = BLOCK) -> None:
    """One launch for each range; nothing waits for the device."""
    device = work[0].params[0].device
    scale = scale.to(device, torch.float32)
    flag = scale if skip is None else skip.to(device, torch.float32)
    for batch in work:
        for p, g, copy, *buffers in zip(batch.params, batch.grads, batch.copies, *batch.states, strict=True):
            n = p.numel()
            constants = {"COPY": copy is not None, "SKIP": skip is not None, "MOMENTUM": bool(buffers), "NESTEROV": h.nesterov}
            tensors = (p, g, buffers[0] if buffers else p, p if copy is None else copy, scale, flag)
            _kernel[(cdiv(n, block),)](*tensors, n, h.lr, h.momentum, h.weight_decay, **constants, BLOCK=block)


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
    torch._fused_sgd_(
        batch.params,
        batch.grads,
        batch.states[0] if batch.states else [],
        weight_decay=h.weight_decay,
        momentum=h.momentum if batch.states else 0.0,
        lr=h.lr,
        dampening=0.0,
        nesterov=h.nesterov and bool(batch.states),
        maximize=False,
        is_first_step=False,
        grad_scale=None if scale == 1.0 else torch.tensor(1.0 / scale if scale else math.inf),
        found_inf=None,
    )


def _native(library: Any, batch: Batch, h: Hyper, scale: float) -> None:
    grad_code, copy_code = batch.codes()
    pointers = native.pointers
    buffers = pointers(batch.states[0]) if batch.states else None
    numbers = (h.lr, h.momentum, h.weight_decay, scale)
    library.sgd(
        native.integer(len(batch.params)), native.lengths(batch.params), pointers(batch.params),
        pointers(batch.grads), grad_code, buffers, pointers(batch.copies), copy_code,
        *map(native.double, numbers), int(h.nesterov), native.threads(),
    )  # fmt: skip


SGD = Operation("sgd", reference, triton, cpu)
