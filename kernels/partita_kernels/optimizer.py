"""Optimizer updates over flat ranges: unscale, clip, decay, moments, weights, and the low-precision copy.

Float32 gradients take torch's fused update: one pass, with the scale applied inside. Low-precision gradients are widened first and
copies are written after it, one pass each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
    """AdamW (Loshchilov and Hutter 2019, algorithm 2), or Adam with decay in the gradient, in place.

    All tensors are 1-D, range by range of equal lengths; params and moments float32. step counts from 1. scale: 0-d float32 factor on
    the gradients. skip: 0-d; nonzero changes nothing. copies: low-precision weights to write, or None. Gradients are overwritten.
    """
    live = [i for i, p in enumerate(params) if p.numel()]
    if not live:
        return
    wide = [grads[i] if grads[i].dtype == torch.float32 else grads[i].float() for i in live]
    update = torch._fused_adamw_ if decoupled else torch._fused_adam_
    device = params[live[0]].device
    count = torch.full((), float(step), dtype=torch.float32, device=device)
    update(
        [params[i] for i in live],
        wide,
        [exp_avgs[i] for i in live],
        [exp_avg_sqs[i] for i in live],
        [],
        [count.clone() for _ in live],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=_divisor(scale, device),
        found_inf=_flag(skip, device),
    )
    _write_copies([copies[i] for i in live], [params[i] for i in live])


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
    """SGD with momentum as torch.optim.SGD defines it (buffers start at zero), in place. Arguments as `adamw_`."""
    live = [i for i, p in enumerate(params) if p.numel()]
    if not live:
        return
    device = params[live[0]].device
    torch._fused_sgd_(
        [params[i] for i in live],
        [grads[i] if grads[i].dtype == torch.float32 else grads[i].float() for i in live],
        [momentum_buffers[i] for i in live] if momentum_buffers is not None else [],
        weight_decay=weight_decay,
        momentum=momentum,
        lr=lr,
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
        is_first_step=False,
        grad_scale=_divisor(scale, device),
        found_inf=_flag(skip, device),
    )
    _write_copies([copies[i] for i in live], [params[i] for i in live])


def _divisor(scale: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """What torch's fused updates divide gradients by; None on the CPU where the factor is one, which saves rewriting the gradients."""
    if device.type == "cpu" and float(scale) == 1.0:
        return None
    return scale.reciprocal()


def _flag(skip: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if skip is None else (skip != 0).to(torch.float32).to(device)


def _write_copies(copies: Sequence[torch.Tensor | None], params: Sequence[torch.Tensor]) -> None:
    for copy, param in zip(copies, params, strict=True):
        if copy is not None:
            copy.copy_(param)
