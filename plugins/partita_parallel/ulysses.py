"""Ulysses (Jacobs et al. 2023): ranks exchange tokens for heads, so that each sees whole sequences of some heads."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from partita.runtime.mesh import Group
from partita.runtime.traffic import sending_among

Tensor = torch.Tensor


def ulysses_columns(tokens: int, rank: int, size: int) -> Tensor:
    """int64 [tokens / size]: neighbours; heads share the work, so nothing has to be balanced."""
    return torch.arange(tokens).chunk(size)[rank]


def _exchange(x: Tensor, group: Group, split: int, join: int) -> Tensor:
    """Part i of dimension `split` goes to rank i; what comes is put together along `join`, in rank order."""
    send = x.unflatten(split, (group.size, -1)).movedim(split, 0).contiguous()
    received = torch.empty_like(send)
    with sending_among(group, send):
        dist.all_to_all_single(received.view(-1), send.view(-1), group=group.process_group)
    return received.movedim(0, join).flatten(join, join + 1)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, split: int, join: int) -> Tensor:
        ctx.group, ctx.split, ctx.join = group, split, join
        return _exchange(x, group, split, join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _exchange(grad, ctx.group, ctx.join, ctx.split), None, None, None


HEADS, TOKENS = 1, 2


def to_heads(x: Tensor, group: Group) -> Tensor:
    """[B, H, t, D] of this rank's tokens -> [B, H / size, T, D] of its heads."""
    out: Tensor = _Exchange.apply(x, group, HEADS, TOKENS)
    return out


def to_tokens(x: Tensor, group: Group) -> Tensor:
    """The way back."""
    out: Tensor = _Exchange.apply(x, group, TOKENS, HEADS)
    return out


def exchanged(q: Tensor, k: Tensor, v: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values by heads. Heads of keys that can't be shared evenly are repeated first."""
    if k.shape[HEADS] % group.size:
        k, v = (t.repeat_interleave(q.shape[HEADS] // t.shape[HEADS], dim=HEADS) for t in (k, v))
    return to_heads(q, group), to_heads(k, group), to_heads(v, group)
