"""Cross entropy of logits whose classes are cut over ranks (Shoeybi et al. 2019, section 3): no rank ever has a whole row.

Each rank reads its shard once; per row one maximum and two or three sums travel, and backward needs nothing from others. With Z_r the
log-sum-exp of shard r: Z = m + log sum_r exp(Z_r - m), m = max_r Z_r.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from partita_kernels.loss import CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD, Options
from partita_kernels.rows import as_rows, like, wide

Tensor = torch.Tensor
Reduce = Callable[[Tensor], Tensor]

IGNORED, ELSEWHERE = -1, -2  # labels within a shard


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    offset: int,
    classes: int,
    reduce_max: Reduce,
    reduce_sum: Reduce,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`cross_entropy` of a shard of the logits: the same (sum, count) on all ranks that share the rows, 0-d.

    logits [..., V_r]: classes offset to offset + V_r of all `classes`; V_r may be 0. labels [...], int64: of all classes, alike on
    these ranks. reduce_max, reduce_sum: all-reduce a float tensor over these ranks and return it (in place or not). Each rank's
    gradient is that of its shard, for a loss that all these ranks hold once: don't sum it over them.
    """
    options = Options(ignore_index, label_smoothing, z_loss)
    total = _Loss.apply(logits, labels, offset, classes, reduce_max, reduce_sum, options)
    return total, (labels != ignore_index).sum()


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, offset: int, classes: int, most: Reduce, add: Reduce, o: Options
    ) -> Tensor:
        flat = labels.reshape(-1)
        rows = as_rows(logits) if logits.numel() else logits.reshape(flat.shape[0], logits.shape[-1])
        inside = (flat >= offset) & (flat < offset + rows.shape[1])
        own = torch.where(inside, flat - offset, ELSEWHERE).masked_fill_(flat == o.ignore_index, IGNORED)
        lse, losses = _losses(rows, flat, inside, own, classes, most, add, o)
        ctx.save_for_backward(logits, own, lse)
        ctx.options = o._replace(ignore_index=IGNORED, classes=classes)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, own, lse = ctx.saved_tensors
        out = like(logits)
        if logits.numel():
            rows, d = as_rows(logits), dtotal.to(lse.dtype).expand(lse.shape[0])
            CROSS_ENTROPY_BACKWARD.on(logits.device)(d, rows, own, lse, ctx.options, out.view(rows.shape))
        return out, *[None] * 6


def _losses(
    rows: Tensor, labels: Tensor, inside: Tensor, own: Tensor, classes: int, most: Reduce, add: Reduce, o: Options
) -> tuple[Tensor, Tensor]:
    """(log-sum-exp over all ranks [R], losses [R], 0 where ignored)."""
    x = wide(rows[:, :0])  # the dtype of sums
    if rows.shape[1]:
        _, part = CROSS_ENTROPY.on(rows.device)(rows, torch.full_like(own, IGNORED), Options(IGNORED))
        picked = rows.gather(1, own.clamp(min=0)[:, None])[:, 0].to(x.dtype).masked_fill(~inside, 0.0)
    else:
        part, picked = x.new_full((rows.shape[0],), -torch.inf), x.new_zeros(rows.shape[0])
    peak = most(part.clone())
    sums = [torch.exp(part - peak), picked]
    if o.label_smoothing:
        sums.append(rows.sum(1, dtype=x.dtype))
    total, chosen, *plain = add(torch.stack(sums))
    lse = peak + total.log()
    losses = lse - (1 - o.label_smoothing) * chosen + o.z_loss * lse.square()
    if plain:
        losses = losses - o.label_smoothing / classes * plain[0]
    losses = losses.masked_fill((labels < 0) | (labels >= classes), float("nan"))
    return lse, losses.masked_fill(labels == o.ignore_index, 0.0)
