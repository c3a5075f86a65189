"""The layer: router, experts, and what stands beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from partita.models.noise import Noise
from partita.runtime.mesh import Group
from partita.runtime.traffic import sending_among
from partita_kernels import Order, expert_order, permute, unpermute
from partita_moe.dispatch import Exchange, by_expert, exchange_counts
from partita_moe.expert_choice import taken
from partita_moe.experts import Experts
from partita_moe.jitter import jittered
from partita_moe.packing import Packing
from partita_moe.routing import EXPERT_CHOICE, Choice, Routing, balance_loss, choose, chosen, wide, within_capacity, z_loss
from partita_moe.spread import Spread, present

Tensor = torch.Tensor
SEQUENCE, GLOBAL = "sequence", "global"
LOSSES = (SEQUENCE, "batch", GLOBAL)  # balances that are a term of the objective
FIGURES = ("dropped choices", "tokens without an expert", "auxiliary loss x tokens", "entropy of the choice x tokens", "tokens")


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


class ExpertLayer(nn.Module):
    """Sends each token to k of the experts and adds what they answer, by their gates. Subclasses hold the router's weights.

    group: the ranks that share out the experts; without one, all are here. spread: the ranks that share each expert's matrices, likewise. term_weight: of one token in the objective, known in
    backward. In training, tokens that an expert has no room for get nothing from it.
    """

    experts: Experts

    def __init__(self, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.load: Tensor | None
        # share of each expert in the update before
        self.register_buffer("load", torch.full((routing.experts,), 1.0 / routing.experts) if routing.balance == GLOBAL else None)
        self.group: Group | None = None
        self.spread: Spread | None = None
        self.pieces: Group | None = None  # ranks that hold the other tokens of the same sequences
        self.block = 0  # the number of the block that it lies in, which tells its random numbers from those of others
        self.noise: Noise | None = None  # see `bring_noise`
        self.packing: Packing | None = None  # of rows on the wire
        self.term_weight: Callable[[], float] = lambda: 1.0
        self.counting: Callable[[], bool] = lambda: True
        # since the last update, float64 [E + 5]: choices of each expert before any is dropped, then `FIGURES`
        self.figures: Tensor | None = None

    def init_buffers(self, device: torch.device) -> None:
        """Allocate what is no parameter."""
        if self.load is not None:
            self.load = torch.full((self.routing.experts,), 1.0 / self.routing.experts, device=device)

    def router_weight(self) -> Tensor:
        """The router's matrix [E, C]."""
        raise NotImplementedError

    def choice_bias(self) -> Tensor | None:
        """What is added to scores for the choice only, [E]; None: nothing."""
        raise NotImplementedError

    def companion(self, flat: Tensor) -> Tensor | None:
        """What every token gets whatever it is routed to, for tokens [n, C]; None: nothing."""
        raise NotImplementedError

    def joined(self, flat: Tensor, routed: Tensor, beside: Tensor | None) -> Tensor:
        """The answers of the experts together with those of the companion."""
        return routed if beside is None else beside + routed

    def forward(self, x: Tensor, noise: Noise | None = None) -> Tensor:
        """x [B, T, C] -> [B, T, C]. noise: of the jitter; None: none."""
        flat = x.reshape(-1, x.shape[-1])
        seen = jittered(wide(x), self.routing.jitter, noise, self.block).reshape(flat.shape)
        logits = F.linear(seen, wide(self.router_weight()))
        choice, order = self._chosen(logits, sequences=x.shape[0])
        if not flat.is_meta:
            flat = self._attach(flat, logits, choice, order, sequences=x.shape[0])
            if self.routing.capacity is not None and self.training:  # else the counts are what they are
                choice, order = self._kept(choice)
        routed, beside = self._routed(flat, choice, order)
        return self.joined(flat, routed, beside).view_as(x)

    def _chosen(self, logits: Tensor, sequences: int) -> tuple[Choice, Order]:
        if self.routing.gate == EXPERT_CHOICE:
            return taken(logits, self.routing, sequences)
        choice = choose(logits, self.routing, self.choice_bias())
        return choice, expert_order(choice.experts, self.routing.experts)

    def _attach(self, flat: Tensor, logits: Tensor, choice: Choice, order: Order, sequences: int) -> Tensor:
        routing = self.routing
        auxiliary = None
        if self.training and routing.balance in LOSSES:
            auxiliary = balance_loss(choice, routing, sequences, self._share(choice, sequences))
        self._count(choice, order, auxiliary)
        if not (self.training and torch.is_grad_enabled()):
            return flat
        term = logits.new_zeros(())
        if auxiliary is not None:
            term = term + routing.aux_weight * auxiliary
        if routing.z_weight:
            term = term + routing.z_weight * z_loss(logits)
        return Attach.apply(flat, term * len(flat), self.term_weight) if term.requires_grad else flat

    @torch.no_grad()
    def _share(self, choice: Choice, sequences: int) -> Tensor | None:
        """The share of each expert where it isn't that of the tokens that are here: see `balance_loss`."""
        if self.routing.balance != SEQUENCE or self.pieces is None:
            return self.load
        counts = chosen(choice, self.routing, sequences).sum(1)
        with sending_among(self.pieces, counts, 2, "expert_load"):
            dist.all_reduce(counts, group=self.pieces.process_group)
        return counts / counts.sum(-1, keepdim=True)

    @torch.no_grad()
    def _count(self, choice: Choice, order: Order, auxiliary: Tensor | None) -> None:
        if not self.training or not self.counting():
            return
        p = choice.probabilities
        entropy = -torch.dot(p.flatten(), p.clamp(min=1e-20).log_().flatten())
        weighed = entropy.new_zeros(()) if auxiliary is None else auxiliary * len(p)
        none = entropy.new_zeros(())
        untaken = (order.places < 0).all(1).sum().to(p.dtype) if self.routing.gate == EXPERT_CHOICE else none
        sums = torch.stack([none, untaken, weighed, entropy, entropy.new_full((), len(p))])
        figures = torch.cat([order.sizes.double(), sums.double()])
        self.figures = figures if self.figures is None else self.figures + figures

    def _kept(self, choice: Choice) -> tuple[Choice, Order]:
        """Those choices that an expert has room for, and their order."""
        kept = within_capacity(choice, self.routing)
        choice = replace(choice, experts=choice.experts.masked_fill(~kept, -1))
        order = present(expert_order(choice.experts, self.routing.experts))
        if self.figures is not None and self.counting():
            self.figures[self.routing.experts] += kept.numel() - len(order.slots)
            self.figures[self.routing.experts + 1] += (~kept).all(1).sum()
        return choice, order

    def _routed(self, flat: Tensor, choice: Choice, order: Order) -> tuple[Tensor, Tensor | None]:
        """What the experts answer, summed by gates, and what the companion does, which is computed while rows are on their way."""
        tokens, gates, spread = flat, choice.gates, self.spread
        if spread is not None:
            tokens, gates, order = spread.enter(flat, choice, order, self.training and self.routing.capacity is not None)
        rows = permute(tokens, order)
        if self.group is None or self.group.size == 1:
            answers, beside = self.experts(rows, order.sizes), self.companion(flat)
        else:
            answers, beside = self._sent(flat, rows, order.sizes, self.group)
        routed = unpermute(answers, order, gates)
        return routed if spread is None else spread.leave(routed), beside

    def _sent(self, flat: Tensor, rows: Tensor, counts: Tensor, group: Group) -> tuple[Tensor, Tensor | None]:
        """What experts elsewhere make of rows that lie by expert, and the companion of all tokens."""
        received = exchange_counts(counts, group)
        sent, taken = counts.view(group.size, -1).sum(1).tolist(), received.sum(1).tolist()
        way = Exchange(rows, sent, taken, group, self.packing)
        beside = self.companion(flat)
        order = by_expert(received)
        answers = self.experts(permute(way.arrived(), order), order.sizes)
        return Exchange(unpermute(answers, order), taken, sent, group, self.packing).arrived(), beside


