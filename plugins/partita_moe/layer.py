"""The layer: router, experts, and what stands beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from partita.runtime.mesh import Group
from partita_moe.dispatch import by_expert, exchange, exchange_counts
from partita_moe.experts import Experts
from partita_moe.routing import Choice, Routing, balance_loss, choose, loads, within_capacity, z_loss

Tensor = torch.Tensor


class Attach(torch.autograd.Function):
    """x, unchanged, with a term of the objective attached: its gradient is `weight()` whatever comes from above.

    So terms inside the model need no way out of it, under a pipeline as well.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, term: Tensor, weight: Callable[[], float]) -> Tensor:
        ctx.weight, ctx.like = weight, term
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], torch.full_like(ctx.like, ctx.weight()), None


class MoeLayer(nn.Module):
    """Sends each token to k of the experts and adds what they answer, by their gates.

    dense: a layer that sees every token (shared experts, or the dense half of the residual form). group: the ranks that share out
    the experts; without one, all are here. term_weight: of one token in the objective, known in backward. Tokens that an expert has
    no room for get nothing from it.
    """

    router: Tensor
    bias: Tensor

    def __init__(self, width: int, experts: Experts, routing: Routing, dense: nn.Module | None = None) -> None:
        super().__init__()
        self.routing, self.experts, self.dense = routing, experts, dense
        self.router = nn.Parameter(torch.empty(routing.experts, width))
        self.mix = nn.Parameter(torch.empty(2, width)) if routing.residual else None
        self.register_buffer("bias", torch.zeros(routing.experts))
        self.group: Group | None = None
        self.term_weight: Callable[[], float] = lambda: 1.0
        self.counting: Callable[[], bool] = lambda: True
        self.counts: Tensor | None = None  # tokens of each expert since the last update, before any is dropped
        self.dropped = 0
        self.terms: Tensor | None = None  # (auxiliary loss, entropy of the choice) of the last micro-batch

    def init_buffers(self, device: torch.device) -> None:
        """Allocate what is no parameter."""
        self.bias = torch.zeros(self.routing.experts, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, C] -> [B, T, C]."""
        flat = x.reshape(-1, x.shape[-1])
        logits = F.linear(flat.float(), self.router.float())
        biased = self.routing.balance == "bias"
        choice = choose(logits, self.routing, self.bias if biased else None)
        flat = self._attach(flat, logits, choice, sequences=x.shape[0])
        y = self._routed(flat, choice)
        return self._beside(flat, y).view_as(x)

    def _attach(self, flat: Tensor, logits: Tensor, choice: Choice, sequences: int) -> Tensor:
        routing = self.routing
        if flat.is_meta:
            return flat
        auxiliary = balance_loss(choice, routing, sequences) if routing.balance in ("sequence", "batch") else None
        self._count(choice, auxiliary)
        if not (self.training and torch.is_grad_enabled()):
            return flat
        term = logits.new_zeros(())
        if auxiliary is not None:
            term = term + routing.aux_weight * auxiliary
        if routing.z_weight:
            term = term + routing.z_weight * z_loss(logits)
        return Attach.apply(flat, term * len(flat), self.term_weight) if term.requires_grad else flat

    @torch.no_grad()
    def _count(self, choice: Choice, auxiliary: Tensor | None) -> None:
        if not self.training or not self.counting():
            return
        counts = loads(choice.experts, self.routing.experts)
        self.counts = counts if self.counts is None else self.counts + counts
        p = choice.probabilities
        entropy = -(p * p.clamp(min=1e-20).log()).sum(-1).mean()
        self.terms = torch.stack([auxiliary if auxiliary is not None else entropy.new_zeros(()), entropy])

    def _routed(self, flat: Tensor, choice: Choice) -> Tensor:
        k = self.routing.top_k
        ids, gates = choice.experts.reshape(-1), choice.gates.reshape(-1)
        if flat.is_meta:
            rows = flat.repeat_interleave(k, 0)
            y = self.experts(rows, []) * gates.unsqueeze(1).to(flat.dtype)
            return y.view(-1, k, flat.shape[1]).sum(1)
        if self.routing.capacity is not None:
            kept = within_capacity(choice, self.routing).reshape(-1)
            if self.training and self.counting():
                self.dropped += int((~kept).sum())
            where = kept.nonzero().squeeze(1)
            order = where[ids[where].argsort(stable=True)]
        else:
            order = ids.argsort(stable=True)
        token = order // k
        rows = flat.index_select(0, token)
        answers = self._answer(rows, loads(ids[order], self.routing.experts))
        weighted = answers.float() * gates[order].unsqueeze(1)
        return torch.zeros_like(flat, dtype=torch.float32).index_add(0, token, weighted).to(flat.dtype)

    def _answer(self, rows: Tensor, counts: Tensor) -> Tensor:
        """What the experts make of rows that lie by expert."""
        if self.group is None or self.group.size == 1:
            return self.experts(rows, counts.tolist())
        received = exchange_counts(counts, self.group)
        sent, taken = counts.view(self.group.size, -1).sum(1).tolist(), received.sum(1).tolist()
        there = exchange(rows, sent, taken, self.group)
        order = by_expert(received)
        answers = self.experts(there.index_select(0, order), received.sum(0).tolist())
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return exchange(answers.index_select(0, back), taken, sent, self.group)

    def _beside(self, flat: Tensor, routed: Tensor) -> Tensor:
        if self.dense is None:
            return routed
        dense = self.dense(flat)
        if self.mix is None:
            return dense + routed
        share = (
            F.linear(flat.float(), self.mix.float()).softmax(-1).to(flat.dtype)
        )  # PR-MoE (Rajbhandari et al. 2022, section 4.1)
        return share[:, :1] * dense + share[:, 1:] * routed
