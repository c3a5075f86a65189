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
from partita_kernels import attention_piece, attention_piece_backward

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


Bounds = tuple[Tensor, Tensor]  # int32 [B or 1, M] each: see partita_kernels.attention


def _documents(mine: Tensor, group: Group) -> list[Tensor]:
    """For each rank int64 [B, t]: numbers of its tokens' documents, ascending in the sequence. mine: [B, t], any number for a document."""
    parts = Gathering(mine.unsqueeze(0), group, 0).wait()
    columns = [ring_columns(mine.shape[1] * group.size, rank, group.size).to(mine.device) for rank in range(group.size)]
    whole = torch.empty(mine.shape[0], mine.shape[1] * group.size, dtype=mine.dtype, device=mine.device)
    whole[:, torch.cat(columns)] = parts.transpose(0, 1).flatten(1)
    changes = (whole[:, 1:] != whole[:, :-1]).cumsum(1)
    numbers = torch.cat([torch.zeros_like(changes[:, :1]), changes], 1)
    return [numbers[:, c].contiguous() for c in columns]


def _bounds(turn: _Turn, rank: int, tokens: int, documents: list[Tensor] | None, device: torch.device) -> Bounds:
    """Which keys of a turn each of its queries sees. tokens: of a rank."""
    queries, keys = (len(range(*s.indices(tokens))) for s in (turn.queries, turn.keys))
    upto = torch.arange(1, queries + 1, dtype=torch.int32, device=device).unsqueeze(0) if turn.causal else None
    if documents is None:
        high = torch.full((1, queries), keys, dtype=torch.int32, device=device) if upto is None else upto
        return torch.zeros_like(high), high
    own, others = documents[rank][:, turn.queries].contiguous(), documents[turn.source][:, turn.keys].contiguous()
    low, high = (torch.searchsorted(others, own, right=right, out_int32=True) for right in (False, True))
    if upto is not None:
        high = torch.minimum(high, upto)  # a query's own token is one of its document
    return low, high


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, group: Group, causal: bool) -> Tensor:
        everyones = None if documents is None else _documents(documents, group)
        turns = _turns(group.rank, group.size, q.shape[2], causal)
        bounds = [_bounds(turn, group.rank, q.shape[2], everyones, q.device) for turn in turns]
        kv = torch.stack((k, v))
        out = lse = torch.empty(0)
        for turn, seen in zip(turns, bounds, strict=True):
            passing = _Passing(kv, group) if turn.source != (group.rank + 1) % group.size else None
            keys, values = (t[:, :, turn.keys] for t in kv)
            piece, sums = attention_piece(q[:, :, turn.queries], keys, values, *seen)
            if turn.source == group.rank:
                out, lse = piece.float(), sums
            else:
                out[:, :, turn.queries], lse[:, :, turn.queries] = merge(
                    out[:, :, turn.queries], lse[:, :, turn.queries], piece.float(), sums
                )
            kv = passing.wait() if passing is not None else kv
        # laid out like fused attention's, so that joining the heads is no copy
        result = out.transpose(1, 2).to(q.dtype, memory_format=torch.contiguous_format).transpose(1, 2)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.group, ctx.turns, ctx.bounds = group, turns, bounds
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        group = ctx.group
        kv = torch.stack((k, v))
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        dkv = torch.zeros(kv.shape, dtype=torch.float32, device=q.device)
        returning: _Passing | None = None
        for turn, seen in zip(ctx.turns, ctx.bounds, strict=True):
            passing = _Passing(kv, group) if turn.source != (group.rank + 1) % group.size else None
            keys, values = (t[:, :, turn.keys] for t in kv)
            rows = turn.queries
            grads = attention_piece_backward(
                dout[:, :, rows], q[:, :, rows], keys, values, out[:, :, rows], lse[:, :, rows], *seen
            )
            dq[:, :, rows] += grads[0]
            if returning is not None:  # what other ranks have added to the gradients of the keys that are here now
                dkv = returning.wait()
            for total, grad in zip(dkv, grads[1:], strict=True):
                total[:, :, turn.keys] += grad
            returning = _Passing(dkv, group)
            kv = passing.wait() if passing is not None else kv
        assert returning is not None
        dk, dv = returning.wait()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two pieces over disjoint keys as one (Milakov and Gimelshein 2018). In the first, each query has seen something."""
    total = torch.logaddexp(lse, more_lse)
    return out * (lse - total).exp().unsqueeze(-1) + more * (more_lse - total).exp().unsqueeze(-1), total


def ring_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, group: Group, causal: bool) -> Tensor:
    """q [B, H, t, D], k and v [B, H or fewer, t, D] of this rank's columns (`ring_columns`) -> [B, H, t, D] over all tokens.

    documents: int64 [B, t]; tokens see those of their own document only, which lie together in the sequence.
    """
    out: Tensor = _Ring.apply(q, k, v, documents, group, causal)
    return out
