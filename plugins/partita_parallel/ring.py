"""Ring attention (Liu et al. 2023): queries stay, keys and values go round, and pieces are merged by their log-sum-exps.

The sequence is cut into 2 x size chunks, and rank i has chunks i and 2 x size - 1 - i (Llama 3, section 3.3.2; striped in Brandon et al.
2023): with a causal mask every rank then has the same work in every turn, and two of three kinds of turns need no mask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from partita.runtime.functional import Gathering
from partita.runtime.mesh import Group
from partita.runtime.traffic import purpose_of, sent
from partita_parallel import blocks

Tensor = torch.Tensor


def ring_columns(tokens: int, rank: int, size: int) -> Tensor:
    """int64 [tokens / size]: the tokens of a sequence that a rank has, ascending."""
    chunks = torch.arange(tokens).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


class _Turn(NamedTuple):
    """Which queries meet which keys when this rank has those of `source`."""

    source: int
    queries: slice
    keys: slice
    causal: bool


def _turns(rank: int, size: int, tokens: int, causal: bool) -> list[_Turn]:
    """One for each source, the own one first. tokens: of a rank."""
    everything, half = slice(None), tokens // 2
    out = []
    for step in range(size):
        source = (rank - step) % size
        if not causal or source == rank:
            out.append(_Turn(source, everything, everything, causal))
        elif source < rank:  # its first chunk lies before both of ours, its second one behind both
            out.append(_Turn(source, everything, slice(0, half), False))
        else:  # both of its chunks lie between ours
            out.append(_Turn(source, slice(half, None), everything, False))
    return out


class _Passing:
    """A tensor on its way to the next rank, and one from the rank before."""

    def __init__(self, tensor: Tensor, group: Group) -> None:
        self._sent, self._received = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
        after, before = group.ranks[(group.rank + 1) % group.size], group.ranks[group.rank - 1]
        handle = group.process_group
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, self._sent, after, handle), dist.P2POp(dist.irecv, self._received, before, handle)]
        )
        size = self._sent.numel() * self._sent.element_size()
        self._works = [sent(purpose_of(group), size * (i == 0), work, self._sent) for i, work in enumerate(works)]

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


def _widen(x: Tensor, heads: int) -> Tensor:
    """Keys or values of `heads` query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _narrow(grad: Tensor, heads: int) -> Tensor:
    """The counterpart: gradients of query heads that share keys, summed."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _visible(documents: Tensor | None, turn: _Turn, rank: int) -> Tensor | None:
    """Bool [B, 1, M, N] of a turn; documents: int64 [size, B, t] of all ranks."""
    if documents is None:
        return None
    same = documents[rank][:, turn.queries].unsqueeze(2) == documents[turn.source][:, turn.keys].unsqueeze(1)
    return (same.tril() if turn.causal else same).unsqueeze(1)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, group: Group, causal: bool) -> Tensor:
        everyones = None
        if documents is not None:
            everyones = Gathering(documents.unsqueeze(0), group, 0).wait()
        kv = torch.stack((k, v))
        out = lse = torch.empty(0)
        for turn in _turns(group.rank, group.size, q.shape[2], causal):
            passing = _Passing(kv, group) if turn.source != (group.rank + 1) % group.size else None
            keys, values = (_widen(t[:, :, turn.keys], q.shape[1]) for t in kv)
            visible = _visible(everyones, turn, group.rank)
            piece = blocks.forward(q[:, :, turn.queries], keys, values, visible, turn.causal)
            if turn.source == group.rank:
                out, lse = piece
            else:
                out[:, :, turn.queries], lse[:, :, turn.queries] = blocks.merge(
                    out[:, :, turn.queries], lse[:, :, turn.queries], *piece
                )
            kv = passing.wait() if passing is not None else kv
        # laid out like fused attention's, so that joining the heads is no copy
        result = out.transpose(1, 2).to(q.dtype, memory_format=torch.contiguous_format).transpose(1, 2)
        ctx.save_for_backward(q, k, v, result, lse, everyones)
        ctx.group, ctx.causal = group, causal
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, lse, everyones = ctx.saved_tensors
        group, heads = ctx.group, k.shape[1]
        kv = torch.stack((k, v))
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        dkv = torch.zeros(kv.shape, dtype=torch.float32, device=q.device)
        returning: _Passing | None = None
        for turn in _turns(group.rank, group.size, q.shape[2], ctx.causal):
            passing = _Passing(kv, group) if turn.source != (group.rank + 1) % group.size else None
            keys, values = (_widen(t[:, :, turn.keys], q.shape[1]) for t in kv)
            rows = turn.queries
            visible = _visible(everyones, turn, group.rank)
            grads = blocks.backward(
                dout[:, :, rows], q[:, :, rows], keys, values, out[:, :, rows], lse[:, :, rows].contiguous(), visible, turn.causal
            )
            dq[:, :, rows] += grads[0]
            if returning is not None:  # what other ranks have added to the gradients of the keys that are here now
                dkv = returning.wait()
            for total, grad in zip(dkv, grads[1:], strict=True):
                total[:, :, turn.keys] += _narrow(grad, heads)
            returning = _Passing(dkv, group)
            kv = passing.wait() if passing is not None else kv
        assert returning is not None
        dk, dv = returning.wait()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def ring_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, group: Group, causal: bool) -> Tensor:
    """q [B, H, t, D], k and v [B, H or fewer, t, D] of this rank's columns (`ring_columns`) -> [B, H, t, D] over all tokens.

    documents: int64 [B, t]; tokens see those of their own document only.
    """
    out: Tensor = _Ring.apply(q, k, v, documents, group, causal)
    return out