class MoeLayer(ExpertLayer):
    """The expert layer that `add_experts` makes.

    dense: a layer that sees every token (shared experts, or the dense half of the residual form).
    """

    router: Tensor
    bias: Tensor

    def __init__(self, width: int, experts: Experts, routing: Routing, dense: nn.Module | None = None) -> None:
        super().__init__(routing)
        self.experts, self.dense = experts, dense
        self.router = nn.Parameter(torch.empty(routing.experts, width))
        self.mix = nn.Parameter(torch.empty(2, width)) if routing.residual else None
        self.register_buffer("bias", torch.zeros(routing.experts))

    def init_buffers(self, device: torch.device) -> None:
        """Allocate what is no parameter."""
        super().init_buffers(device)
        self.bias = torch.zeros(self.routing.experts, device=device)

    def router_weight(self) -> Tensor:
        """See `ExpertLayer`."""
        return self.router

    def choice_bias(self) -> Tensor | None:
        """See `ExpertLayer`."""
        return self.bias if self.routing.balance == "bias" else None

    def companion(self, flat: Tensor) -> Tensor | None:
        """See `ExpertLayer`."""
        return None if self.dense is None else self.dense(flat)

    def joined(self, flat: Tensor, routed: Tensor, beside: Tensor | None) -> Tensor:
        """Summed; in the residual form by learned shares (PR-MoE: Rajbhandari et al. 2022, section 4.1)."""
        if self.mix is None or beside is None:
            return super().joined(flat, routed, beside)
        share = F.linear(wide(flat), wide(self.mix)).softmax(-1).to(flat.dtype)
        return share[:, :1] * beside + share[:, 1:] * routed
