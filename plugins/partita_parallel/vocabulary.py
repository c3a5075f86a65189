"""Cross entropy of logits whose tokens are cut over ranks: no rank ever has a whole row (Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from partita.runtime.mesh import Group
from partita.train.loss import IGNORED
from partita_parallel.functional import all_reduce

Tensor = torch.Tensor


class _CrossEntropy(torch.autograd.Function):
    """Losses [R] of logits [R, V / size] and labels [R]; see `partita_kernels.loss` for the formula and its gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: Group, first: int, vocab: int, smoothing: float, z_loss: float
    ) -> Tensor:
        x = logits.float()
        top = x.amax(1) if x.shape[1] else x.new_full((x.shape[0],), -torch.inf)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group.process_group)
        place = labels - first
        mine = (place >= 0) & (place < x.shape[1])
        place = place.masked_fill(~mine, 0)
        picked = x.gather(1, place.unsqueeze(1)).squeeze(1).masked_fill(~mine, 0.0)
        # one message: sums of exponentials, the label's logit (of the one rank that has it), sums of logits, who has the label
        sums = [(x - top.unsqueeze(1)).exp_().sum(1), picked, mine.float()] + ([x.sum(1)] if smoothing else [])
        total = all_reduce(torch.stack(sums), group)
        lse = total[0].log() + top
        losses = lse - (1 - smoothing) * total[1] + z_loss * lse.square()
        if smoothing:
            losses = losses - smoothing * total[3] / vocab
        losses = losses.masked_fill(total[2] == 0, torch.nan)  # a label that is no token must not go unnoticed
        ctx.save_for_backward(logits, lse, place, mine, labels != IGNORED)
        ctx.vocab, ctx.smoothing, ctx.z_loss = vocab, smoothing, z_loss
        return losses.masked_fill(labels == IGNORED, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, lse, place, mine, counted = ctx.saved_tensors
        g = (logits.float() - lse.unsqueeze(1)).exp_()
        if ctx.z_loss:
            g.mul_((1 + 2 * ctx.z_loss * lse).unsqueeze(1))
        if ctx.smoothing:
            g.sub_(ctx.smoothing / ctx.vocab)
        g.scatter_add_(1, place.unsqueeze(1), (mine.float() * (ctx.smoothing - 1)).unsqueeze(1))
        g.mul_(grad.unsqueeze(1)).masked_fill_(~counted.unsqueeze(1), 0.0)
        return g.to(logits.dtype), None, None, None, None, None, None


def vocabulary_cross_entropy(
    logits: Tensor, labels: Tensor, group: Group, first: int, vocab: int, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Like `partita.train.loss.token_cross_entropy`, of logits [..., V / size] that begin with token `first` of `vocab`.

    Every rank of the group gets the same (float32 sum, int64 count).
    """
    flat, target = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    losses = _CrossEntropy.apply(flat, target, group, first, vocab, label_smoothing, z_loss)
    return losses.sum(), (target != IGNORED).sum()
